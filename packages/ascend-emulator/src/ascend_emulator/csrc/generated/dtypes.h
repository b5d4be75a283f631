// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
// Written by tools/generated_docs/emulator_dtypes.py from torch_npu's documentation for pytorch 2-13-0:
// what an operator's first argument may be on Atlas A2 and A3. Wider than the documentation, which lists what was verified:
// bfloat16 goes with float16, an integer type with the others and float64, a complex type with float64. Where NPUs took or
// refused a dtype in PyTorch's own tests, that counts (emulator_verdicts.toml: "on A3").
// Operators that are not here have no rule: the documentation does not say, or what it says is about something else.
{"aclnnAbs", "bf16 fp16 fp32 fp64 uint8 int8 int16 int32 int64 bool complex64"},  // taken on A3: complex64
{"aclnnAcos", "bf16 fp16 fp32 fp64 uint8 int8 int16 int32 int64 bool"},
{"aclnnAdaptiveAvgPool2d", "bf16 fp16 fp32"},
{"aclnnAdaptiveAvgPool3d", "bf16 fp16 fp32"},
{"aclnnAdd", "bf16 fp16 fp32 fp64 uint8 int8 int16 int32 int64 bool complex64 complex128"},  // taken on A3: complex64 complex128
{"aclnnAddV3", "bf16 fp16 fp32 fp64 int8 int32 bool complex64 complex128"},  // refused on A3: uint8 int16 int64; taken on A3: complex64 complex128
{"aclnnAddbmm", "bf16 fp16 fp32 bool"},  // refused on A3: fp64 uint8 int8 int16 int32 int64 complex64 complex128
{"aclnnAddcdiv", "bf16 fp16 fp32 fp64 uint8 int8 int16 int32 int64"},
{"aclnnAddcmul", "bf16 fp16 fp32 fp64 uint8 int8 int32 int64"},  // refused on A3: int16
{"aclnnAddmm", "bf16 fp16 fp32"},
{"aclnnAddmmWeightNz", "bf16 fp16 fp32"},
{"aclnnAddmv", "bf16 fp16 fp32 fp64"},  // refused on A3: uint8 int8 int16 int32 int64
{"aclnnAddr", "bf16 fp16 fp32 fp64 uint8 int8 int16 int32 int64 bool"},
{"aclnnAdds", "bf16 fp16 fp32 fp64 uint8 int8 int16 int32 int64 bool complex64 complex128"},  // taken on A3: complex64 complex128
{"aclnnAll", "bf16 fp16 fp32 fp64 uint8 int8 int16 int32 int64 bool"},
{"aclnnAmax", "bf16 fp16 fp32 fp64 uint8 int8 int16 int32 int64 bool"},
{"aclnnAmin", "bf16 fp16 fp32 fp64 uint8 int8 int16 int32 int64 bool"},
{"aclnnAminmaxAll", "bf16 fp16 fp32 fp64 uint8 int8 int16 int32 int64 bool"},
{"aclnnAminmaxDim", "bf16 fp16 fp32 fp64 uint8 int8 int16 int32 int64 bool"},
{"aclnnAngleV2", "fp16 fp32 uint8 int8 int16 int32 int64 bool complex64"},  // refused on A3: bf16 fp64 complex128; taken on A3: complex64
{"aclnnAny", "bf16 fp16 fp32 fp64 uint8 int8 int16 int32 int64 bool"},
{"aclnnArange", "bf16 fp16 fp32 fp64 int32 int64 bool"},  // refused on A3: uint8 int8 int16
{"aclnnArgMax", "bf16 fp16 fp32 fp64 uint8 int8 int16 int32 int64"},
{"aclnnArgMin", "bf16 fp16 fp32 fp64 uint8 int8 int16 int32 int64"},
{"aclnnAsin", "bf16 fp16 fp32 fp64 uint8 int8 int16 int32 int64 bool"},
{"aclnnAtan", "bf16 fp16 fp32 fp64 uint8 int8 int16 int32 int64 bool"},
{"aclnnAvgPool2d", "bf16 fp16 fp32 uint8 int8 int16 int32 bool"},  // refused on A3: fp64 int64
{"aclnnAvgPool3d", "bf16 fp16 fp32 uint8 int8 int16 int32 bool"},  // refused on A3: fp64 int64
{"aclnnBaddbmm", "bf16 fp16 fp32"},
{"aclnnBatchMatMul", "bf16 fp16 fp32"},
{"aclnnBatchMatMulWeightNz", "bf16 fp16 fp32"},
{"aclnnBatchNorm", "bf16 fp16 fp32 uint8 int8 int16 int32 int64 bool"},  // refused on A3: fp64
{"aclnnBinaryCrossEntropy", "bf16 fp16 fp32"},
{"aclnnBinaryCrossEntropyWithLogits", "bf16 fp16 fp32"},
{"aclnnBitwiseAndScalar", "uint8 int8 int16 int32 int64 bool"},
{"aclnnBitwiseAndTensor", "uint8 int8 int16 int32 int64 bool"},
{"aclnnBitwiseNot", "uint8 int8 int16 int32 int64 bool"},
{"aclnnBitwiseOrScalar", "uint8 int8 int16 int32 int64 bool"},
{"aclnnBitwiseOrTensor", "uint8 int8 int16 int32 int64 bool"},
{"aclnnBitwiseXorScalar", "uint8 int8 int16 int32 int64 bool"},
{"aclnnBitwiseXorTensor", "uint8 int8 int16 int32 int64 bool"},
{"aclnnBucketize", "bf16 fp16 fp32 fp64 uint8 int8 int16 int32 int64"},
{"aclnnCat", "bf16 fp16 fp32 fp64 uint8 int8 int16 int32 int64 bool complex64"},  // refused on A3: complex128; taken on A3: complex64
{"aclnnCdist", "bf16 fp16 fp32 uint8 int8 int16 int32 int64 bool"},  // refused on A3: fp64
{"aclnnCeil", "bf16 fp16 fp32 fp64 uint8 int8 int16 int32 int64"},  // op-plugin's test_ceil.py, test_ceil_integer_identity_npu
{"aclnnCelu", "bf16 fp16 fp32"},
{"aclnnClampMaxTensor", "bf16 fp16 fp32 fp64 uint8 int8 int16 int32 int64"},  // refused on A3: bool
{"aclnnClampMinTensor", "bf16 fp16 fp32 fp64 uint8 int8 int16 int32 int64"},  // refused on A3: bool
{"aclnnConvolution", "bf16 fp16 fp32 uint8 int8 int16 int32 bool"},  // refused on A3: fp64 int64
{"aclnnCumprod", "bf16 fp16 fp32 fp64 uint8 int8 int16 int32 int64"},
{"aclnnDiv", "bf16 fp16 fp32 fp64 uint8 int8 int16 int32 int64 bool complex64 complex128"},  // taken on A3: complex64 complex128
{"aclnnDivMod", "bf16 fp16 fp32 fp64 uint8 int8 int16 int32 int64 bool"},
{"aclnnDivMods", "bf16 fp16 fp32 fp64 uint8 int8 int16 int32 int64 bool"},
{"aclnnDivs", "bf16 fp16 fp32 fp64 uint8 int8 int16 int32 int64 bool complex64 complex128"},  // taken on A3: complex64 complex128
{"aclnnDot", "bf16 fp16 fp32 uint8 int8 int32"},  // refused on A3: fp64 int16 int64
{"aclnnDropoutDoMask", "bf16 fp16 fp32 uint8 int8 int16 int32 int64 bool"},  // refused on A3: fp64
{"aclnnElu", "bf16 fp16 fp32 fp64"},
{"aclnnEmbedding", "bf16 fp16 fp32 uint8 int8 int16 int32 int64 bool"},  // refused on A3: fp64
{"aclnnEmbeddingBag", "bf16 fp16 fp32 uint8 int8 int16 int32 int64 bool"},  // refused on A3: fp64
{"aclnnEqual", "bf16 fp16 fp32 fp64 uint8 int8 int16 int32 int64 bool"},  // refused on A3: complex64 complex128
{"aclnnErf", "bf16 fp16 fp32 fp64 int64 bool"},  // refused on A3: uint8 int8 int16 int32
{"aclnnErfc", "bf16 fp16 fp32 fp64 int64 bool"},  // refused on A3: uint8 int8 int16 int32
{"aclnnErfinv", "bf16 fp16 fp32 uint8 int8 int16 int32 int64 bool"},  // refused on A3: fp64
{"aclnnExp", "bf16 fp16 fp32 fp64 int64 bool complex64 complex128"},  // refused on A3: uint8 int8 int16 int32; taken on A3: complex64 complex128
{"aclnnExp2", "bf16 fp16 fp32 fp64 uint8 int8 int16 int32 int64 bool"},
{"aclnnExpm1", "bf16 fp16 fp32 int64 bool"},  // refused on A3: fp64 uint8 int8 int16 int32
{"aclnnEye", "bf16 fp16 fp32 uint8 int8 int16 int32 int64 bool"},  // refused on A3: fp64 complex64 complex128
{"aclnnFloor", "bf16 fp16 fp32 fp64 uint8 int8 int16 int32 int64"},
{"aclnnFloorDivide", "bf16 fp16 fp32 fp64 uint8 int8 int16 int32 int64"},
{"aclnnFloorDivides", "bf16 fp16 fp32 fp64 uint8 int8 int16 int32 int64 bool"},  // op-plugin's test_floordivide.py, test_floor_divide_scalar_bool
{"aclnnFmodScalar", "bf16 fp16 fp32 fp64 uint8 int8 int16 int32 int64"},
{"aclnnFmodTensor", "bf16 fp16 fp32 fp64 uint8 int8 int32 int64"},  // refused on A3: int16
{"aclnnForeachCos", "bf16 fp16 fp32 uint8 int8 int16 int32 int64 bool"},  // refused on A3: fp64 complex64 complex128
{"aclnnForeachRoundOffNumberV2", "bf16 fp16 fp32 uint8 int8 int16 int32 int64 bool"},  // refused on A3: fp64
{"aclnnForeachSigmoid", "bf16 fp16 fp32 uint8 int8 int16 int32 int64 bool"},  // refused on A3: fp64 complex64 complex128
{"aclnnForeachSqrt", "bf16 fp16 fp32 uint8 int8 int16 int32 int64 bool"},  // refused on A3: fp64 complex64 complex128
{"aclnnForeachTanh", "bf16 fp16 fp32 uint8 int8 int16 int32 int64 bool"},  // refused on A3: fp64 complex64 complex128
{"aclnnFrac", "bf16 fp16 fp32"},
{"aclnnGather", "bf16 fp16 fp32 fp64 uint8 int8 int16 int32 int64 bool"},
{"aclnnGcd", "bf16 fp16 fp32 fp64 int16 int32 int64 bool"},  // refused on A3: uint8 int8
{"aclnnGeScalar", "bf16 fp16 fp32 fp64 uint8 int8 int16 int32 int64 bool"},
{"aclnnGeTensor", "bf16 fp16 fp32 fp64 uint8 int8 int16 int32 int64 bool"},
{"aclnnGelu", "bf16 fp16 fp32"},
{"aclnnGeluV2", "bf16 fp16 fp32"},
{"aclnnGlu", "bf16 fp16 fp32 fp64"},
{"aclnnGridSampler2D", "bf16 fp16 fp32 uint8 int8 int16 int32 int64 bool"},  // refused on A3: fp64
{"aclnnHardshrink", "bf16 fp16 fp32"},
{"aclnnHardsigmoid", "bf16 fp16 fp32 uint8 int8 int16 int32 int64"},  // op-plugin's test_hardsigmoid.py, test_hardsigmoid; refused on A3: fp64
{"aclnnHardswish", "bf16 fp16 fp32"},
{"aclnnHardtanh", "bf16 fp16 fp32 fp64 uint8 int8 int16 int32 int64"},
{"aclnnHistc", "fp16 fp32 int32"},  // op-plugin's HistcKernelNpu.cpp; refused on A3: bf16
{"aclnnIm2col", "bf16 fp16 fp32 uint8 int8 int16 int32 int64"},  // refused on A3: fp64 bool complex64 complex128
{"aclnnIndex", "bf16 fp16 fp32 fp64 uint8 int8 int16 int32 int64 bool"},  // refused on A3: complex64 complex128
{"aclnnIndexAdd", "bf16 fp16 fp32 fp64 uint8 int8 int16 int32 int64 bool"},  // refused on A3: complex64 complex128
{"aclnnIndexFill", "bf16 fp16 fp32 int32 int64 bool"},  // refused on A3: fp64 uint8 int8 int16 complex64 complex128
{"aclnnIndexPutImpl", "bf16 fp16 fp32 fp64 uint8 int8 int16 int32 int64 bool"},  // refused on A3: complex64 complex128
{"aclnnInplaceAcos", "bf16 fp16 fp32 fp64 uint8 int8 int16 int32 int64 bool"},
{"aclnnInplaceAdd", "bf16 fp16 fp32 fp64 uint8 int8 int16 int32 int64 bool complex64 complex128"},  // taken on A3: complex64 complex128
{"aclnnInplaceAddcdiv", "bf16 fp16 fp32 fp64 uint8 int8 int16 int32 int64"},
{"aclnnInplaceAddcmul", "bf16 fp16 fp32 fp64 uint8 int8 int32 int64"},  // refused on A3: int16
{"aclnnInplaceAddmm", "bf16 fp16 fp32"},
{"aclnnInplaceAddr", "bf16 fp16 fp32 fp64 uint8 int8 int16 int32 int64 bool"},
{"aclnnInplaceAdds", "bf16 fp16 fp32 fp64 uint8 int8 int16 int32 int64 bool complex64 complex128"},  // taken on A3: complex64 complex128
{"aclnnInplaceAsin", "bf16 fp16 fp32 fp64 uint8 int8 int16 int32 int64 bool"},
{"aclnnInplaceAtan", "bf16 fp16 fp32 fp64 uint8 int8 int16 int32 int64 bool"},
{"aclnnInplaceAtan2", "bf16 fp16 fp32 fp64 uint8 int8 int16 int32 int64 bool"},
{"aclnnInplaceBitwiseAndScalar", "uint8 int8 int16 int32 int64 bool"},
{"aclnnInplaceBitwiseAndTensor", "uint8 int8 int16 int32 int64 bool"},
{"aclnnInplaceBitwiseXorScalar", "uint8 int8 int16 int32 int64 bool"},
{"aclnnInplaceBitwiseXorTensor", "uint8 int8 int16 int32 int64 bool"},
{"aclnnInplaceCelu", "bf16 fp16 fp32"},
{"aclnnInplaceDiv", "bf16 fp16 fp32 fp64 uint8 int8 int16 int32 int64 bool"},
{"aclnnInplaceDivMod", "bf16 fp16 fp32 fp64 uint8 int8 int16 int32 int64 bool"},
{"aclnnInplaceDivMods", "bf16 fp16 fp32 fp64 uint8 int8 int16 int32 int64 bool"},
{"aclnnInplaceDivs", "bf16 fp16 fp32 fp64 uint8 int8 int16 int32 int64 bool"},
{"aclnnInplaceElu", "bf16 fp16 fp32 fp64"},
{"aclnnInplaceErf", "bf16 fp16 fp32 fp64 int64 bool"},  // refused on A3: uint8 int8 int16 int32
{"aclnnInplaceErfc", "bf16 fp16 fp32 fp64 int64 bool"},  // refused on A3: uint8 int8 int16 int32
{"aclnnInplaceErfinv", "bf16 fp16 fp32 uint8 int8 int16 int32 int64 bool"},  // refused on A3: fp64
{"aclnnInplaceExp", "bf16 fp16 fp32 fp64 int64 bool complex64 complex128"},  // refused on A3: uint8 int8 int16 int32; taken on A3: complex64 complex128
{"aclnnInplaceExp2", "bf16 fp16 fp32 fp64 uint8 int8 int16 int32 int64 bool"},
{"aclnnInplaceExpm1", "bf16 fp16 fp32 int64 bool"},  // refused on A3: fp64 uint8 int8 int16 int32
{"aclnnInplaceFillDiagonal", "bf16 fp16 fp32 fp64 uint8 int8 int16 int32 int64 bool"},
{"aclnnInplaceFloor", "bf16 fp16 fp32 fp64 uint8 int8 int16 int32 int64"},
{"aclnnInplaceFloorDivide", "bf16 fp16 fp32 fp64 uint8 int8 int16 int32 int64"},
{"aclnnInplaceFloorDivides", "bf16 fp16 fp32 fp64 uint8 int8 int16 int32 int64"},
{"aclnnInplaceFmodScalar", "bf16 fp16 fp32 fp64 uint8 int8 int16 int32 int64"},
{"aclnnInplaceFmodTensor", "bf16 fp16 fp32 fp64 uint8 int8 int32 int64"},  // refused on A3: int16
{"aclnnInplaceFrac", "bf16 fp16 fp32"},
{"aclnnInplaceGeScalar", "bf16 fp16 fp32 fp64 uint8 int8 int16 int32 int64 bool"},
{"aclnnInplaceGeTensor", "bf16 fp16 fp32 fp64 uint8 int8 int16 int32 int64 bool"},
{"aclnnInplaceGtScalar", "bf16 fp16 fp32 fp64 uint8 int8 int16 int32 int64 bool"},
{"aclnnInplaceGtTensor", "bf16 fp16 fp32 fp64 uint8 int8 int16 int32 int64 bool"},
{"aclnnInplaceHardsigmoid", "bf16 fp16 fp32 uint8 int8 int16 int32 int64"},  // as aclnnHardsigmoid; refused on A3: fp64
{"aclnnInplaceHardswish", "bf16 fp16 fp32"},
{"aclnnInplaceHardtanh", "bf16 fp16 fp32 fp64 uint8 int8 int16 int32 int64"},
{"aclnnInplaceIndexFill", "bf16 fp16 fp32 int32 int64 bool"},  // refused on A3: fp64 uint8 int8 int16 complex64 complex128
{"aclnnInplaceIndexFillTensor", "bf16 fp16 fp32 fp64 uint8 int8 int16 int32 int64 bool"},
{"aclnnInplaceLeScalar", "bf16 fp16 fp32 fp64 uint8 int8 int16 int32 int64 bool"},
{"aclnnInplaceLeTensor", "bf16 fp16 fp32 fp64 uint8 int8 int16 int32 int64 bool"},
{"aclnnInplaceLeakyRelu", "bf16 fp16 fp32 fp64"},
{"aclnnInplaceLerps", "bf16 fp16 fp32"},
{"aclnnInplaceLog1p", "bf16 fp16 fp32 fp64 uint8 int8 int16 int32 int64 bool"},
{"aclnnInplaceLogicalNot", "bf16 fp16 fp32 fp64 uint8 int8 int16 int32 int64 bool"},
{"aclnnInplaceLtScalar", "bf16 fp16 fp32 fp64 uint8 int8 int16 int32 int64 bool"},
{"aclnnInplaceLtTensor", "bf16 fp16 fp32 fp64 uint8 int8 int16 int32 int64 bool"},
{"aclnnInplaceMaskedFillScalar", "bf16 fp16 fp32 int8 int32 int64 bool"},  // refused on A3: fp64 uint8 int16
{"aclnnInplaceMaskedFillTensor", "bf16 fp16 fp32 int8 int32 int64 bool"},  // refused on A3: fp64 uint8 int16
{"aclnnInplaceMaskedScatter", "bf16 fp16 fp32 fp64 uint8 int8 int16 int32 int64 bool"},
{"aclnnInplaceMish", "bf16 fp16 fp32"},
{"aclnnInplaceNanToNum", "bf16 fp16 fp32 uint8 int8 int16 int32 int64 bool"},  // refused on A3: fp64
{"aclnnInplaceNormal", "bf16 fp16 fp32 fp64 uint8 int8 int16 int32 int64 bool"},  // torch_npu's test_dlpack.py, op-plugin's test_npu_gather_sparse_index.py
{"aclnnInplaceNormalTensor", "bf16 fp16 fp32"},
{"aclnnInplaceOne", "bf16 fp16 fp32 fp64 uint8 int8 int16 int32 int64 bool"},  // refused on A3: complex64 complex128
{"aclnnInplacePowTensorScalar", "bf16 fp16 fp32 fp64 uint8 int8 int16 int32 int64 complex64 complex128"},  // taken on A3: complex64 complex128
{"aclnnInplacePowTensorTensor", "bf16 fp16 fp32 fp64 uint8 int8 int16 int32 int64 complex64 complex128"},  // taken on A3: complex64 complex128
{"aclnnInplacePut", "fp16 fp32 int32 bool"},  // refused on A3: bf16 fp64 uint8 int8 int16 int64 complex64 complex128; taken on A3: bool
{"aclnnInplaceRandom", "bf16 fp16 fp32 fp64 uint8 int8 int16 int32 int64 bool"},
{"aclnnInplaceRandomTensor", "bf16 fp16 fp32 fp64 uint8 int8 int16 int32 int64 bool"},
{"aclnnInplaceRandomWithoutFromTo", "bf16 fp16 fp32 fp64 uint8 int8 int16 int32 int64 bool"},
{"aclnnInplaceRandomWithoutFromToTensor", "bf16 fp16 fp32 fp64 uint8 int8 int16 int32 int64 bool"},
{"aclnnInplaceRelu", "bf16 fp16 fp32 uint8 int8 int32 int64"},  // refused on A3: fp64 int16
{"aclnnInplaceRemainderTensorScalar", "bf16 fp16 fp32 fp64 int32 int64"},  // refused on A3: uint8 int8 int16
{"aclnnInplaceRemainderTensorTensor", "bf16 fp16 fp32 fp64 int32 int64"},  // refused on A3: uint8 int8 int16
{"aclnnInplaceRenorm", "bf16 fp16 fp32 uint8 int8 int16 int32 int64 bool"},  // refused on A3: fp64 complex64 complex128
{"aclnnInplaceRoundDecimals", "bf16 fp16 fp32 fp64 uint8 int8 int16 int32 int64"},
{"aclnnInplaceScatterReduce", "fp32 fp64 uint8 int8 int16 int32 int64"},
{"aclnnInplaceSinc", "bf16 fp16 fp32 fp64 uint8 int8 int16 int32 int64 bool"},  // refused on A3: complex64 complex128
{"aclnnInplaceSinh", "bf16 fp16 fp32 fp64"},
{"aclnnInplaceSub", "bf16 fp16 fp32 fp64 uint8 int8 int16 int32 int64 complex64 complex128"},
{"aclnnInplaceSubs", "bf16 fp16 fp32 fp64 uint8 int8 int16 int32 int64 complex64 complex128"},
{"aclnnInplaceTanh", "bf16 fp16 fp32 uint8 int8 int16 int32 int64 bool"},  // refused on A3: fp64
{"aclnnInplaceThreshold", "bf16 fp16 fp32 uint8 int8 int16 int32 int64"},  // refused on A3: fp64
{"aclnnInplaceTril", "bf16 fp16 fp32 fp64 uint8 int8 int16 int32 int64 bool"},
{"aclnnInplaceTriu", "bf16 fp16 fp32 fp64 uint8 int8 int16 int32 int64 bool"},
{"aclnnInplaceUniform", "bf16 fp16 fp32 fp64 uint8 int8 int16 int32 int64"},
{"aclnnInplaceUniformTensor", "bf16 fp16 fp32 fp64 uint8 int8 int16 int32 int64"},
{"aclnnInplaceXLogYScalarOther", "bf16 fp16 fp32 fp64 uint8 int8 int16 int32 int64 bool"},
{"aclnnIsClose", "bf16 fp16 fp32 fp64 uint8 int8 int16 int32 int64 bool"},
{"aclnnIsFinite", "bf16 fp16 fp32 fp64 uint8 int8 int16 int32 int64 bool"},
{"aclnnIsInTensorScalar", "bf16 fp16 fp32 fp64 uint8 int8 int16 int32 int64"},
{"aclnnIsNegInf", "bf16 fp16 fp32 uint8 int8 int16 int32 int64 bool"},  // refused on A3: fp64
{"aclnnIsPosInf", "bf16 fp16 fp32 uint8 int8 int16 int32 int64 bool"},  // refused on A3: fp64
{"aclnnKlDiv", "bf16 fp16 fp32"},
{"aclnnKthvalue", "fp16 fp32 uint8 int8 int16 int32 int64 bool"},  // refused on A3: bf16 fp64
{"aclnnL1Loss", "bf16 fp16 fp32 uint8 int8 int16 int32 int64"},  // refused on A3: fp64
{"aclnnLayerNorm", "bf16 fp16 fp32 uint8 int8 int16 int32 int64 bool"},  // refused on A3: fp64
{"aclnnLeScalar", "bf16 fp16 fp32 fp64 uint8 int8 int16 int32 int64 bool"},
{"aclnnLeTensor", "bf16 fp16 fp32 fp64 uint8 int8 int16 int32 int64 bool"},
{"aclnnLeakyRelu", "bf16 fp16 fp32 fp64"},
{"aclnnLeftShift", "uint8 int8 int16 int32 int64"},
{"aclnnLerps", "bf16 fp16 fp32"},
{"aclnnLinalgCholesky", "fp32"},
{"aclnnLinalgVectorNorm", "bf16 fp16 fp32 fp64 uint8 int8 int16 int32 int64 bool"},  // refused on A3: complex64 complex128
{"aclnnLinspace", "bf16 fp16 fp32 fp64 uint8 int8 int16 int32 int64 bool"},  // refused on A3: complex64 complex128
{"aclnnLog1p", "bf16 fp16 fp32 fp64 uint8 int8 int16 int32 int64 bool"},
{"aclnnLogAddExp", "bf16 fp16 fp32 uint8 int8 int16 int32 int64 bool"},  // refused on A3: fp64 complex64 complex128
{"aclnnLogAddExp2", "bf16 fp16 fp32 uint8 int8 int16 int32 int64 bool"},  // refused on A3: fp64
{"aclnnLogSigmoidForward", "bf16 fp16 fp32 uint8 int8 int16 int32 int64 bool"},  // refused on A3: fp64
{"aclnnLogSoftmax", "bf16 fp16 fp32 fp64"},  // taken on A3: fp64
{"aclnnLogSpace", "bf16 fp16 fp32 bool"},  // refused on A3: fp64 uint8 int8 int16 int32 int64 complex64 complex128
{"aclnnLogSumExp", "bf16 fp16 fp32 uint8 int8 int16 int32 int64 bool"},  // refused on A3: fp64
{"aclnnLogicalNot", "bf16 fp16 fp32 fp64 uint8 int8 int16 int32 int64 bool"},
{"aclnnLogit", "bf16 fp16 fp32"},  // refused on A3: fp64 uint8 int8 int16 int32 int64 bool
{"aclnnMaskedSelect", "bf16 fp16 fp32 fp64 uint8 int8 int16 int32 int64 bool"},  // refused on A3: complex64 complex128
{"aclnnMatmul", "bf16 fp16 fp32"},
{"aclnnMatmulWeightNz", "bf16 fp16 fp32"},
{"aclnnMaxDim", "bf16 fp16 fp32 int64 bool"},  // refused on A3: fp64 uint8 int8 int16 int32
{"aclnnMaxPool2dWithMask", "bf16 fp16 fp32 uint8 int8 int16 int32 int64 bool"},  // refused on A3: fp64
{"aclnnMaxPool3dWithArgmax", "bf16 fp16 fp32 uint8 int8 int16 int32 int64 bool"},  // refused on A3: fp64
{"aclnnMaxUnpool2d", "bf16 fp16 fp32 fp64 uint8 int8 int16 int32 int64"},
{"aclnnMaximum", "bf16 fp16 fp32 fp64 uint8 int8 int16 int32 int64 bool"},
{"aclnnMean", "bf16 fp16 fp32 fp64 complex64 complex128"},
{"aclnnMedian", "fp16 fp32 uint8 int8 int16 int32 int64"},  // refused on A3: bf16 fp64
{"aclnnMedianDim", "bf16 fp16 fp32 uint8 int8 int16 int32 int64"},  // refused on A3: fp64
{"aclnnMinDim", "bf16 fp16 fp32 int64 bool"},  // refused on A3: fp64 uint8 int8 int16 int32
{"aclnnMinimum", "bf16 fp16 fp32 fp64 uint8 int8 int16 int32 int64 bool"},
{"aclnnMish", "bf16 fp16 fp32"},
{"aclnnMm", "bf16 fp16 fp32"},
{"aclnnMseLoss", "bf16 fp16 fp32"},
{"aclnnMultilabelMarginLoss", "bf16 fp16 fp32 uint8 int8 int16 int32 int64 bool"},  // refused on A3: fp64
{"aclnnMultinomial", "bf16 fp16 fp32 fp64"},  // taken on A3: fp64
{"aclnnMv", "bf16 fp16 fp32"},
{"aclnnNLLLoss", "bf16 fp16 fp32 uint8 int8 int16 int32 int64 bool"},  // refused on A3: fp64
{"aclnnNanMedian", "fp16 fp32 uint8 int8 int16 int32 int64 bool"},  // refused on A3: bf16 fp64
{"aclnnNanMedianDim", "bf16 fp16 fp32 uint8 int8 int16 int32 int64 bool"},  // refused on A3: fp64
{"aclnnNanToNum", "bf16 fp16 fp32 uint8 int8 int16 int32 int64 bool"},  // refused on A3: fp64
{"aclnnNeg", "bf16 fp16 fp32 fp64 int8 int32 int64 complex64 complex128"},  // refused on A3: uint8 int16
{"aclnnNonzero", "bf16 fp16 fp32 fp64 uint8 int8 int16 int32 int64 bool"},  // refused on A3: complex64 complex128
{"aclnnNorm", "bf16 fp16 fp32 fp64 complex64 complex128"},  // taken on A3: complex64 complex128
{"aclnnPdist", "bf16 fp16 fp32 uint8 int8 int16 int32 int64 bool"},  // refused on A3: fp64
{"aclnnPolar", "bf16 fp16 fp32 uint8 int8 int16 int32 int64 bool"},  // refused on A3: fp64
{"aclnnPowTensorScalar", "bf16 fp16 fp32 fp64 uint8 int8 int16 int32 int64 bool complex64 complex128"},  // taken on A3: bool complex64 complex128
{"aclnnPowTensorTensor", "bf16 fp16 fp32 fp64 uint8 int8 int16 int32 int64 complex64 complex128"},  // taken on A3: complex64 complex128
{"aclnnPrelu", "bf16 fp16 fp32 uint8 int8 int16 int32 int64 bool"},  // refused on A3: fp64
{"aclnnProd", "bf16 fp16 fp32 fp64 uint8 int8 int16 int32 int64 bool"},  // refused on A3: complex64 complex128
{"aclnnRReluWithNoise", "bf16 fp16 fp32 uint8 int8 int16 int32 int64 bool"},  // refused on A3: fp64
{"aclnnReduceNansum", "bf16 fp16 fp32 uint8 int8 int16 int32 int64 bool"},  // refused on A3: fp64
{"aclnnReflectionPad1d", "bf16 fp16 fp32 fp64 int8 int32 bool complex64"},  // refused on A3: uint8 int16 int64 complex128; taken on A3: complex64
{"aclnnReflectionPad2d", "bf16 fp16 fp32 fp64 int8 int32 bool complex64"},  // refused on A3: uint8 int16 int64 complex128; taken on A3: complex64
{"aclnnReflectionPad3d", "bf16 fp16 fp32 fp64 int8 int32 bool complex64"},  // refused on A3: uint8 int16 int64 complex128; taken on A3: complex64
{"aclnnRelu", "bf16 fp16 fp32 uint8 int8 int32 int64"},  // refused on A3: fp64 int16
{"aclnnRemainderScalarTensor", "bf16 fp16 fp32 fp64 uint8 int8 int16 int32 int64"},
{"aclnnRemainderTensorScalar", "bf16 fp16 fp32 fp64 int32 int64"},  // refused on A3: uint8 int8 int16
{"aclnnRemainderTensorTensor", "bf16 fp16 fp32 fp64 int32 int64"},  // refused on A3: uint8 int8 int16
{"aclnnRenorm", "bf16 fp16 fp32 uint8 int8 int16 int32 int64 bool"},  // refused on A3: fp64 complex64 complex128
{"aclnnRepeatInterleaveInt", "bf16 fp16 fp32 uint8 int8 int16 int32 int64 bool"},  // refused on A3: fp64 complex64 complex128
{"aclnnRepeatInterleaveIntWithDim", "bf16 fp16 fp32 uint8 int8 int16 int32 int64 bool"},  // refused on A3: fp64 complex64 complex128
{"aclnnRepeatInterleaveWithDim", "bf16 fp16 fp32 uint8 int8 int16 int32 int64 bool"},  // refused on A3: fp64 complex64 complex128
{"aclnnReplicationPad1d", "bf16 fp16 fp32 fp64 uint8 int8 int16 int32 int64 bool complex64"},  // refused on A3: complex128; taken on A3: complex64
{"aclnnReplicationPad2d", "bf16 fp16 fp32 fp64 uint8 int8 int16 int32 int64 bool complex64"},  // refused on A3: complex128; taken on A3: complex64
{"aclnnReplicationPad3d", "bf16 fp16 fp32 fp64 uint8 int8 int16 int32 int64 bool complex64"},  // refused on A3: complex128; taken on A3: complex64
{"aclnnRoll", "bf16 fp16 fp32 uint8 int8 int32 int64 bool"},  // refused on A3: fp64 int16
{"aclnnRound", "bf16 fp16 fp32 fp64 uint8 int8 int16 int32 int64"},
{"aclnnRoundDecimals", "bf16 fp16 fp32 fp64 uint8 int8 int16 int32 int64"},
{"aclnnScatterAdd", "bf16 fp16 fp32 fp64 uint8 int8 int16 int32 int64 bool complex64 complex128"},  // taken on A3: complex64 complex128
{"aclnnScatterReduce", "fp32 fp64 uint8 int8 int16 int32 int64"},
{"aclnnSearchSorted", "fp16 fp32 uint8 int8 int16 int32 int64 bool"},  // refused on A3: bf16 fp64
{"aclnnSign", "bf16 fp16 fp32 fp64 int32 int64 bool complex64 complex128"},  // refused on A3: uint8 int8 int16; taken on A3: complex64 complex128
{"aclnnSilu", "bf16 fp16 fp32"},
{"aclnnSimThreadExponential", "bf16 fp16 fp32 fp64"},
{"aclnnSinc", "bf16 fp16 fp32 fp64 uint8 int8 int16 int32 int64 bool"},  // refused on A3: complex64 complex128
{"aclnnSinh", "bf16 fp16 fp32 fp64 uint8 int8 int16 int32 int64 bool complex64 complex128"},  // taken on A3: uint8 int8 int16 int32 int64 bool complex64 complex128
{"aclnnSmoothL1Loss", "bf16 fp16 fp32"},
{"aclnnSoftMarginLoss", "bf16 fp16 fp32 complex64 complex128"},  // refused on A3: fp64
{"aclnnSoftmax", "bf16 fp16 fp32 fp64"},
{"aclnnSoftmaxBackward", "bf16 fp16 fp32 uint8 int8 int16 int32 int64 bool"},  // refused on A3: fp64
{"aclnnSoftplus", "bf16 fp16 fp32"},
{"aclnnSoftshrink", "bf16 fp16 fp32"},
{"aclnnSort", "bf16 fp16 fp32 uint8 int8 int16 int32 int64 bool"},  // refused on A3: fp64
{"aclnnStack", "bf16 fp16 fp32 fp64 uint8 int8 int16 int32 int64 bool complex64 complex128"},  // taken on A3: complex64 complex128
{"aclnnStd", "bf16 fp16 fp32 uint8 int8 int16 int32 int64 bool"},  // refused on A3: fp64 complex64 complex128
{"aclnnStdMeanCorrection", "bf16 fp16 fp32 uint8 int8 int16 int32 int64 bool"},  // refused on A3: fp64 complex64 complex128
{"aclnnSub", "bf16 fp16 fp32 fp64 uint8 int8 int16 int32 int64 complex64 complex128"},
{"aclnnSubs", "bf16 fp16 fp32 fp64 uint8 int8 int16 int32 int64 complex64 complex128"},
{"aclnnTake", "bf16 fp16 fp32 fp64 uint8 int8 int16 int32 int64 bool complex64 complex128"},  // taken on A3: complex64 complex128
{"aclnnTanh", "bf16 fp16 fp32 uint8 int8 int16 int32 int64 bool"},  // refused on A3: fp64
{"aclnnThreshold", "bf16 fp16 fp32 uint8 int8 int16 int32 int64"},  // refused on A3: fp64
{"aclnnTriangularSolve", "bf16 fp16 fp32 uint8 int8 int16 int32 int64 bool"},  // refused on A3: fp64
{"aclnnTril", "bf16 fp16 fp32 fp64 uint8 int8 int16 int32 int64 bool"},
{"aclnnTriu", "bf16 fp16 fp32 fp64 uint8 int8 int16 int32 int64 bool"},
{"aclnnTrunc", "bf16 fp16 fp32 uint8 int8 int16 int32 int64"},  // as aclnnCeil; refused on A3: fp64
{"aclnnUpsampleBicubic2d", "bf16 fp16 fp32 int8 int16 int32 int64 bool"},  // refused on A3: fp64 uint8
{"aclnnUpsampleBilinear2d", "bf16 fp16 fp32 fp64 int8 int16 int32 int64 bool"},  // refused on A3: uint8
{"aclnnUpsampleBilinear2dAA", "bf16 fp16 fp32 int8 int16 int32 int64 bool"},  // refused on A3: fp64 uint8
{"aclnnUpsampleLinear1d", "bf16 fp16 fp32 uint8 int8 int16 int32 int64 bool"},  // refused on A3: fp64
{"aclnnUpsampleNearest2dV2", "bf16 fp16 fp32 fp64 int8 int16 int32 int64 bool"},  // refused on A3: uint8
{"aclnnUpsampleNearest3d", "bf16 fp16 fp32 fp64 int8 int16 int32 int64 bool"},  // refused on A3: uint8
{"aclnnUpsampleNearestExact1d", "bf16 fp16 fp32 int8 int16 int32 int64 bool"},  // refused on A3: fp64 uint8
{"aclnnUpsampleNearestExact2d", "bf16 fp16 fp32 int8 int16 int32 int64 bool"},  // refused on A3: fp64 uint8
{"aclnnUpsampleNearestExact3d", "bf16 fp16 fp32 int8 int16 int32 int64 bool"},  // refused on A3: fp64 uint8
{"aclnnVarCorrection", "bf16 fp16 fp32"},
{"aclnnVarMean", "fp16 fp32 uint8 int8 int16 int32 int64 bool"},  // refused on A3: bf16 fp64 complex64 complex128
{"aclnnXLogYScalarOther", "bf16 fp16 fp32 fp64 uint8 int8 int16 int32 int64 bool"},
{"aclnnXLogYTensor", "bf16 fp16 fp32 uint8 int8 int16 int32 int64 bool"},  // refused on A3: fp64
