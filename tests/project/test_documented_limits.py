# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Limits that torch_npu documents, and the emulator's rules of operators. That the counts are on
docs/emulator-rules.md is in test_docs.py."""

import re
from pathlib import Path
from typing import Any

import pytest
from ascend_emulator import rules
from ascend_emulator.verify import references, tables
from harness import checkout

PAGE = """
功能描述:
x必须为2的倍数.
参数说明:
x: Tensor类型, 必选输入, 数据类型支持float16, 不支持非连续的Tensor. 当y为None时, x的维度必须大于1.
- group（Tensor）：可选参数，取值范围是[0, 3]，默认为空
约束说明:
k不超过1024
调用示例:
z必须为3
"""


@pytest.fixture(scope="module")
def limits() -> Any:
    return checkout.import_tool("generated_docs.limits")


NOT_VERIFIED = {
    "npu_change_data_ptr",  # computes nothing
    "npu_moe_distribute_combine_v2",  # of several ranks
    "npu_moe_distribute_dispatch_v2",
    "npu_sim_exponential_",  # random
    "_npu_fused_infer_attention_score_get_max_workspace",
    "_npu_fused_infer_attention_score_v2_get_max_workspace",
}


def test_verify_computes_each_operator_that_the_wheels_call() -> None:
    packages = checkout.ROOT / "packages"
    sources = {*packages.glob("*/src/**/*.py")} - {*packages.glob("ascend-emulator/**/*.py")}
    text = "".join(path.read_text() for path in sources)
    called = set(re.findall(r"torch_npu\.(_?npu_\w+?)_?\b", text))
    calls = Path(references.__file__).read_text()
    calls += "".join(case.call for case in tables.cases("operators").values())
    verified = set(re.findall(r"npu\.(_?npu_\w+?)_?\b", calls))
    assert called - verified == {name.removesuffix("_") for name in NOT_VERIFIED}


def test_rules_quote_the_documentation_word_by_word(limits: Any) -> None:
    assert limits.unknown() == []


def test_limits_of_a_page(limits: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "pages", lambda: {"npu_x": PAGE})
    assert limits.limits("npu_x") == [
        "x: 数据类型支持float16",
        "x: 不支持非连续的Tensor",
        "x: 当y为None时, x的维度必须大于1",
        "group: 取值范围是[0, 3]",
        "k不超过1024",
    ]


def test_operators_named_as_not_emulated_are_not(limits: Any) -> None:
    text = "".join(path.read_text() for path in (rules.SOURCES / "ops").rglob("*.cpp"))
    missing = limits.not_emulated()
    assert missing.keys() < limits.pages().keys()
    assert [n for names in missing.values() for n in names if re.search(rf"\b{n}\b", text)] == []


def test_limits_of_other_projects_have_a_rule_or_a_reason(limits: Any) -> None:
    share = re.search(r"of which ([\d.]+) % have", limits.counts_of_projects())
    assert share
    assert float(share[1]) >= 95


def test_limit_without_a_rule_is_missing(limits: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    states = limits.state("npu_dynamic_quant")
    assert states["x: 输入x的维度必须大于1"] == "dynamic_quant.x-rank"
    assert "" not in states.values()
    monkeypatch.setattr(limits, "pages", lambda: {"npu_dynamic_quant": PAGE})
    assert set(limits.state("npu_dynamic_quant").values()) == {""}
