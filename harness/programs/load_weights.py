# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Run by test_model_loading.py: load models by every strategy and from every type of peer, and an
engine from a peer.

    python harness/programs/load_weights.py DIRECTORY CASE

DIRECTORY has checkpoints: `plain`, `other` (the same architecture with other weights), `quantized`,
`fp8`, `fp8-plain`. CASE is as in serve_layout.py. Prints `RESULT {json}`.
"""

import gc
import hashlib
import json
import logging
import os
import sys
from pathlib import Path
from typing import Any

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the engine in this process

import harness.engines.imports  # noqa: F401
import serve_layout
import torch
from ascend_model_loader import server
from ascend_platform import extension
from harness.weights.peers import Cut
from harness.weights.streams import STREAMS
from measure_loading import load
from vllm import LLM
from vllm.model_executor.model_loader import ShardedStateLoader

LINES: list[str] = []


class Lines(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        LINES.append(record.getMessage())


HANDLER = Lines()


def log_lines() -> list[str]:
    """Lines that the loader has logged since the last call, without the table."""
    if HANDLER not in extension.logger.handlers:
        # vLLM removes other handlers when it configures its logging.
        extension.logger.addHandler(HANDLER)
    result = [line.partition("\n")[0] for line in LINES if "weights" in line]
    LINES.clear()
    return result


def digest(model: torch.nn.Module) -> str:
    """SHA-256 of a model's state, including what post-processing has made of its weights."""
    hasher = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        hasher.update(
            name.encode() + tensor.cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        )
    return hasher.hexdigest()


def at(port: int, *more: str) -> dict[str, Any]:
    return {
        "peers": [f"127.0.0.1:{port}"],
        "strategies": ["peer", *more],
        "timeout": 5,
        "deadline": 60,
    }


def serve(model: Path, **engine: Any) -> tuple[str, int]:
    """Load by vLLM's default loader and serve: the digest, and the port."""
    model_loaded, _ = load(
        str(model), 0, {"strategies": ["default"], "serve_weights": True, "port": 0}, **engine
    )
    server.awake(True)
    assert server.publication.server is not None
    return digest(model_loaded), server.publication.server.port


def attempt(model: Path, extra: dict[str, Any], **engine: Any) -> dict[str, Any]:
    log_lines()
    try:
        model_loaded, _ = load(str(model), 0, extra, **engine)
    except RuntimeError as error:
        return {"error": str(error), "said": log_lines()}
    return {"digest": digest(model_loaded), "said": log_lines()}


def sharded(model: Path) -> dict[str, Any]:
    """Save and load a sharded state with vLLM's load format."""
    directory = model.with_name(f"{model.name}-sharded")
    directory.mkdir()
    for path in model.glob("*.json"):
        (directory / path.name).write_bytes(path.read_bytes())
    model_loaded, _ = load(str(model), 0, {}, load_format="auto")
    ShardedStateLoader.save_model(model_loaded, str(directory))
    try:
        model_loaded, _ = load(str(directory), 0, {}, load_format="sharded_state")
    except (RuntimeError, ValueError, KeyError, AttributeError) as error:
        return {"error": f"{type(error).__name__}: {error}"}
    return {"digest": digest(model_loaded)}


def memory(model: Path, target: str) -> dict[str, Any]:
    """Bytes on the NPU while an FP8 checkpoint is loaded and converted: the most, and at the end;
    the weights' digest."""
    gc.collect()
    torch.npu.empty_cache()
    before = torch.npu.memory_allocated()
    torch.npu.reset_peak_memory_stats()
    model_loaded, _ = load(
        str(model),
        0,
        {},
        load_format="auto",
        additional_config={"ascend": {"platform": {"fp8": target}}},
    )
    usage = {
        "most": torch.npu.max_memory_allocated() - before,
        "final": torch.npu.memory_allocated() - before,
    }
    return usage | {"digest": digest(model_loaded)}


def main(directory: Path, case: dict[str, Any]) -> None:
    plain = directory / "plain"
    result: dict[str, Any] = {}
    result["default"], port = serve(plain)
    size = sum(path.stat().st_size for path in plain.glob("*.safetensors"))
    ways: dict[str, dict[str, Any]] = {
        **STREAMS,
        "peer": at(port),
        "no peer": at(9, "default"),
    }
    for name, extra in ways.items():
        result[name] = attempt(plain, extra)
    for tenth in range(10):
        with Cut(port, size * tenth // 10) as cut:
            result[f"dies at {tenth}0 %"] = attempt(plain, at(cut.port, "default"))
    with Cut(port, size // 2) as cut:
        result["dies, and no other strategy"] = attempt(plain, at(cut.port))
    result["other weights"] = attempt(directory / "other", at(port))
    result["other dtype"] = attempt(plain, at(port), dtype="float16")
    result["quantized default"], quantized = serve(directory / "quantized")
    assert server.publication.server is not None
    result["quantized kept"] = len(server.publication.server._tensors)
    result["quantized"] = attempt(directory / "quantized", at(quantized))
    result["other quantization"] = attempt(plain, at(quantized))
    result["sharded state"] = sharded(plain)
    result["fp8"] = {
        target: memory(directory / "fp8", target) for target in ("dequantize", "W8A8_DYNAMIC")
    }
    result["fp8 plain"] = attempt(directory / "fp8-plain", {}, load_format="auto")
    result["quantized sharded state"] = sharded(directory / "quantized")

    _, port = serve(Path(case["model"]))
    log_lines()
    options = serve_layout.COMMON | {
        "load_format": "netloader",
        "enable_sleep_mode": True,
        "gpu_memory_utilization": 0.3,
    }
    options |= {"enable_lora": True}  # Its layers wrap those that are loaded.
    engine = LLM(
        case["model"],
        model_loader_extra_config=at(port) | {"serve_weights": True, "port": 0},
        **options,
    )
    result["answers"] = [
        [each] for each in serve_layout.answers(engine, case, range(len(case["prompts"]))).values()
    ]
    result["engine said"] = log_lines()
    assert server.publication.server is not None
    port = server.publication.server.port
    result["from the engine"] = attempt(Path(case["model"]), at(port))
    engine.sleep(level=1)
    result["asleep"] = attempt(Path(case["model"]), at(port))
    engine.wake_up()
    result["awake"] = attempt(Path(case["model"]), at(port))
    print("RESULT", json.dumps(result), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
