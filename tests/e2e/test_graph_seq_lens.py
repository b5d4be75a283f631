# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Each replay of a graph uses its own sequence lengths, however far the host is ahead of
the NPU."""

import sys

from harness.engines import npus

PROGRAM = """
import torch, torch_npu
from ascend_attention.dense import FusedAttentionImpl
from ascend_attention.metadata import FusedAttentionMetadata
from ascend_platform.graph import acl_graph
from vllm.config import VllmConfig
from vllm.forward_context import set_forward_context

torch.manual_seed(0)
tokens, size, blocks = 4, 64, 9
keys, values = (torch.randn(blocks, 128, 2, size, dtype=torch.float16).npu() for _ in range(2))
query, key, value = (torch.randn(tokens, heads, size, dtype=torch.float16).npu() for heads in (4, 2, 2))
table = torch.arange(1, blocks, dtype=torch.int32).view(tokens, 2).npu()
mask = torch.ones(2048, 2048, dtype=torch.int8).triu_(1).npu()
places = torch.arange(tokens).npu()
layer = FusedAttentionImpl(4, size, size**-0.5, 2)
output = torch.zeros(tokens, 4, size, dtype=torch.float16, device="npu")

def metadata(*kv):
    lengths = {"actual_seq_lengths": [1, 2, 3, 4], "actual_seq_lengths_kv": list(kv)}
    return FusedAttentionMetadata(lambda: lengths, tokens, table, places, mask, torch.empty(1, device="npu"))

def attend(meta):
    layer.forward(None, query, key, value, (keys, values), meta, output)
    layer.forward(None, query + output, key, value, (keys, values), meta, output)

config = VllmConfig()
steps = [metadata(1, 1, 1, 1), metadata(5, 200, 130, 256), metadata(256, 3, 77, 129), metadata(2, 2, 2, 255)]
expected = []
for meta in steps:
    attend(meta)
    expected.append(output.clone())
torch.npu.synchronize()
graph, stream = acl_graph.NPUGraph(), torch.npu.Stream()
with acl_graph._Capture(graph, stream=stream):
    attend(steps[0])
found = []
for meta in steps:
    with set_forward_context({"layer": meta}, config):
        graph.replay()
    found.append(output.clone())
torch.npu.synchronize()
print("SAME", [bool((a == b).all()) for a, b in zip(expected, found)])
"""


def test_consecutive_replays_use_their_own_sequence_lengths() -> None:
    """Without waiting for the previous replay, its sequence lengths would be overwritten unread,
    and the
    next replay would hang."""
    done = npus.run(
        1,
        sys.executable,
        "-c",
        PROGRAM,
        timeout=240,
        VLLM_PLUGINS="",
        ASCEND_EMULATOR_ADVERSARY="1",
    )
    assert "SAME [True, True, True, True]" in done.stdout, done.stdout[-1000:] + done.stderr[-3000:]
