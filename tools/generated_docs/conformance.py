# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Results of the conformance suite for vLLM's own KV connectors; `tools/check transfers connectors`
writes connectors.json."""

import json
from pathlib import Path

from generated_docs import markdown

KEPT = Path(__file__).with_name("connectors.json")


def text() -> str:
    """Tests that passed on each platform, and the causes of those that failed."""
    rows, failures = [], []
    for name, places in json.loads(KEPT.read_text()).items():
        passed, causes = [], dict[str, dict[str, str]]()
        for place, results in places.items():
            ran = {test: result for test, result in results.items() if result != "skipped"}
            passed.append(f"{sum(result == 'passed' for result in ran.values())} of {len(ran)}")
            for cause in dict.fromkeys(result for result in ran.values() if result != "passed"):
                tests = [test.replace("_", " ") for test, result in ran.items() if result == cause]
                causes.setdefault(cause, {})[place] = (
                    ", ".join(tests) if len(tests) < len(ran) else "all"
                )
        rows.append([name, *passed])
        failures += [f"- {name}, {_where(where)}: `{cause}`" for cause, where in causes.items()]
    head = ["connector", "passed: CPU", "NPU"]
    return "\n\n".join([markdown.table(head, rows), "Failures:", "\n".join(failures)])


def _where(tests: dict[str, str]) -> str:
    """Failed tests by platform; without the platforms if both have the same."""
    if len(tests) == 2 and len(set(tests.values())) == 1:
        return next(iter(tests.values()))
    return "; ".join(f"{place}, {names}" for place, names in tests.items())
