# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Recurrent states of the V2 runner: copies at the ends of cached prefixes, and accepted tokens."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from harness.references.v2_batches import device

pytest.importorskip("vllm.v1.worker.gpu.model_states.prompt_embeds", reason="since vLLM 0.33")

from ascend_platform.runners.v2.kernels.model_states import NPUMambaHybridModelState

BLOCK, BLOCKS, REQUESTS = 4, 12, 3


def model_state(**given: Any) -> Any:
    state: Any = object.__new__(NPUMambaHybridModelState)
    vars(state).update(given)
    return state


def test_states_move_to_the_block_in_which_a_request_goes_on() -> None:
    """Requests of several blocks, in steps of one to six tokens, beside one that stays in its
    block; the layers of another group are not touched."""
    layers = {
        name: SimpleNamespace(kv_cache=(torch.zeros(BLOCKS, 2, 3, device="npu"),)) for name in "ab"
    }
    groups = [SimpleNamespace(layer_names=[name]) for name in "ab"]
    table = np.arange(BLOCKS, dtype=np.int32).reshape(REQUESTS, -1)[:, ::-1]
    forward = SimpleNamespace(static_forward_context=layers)
    state = model_state(
        _align_mode=True,
        _has_drafts=False,
        _mamba_spec=SimpleNamespace(block_size=BLOCK),
        _mamba_group_ids=[1],
        _columns=np.full(REQUESTS, -1),
        _block_tables=SimpleNamespace(on_host=[table[::-1], table]),
        vllm_config=SimpleNamespace(compilation_config=forward),
    )
    computed, running = np.zeros(REQUESTS, np.int64), [None] * REQUESTS
    (states,) = layers["b"].kv_cache
    for step, rows in enumerate(([0, 1], [1, 0], [2, 0], [0, 2], [1], [0, 1, 2])):
        tokens = np.array([1 + (step + row) % 6 for row in rows])
        batch = SimpleNamespace(
            idx_mapping_np=np.array(rows),
            num_computed_tokens_np=computed[rows],
            num_scheduled_tokens=tokens,
        )
        state.preprocess_state(batch, (), SimpleNamespace(kv_cache_groups=groups), None)
        computed[rows] += tokens
        for row in rows:
            block = int(table[row, (computed[row] - 1) // BLOCK])
            if running[row] is not None:
                assert states[block].cpu().unique().tolist() == [running[row]]
            running[row] = 10 * step + row + 1
            states[block] = running[row]
    assert not layers["a"].kv_cache[0].any()


def test_accepted_tokens_are_kept_for_steps_with_drafts() -> None:
    kept = device([1, 1, 4, 1])
    state = model_state(_has_drafts=True, num_accepted_tokens_gpu=kept)
    state.postprocess_state(device([3, -1, 0], torch.int64), device([3, 2, 0]))
    assert kept.tolist() == [1, 1, 4, 3]
    state.postprocess_state(device([2, 3], torch.int64), 0)
    assert kept.tolist() == [1, 1, 1, 1]
    state._has_drafts = False
    state.postprocess_state(device([0], torch.int64), device([3]))
    assert kept.tolist() == [1, 1, 1, 1]
