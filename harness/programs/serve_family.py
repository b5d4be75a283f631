# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Serve prompts with a model of a family of ascend-models, and compare with transformers in float32.

The program of each family, such as serve_deepseek_v4.py, calls :func:`main` with its mutations. The
tests of ascend-models run

    python harness/programs/serve_deepseek_v4.py FILE

FILE is JSON: [{"name": ..., "model": DIR, "engine": {...}, "batches": [[[1, 2], [3]], ...],
"length": 8, "mutations": ["sink"], "ranks": 2, "layout": {...}}]. With ranks, processes under
vLLM's external launcher, the layout is tensor-parallel by default, and data-parallel engines share
the prompts; without, the executor is the engine's. ``reference`` is a directory of other weights for
transformers. The prompts of a batch are served at once. Prints one line `RESULT {json}` a case:
tokens that are not transformers' best, the differences of log-probabilities, and of those that
transformers' own form in the engine's dtype has, vLLM's counters; and for each mutation of the
engine's model the same of the first prompt. With ``drafts``, the folder of the MTP layer, the
drafts are compared, too; with ``sleeps`` the last batch is answered again after each level of
sleep.
"""

import copy
import functools
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

# The engine runs in a fork of this process for each case, without a spawn.
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"

import harness.engines.imports  # noqa: F401
import torch
from harness.engines import launcher
from harness.references import deepseek_v4_drafts
from harness.references import log_probabilities as references
from vllm import LLM, SamplingParams, TokensPrompt

Mutations = dict[str, Callable[[Any], None]]
COMMON: dict[str, Any] = {
    "skip_tokenizer_init": True,
    "max_model_len": 1024,
    "max_num_seqs": 4,
    "seed": 0,
    "enforce_eager": True,
    "disable_log_stats": False,
    "gpu_memory_utilization": 0.5,
}
MUTATED = 3
"""Tokens of an answer of a mutated model."""
COUNTERS = {
    "preemptions": "vllm:num_preemptions",
    "cached": "vllm:prefix_cache_hits",
    "accepted": "vllm:spec_decode_num_accepted_tokens",
}


def serve(
    engine: LLM, prompts: list[list[int]], length: int, preempted_at: int = 0
) -> list[dict[str, Any]]:
    """Answers; with ``preempted_at`` all running requests are preempted before this step."""
    sampling = SamplingParams(
        temperature=0, max_tokens=length, logprobs=0, detokenize=False, ignore_eos=True
    )
    core, step = engine.llm_engine, 0
    outputs: dict[int, Any] = {}
    for number, prompt in enumerate(prompts):
        core.add_request(str(number), TokensPrompt(prompt_token_ids=prompt), sampling)
    while core.has_unfinished_requests():
        step += 1
        if step == preempted_at:
            core.reset_prefix_cache(reset_running_requests=True)
        outputs |= {int(it.request_id): it for it in core.step() if it.finished}
    results = []
    for output in (outputs[number] for number in range(len(prompts))):
        steps: Any = output.outputs[0].logprobs
        tokens = list(output.outputs[0].token_ids)
        pairs = zip(steps, tokens, strict=True)
        results.append(
            {"tokens": tokens, "logprobs": [step[token].logprob for step, token in pairs]}
        )
    return results


def compare(model: Any, prompts: list[list[int]], answers: list[dict[str, Any]]) -> dict[str, Any]:
    """Tokens, those that are not the model's best, and the differences of log-probabilities."""
    pairs = [references.differences(model, *each) for each in zip(prompts, answers, strict=True)]
    each = torch.cat([difference for _, difference in pairs])
    return {
        "tokens": len(each),
        "others": sum(count for count, _ in pairs),
        "most": float(each.max()),
        "mean": float(each.mean()),
    }


def own_mean(exact: Any, rough: Any, prompts: Any, answers: Any) -> float:
    """The mean difference of log-probabilities of transformers' form in the engine's dtype."""
    results = []
    for prompt, answer in zip(prompts, answers, strict=True):
        chosen = torch.tensor(answer["tokens"]).unsqueeze(1)
        both = [
            references.logits(each, prompt, [answer["tokens"]])[0]
            .float()
            .log_softmax(-1)
            .gather(1, chosen)
            for each in (exact, rough)
        ]
        results.append((both[0] - both[1]).abs().flatten())
    return float(torch.cat(results).mean())


def record_drafts(engine: LLM) -> list[tuple[int, int, int, list[int]]]:
    """A list to which the engine adds its drafts: the request, the position of its last token, the
    token after that, and the drafts that follow."""
    (runner,) = engine.collective_rpc(lambda worker: worker.model_runner)
    propose, recorded = runner.drafter.propose, list[tuple[int, int, int, list[int]]]()

    def recording(**named: Any) -> torch.Tensor:
        # The call changes its arguments.
        at = named["token_indices_to_sample"]
        if at is None:
            at = named["common_attn_metadata"].query_start_loc[1:] - 1
        following = named["next_token_ids"].tolist()
        positions = named["target_positions"][at.long()].tolist()
        drafts: torch.Tensor = propose(**named)
        requests = [int(name.partition("-")[0]) for name in runner.input_batch.req_ids]
        recorded.extend(zip(requests, positions, following, drafts.tolist(), strict=False))
        return drafts

    runner.drafter.propose = recording
    return recorded


def judge_drafts(
    drafter: deepseek_v4_drafts.Drafter,
    recorded: list[tuple[int, int, int, list[int]]],
    sequences: list[list[int]],
) -> dict[str, int]:
    """How many drafts there are of the sequences, and how many are others than the reference's."""
    streams = [drafter.streams(tokens) for tokens in sequences]
    count = differing = 0
    for request, position, following, drafts in recorded:
        tokens = sequences[request][1 : position + 2]
        if len(tokens) <= position:
            continue  # Beyond the last token of the request.
        count += len(drafts)
        expected = drafter.drafts(streams[request][: position + 1], tokens, len(drafts))
        differing += following != tokens[-1] or drafts != expected
    return {"drafts": count, "other drafts": differing}


def answers_after_sleep(engine: LLM, prompts: list[list[int]], length: int) -> list[Any]:
    """Answers after sleep of level 1, and of level 2, after which the weights are loaded again."""
    engine.sleep(level=1)
    engine.wake_up()
    results = [serve(engine, prompts, length)]
    engine.sleep(level=2)
    engine.wake_up(tags=["weights"])
    engine.collective_rpc("reload_weights")
    engine.wake_up(tags=["kv_cache"])
    return [*results, serve(engine, prompts, length)]


def mutated(
    engine: LLM, case: dict[str, Any], reference: Any, mutations: Mutations
) -> dict[str, Any]:
    """Comparisons of the first prompt with each mutation, undone after it."""
    if not case["mutations"]:
        return {}
    (model,) = engine.apply_model(lambda model: model)
    prompts, results = case["batches"][0][:1], {}
    kept = {name: value.clone() for name, value in model.state_dict().items()}
    for name in case["mutations"]:
        modules = [(each, dict(vars(each))) for each in model.modules()]
        mutations[name](model)
        engine.reset_prefix_cache()
        results[name] = compare(reference, prompts, serve(engine, prompts, MUTATED))
        for each, before in modules:
            vars(each).clear()
            vars(each).update(before)
        model.load_state_dict(kept)
    return results


def run(
    case: dict[str, Any], load: Callable[[str], Any], mutations: Mutations, rank: int, port: int
) -> dict[str, Any]:
    options, ranks = COMMON | case["engine"], case.get("ranks", 1)
    dtype, batches = getattr(torch, options["dtype"]), case["batches"]
    if ranks > 1:
        os.environ.update(launcher.torchrun_variables(rank, ranks, port))
        options |= {
            "distributed_executor_backend": "external_launcher",
            **case.get("layout", {"tensor_parallel_size": ranks}),
        }
    engines = options.get("data_parallel_size", 1)
    number, member = divmod(rank, ranks // engines)
    batches = [batch[number::engines] for batch in batches]
    if member:
        engine = LLM(case["model"], **options)
        for batch in batches:
            serve(engine, batch, case["length"])
        return {}
    weights = case.get("reference", case["model"])
    reference = load(weights)
    # Before the engine, with which vLLM's class of the configuration replaces transformers'.
    drafter = None
    if "drafts" in case:
        drafter = deepseek_v4_drafts.Drafter(reference, Path(case["drafts"]))
    engine = LLM(case["model"], **options)
    prompts = [prompt for batch in batches for prompt in batch]
    answers: list[dict[str, Any]] = []
    at = case.get("preempted_at", 0)
    drafts = record_drafts(engine) if drafter is not None else []
    for batch in batches:
        answers += serve(engine, batch, case["length"], at)
    metrics = {each.name: each.value for each in engine.get_metrics() if hasattr(each, "value")}
    results = compare(reference, prompts, answers) | {
        "name": case["name"],
        "mutations": mutated(engine, case, reference, mutations),
        **{name: int(metrics.get(metric, 0)) for name, metric in COUNTERS.items()},
    }
    if drafter is not None:
        pairs = zip(prompts, answers, strict=True)
        sequences = [prompt + answer["tokens"] for prompt, answer in pairs]
        results |= judge_drafts(drafter, drafts, sequences)
    if case.get("sleeps"):
        again = answers_after_sleep(engine, batches[-1], case["length"])
        results["same after sleep"] = [each == answers[-len(each) :] for each in again]
    if dtype != torch.float32:
        rough = copy.deepcopy(reference)
        for parameter in rough.parameters():  # Buffers keep the rotary frequencies.
            parameter.data = parameter.data.to(dtype)
        results["own mean"] = own_mean(reference, rough, prompts, answers)
    return results


def merged(results: list[dict[str, Any]]) -> dict[str, Any]:
    """The results of a case's engines, each of which has its own prompts, as one."""
    tokens = sum(each["tokens"] for each in results)
    return results[0] | {
        "tokens": tokens,
        "others": sum(each["others"] for each in results),
        "most": max(each["most"] for each in results),
        "mean": sum(each["mean"] * each["tokens"] for each in results) / tokens,
    }


def load(weights: str) -> Any:
    """transformers' model in float32."""
    kind = references.class_of(Path(weights))
    return kind.from_pretrained(weights, dtype=torch.float32).eval()


def main(mutations: Mutations, load: Callable[[str], Any] = load) -> None:
    """Serve the cases of the file.

    Args:
        mutations: changes of the engine's model by their names.
        load: the reference of a folder of weights.
    """
    for each in json.loads(Path(sys.argv[1]).read_text()):
        work = functools.partial(run, each, load, mutations)
        ranks = launcher.run_ranks(each["name"], each.get("ranks", 1), work)
        print("RESULT", json.dumps(merged([each for each in ranks if each])), flush=True)
