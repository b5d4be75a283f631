#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Write the names of CANN's public C functions, each of which the emulator answers or refuses by
its own name.

tools/generated_docs/cann_names.py --pytorch GITDIR --op-plugin GITDIR --torch-npu DIR...    rewrite
the emulator's cann_names.txt

GITDIR are clones of Ascend/pytorch and Ascend/op-plugin, DIR unpacked wheels of torch_npu. Names
are the declarations in CANN's headers that torch_npu's releases from 2.7.1 on and these wheels
contain, the operators that op-plugin's releases call, and the functions below; without the
operators of facts/arguments.toml, which emulator_arguments.py writes.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tomllib
from pathlib import Path

TARGET = (
    Path(__file__).resolve().parents[2]
    / "packages/ascend-emulator/src/ascend_emulator/cann_names.txt"
)
RELEASES = r"v2\.(7\.1|8\.0|9\.0|1\d\.0)(-\d.*)?$|master$"
OPERATORS = r"\d.*|master$"
HEADERS = r"third_party/(acl|hccl)/inc/(acl|hccl|external)/.*\.h$"
STATUS = ("aclError", "aclnnStatus", "HcclResult")
# From CANN's API reference: aclnn's common interfaces (aclnn_base.h), and functions that later
# headers dropped.
DOCUMENTED = """
aclDestroyAclOpExecutor aclSetAclOpExecutorRepeatable aclSetDynamicInputTensorAddr aclSetDynamicOutputTensorAddr
aclSetDynamicTensorAddr aclSetInputTensorAddr aclSetOutputTensorAddr aclSetTensorAddr aclnnInit aclnnFinalize
aclGetTensorListSize aclGetIntArraySize aclGetFloatArraySize aclGetBoolArraySize aclGetScalarListSize aclInitTensor
aclGetViewStrides aclGetViewOffset aclGetFormat aclGetStorageShape aclGetDataType aclSetRawTensorAddr aclGetRawTensorAddr
aclCreateFp16Array aclDestroyFp16Array aclCreateBf16Array aclDestroyBf16Array aclCreateStringArray aclDestroyStringArray
aclrtMallocCached aclrtMemFlush aclrtMemInvalidate aclGenGraphAndDumpForOp aclrtQueryEvent aclrtQueryEventWaitStatus
aclrtCreateStreamV2 aclrtSetStreamConfigOpt aclrtSetTsDevice aclrtSetGroup aclrtGetGroupCount aclrtCreateGroupInfo
aclrtDestroyGroupInfo aclrtGetAllGroupInfo aclrtGetGroupInfoDetail aclrtCtxSetSysParamOpt aclrtCtxGetSysParamOpt
aclrtGetOverflowStatus aclrtResetOverflowStatus aclrtSetStreamFailureMode aclrtDestroyStreamForce
"""
# Operators of that reference (the lists of fused and NN operators from CANN 8.0 on, and the release
# notes' new ones) that neither op-plugin nor a header names; MindSpeed calls some of them.
OTHER_OPERATORS = """
aclnnAdaLayerNorm aclnnAdaLayerNormBackward aclnnAdaLayerNormQuant aclnnAdaLayerNormV2 aclnnAddLayerNormQuant
aclnnAddLayerNormQuantV2 aclnnAddRmsNormDynamicMxQuantV2 aclnnAddRmsNormDynamicQuant aclnnAllGatherAdd
aclnnAlltoAllAllGatherBatchMatMul aclnnApplyAdamWQuant aclnnApplyFusedEmaAdam aclnnBatchMatMulReduceScatterAlltoAll
aclnnBatchMatmulQuant aclnnBidirectionLSTM aclnnBidirectionLSTMV2 aclnnBlendImagesCustom aclnnEinsum aclnnExpSegsum
aclnnExpSegsumBackward aclnnExpandIntoJaggedPermute aclnnFFNV3 aclnnFatreluMul aclnnGroupNormSiluV2
aclnnGroupedMatMulAllReduce aclnnGroupedMatmulFinalizeRouting aclnnGroupedMatmulSwigluQuant aclnnGroupedMatmulV2
aclnnGroupedMatmulV3 aclnnHeaviside aclnnIncreFlashAttentionV2 aclnnIncreFlashAttentionV3 aclnnInplaceAddV3
aclnnInplaceMatmulAllReduceAddRmsNorm aclnnInplaceQuantMatmulAllReduceAddRmsNorm
aclnnInplaceWeightQuantMatmulAllReduceAddRmsNorm aclnnMatmulAllReduceAddRmsNorm aclnnMatmulCompress aclnnMlaPreprocess
aclnnMlaProlog aclnnMoeFinalizeRoutingV2Grad aclnnMoeFusedTopk aclnnMoeInitRoutingV2Grad aclnnMoeTokenPermuteWithEp
aclnnMoeTokenPermuteWithEpGrad aclnnMoeTokenUnpermuteWithEp aclnnMoeTokenUnpermuteWithEpGrad aclnnNormRopeConcat
aclnnNormRopeConcatBackward aclnnNpuFormatCast aclnnObfuscationCalculate aclnnObfuscationSetup
aclnnPromptFlashAttentionV2 aclnnQuantMatmul aclnnQuantMatmulAllReduceAddRmsNorm aclnnQuantMatmulV2
aclnnQuantizedBatchNorm aclnnRingAttentionUpdate aclnnRopeQuantKvcache aclnnSquaredRelu aclnnSwiGluQuant
aclnnSwinAttentionScore aclnnSwinAttentionScoreQuant aclnnSwinTransformerLnQkvQuant aclnnTfScatterAdd
aclnnWeightQuantBatchMatmul aclnnWeightQuantMatmulAllReduceAddRmsNorm
"""
# words of op-plugin's comments
NO_OPERATORS = frozenset({"aclnnOpInfoRecord", "aclnnV2", "aclnnInpalceCopy"})
# of DOCUMENTED: they return a pointer
VALUES = frozenset({"aclCreateFp16Array", "aclCreateBf16Array", "aclCreateStringArray"})


def git(directory: Path, *arguments: str) -> str:
    return subprocess.run(
        ["git", "-C", str(directory), *arguments], capture_output=True, text=True, check=True
    ).stdout


def branches(directory: Path, pattern: str) -> list[str]:
    names = git(
        directory, "for-each-ref", "--format=%(refname:short)", "refs/heads", "refs/remotes"
    ).split()
    return [name for name in names if re.fullmatch(pattern, name.rpartition("origin/")[2])]


def declared(text: str) -> dict[str, bool]:
    """C functions that a header declares: name to whether it returns a status."""
    text = re.sub(r"/\*.*?\*/|//[^\n]*", "", text, flags=re.DOTALL)
    found = re.findall(
        r"(?:ACL_FUNC_VISIBILITY|extern)\s+([\w\s*]+?)\s*\b((?:acl|Hccl)\w+)\s*\(", text
    )
    return {name: kind.split()[-1] in STATUS for kind, name in found}


def names(pytorch: Path, op_plugin: Path, wheels: list[Path]) -> dict[str, bool]:
    found = {name: name not in VALUES for name in (*DOCUMENTED.split(), *OTHER_OPERATORS.split())}
    seen: set[str] = set()
    for branch in branches(pytorch, RELEASES):
        for line in git(pytorch, "ls-tree", "-r", branch, "third_party").splitlines():
            blob, path = line.split()[2:4]
            if re.search(HEADERS, path) and blob not in seen:
                seen.add(blob)
                found |= declared(git(pytorch, "cat-file", "blob", blob))
    for header in (
        header
        for wheel in wheels
        for header in wheel.rglob("*.h")
        if re.search(HEADERS, header.as_posix())
    ):
        found |= declared(header.read_text(errors="replace"))
    for branch in branches(op_plugin, OPERATORS):
        lines = git(
            op_plugin,
            "grep",
            "-hoE",
            r"\baclnn[A-Z][A-Za-z0-9]+",
            branch,
            "--",
            "op_plugin/*.cpp",
            "op_plugin/*.h",
            "*.yaml",
        )
        operators = {re.sub(r"GetWorkspaceSize$", "", name) for name in lines.split()}
        found |= dict.fromkeys(operators - NO_OPERATORS, True)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pytorch", type=Path, required=True, metavar="GITDIR")
    parser.add_argument("--op-plugin", type=Path, required=True, metavar="GITDIR")
    parser.add_argument("--torch-npu", type=Path, nargs="+", required=True, metavar="DIR")
    options = parser.parse_args()
    found = names(options.pytorch, options.op_plugin, options.torch_npu)
    arguments = TARGET.parent / "facts" / "arguments.toml"
    for name in tomllib.loads(arguments.read_text()):
        found.pop(f"aclnn{name}", None)
    TARGET.write_text(
        "".join(f"{name}{'' if found[name] else ' value'}\n" for name in sorted(found))
    )
    print(
        f"{len(found)} names in {TARGET.name}, of which"
        f" {sum(not status for status in found.values())} return a value"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
