# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""``torch`` with the streams and events of torch.npu instead of torch.cuda, for the modules of
vLLM that use them."""

import torch

from ascend_platform.graph.acl_graph import module_with_overrides

STREAM_NAMES = (
    "Stream",
    "Event",
    "stream",
    "current_stream",
    "default_stream",
    "set_stream",
    "synchronize",
)

# Some of vLLM's modules call torch.cuda.Stream, Event, stream and current_stream directly, such as
# the V1 runner, in __init__ and in every step (gpu_model_runner.py:276-298, 745-753). Only these
# modules get torch.npu's; torch.cuda itself is unchanged.
torch_on_npu = module_with_overrides(
    torch,
    cuda=module_with_overrides(
        torch.cuda, **{name: getattr(torch.npu, name) for name in STREAM_NAMES}
    ),
)
