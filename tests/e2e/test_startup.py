# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Starts of an engine: what an engine core in a process of its own leaves behind, its end with its
parent, and a model that is refused once it is loaded."""

import gc
import json
import sys
from pathlib import Path

from harness import checkout
from harness.engines import npus
from harness.models.small import TINY


def test_engine_core_restores_garbage_collection_and_exits_with_its_parent() -> None:
    done = npus.run(
        1, sys.executable, str(checkout.PROGRAMS / "start_engine.py"), str(checkout.ADDER)
    )
    (result,) = npus.results(done.stdout)
    assert result["ended"]
    assert result["pid"] != result["parent"]
    assert "ascend-parent" in result["threads"]
    assert tuple(result["thresholds"]) == gc.get_threshold()
    assert result["frozen"] > 500_000  # what is imported


def test_rotary_table_that_is_too_short_is_refused(tmp_path: Path) -> None:
    scaling = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 64}
    config = TINY | {"rope_parameters": scaling | {"rope_theta": 10000.0}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    options = {"skip_tokenizer_init": True, "load_format": "dummy", "enforce_eager": True}
    options |= {"max_num_seqs": 4, "kv_cache_memory_bytes": 16 << 20}
    for length, refused in ((129, True), (128, False)):
        named = options | {"max_model_len": length}
        code = f"import sys; from vllm import LLM; LLM(sys.argv[1], **{named})"
        done = npus.run(
            1, sys.executable, "-c", code, str(tmp_path), VLLM_ENABLE_V1_MULTIPROCESSING="0"
        )
        line = "the rotary embedding has 128 positions"
        assert (done.returncode != 0, line in done.stderr) == (refused, refused), done.stderr[
            -3000:
        ]
