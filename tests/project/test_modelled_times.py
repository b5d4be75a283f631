# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Modelled times compared with published figures of real NPUs: errors may not become worse, and the
constants of the code are those of the fit.

That docs/modelled-times.md is what tools/docs-tables makes of the figures is in test_docs.py.
"""

import dataclasses
import json
import tomllib
from pathlib import Path
from typing import Any

import pytest
from ascend_cli import figures
from ascend_cli.plan import laws as plan
from ascend_emulator import chips as emulated
from ascend_emulator import laws as emulator
from harness import checkout


@pytest.fixture(scope="module")
def published() -> Any:
    return checkout.import_tool("published.errors")


def test_errors_are_not_worse_than_recorded(published: Any) -> None:
    limits = json.loads(published.LIMITS.read_text())
    now = published.records()
    assert now.keys() == limits.keys()
    assert published.worse(now, limits) == []


def test_worse_bias_quantiles_and_fewer_rows_are_found(published: Any) -> None:
    limits = json.loads(published.LIMITS.read_text())
    for key, value in (("bias", 0.5), ("low", 0.1), ("high", 9.0), ("rows", 1), ("within", 0.0)):
        name = "typical: time per output token, vllm-ascend with graphs"
        (result,) = published.worse(limits | {name: limits[name] | {key: value}}, limits)
        assert result.startswith(name)


def test_constants_are_those_of_the_fit(published: Any) -> None:
    laws, fit = published.laws, published.fit
    collectives = {"collective": laws.COLLECTIVE, "experts": laws.EXPERTS}
    for name, fields in fit.FIELDS.items():
        known = collectives.get(name) or laws.LAWS[name]
        result = [getattr(fit.law(name), field) for field in fields]
        assert [getattr(known, field) for field in fields] == pytest.approx(result, rel=0.02), name
    host = dataclasses.astuple(laws.HOSTS["typical"])[:3]
    assert host == pytest.approx(dataclasses.astuple(fit.host())[:3], rel=0.02, abs=0.01)
    assert laws.FITTED.accepted == fit.accepted()


def test_laws_of_the_emulator_are_those_of_the_plan() -> None:
    """The emulator's files are links; test_wheels.py compares the wheels."""
    ours, linked = (Path(module.__file__).parent for module in (plan, emulator))
    assert (linked / "law.py").samefile(ours / "law.py")
    assert (linked / "fitted_laws.toml").samefile(ours / "laws.toml")
    known = {name: law for name, law in emulator.laws().items() if name in plan.LAWS}
    fields = ("start_us", "rows_us", "bandwidth", "rate")
    assert {name: [getattr(law, field) for field in fields] for name, law in known.items()} == {
        name: [getattr(law, field) for field in fields] for name, law in plan.LAWS.items()
    }


@pytest.mark.parametrize("name", [name for name in emulated.chips() if figures.figures_of(name)])
def test_chips_of_the_emulator_have_the_figures_of_the_plan(name: str) -> None:
    known, chip = figures.figures_of(name), emulated.chip(name)
    assert known is not None
    assert (chip.memory >> 30, chip.node) == (known.memory_gib, known.node)
    for modelled, published in (
        (chip.bandwidth / 1e9, known.bandwidth_gbs),
        (chip.network_bandwidth / 1e9, known.network_gbs),
        (chip.injection_bandwidth / 1e9, known.injection_gbs),
        (chip.collective * 1e6, known.collective_us),
    ):
        assert modelled == pytest.approx(published), name
    assert chip.cube_flops / 1e12 == pytest.approx(known.tflops, rel=0.02)
    assert known.link_gbs in (0, chip.link_bandwidth / 1e9)


def test_ranges_are_the_quantiles_of_published_rows(published: Any) -> None:
    assert published.bands() == published.laws.BANDS


def test_withheld_rows_are_in_no_fit(published: Any) -> None:
    withheld = published.figures.withheld()
    assert len(withheld) == published.figures.WITHHELD
    every = {"first_ms", "token_ms", "step_ms", "tokens_per_second"}
    for regime in published.laws.HOSTS:
        assert withheld.isdisjoint(published.fit._seen("", every, regime))


def test_models_have_their_published_number_of_weights(published: Any) -> None:
    known = tomllib.loads((published.figures.DATA / "models.toml").read_text())
    for name, model in published.figures.models().items():
        if billions := known[name].get("billions"):
            assert model.parameters / 1e9 == pytest.approx(billions, rel=0.02), name


def test_every_row_has_a_source_with_a_link(published: Any) -> None:
    sources = published.figures.sources()
    assert {row.source for row in published.figures.rows()} < sources.keys()
    for source in sources.values():
        assert source["url"].startswith("https://")
        assert source["regime"] in published.laws.HOSTS
