# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Tables of results that the commands of tools/ keep in this folder."""

import json
import re
import tomllib
from pathlib import Path

from generated_docs.markdown import table

DATA = Path(__file__).parent


def launches() -> str:
    """Launches and bytes of a layer, by tools/check launches."""
    rows, names = [], []
    with_v2 = json.loads((DATA / "launches_v2.json").read_text())
    for name, steps in json.loads((DATA / "launches.json").read_text()).items():
        for step, each in steps.items():
            sent = [f"{each[key] / 1e6:.2f}" for key in ("sent", "to send")]
            ratio = f"{each['bytes'] / each['needed']:.2f}"
            cells = [
                name,
                step,
                f"{sum(each['launches'].values())}",
                f"{each['bytes'] / 1e6:.1f}",
                f"{each['needed'] / 1e6:.1f}",
                ratio,
            ]
            # It is unknown for models with several layer types.
            outside = "" if each["outside"] is None else f"{each['outside']}"
            of_v2 = [
                str(count) for count in with_v2.get(name, {}).get(step, ["", ""] if with_v2 else [])
            ]
            rows.append(
                [
                    *cells,
                    *(sent if each["to send"] else ["", ""]),
                    outside,
                    f"{each['waits']}",
                    *of_v2,
                ]
            )
        counted = [
            f"{count} \N{MULTIPLICATION SIGN} `{launched}`" if count > 1 else f"`{launched}`"
            for launched, count in steps.get("decode", each)["launches"].items()
        ]
        names.append(f"- {name}, decode: {', '.join(counted)}")
    head = [
        "model",
        "step",
        "launches per layer",
        "MB per layer",
        "minimum",
        "ratio",
        "MB sent per layer",
        "minimum",
        "launches outside of layers",
    ]
    of_v2 = ["launches outside with V2", "synchronizations with V2"] if with_v2 else []
    return "\n".join([table([*head, "host synchronizations", *of_v2], rows), "", *names])


def modelled_launches() -> str:
    """Modelled times of a layer, and what costs much on an NPU, by tools/check launches."""
    rows = []
    for name, steps in json.loads((DATA / "launches.json").read_text()).items():
        for step, each in steps.items():
            ai_cpu = [f"{count} `{launched}`" for launched, count in each["ai_cpu"].items()]
            exposed = f"{each['exposed']:.0f}" if each["to send"] else ""
            counts = [str(each[count]) for count in ("masked", "compilations", "waits")]
            cells = [f"{each['modelled']:.0f}", exposed, ", ".join(ai_cpu) or "0"]
            rows.append([name, step, *cells, *counts])
    head = ["model", "step", "modelled us per layer", "of these exposed communication"]
    head += ["AI CPU launches", "masks of single query tokens per layer", "compilations", "waits"]
    return table(head, rows)


def hybrid() -> str:
    """Models with states, served in several ways, by tools/check hybrid --keep."""
    rows = []
    for way, by_dtype in json.loads((DATA / "hybrid.json").read_text()).items():
        for dtype, found in by_dtype.items():
            counted = found["counters"]
            drafts = f"{counted['accepted']} of {counted['drafted']}" if counted["drafted"] else ""
            cells = [way, dtype, re.sub(r" \(.*", "", found["rule"]), found.get("states", "")]
            cells += [found["graphs"], found["tokens"], found["others"]]
            cells += [f"{found['mean']:.2g}", f"{found['most']:.2g}"]
            rounded = found.get("transformers")
            cells += [rounded["others"], f"{rounded['mean']:.2g}"] if rounded else ["", ""]
            rows.append(
                [
                    str(cell)
                    for cell in [
                        *cells,
                        counted["cached"] or "",
                        counted["preemptions"] or "",
                        drafts,
                    ]
                ]
            )
    head = ["served", "dtype", "gated delta rule", "states", "graphs", "tokens"]
    head += ["not transformers' choice", "difference: mean", "largest"]
    head += ["transformers in this dtype: other choices", "mean"]
    return table(
        [*head, "prompt tokens from the prefix cache", "preemptions", "draft tokens accepted"], rows
    )


def architectures(with_media: bool = False) -> str:
    """Each text architecture of vLLM's registry that transformers can build, or those with images
    or sounds, by tools/check architectures; those that were not measured as lists by cause."""
    rows, not_measured = [], dict[str, list[str]]()
    reasons = tomllib.loads((DATA / "architectures.toml").read_text())
    for name, found in json.loads((DATA / "models.json").read_text()).items():
        if ("inputs" in found) != with_media:
            continue
        result, message = found["result"], _cause(found.get("message", ""))
        if result == "not measured":
            not_measured.setdefault(message, []).append(f"`{name}`")
            continue
        if result == "wrong":
            result, message = "differs", reasons["differs"].get(name, "not explained yet")
        if result == "failed":
            message = reasons["failed"].get(name, message)
        most = f"{found['most']:.0e}" if "most" in found else ""
        inputs = [found["inputs"]] if with_media else []
        rows.append([f"`{name}`", *inputs, result, most, message.replace("|", "/")])
    head = ["architecture", *(["inputs"] if with_media else []), "result", "largest difference"]
    lists = [f"- {cause}: {', '.join(names)}" for cause, names in not_measured.items()]
    return "\n".join([table([*head, "reason"], rows), "", "Not measured:", "", *lists])


def _cause(message: str) -> str:
    """An error without its type, the architecture, the version of the wheel and the fix, which the
    rows would repeat."""
    message = message.removeprefix("ValidationError: ").removeprefix("Value error, ")
    message = re.sub(r"^RefusedError: \w+ is not supported by ascend-platform \S+: ", "", message)
    message = re.sub(r"^ascend-platform \S+ does not support (.*) \(\w+\) yet", r"\1", message)
    message = message.partition(" [type=")[0].partition("; fix: ")[0]
    return re.sub(r"\s+", " ", message)[:300].rstrip("[(, ")


def architecture_counts() -> str:
    """How many architectures of vLLM's registry have each result."""
    counts: dict[str, list[int]] = {}
    for found in json.loads((DATA / "models.json").read_text()).values():
        result = "differs" if found["result"] == "wrong" else found["result"]
        counts.setdefault(result, [0, 0])["inputs" in found] += 1
    order = ["right", "differs", "refused", "failed", "not built", "not measured"]
    rows = [[result, *map(str, counts[result])] for result in sorted(counts, key=order.index)]
    rows.append(["all", *(str(sum(each)) for each in zip(*counts.values(), strict=True))])
    return table(["result", "text", "with images or sounds"], rows)


def prefill_bytes() -> str:
    """Bytes that a layer of a dense model moves in prefill, by operator, by tools/check
    launches."""
    counted = json.loads((DATA / "launches.json").read_text())["dense"]["prefill"]
    moved = sorted(counted["moved"].items(), key=lambda each: -each[1])
    rows = [
        [f"`{name}`", str(counted["launches"][name]), f"{size / 1e6:.1f}"] for name, size in moved
    ]
    return table(["operator", "launches", "MB"], rows)
