# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Modelled times compared with published figures of real NPUs: errors may not become worse, and the
constants of the code are those of the fit.

That docs/modelled-times.md is what tools/docs-tables makes of the figures is in test_docs.py.
"""

import dataclasses
import json
import tomllib
from typing import Any

import pytest
from ascend_emulator import chips as emulated
from ascend_emulator import laws as emulator
from ascend_platform import chips
from ascend_platform.cli.plan import laws as plan
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
        (found,) = published.worse(limits | {name: limits[name] | {key: value}}, limits)
        assert found.startswith(name)


def test_constants_are_those_of_the_fit(published: Any) -> None:
    laws, fit = published.laws, published.fit
    collectives = {"collective": laws.COLLECTIVE, "experts": laws.EXPERTS}
    for name, fields in fit.FIELDS.items():
        known = collectives.get(name) or laws.LAWS[name]
        found = [getattr(fit.law(name), field) for field in fields]
        assert [getattr(known, field) for field in fields] == pytest.approx(found, rel=0.02), name
    host = dataclasses.astuple(laws.HOSTS["typical"])[:3]
    assert host == pytest.approx(dataclasses.astuple(fit.host())[:3], rel=0.02, abs=0.01)
    assert laws.FITTED.accepted == fit.accepted()


def test_laws_of_the_emulator_are_those_of_the_plan() -> None:
    known = {name: law for name, law in emulator.laws().items() if name in plan.LAWS}
    fields = [field.name for field in dataclasses.fields(emulator.Law)]
    assert {name: dataclasses.asdict(law) for name, law in known.items()} == {
        name: {field: getattr(law, field) for field in fields} for name, law in plan.LAWS.items()
    }
    collectives = {"collective": plan.COLLECTIVE, "experts": plan.EXPERTS}
    assert {name: dataclasses.asdict(law) for name, law in emulator.collectives().items()} == {
        name: {
            field.name: getattr(law, field.name)
            for field in dataclasses.fields(emulator.CollectiveLaw)
        }
        for name, law in collectives.items()
    }
    assert emulator.FULL_ROWS == plan.FULL_ROWS


@pytest.mark.parametrize("name", chips.FIGURES)
def test_chips_of_the_emulator_have_the_figures_of_the_plan(name: str) -> None:
    figures, chip = chips.FIGURES[name], emulated.chip(name)
    assert (chip.memory >> 30, chip.node) == (figures.memory_gib, figures.node)
    for found, published in (
        (chip.bandwidth / 1e9, figures.bandwidth_gbs),
        (chip.network_bandwidth / 1e9, figures.network_gbs),
        (chip.injection_bandwidth / 1e9, figures.injection_gbs),
        (chip.collective * 1e6, figures.collective_us),
    ):
        assert found == pytest.approx(published), name
    assert chip.cube_flops / 1e12 == pytest.approx(figures.tflops, rel=0.02)
    assert figures.link_gbs in (0, chip.link_bandwidth / 1e9)


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
