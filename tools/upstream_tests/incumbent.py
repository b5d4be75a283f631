# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""vllm-ascend, unmodified, on the emulated NPU: its tokens against those of transformers (see
tools/upstream).

Its code has been validated on hardware: it confirms the operators that it calls, and a refusal that
it meets needs an explanation. It runs in an environment of its own, `.upstream/incumbent/.venv`,
with this project's torch and torch-npu. incumbent_engine.py replaces two operators, from outside,
that vllm-ascend has as Triton or compiled kernels only.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import environment

HOME = environment.ROOT / ".upstream" / "incumbent"
VENV = HOME / ".venv"
ENGINE = Path(__file__).with_name("incumbent_engine.py")
REPORT = environment.ROOT / "docs" / "reports" / "incumbent-tests.md"
VLLM_ASCEND, VLLM = "0.27.1rc1", "0.27.1"
NEEDS = ["scipy", "pandas", "quart", "msgpack", "decorator"]  # of vllm-ascend, beyond vLLM's
BUILD = {
    "VLLM_TARGET_DEVICE": "empty",
    "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
    "COMPILE_CUSTOM_KERNELS": "0",
}
MLA: dict[str, Any] = {
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "moe_intermediate_size": 128,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "rope_interleave": True,
}
GQA: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 128}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "dense": ("Qwen3", GQA),
    "mixture of experts": (
        "Qwen3Moe",
        GQA
        | {
            "moe_intermediate_size": 128,
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "norm_topk_prob": True,
        },
    ),
    "DeepSeek-V2": (
        "DeepseekV2",
        MLA
        | {
            "n_routed_experts": 8,
            "q_lora_rank": None,
            "topk_method": "greedy",
            "n_group": 1,
            "topk_group": 1,
        },
    ),
    "DeepSeek-V3": (
        "DeepseekV3",
        MLA
        | {
            "n_routed_experts": 16,
            "q_lora_rank": 128,
            "n_group": 4,
            "topk_group": 2,
            "norm_topk_prob": True,
        }
        | {"routed_scaling_factor": 2.5, "topk_method": "noaux_tc", "scoring_func": "sigmoid"},
    ),
}


def prepare() -> None:
    """Create the environment, unless it is complete."""
    if (VENV / "complete").exists():
        return
    HOME.mkdir(parents=True, exist_ok=True)
    environment.create(VENV)
    requirements = HOME / "requirements.txt"
    pins = environment.REQUIREMENTS.read_text().splitlines()
    requirements.write_text("\n".join(line for line in pins if not line.startswith("vllm==")))
    environment.install(
        VENV, requirements, "installing the requirements of vllm-ascend's environment"
    )
    uv, settings = environment.find_uv()
    variables = (
        settings
        | BUILD
        | {
            "SOC_VERSION": "ascend910b1",
            "PATH": f"{VENV / 'bin'}{os.pathsep}{os.environ['PATH']}",
        }
    )
    for wanted in (
        NEEDS,
        ["--no-deps", "--no-build-isolation", "--no-binary", "vllm", f"vllm=={VLLM}"],
        [
            "--no-deps",
            "--no-build-isolation",
            "--no-binary",
            "vllm-ascend",
            f"vllm-ascend=={VLLM_ASCEND}",
        ],
        ["--no-deps", "--editable", str(environment.ROOT / "packages" / "ascend-emulator")],
    ):
        command = [
            uv,
            "pip",
            "install",
            "--quiet",
            "--python",
            str(VENV / "bin" / "python"),
            *wanted,
        ]
        if subprocess.run(command, env=variables, cwd=HOME, check=False).returncode:
            sys.exit(
                f"upstream: cannot install {wanted[-1]}; check the network and the package index,"
                " then start again"
            )
    (VENV / "complete").touch()


def variables() -> dict[str, str]:
    """Environment variables of a process of vllm-ascend: none of this project's."""
    return {
        key: value for key, value in os.environ.items() if not key.startswith(("ASCEND_", "VLLM_"))
    } | {"LD_LIBRARY_PATH": ""}


def make(name: str) -> Path:
    """Write a model with random weights, unless it exists."""
    import torch
    import transformers

    path = HOME / "models" / name.replace(" ", "-")
    if path.exists():
        return path
    torch.manual_seed(11)
    family, special = MODELS[name]
    common = {
        "vocab_size": 512,
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 3,
        "initializer_range": 0.08,
    }
    common |= {"max_position_embeddings": 1024, "eos_token_id": 1, "pad_token_id": 0}
    config = getattr(transformers, f"{family}Config")(
        bos_token_id=None, tie_word_embeddings=False, **common, **special
    )
    model = transformers.AutoModelForCausalLM.from_config(config).bfloat16()
    with torch.no_grad():
        for key, weight in model.named_parameters():
            if "norm" in key and weight.dim() == 1:
                weight.copy_(1 + 0.2 * torch.randn(weight.shape))
        for key, bias in model.named_buffers():
            if "e_score_correction_bias" in key:
                bias.copy_(0.05 * torch.randn(bias.shape))
    model.save_pretrained(path)
    return path


class Found(NamedTuple):
    """A comparison with transformers in float32.

    tokens: compared. others: those that are not its choice. regret: how far its log-probability of
    such a token is below that of its choice, at most. most: largest difference of the engine's
    three best log-probabilities. own: the same of transformers in the engine's dtype.
    """

    tokens: int
    others: int
    regret: float
    most: float
    own: float


def compare(path: Path, dtype: str, answers: list[dict[str, Any]]) -> Found:
    import torch
    import transformers

    exact, rounded = (
        transformers.AutoModelForCausalLM.from_pretrained(
            path, dtype=kind, attn_implementation="eager"
        ).eval()
        for kind in (torch.float32, getattr(torch, dtype))
    )
    tokens = others = 0
    regret = most = own = 0.0
    for answer in answers:
        ids = torch.tensor([answer["prompt"] + answer["tokens"]])
        with torch.no_grad():
            wanted, near = (
                model(ids).logits[0].float().log_softmax(-1) for model in (exact, rounded)
            )
        for step, (token, best) in enumerate(
            zip(answer["tokens"], answer["logprobs"], strict=True)
        ):
            place = len(answer["prompt"]) + step - 1
            short = float(wanted[place].max() - wanted[place, token])
            tokens, others, regret = tokens + 1, others + (short > 0), max(regret, short)
            for chosen, value in best.items():
                most = max(most, abs(float(wanted[place, int(chosen)]) - value))
                own = max(own, abs(float(wanted[place, int(chosen)] - near[place, int(chosen)])))
    return Found(tokens, others, regret, most, own)


HEAD = """# vllm-ascend on the emulated NPU

Generated by `tools/upstream --suite incumbent`; do not edit. vllm-ascend {version} with vLLM {vllm}, unmodified, serves
small models with random weights: six prompts of 1 to 300 tokens in batches of at most 128, 12 greedy tokens each. They are
compared with transformers on the CPU in float32, given the same tokens. Its code has been validated on NPUs, so agreement
confirms the operators that it calls.

*Not its choice*: tokens that transformers would not have chosen; *short of it by*: how far its log-probability of these is
below that of its choice, at most. *Difference*: of the three best log-probabilities, at most, beside that of transformers in
the same dtype.

| model | dtype | tokens | not its choice | short of it by | difference | transformers' own |
| --- | --- | --- | --- | --- | --- | --- |
"""
TAIL = """
Two operators are replaced from outside: a Triton kernel without a fallback (slot mapping), and `moe_gating_top_k`, which
vllm-ascend has compiled for NPUs only, by CANN's operator of that name. It runs eagerly, so without its default graphs and the
passes of torch.compile, and without Triton and its compiled operators: other operators than in production. Graphs do not need
the compiled operators; with those, the passes that insert Triton kernels and npugraph_ex off, it captures and replays them.
"""


def main(names: list[str], deadline: float) -> int:
    """Run the models, and write the report if all were selected."""
    prepare()
    rows, failed = [], 0
    for name in names or MODELS:
        # vllm-ascend's latent attention gathers its cache into bfloat16 (aclnnGatherPaKvCache
        # refuses that for float16).
        for dtype in (
            ("bfloat16",) if "kv_lora_rank" in MODELS[name][1] else ("bfloat16", "float16")
        ):
            path, output = make(name), HOME / f"{name.replace(' ', '-')}-{dtype}.json"
            python = VENV / "bin" / "python"
            command = [
                python,
                "-m",
                "ascend_emulator.cli",
                "run",
                "--",
                python,
                ENGINE,
                path,
                dtype,
                output,
            ]
            output.unlink(missing_ok=True)
            with open(output.with_suffix(".log"), "w") as log:
                subprocess.run(
                    list(map(str, command)),
                    env=variables(),
                    stdout=log,
                    stderr=log,
                    timeout=deadline,
                    check=False,
                )
            if not output.exists():
                print(
                    f"upstream: vllm-ascend failed with the {name} model; see {log.name}",
                    flush=True,
                )
                failed += 1
                continue
            found = compare(path, dtype, json.loads(output.read_text()))
            cells = [
                name,
                dtype,
                found.tokens,
                found.others,
                *(f"{value:.3f}" for value in found[2:]),
            ]
            rows.append(f"| {' | '.join(map(str, cells))} |")
            print(rows[-1], flush=True)
    if not names and not failed:
        REPORT.write_text(
            HEAD.format(version=VLLM_ASCEND, vllm=VLLM) + "\n".join(rows) + "\n" + TAIL
        )
    return int(failed > 0)
