# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Tokens and log-probabilities of the engine, compared with Hugging Face transformers on
the CPU."""

import importlib.metadata
import json
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from ascend_platform.config.runners import has_v1
from harness import checkout
from harness.engines import npus
from harness.project import vllm_copy
from packaging.version import Version

ADDER = checkout.ADDER
FUSED, BUILT_IN = (
    "ascend_attention.dense.FusedAttentionImpl",
    "ascend_platform.attention.paged.PagedAttentionImpl",
)
VOCABULARY = 512
SHAPES = {
    "llama": ("Llama", 4, 4),
    "qwen2": ("Qwen2", 4, 2),
    "qwen3": ("Qwen3", 8, 2),
    "mistral": ("Mistral", 4, 1),
}
LITTLE = {"gpu_memory_utilization": 0.3}
SMALL_CHUNKS = {"max_num_batched_tokens": 64, "max_num_seqs": 32}
NO_CHUNKS = {"enable_chunked_prefill": False, "max_num_batched_tokens": 2048}

# Name: (shape, dtype, concurrent prompts, engine options).
CASES: dict[str, tuple[str, str, int, dict[str, Any]]] = {
    "qwen3-bf16": ("qwen3", "bfloat16", 32, {}),
    "qwen3-bf16-small-chunks": ("qwen3", "bfloat16", 32, SMALL_CHUNKS),
    "llama-fp16-no-chunks": ("llama", "float16", 8, NO_CHUNKS),
    "qwen2-fp16-no-prefix-cache": ("qwen2", "float16", 8, {"enable_prefix_caching": False}),
    "mistral-bf16-one": ("mistral", "bfloat16", 1, {}),
    "llama-fp32": ("llama", "float32", 8, SMALL_CHUNKS),
}
V1, V2 = (
    {"additional_config": {"ascend": {"platform": {"model_runner": runner}}}}
    for runner in ("v1", "v2")
)
FEW_BLOCKS = {
    "num_gpu_blocks_override": 28,
    "async_scheduling": False,
    "disable_log_stats": False,
    "max_num_seqs": 24,
}
RUNNER_CASES: dict[str, tuple[str, str, int, dict[str, Any]]] = {
    "chunks and prefix cache": ("qwen3", "bfloat16", 32, SMALL_CHUNKS),
    "synchronous, no prefix cache": (
        "qwen2",
        "float16",
        8,
        {"enable_prefix_caching": False, "async_scheduling": False},
    ),
    "preemption": ("llama", "bfloat16", 24, FEW_BLOCKS),
}
"""As CASES, for comparing vLLM's V2 model runner with V1."""
HAS_V1 = has_v1()
GRAPHS = {"V2 with graphs": "FULL_AND_PIECEWISE", "V2 with full graphs": "FULL"}
BUILT_IN_CASES = ("qwen3-bf16-small-chunks", "qwen2-fp16-no-prefix-cache")


def prompts(count: int) -> list[list[int]]:
    """Prompts of 1 to 600 tokens; every third shares a beginning with the others, for the prefix
    cache."""
    draw = random.Random(count)
    lengths = [600, 1, 257, 2, 400, 7, 129, 33]
    shared = [draw.randrange(3, VOCABULARY) for _ in range(600)]
    out = []
    for i in range(count):
        length = lengths[i % len(lengths)]
        tokens = [draw.randrange(3, VOCABULARY) for _ in range(length)]
        out.append((shared[:length] + tokens)[:length] if i % 3 == 2 else tokens)
    return out


@pytest.fixture(scope="module")
def random_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """Directory of a model with random weights of one of SHAPES."""

    @cache
    def make(shape: str) -> str:
        import torch
        import transformers

        family, heads, kv_heads = SHAPES[shape]
        torch.manual_seed(0)
        config = getattr(transformers, f"{family}Config")(
            vocab_size=VOCABULARY,
            hidden_size=256,
            intermediate_size=512,
            num_hidden_layers=3,
            num_attention_heads=heads,
            num_key_value_heads=kv_heads,
            head_dim=64,
            max_position_embeddings=2048,
            sliding_window=None,
            initializer_range=0.1,  # choices with clear margins
            bos_token_id=0,
            eos_token_id=1,
        )
        directory = tmp_path_factory.mktemp(shape)
        getattr(transformers, f"{family}ForCausalLM")(config).save_pretrained(directory)
        return str(directory)

    return make


v2_runner = pytest.mark.skipif(
    Version(importlib.metadata.version("vllm")) < Version("0.33"),
    reason="vLLM's V2 runner is supported from 0.33 on",
)

Served = tuple[dict[str, dict[str, Any]], str]


def serve(cases: list[dict[str, Any]], plugins: str | None, python: str = sys.executable) -> Served:
    """Results of serve_prompts.py by case name, and what the platform logged; with `python` of
    another environment, in that."""
    variables = {name: value for name, value in os.environ.items() if name != "VLLM_PLUGINS"}
    variables["PYTHONPATH"] = npus.path()
    if plugins is not None:
        variables["VLLM_PLUGINS"] = plugins
    command = [python, str(checkout.PROGRAMS / "serve_prompts.py"), json.dumps(cases)]
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=1200)
    return npus.by_name(done), "\n".join(
        line for line in done.stdout.splitlines() if "vllm-ascend-all |" in line
    )


def case(
    name: str, directory: str, cases: dict[str, tuple[str, str, int, dict[str, Any]]] = CASES
) -> dict[str, Any]:
    _, dtype, count, engine = cases[name]
    # Answers differ in size, so decodes continue while prompts arrive.
    draw = random.Random(name)
    lengths = [draw.choice([3, 12, 24]) for _ in range(count)]
    served = {
        "dtype": dtype,
        "prompts": prompts(count),
        "lengths": lengths,
        "engine": LITTLE | engine,
    }
    return {"name": name, "model": directory} | served


@pytest.fixture(scope="module")
def serve_by_plugins(random_model: Callable[[str], str]) -> Callable[[str | None], Served]:
    """All models by the plugins that they are served with, in one process for each choice of
    plugins."""

    @cache
    def by_plugins(plugins: str | None) -> Served:
        names = {None: tuple(CASES), "ascend": BUILT_IN_CASES}.get(plugins, ())
        return serve(
            [*(case(name, random_model(CASES[name][0])) for name in names), adder()], plugins
        )

    return by_plugins


def check(
    result: dict[str, Any], dtype: str, attention: str, record: Callable[[str, object], None]
) -> None:
    assert result["attention"] == attention
    errors = [error for served in result["results"] for error in served["errors"]]
    reference_errors = [error for served in result["results"] for error in served["own_errors"]]
    regret = max(regret for served in result["results"] for regret in served["regrets"])
    mean, own_mean = sum(errors) / len(errors), sum(reference_errors) / len(reference_errors)
    record("log-probability difference, max", max(errors))
    record("the same of Hugging Face in this dtype, max", max(reference_errors))
    print(
        f"{result['name']}: {len(errors)} tokens, log-probability difference max {max(errors):.2e}"
        f" mean {mean:.2e}, of Hugging Face in {dtype} max {max(reference_errors):.2e} mean {own_mean:.2e}; a"
        f" choice's distance from the best at most {regret:.2e}"
    )
    if dtype == "float32":
        assert max(errors) < 1e-3
    else:
        # Rounding differs by the order of operations, so the bound is the error of Hugging Face
        # itself in this dtype.
        assert mean < 1.5 * own_mean
        assert max(errors) < 3 * max(reference_errors)
    # Greedy: the chosen token is the best one up to the difference.
    assert regret < 2 * max(errors)


@pytest.mark.parametrize("name", CASES)
def test_log_probabilities(
    name: str,
    serve_by_plugins: Callable[[str | None], Served],
    record_property: Callable[[str, object], None],
) -> None:
    dtype = CASES[name][1]
    check(
        serve_by_plugins(None)[0][name],
        dtype,
        BUILT_IN if dtype == "float32" else FUSED,
        record_property,
    )  # the fused kernel has no float32


@pytest.mark.parametrize("name", BUILT_IN_CASES)
def test_log_probabilities_of_the_platform_without_siblings(
    name: str,
    serve_by_plugins: Callable[[str | None], Served],
    record_property: Callable[[str, object], None],
) -> None:
    check(serve_by_plugins("ascend")[0][name], CASES[name][1], BUILT_IN, record_property)


@pytest.fixture(scope="module")
def served_by_runners(random_model: Callable[[str], str]) -> dict[str, Any]:
    """Results of RUNNER_CASES and the adder by runner and name; engines of both runners share
    processes, by their own choice."""
    cases, results, message = [], {}, ""
    for name in RUNNER_CASES:
        served = case(name, random_model(RUNNER_CASES[name][0]), RUNNER_CASES)
        if name == "preemption":  # Preempt when decode requests need their second block.
            draw = random.Random(name)
            served["prompts"] = [
                [draw.randrange(3, VOCABULARY) for _ in range(draw.randint(90, 127))]
                for _ in range(24)
            ]
            served["lengths"] = [48] * 24
        cases.append(served)
    graphs = {
        runner: V2 | {"compilation_config": {"cudagraph_mode": mode}}
        for runner, mode in GRAPHS.items()
    }
    eager = {"enforce_eager": True}
    every = [*cases, adder()]
    # The requests do not all fit on one command line, and the graphs of more engines do not fit
    # into the address space of a small emulated NPU.
    groups = [
        (every, {"V1": eager | V1, "V2": eager | V2} if HAS_V1 else {"V2": eager | V2}),
        *(([served], graphs) for served in every),
    ]
    for together, runners in groups:
        asked = [
            served | {"name": f"{runner}, {served['name']}", "engine": served["engine"] | options}
            for served in together
            for runner, options in runners.items()
        ]
        result, lines = serve(asked, None)
        results |= result
        message += lines
    assert "model runner: V2 (additional_config)" in message
    return results


@v2_runner
@pytest.mark.parametrize("runner", ["V2", *GRAPHS])
@pytest.mark.parametrize("name", RUNNER_CASES)
def test_v2_runner_gives_the_tokens_of_v1(
    name: str,
    runner: str,
    served_by_runners: dict[str, Any],
    record_property: Callable[[str, object], None],
) -> None:
    second = served_by_runners[f"{runner}, {name}"]
    if HAS_V1:
        first = served_by_runners[f"V1, {name}"]
        assert [served["tokens"] for served in second["results"]] == [
            served["tokens"] for served in first["results"]
        ]
        assert second["preemptions"] == first["preemptions"]
    assert (second["preemptions"] or 0) > 0 or name != "preemption"
    check(second, RUNNER_CASES[name][1], FUSED, record_property)


@v2_runner
@pytest.mark.parametrize("runner", ["V2", *GRAPHS])
def test_trained_model_has_the_same_greedy_tokens_with_v2(
    runner: str, served_by_runners: dict[str, Any]
) -> None:
    check_adder(served_by_runners[f"{runner}, adder"], FUSED)


@v2_runner
def test_vllm_without_the_v1_runner_and_the_ir_is_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As later vLLMs are announced: a copy without the V1 runner's module and without ``vllm.ir``,
    and no option."""
    tree = vllm_copy.make(tmp_path)
    (tree / "vllm" / "v1" / "worker" / "gpu_model_runner.py").unlink(missing_ok=True)
    vllm_copy.without_ir(tree)
    monkeypatch.delenv("VLLM_USE_V2_MODEL_RUNNER", raising=False)
    monkeypatch.setenv("PYTHONPATH", f"{tree}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    results, stderr = serve([adder()], None)
    assert "model runner: V2 (vLLM has no V1 runner)" in stderr
    check_adder(results["adder"], FUSED)


SUMS = [(12, 34), (7, 8), (99, 1), (50, 49), (86, 77), (0, 0), (95, 99), (60, 6)]


def adder() -> dict[str, Any]:
    """Sums, and one long continuation (see the model card)."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(ADDER)
    ids = [tokenizer(f"{a}+{b}=").input_ids for a, b in SUMS] + [tokenizer("1").input_ids]
    lengths = [4] * len(SUMS) + [400]
    return {
        "name": "adder",
        "model": str(ADDER),
        "dtype": "bfloat16",
        "prompts": ids,
        "lengths": lengths,
        "engine": LITTLE,
    }


def check_adder(result: dict[str, Any], attention: str) -> None:
    """Token for token as Hugging Face has them."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(ADDER)
    assert result["attention"] == attention
    for served in result["results"]:
        assert served["tokens"] == served["greedy"]
    for (a, b), served in zip(SUMS, result["results"], strict=False):
        assert tokenizer.decode(served["tokens"]).startswith(f"{a + b};")


@pytest.mark.parametrize(
    "plugins", [None, "ascend,ascend_attention", "ascend"], ids=["all", "fused", "built-in"]
)
def test_trained_model_gives_the_same_greedy_tokens(
    plugins: str | None, serve_by_plugins: Callable[[str | None], Served]
) -> None:
    results, stderr = serve_by_plugins(plugins)
    check_adder(results["adder"], BUILT_IN if plugins == "ascend" else FUSED)
    version = importlib.metadata.version("ascend-attention")
    if plugins == "ascend":
        assert f"attention {version} off (filtered out by VLLM_PLUGINS)" in stderr
        assert (
            "attention: built-in PyTorch (ascend-attention is off (filtered out by VLLM_PLUGINS))"
            in stderr
        )
    else:
        assert f"attention: fused (ascend-attention {version})" in stderr


def test_platform_serves_when_its_siblings_are_uninstalled(tmp_path: Path) -> None:
    copy = tmp_path / "venv"
    shutil.copytree(sys.prefix, copy, symlinks=True, copy_function=os.link)
    uv, variables = checkout.find_uv()
    siblings = [
        "ascend-attention",
        "ascend-communicator",
        "ascend-kv-connector",
        "ascend-model-loader",
        "ascend-patches",
    ]
    python = str(copy / "bin" / "python")
    subprocess.run(
        [uv, "pip", "uninstall", "-q", "--python", python, *siblings, "vllm-ascend-all"],
        env=variables,
        check=True,
    )
    results, stderr = serve([adder()], None, python)
    check_adder(results["adder"], BUILT_IN)
    for sibling in siblings:
        assert f"{sibling.removeprefix('ascend-')} not installed" in stderr
    assert "attention: built-in PyTorch (ascend-attention is not installed)" in stderr
