# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Run by `tools/check architectures`: make, serve and compare a tiny model of each of these types, each in
a fork with a deadline.

    python harness/programs/serve_architectures.py '{"LlamaForCausalLM": "llama"}' SECONDS

Prints a line `RESULT {json}` for each: `right` or `wrong` with the largest difference, `refused` or
`failed` with the message.
"""

import contextlib
import json
import os
import re
import signal
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

import harness.engines.imports  # noqa: F401
import serve_layout
import torch
import transformers
from harness.compare import layouts
from harness.engines import launcher, model_classes
from harness.engines.ports import free_port
from harness.models import multimodal as models
from harness.models import registry
from harness.models.sound_families import FAMILIES
from harness.references import multimodal
from vllm.platforms import current_platform
from vllm.plugins import load_general_plugins

BOUND = 1e-4
"""Of the difference of log-probabilities in float32."""
BOUND_WITH_MEDIA = 1e-3
"""With images or sounds, whose encoders have large random weights."""

OURS = re.compile(
    r"ascend-platform|Ascend NPU|ascend-attention|are not supported; |not supported on"
)


def outcome_with_media(architecture: str, kind: str, path: Path) -> dict[str, Any]:
    """The outcome of a model with images or sounds; each prompt is answered twice, the second time
    from the prefix cache."""
    media = multimodal.limits(kind)["limit_mm_per_prompt"].items()
    inputs = ", ".join(name for name, max_diff in media if max_diff)
    return serve_with_media(architecture, kind, path) | {"inputs": inputs}


def serve_with_media(architecture: str, kind: str, path: Path) -> dict[str, Any]:
    try:
        models.write(kind, path)
        registry.name_published(path, architecture)
        exact = multimodal.reference(kind, path)
        requests: list[Any] = [multimodal.request(kind, i) for i in range(len(multimodal.LENGTHS))]
        for number in range(len(requests)):
            exact(number, (3,))
    except Exception as error:
        return {"result": "not built", "message": line_of(error)}
    try:
        load_general_plugins()
        current_platform.verify_model_arch(architecture)
        model_classes.load([architecture])
        os.environ.update(launcher.torchrun_variables(0, 1, free_port()))
        options = multimodal.ENGINE | multimodal.limits(kind) | {"dtype": "float32"}
        case = {"model": str(path), "engine": options}
        engine = serve_layout.engine_of_external_launcher(case)
        sampling = [serve_layout.sampling(length) for length in multimodal.LENGTHS]
        served = engine.generate(requests, sampling, use_tqdm=False)
        served += engine.generate(requests, sampling, use_tqdm=False)
    except Exception as error:
        message = line_of(error)
        return {"result": "refused" if OURS.search(message) else "failed", "message": message}
    comparison = multimodal.compare(
        exact, [serve_layout.answer(each.outputs[0]) for each in served]
    )
    result = {"result": "right" if comparison["most"] < BOUND_WITH_MEDIA else "wrong"} | comparison
    return result | {"attention": ", ".join(serve_layout.attention_and_experts(engine))}


def outcome(architecture: str, kind: str, directory: Path) -> dict[str, Any]:
    path = directory / "model"
    if kind in FAMILIES:
        return outcome_with_media(architecture, kind, path)
    try:
        registry.write(kind, path, **registry.OF_ARCHITECTURE.get(architecture, {}))
        # sdpa leaves out soft caps
        exact = transformers.AutoModelForCausalLM.from_pretrained(
            path, dtype=torch.float32, attn_implementation="eager"
        ).eval()
        if architecture == "Step1ForCausalLM":
            registry.give_square_roots(exact)
        registry.publish(kind, path)
        registry.name_published(path, architecture)
    except Exception as error:
        return {"result": "not built", "message": line_of(error)}
    try:
        load_general_plugins()
        current_platform.verify_model_arch(architecture)
        model_classes.load([architecture])
        case = layouts.case(kind, path, registry.ENGINES.get(kind, {}), dtype="float32")
        os.environ.update(launcher.torchrun_variables(0, 1, free_port()))
        engine = serve_layout.engine_of_external_launcher(case)
        served = [
            [each]
            for each in serve_layout.answers(engine, case, range(len(case["prompts"]))).values()
        ]
    except Exception as error:
        message = line_of(error)
        return {"result": "refused" if OURS.search(message) else "failed", "message": message}

    def logprobs(tokens: list[int]) -> Any:
        more: dict[str, Any] = {}
        if kind == "hrm_text":  # Tokens of the prompt attend to each other in both directions.
            asked = zip(case["prompts"], case["lengths"], strict=True)
            length = next(len(prompt) for prompt, new in asked if tokens[:-new] == prompt)
            more["token_type_ids"] = (torch.arange(len(tokens)) < length).long().unsqueeze(0)
        with torch.no_grad():
            return exact(torch.tensor([tokens]), **more).logits[0].float().log_softmax(-1)

    _, mismatches, max_diff, mean = layouts.distances(
        logprobs, registry.SIZES["vocab_size"], served
    )
    record = {
        "result": "right" if max_diff < BOUND else "wrong",
        "most": max_diff,
        "mean": mean,
        "others": mismatches,
    }
    return record | {"attention": ", ".join(serve_layout.attention_and_experts(engine))}


def line_of(error: BaseException) -> str:
    traceback.print_exception(error)
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    wrapped = len(lines) > 1 and "validation error" in lines[0]
    text = next(
        (line for line in lines if OURS.search(line)), lines[int(wrapped)] if lines else ""
    ).partition(" [type=")[0]
    return f"{type(error).__name__}: {text}"[:400]


def run(architecture: str, kind: str, seconds: float) -> dict[str, Any]:
    """The outcome, from a fork that ends at the deadline with all that it has started."""
    with tempfile.TemporaryDirectory() as directory:
        answer, log = Path(directory, "answer"), Path(directory, "log")
        child = os.fork()
        if not child:
            os.setsid()
            with log.open("w") as file:
                os.dup2(file.fileno(), 1)
                os.dup2(file.fileno(), 2)
            status = 1
            try:
                torch.set_num_threads(1)
                answer.write_text(json.dumps(outcome(architecture, kind, Path(directory))))
                status = 0
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(status)
        end, ended = time.monotonic() + seconds, 0
        while not ended and time.monotonic() < end:
            time.sleep(0.2)
            ended, _ = os.waitpid(child, os.WNOHANG)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)
        if not ended:
            os.waitpid(child, 0)
        if answer.exists():
            return dict(json.loads(answer.read_text()))
        print(log.read_text(errors="replace")[-1500:], file=sys.stderr)
        return {
            "result": "failed",
            "message": f"no answer in {seconds:g} s" if not ended else "ended without an answer",
        }


if __name__ == "__main__":
    for name, model_type in json.loads(sys.argv[1]).items():
        started = time.monotonic()
        outcome_of_type = run(name, model_type, float(sys.argv[2]))
        result = {
            "architecture": name,
            "type": model_type,
            **outcome_of_type,
            "seconds": round(time.monotonic() - started, 1),
        }
        print("RESULT", json.dumps(result), flush=True)
