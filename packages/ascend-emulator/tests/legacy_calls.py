# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Calls of torch_npu's functions that legacy graph operators compute."""

import torch
import torch_npu


def either(name, reference):
    """torch_npu's function for tensors of an NPU, `reference` for others."""

    def call(*args):
        tensors = [each for each in args if isinstance(each, torch.Tensor)]
        return getattr(torch_npu, name)(*args) if tensors[0].is_npu else reference(*args)

    return call
