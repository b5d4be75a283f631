// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
// Written by tools/generated_docs/emulator_dtypes.py from torch_npu's documentation for pytorch 2-13-0:
// what an operator's first argument may be on Atlas A2 and A3. Wider than the documentation, which lists what was verified:
// bfloat16 goes with float16, an integer type with the others and float64, a complex type with float64. Where NPUs took or
// refused a dtype in PyTorch's own tests, that counts (emulator_verdicts.toml: "on A3").
// Operators that are not here have no rule: the documentation does not say, or what it says is about something else.
// A row has dtypes and the operators that have them, without "aclnn"; `--explain OPERATOR` has the reasons.
{"bf16 fp16 fp32",
    "AdaptiveAvgPool2d AdaptiveAvgPool3d Addmm AddmmWeightNz Baddbmm BatchMatMul "
    "BatchMatMulWeightNz BinaryCrossEntropy BinaryCrossEntropyWithLogits Celu Frac Gelu GeluV2 "
    "Hardshrink Hardswish InplaceAddmm InplaceCelu InplaceFrac InplaceHardswish InplaceLerps "
    "InplaceMish InplaceNormalTensor KlDiv Lerps Logit Matmul MatmulWeightNz Mish Mm MseLoss Mv "
    "Silu SmoothL1Loss Softplus Softshrink VarCorrection"},
{"bf16 fp16 fp32 bool", "Addbmm LogSpace"},
{"bf16 fp16 fp32 complex64 complex128", "SoftMarginLoss"},
{"bf16 fp16 fp32 fp64",
    "Addmv Elu Glu InplaceElu InplaceLeakyRelu InplaceSinh LeakyRelu LogSoftmax Multinomial "
    "SimThreadExponential Softmax"},
{"bf16 fp16 fp32 fp64 complex64 complex128", "Mean Norm"},
{"bf16 fp16 fp32 fp64 int16 int32 int64 bool", "Gcd"},
{"bf16 fp16 fp32 fp64 int32 int64",
    "InplaceRemainderTensorScalar InplaceRemainderTensorTensor RemainderTensorScalar "
    "RemainderTensorTensor"},
{"bf16 fp16 fp32 fp64 int32 int64 bool", "Arange"},
{"bf16 fp16 fp32 fp64 int32 int64 bool complex64 complex128", "Sign"},
{"bf16 fp16 fp32 fp64 int64 bool", "Erf Erfc InplaceErf InplaceErfc"},
{"bf16 fp16 fp32 fp64 int64 bool complex64 complex128", "Exp InplaceExp"},
{"bf16 fp16 fp32 fp64 int8 int16 int32 int64 bool",
    "UpsampleBilinear2d UpsampleNearest2dV2 UpsampleNearest3d"},
{"bf16 fp16 fp32 fp64 int8 int32 bool complex64",
    "ReflectionPad1d ReflectionPad2d ReflectionPad3d"},
{"bf16 fp16 fp32 fp64 int8 int32 bool complex64 complex128", "AddV3"},
{"bf16 fp16 fp32 fp64 int8 int32 int64 complex64 complex128", "Neg"},
{"bf16 fp16 fp32 fp64 uint8 int8 int16 int32 int64",
    "Addcdiv ArgMax ArgMin Bucketize Ceil ClampMaxTensor ClampMinTensor Cumprod Floor FloorDivide "
    "FmodScalar Hardtanh InplaceAddcdiv InplaceFloor InplaceFloorDivide InplaceFloorDivides "
    "InplaceFmodScalar InplaceHardtanh InplaceRoundDecimals InplaceUniform InplaceUniformTensor "
    "IsInTensorScalar MaxUnpool2d RemainderScalarTensor Round RoundDecimals"},
{"bf16 fp16 fp32 fp64 uint8 int8 int16 int32 int64 bool",
    "Acos Addr All Amax Amin AminmaxAll AminmaxDim Any Asin Atan DivMod DivMods Equal Exp2 "
    "FloorDivides Gather GeScalar GeTensor Index IndexAdd IndexPutImpl InplaceAcos InplaceAddr "
    "InplaceAsin InplaceAtan InplaceAtan2 InplaceDiv InplaceDivMod InplaceDivMods InplaceDivs "
    "InplaceExp2 InplaceFillDiagonal InplaceGeScalar InplaceGeTensor InplaceGtScalar "
    "InplaceGtTensor InplaceIndexFillTensor InplaceLeScalar InplaceLeTensor InplaceLog1p "
    "InplaceLogicalNot InplaceLtScalar InplaceLtTensor InplaceMaskedScatter InplaceNormal "
    "InplaceOne InplaceRandom InplaceRandomTensor InplaceRandomWithoutFromTo "
    "InplaceRandomWithoutFromToTensor InplaceSinc InplaceTril InplaceTriu InplaceXLogYScalarOther "
    "IsClose IsFinite LeScalar LeTensor LinalgVectorNorm Linspace Log1p LogicalNot MaskedSelect "
    "Maximum Minimum Nonzero Prod Sinc Tril Triu XLogYScalarOther"},
{"bf16 fp16 fp32 fp64 uint8 int8 int16 int32 int64 bool complex64",
    "Abs Cat ReplicationPad1d ReplicationPad2d ReplicationPad3d"},
{"bf16 fp16 fp32 fp64 uint8 int8 int16 int32 int64 bool complex64 complex128",
    "Add Adds Div Divs InplaceAdd InplaceAdds PowTensorScalar ScatterAdd Sinh Stack Take"},
{"bf16 fp16 fp32 fp64 uint8 int8 int16 int32 int64 complex64 complex128",
    "InplacePowTensorScalar InplacePowTensorTensor InplaceSub InplaceSubs PowTensorTensor Sub Subs"},
{"bf16 fp16 fp32 fp64 uint8 int8 int32 int64",
    "Addcmul FmodTensor InplaceAddcmul InplaceFmodTensor"},
{"bf16 fp16 fp32 int32 int64 bool", "IndexFill InplaceIndexFill"},
{"bf16 fp16 fp32 int64 bool", "Expm1 InplaceExpm1 MaxDim MinDim"},
{"bf16 fp16 fp32 int8 int16 int32 int64 bool",
    "UpsampleBicubic2d UpsampleBilinear2dAA UpsampleNearestExact1d UpsampleNearestExact2d "
    "UpsampleNearestExact3d"},
{"bf16 fp16 fp32 int8 int32 int64 bool", "InplaceMaskedFillScalar InplaceMaskedFillTensor"},
{"bf16 fp16 fp32 uint8 int8 int16 int32 bool", "AvgPool2d AvgPool3d Convolution"},
{"bf16 fp16 fp32 uint8 int8 int16 int32 int64",
    "Hardsigmoid Im2col InplaceHardsigmoid InplaceThreshold L1Loss MedianDim Threshold Trunc"},
{"bf16 fp16 fp32 uint8 int8 int16 int32 int64 bool",
    "BatchNorm Cdist DropoutDoMask Embedding EmbeddingBag Erfinv Eye ForeachCos "
    "ForeachRoundOffNumberV2 ForeachSigmoid ForeachSqrt ForeachTanh GridSampler2D InplaceErfinv "
    "InplaceNanToNum InplaceRenorm InplaceTanh IsNegInf IsPosInf LayerNorm LogAddExp LogAddExp2 "
    "LogSigmoidForward LogSumExp MaxPool2dWithMask MaxPool3dWithArgmax MultilabelMarginLoss "
    "NLLLoss NanMedianDim NanToNum Pdist Polar Prelu RReluWithNoise ReduceNansum Renorm "
    "RepeatInterleaveInt RepeatInterleaveIntWithDim RepeatInterleaveWithDim SoftmaxBackward Sort "
    "Std StdMeanCorrection Tanh TriangularSolve UpsampleLinear1d XLogYTensor"},
{"bf16 fp16 fp32 uint8 int8 int32", "Dot"},
{"bf16 fp16 fp32 uint8 int8 int32 int64", "InplaceRelu Relu"},
{"bf16 fp16 fp32 uint8 int8 int32 int64 bool", "Roll"},
{"fp16 fp32 int32", "Histc"},
{"fp16 fp32 int32 bool", "InplacePut"},
{"fp16 fp32 uint8 int8 int16 int32 int64", "Median"},
{"fp16 fp32 uint8 int8 int16 int32 int64 bool", "Kthvalue NanMedian SearchSorted VarMean"},
{"fp16 fp32 uint8 int8 int16 int32 int64 bool complex64", "AngleV2"},
{"fp32", "LinalgCholesky"},
{"fp32 fp64 uint8 int8 int16 int32 int64", "InplaceScatterReduce ScatterReduce"},
{"uint8 int8 int16 int32 int64", "LeftShift"},
{"uint8 int8 int16 int32 int64 bool",
    "BitwiseAndScalar BitwiseAndTensor BitwiseNot BitwiseOrScalar BitwiseOrTensor BitwiseXorScalar "
    "BitwiseXorTensor InplaceBitwiseAndScalar InplaceBitwiseAndTensor InplaceBitwiseXorScalar "
    "InplaceBitwiseXorTensor"},
