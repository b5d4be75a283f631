# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Engines of ascend-kv-connector's conformance suite that share a pool of KV cache."""

import json
from pathlib import Path
from typing import Any

from ascend_kv_connector.testing import BLOCK, MODEL, ConnectorTests, Engine


class Suite(ConnectorTests):
    """Engines of the suite, all of the same model, so that they can share a pool."""

    __test__ = False
    device = "npu"

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        (directory / "config.json").write_text(json.dumps(MODEL))

    def make(self, transfer: dict[str, Any], blocks: int = 200, **more: Any) -> Engine:
        from vllm.engine.arg_utils import EngineArgs

        shape: dict[str, Any] = {
            "max_model_len": 512,
            "max_num_seqs": 8,
            "max_num_batched_tokens": 64,
            "block_size": BLOCK,
            "dtype": "float32",
        }
        arguments = EngineArgs(
            model=str(self.directory),
            skip_tokenizer_init=True,
            enforce_eager=True,
            async_scheduling=False,
            kv_transfer_config=json.loads(
                json.dumps(
                    {"kv_connector": "AscendStoreConnector", "kv_role": "kv_both"} | transfer
                )
            ),
            **shape | more,
        )
        return Engine(arguments.create_engine_config(), blocks, self.make_caches, self.parts)
