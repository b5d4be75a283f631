# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Rules of operators: a call that breaks one is refused with its id, and those that break none
compute."""

import re
import sys

import pytest
import torch
import torch_npu
from ascend_emulator import build, rule_parameters, rules
from ascend_emulator.verify import operators, tables
from hypothesis import given, settings
from hypothesis import strategies as st

BROKEN = [rule for rule in rules.rules().values() if rule.case]
VALID = {each.name: each.valid for each in rules.descriptions() if each.valid}
PROGRAM = """
import torch, torch_npu
x = torch.randn(4, 16, dtype=torch.float16, device="npu")
print(torch_npu.npu_dynamic_quant(x, smooth_scales=x[0].float())[0].shape)
"""


def call(name, case):
    given = operators.arguments(tables.Case("refusals", name, case.call, case.inputs))
    names = operators.namespace() | {key: value.npu() for key, value in given.items()}
    result = eval(case.call, names)
    torch.npu.synchronize()
    return result


@pytest.mark.parametrize("name", VALID)
def test_call_that_breaks_no_rule_computes(name):
    call(name, VALID[name])


@pytest.mark.parametrize("rule", BROKEN, ids=lambda rule: rule.id)
def test_call_that_breaks_a_rule_is_refused_with_its_id(rule):
    with pytest.raises(RuntimeError, match=rf"\(rule {re.escape(rule.id)}, {rule.basis}: "):
        call(rule.id, rule.case)


def refused(rule, function, *arguments, **options):
    with pytest.raises(RuntimeError, match=rf"\(rule {re.escape(rule)}, "):
        function(*arguments, **options)


@settings(max_examples=30, deadline=None, derandomize=True)
@given(
    st.integers(1, 9), st.integers(1, 70), st.integers(1, 9), st.sampled_from(["half", "bfloat16"])
)
def test_quantization_of_any_size_names_the_rule_that_is_broken(rows, columns, more, kind):
    dtype = getattr(torch, kind)
    x, smooth = (torch.ones(s, dtype=dtype, device="npu") for s in ((rows, columns), (columns,)))
    quant = torch_npu.npu_dynamic_quant
    values, scale = quant(x, smooth_scales=smooth)
    assert (values.shape, scale.shape) == (x.shape, x.shape[:1])
    refused("dynamic_quant.smooth-dtype", quant, x, smooth_scales=smooth.float())
    refused("dynamic_quant.smooth-rank", quant, x, smooth_scales=smooth[None])
    longer = torch.ones(columns + more, dtype=dtype, device="npu")
    refused("dynamic_quant.smooth-size", quant, x, smooth_scales=longer)


@settings(max_examples=30, deadline=None, derandomize=True)
@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 40), st.integers(1, 5), st.integers())
def test_rerouting_of_any_size_names_the_rule_that_is_broken(ranks, experts, columns, more, kind):
    counts = torch.ones(ranks, experts, dtype=torch.int32, device="npu")
    tokens = torch.ones(ranks * experts, columns, dtype=torch.half, device="npu")
    route = torch_npu.npu_moe_re_routing
    assert torch.equal(route(tokens, counts)[0], tokens)
    refused("moe_re_routing.tokens-dtype", route, tokens.float(), counts)
    scales = torch.ones(len(tokens) + more, device="npu")
    refused("moe_re_routing.scales", route, tokens, counts, per_token_scales=scales)
    if kind and abs(kind) < 1 << 62:
        refused("moe_re_routing.idx-type", route, tokens, counts, idx_type=kind)


def test_rules_of_the_sources_are_in_the_tables():
    text = "".join(path.read_text() for path in build.SOURCES.rglob("*.[ch]*"))
    named = set(re.findall(r'\brule\("([^"]+)"', text))
    without_limits = {rule.id for rule in rules.rules().values() if not rule.limits}
    assert named == without_limits


def without_a_parameter(limit):
    """A table of one rule, about matrices of aclnnBatchMatMul."""
    rule = rules.Rule("batch_matmul.out-dtype", (limit,), (), (), "no document", "inferred", None)
    return rules.Description(
        "batch_matmul", "ops/matmul/matmul", ("aclnnBatchMatMul",), (), {}, None, (rule,)
    )


@pytest.mark.parametrize(
    ("limit", "parameter"),
    [
        ("mat2.size(0) in 1..65535", "mat2"),
        ("self.dtype is mat2.dtype", "mat2"),
        ("other.size(0) is mat2.size(0)", "mat2"),
    ],
)
def test_a_limit_of_no_parameter_is_refused_before_compiling(
    monkeypatch, tmp_path, limit, parameter
):
    """The parameter is called ``other`` in the source; such a limit held for each call."""
    monkeypatch.setattr(rules, "descriptions", lambda: (without_a_parameter(limit),))
    message = (
        f"rule batch_matmul.out-dtype: '{limit}' is about '{parameter}', which is no parameter of"
    )
    with pytest.raises(build.BuildError, match=re.escape(message)):
        build._build(tmp_path, ["false"], (), print)


def test_operators_of_all_forms_have_parameters():
    """Those of structs, of templates, of macros and of the graph."""
    known = rule_parameters.parameters(
        path for path in build.SOURCES.rglob("*.*") if path.suffix in (".cpp", ".h")
    )
    assert {"key_prefix", "query_rope", "block_size"} <= known["aclnnFusedInferAttentionScoreV3"]
    assert {"x1", "transpose_x2"} <= known["aclnnQuantMatmulWeightNz"]
    assert {"x1", "y"} <= known["Add"]
    assert "mat2" in known["aclnnMatmulWeightNz"] - known["aclnnBatchMatMul"]


def test_broken_rules_are_counted_at_exit(run):
    command = [sys.executable, "-c", PROGRAM]
    id = "dynamic_quant.smooth-dtype"
    refused = run("run", "--", *command)
    assert f"(rule {id}, documented: torch_npu 2.13)" in refused.stderr
    assert f"\nascend-emulator: rules broken: {id} (refused 1)\n" in refused.stderr
    allowed = run("run", "--allow", id, "--", *command)
    assert allowed.stdout == "torch.Size([4, 16])\n", allowed.stderr
    assert f"\nascend-emulator: rules broken: {id} (allowed 1)\n" in allowed.stderr
    again = [sys.executable, "-c", PROGRAM + PROGRAM]
    twice = run("run", "--allow", id, "--", *again)
    assert f"\nascend-emulator: rules broken: {id} (allowed 2)\n" in twice.stderr


def test_unknown_rule_is_named(run):
    done = run("run", "--allow", "dynamic_quant.colour", "--", "true")
    assert done.stderr == (
        "ascend-emulator run: there is no rule 'dynamic_quant.colour' (ASCEND_EMULATOR_ALLOW); did you"
        " mean dynamic_quant.chip?; `ascend-emulator rules` lists them\n"
    )
    assert re.search(
        r"^dynamic_quant\.x-rank +documented +torch_npu 2\.13 ", run("rules").stdout, re.M
    )


@pytest.mark.parametrize("limit", ["x.colour in 1", "x in", "x.size(a) in 1", "x.dtype > 1"])
def test_limit_of_no_known_form_is_refused(limit):
    with pytest.raises(ValueError, match="no limit"):
        rules._clause(limit, {}, "0, false")
