# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Launch sites of Triton kernels in vLLM's V2 runner: each is overridden, refused by name or
unreachable, and unchanged."""

import ast
import dataclasses
import importlib.metadata
import uuid
from collections.abc import Iterator
from operator import attrgetter
from types import SimpleNamespace
from typing import Any

import pytest
from ascend_platform import extension, fingerprint
from ascend_platform.config import features, model_runner, runners
from ascend_platform.config.features import Feature
from ascend_platform.overrides import guard, table
from ascend_platform.process import environment
from harness.project import vllm_copy
from packaging.version import Version
from vllm import __version__ as vllm_version
from vllm import envs
from vllm.config import VllmConfig
from vllm.config.utils import replace

LAUNCHES = table.launches()
supported = pytest.mark.skipif(
    Version(vllm_version).release < Version(table.V2_SINCE).release,
    reason="vLLM's V2 runner is another",
)

with_both = pytest.mark.skipif(not runners.has_v1(), reason="there is one runner")


def launches(node: ast.AST, outer: tuple[str, ...] = ()) -> Iterator[tuple[str, str]]:
    """Kernel and launching function of each ``kernel[grid](…)``."""
    for child in ast.iter_child_nodes(node):
        inner = (*outer, child.name) if isinstance(child, ast.FunctionDef | ast.ClassDef) else outer
        if isinstance(child, ast.Call) and isinstance(child.func, ast.Subscript):
            called = child.func.value
            if isinstance(called, ast.Name | ast.Attribute) and ast.unparse(called).endswith(
                "_kernel"
            ):
                yield ast.unparse(called), ".".join(outer)
        yield from launches(child, inner)


@supported
def test_table_has_every_launch() -> None:
    root = vllm_copy.INSTALLED / "v1" / "worker" / "gpu"
    result = []
    for path in root.rglob("*.py"):
        module = ".".join(path.relative_to(root).with_suffix("").parts)
        result += [(module, *launch) for launch in launches(ast.parse(path.read_text()))]
    assert len(result) == 76
    assert sorted(result) == sorted(
        (
            launch.caller.partition(":")[0].removeprefix("vllm.v1.worker.gpu."),
            launch.kernel.partition(":")[2],
            launch.caller.partition(":")[2],
        )
        for launch in LAUNCHES
    )


@supported
def test_no_kernel_and_no_caller_has_changed() -> None:
    assert [each.problem() for each in table.rows("v2") if each.problem()] == []


def test_changed_kernel_is_named(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = tmp_path / "vllm" / "v1" / "worker" / "gpu"
    gpu.mkdir(parents=True)
    file = gpu / "block_table.py"
    file.write_text("def _gather_block_tables_kernel():\n    pass\n")
    named = "vllm.v1.worker.gpu.block_table:BlockTables.gather_block_tables"
    row = next(row for row in table.rows("v2") if row.target == named)
    assert "BlockTables.gather_block_tables is missing" in row.problem(tmp_path)
    file.write_text(f"{file.read_text()}class BlockTables:\n    def gather_block_tables(): ...\n")
    caller = fingerprint.fingerprint(file.read_text(), "BlockTables.gather_block_tables")
    row = dataclasses.replace(row, sources={"0.33": caller})
    assert row.problem(tmp_path).startswith(
        "target vllm.v1.worker.gpu.block_table:_gather_block_tables_kernel has changed: found "
    )
    monkeypatch.setattr(table, "rows", lambda *tables: [row])
    monkeypatch.setattr(fingerprint, "module_source", lambda module, tree: file.read_text())
    guard._problem.cache_clear()
    with pytest.raises(extension.RefusedError, match="_gather_block_tables_kernel has changed"):
        guard.check("v2")
    guard._problem.cache_clear()


def test_refused_launches_may_change(monkeypatch: pytest.MonkeyPatch) -> None:
    row = next(row for row in table.rows("v2") if row.action == "refused")
    changed = dataclasses.replace(row, sources={"0.33": "0" * 12})
    assert changed.problem()
    monkeypatch.setattr(table, "rows", lambda *tables: [changed])
    guard.check("v2")


def test_patches_check_compares_the_table(tmp_path) -> None:
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "_version.py").write_text('__version__ = "0.33.0"\n')
    rows = extension.overrides(tmp_path)
    row = next(row for row in rows if row["name"] == "block_table.BlockTables.gather_block_tables")
    assert row["action"] == "launch contained"
    assert row["why"] == "runners.v2.kernels.block_table:NPUBlockTables.gather_block_tables"
    assert "is missing" in row["problem"]
    (tmp_path / "vllm" / "_version.py").write_text('__version__ = "0.32.0"\n')
    without_v2 = extension.overrides(tmp_path)
    assert len(rows) == len(without_v2) + len(table.rows("v2"))
    assert {row["name"] for row in extension.overrides()} <= {row["name"] for row in without_v2}


@pytest.mark.parametrize("launch", LAUNCHES, ids=lambda launch: f"{launch.kernel}-{launch.caller}")
def test_state_is_true(launch: table.Launch) -> None:
    if launch.state == "overridden":
        path, _, name = launch.by.partition(":")
        module = path.removeprefix("runners.v2.kernels.")
        if (
            module in ("block_table", "model_states")
            and Version(vllm_version).release < Version(table.V2_SINCE).release
        ):
            return
        result = importlib.import_module(f"ascend_platform.runners.v2.kernels.{module}")
        assert callable(attrgetter(name)(result))
    elif launch.state == "refused":
        assert launch.by in {feature.name for feature in features.rows()}
    else:
        assert launch.state == "unreachable"
        assert launch.by


def config(runner: object, **given: object) -> SimpleNamespace:
    options = {"ascend": {"platform": {"model_runner": runner}}}
    return SimpleNamespace(additional_config=options, instance_id=uuid.uuid4().hex, **given)


def test_option_has_three_values() -> None:
    assert model_runner.choice(config("v2")) == (True, "additional_config")
    assert model_runner.choice(config("v1")) == (False, "additional_config")
    with pytest.raises(
        extension.RefusedError,
        match=r"ascend.platform.model_runner is 'v3'; supported: auto, v1, v2; fix: ",
    ):
        model_runner.choice(config("v3"))


def chosen(
    monkeypatch: pytest.MonkeyPatch,
    lacking: list[str],
    asked: bool | None = None,
    version: str = "0.33.0",
    watermark_config: object = None,
    routed_experts: bool = False,
) -> Any:
    """The choice for these requested features, with the environment variable set to `asked`, if
    given."""
    monkeypatch.setenv("VLLM_VERSION", version)
    requested = None if asked is None else str(int(asked))
    monkeypatch.setattr("ascend_platform.process.environment.requested_runner", requested)
    rows = [Feature(name, lambda _: True, runners=features.V2) for name in lacking]
    rows.append(Feature("watermarking", lambda it: it.watermark_config, runners=features.V1))
    rows.append(Feature("experts", lambda it: it.aux_output_config.enabled, runners=features.V1))
    monkeypatch.setattr(features, "rows", lambda: rows)
    given = {
        "_get_v2_model_runner_unsupported_features": list,
        "watermark_config": watermark_config,
        "model_config": object(),
    }
    aux_output = SimpleNamespace(enabled=routed_experts)
    return model_runner.choice(config("auto", aux_output_config=aux_output, **given))


@with_both
def test_v2_is_the_default_but_for_what_it_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    assert chosen(monkeypatch, []) == (True, "the default from vLLM 0.33 on")
    assert chosen(monkeypatch, ["prompt embeddings", "dflash"]) == (
        False,
        "V2 lacks prompt embeddings, dflash",
    )
    assert chosen(monkeypatch, ["prompt embeddings"], watermark_config="given").is_v2
    assert chosen(monkeypatch, ["prompt embeddings"], routed_experts=True).is_v2
    assert chosen(monkeypatch, [], asked=False) == (False, "VLLM_USE_V2_MODEL_RUNNER=0")
    assert chosen(monkeypatch, ["prompt embeddings"], asked=True).is_v2
    assert chosen(monkeypatch, [], version="0.32.0") == (False, "V2 is supported from vLLM 0.33 on")


class OfV1:
    """A logits processor that is none of V2's."""


def of_model(**given: object) -> SimpleNamespace:
    kept = {
        "runner_type": "generate",
        "logits_processors": None,
        "pooler_config": None,
        "architecture": "Qwen3ForCausalLM",
    }
    return SimpleNamespace(model_config=SimpleNamespace(**kept | given))


def lacking(config: SimpleNamespace) -> list[str]:
    names = ("logits processors with V1's interface", "the pooling task plugin")
    return [
        feature.name
        for feature in features.rows()
        if feature.name in names and feature.asked(config)
    ]


@supported
def test_v1_has_the_logits_processors_of_its_interface(monkeypatch: pytest.MonkeyPatch) -> None:
    named = ["logits processors with V1's interface"]
    assert lacking(of_model(logits_processors=["harness.engines.logits_processor:OnlyToken"])) == []
    assert (
        lacking(
            of_model(
                logits_processors=[
                    "harness.engines.logits_processor:OnlyToken",
                    "types:SimpleNamespace",
                ]
            )
        )
        == named
    )
    assert lacking(of_model(logits_processors=[OfV1])) == named
    # for vLLM to report
    assert lacking(of_model(logits_processors=["no.such:Module", "malformed"])) == []
    point = SimpleNamespace(load=lambda: OfV1)
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: [point])
    assert lacking(of_model()) == named
    assert lacking(of_model(runner_type="pooling")) == []


@supported
@pytest.mark.parametrize(
    ("task", "architecture", "result"),
    [("plugin", "A", True), (None, "Terratorch", True), ("embed", "A", False)],
)
def test_v1_pools_by_plugins(task: str | None, architecture: str, result: bool) -> None:
    model = of_model(
        runner_type="pooling", architecture=architecture, pooler_config=SimpleNamespace(task=task)
    )
    assert lacking(model) == ["the pooling task plugin"] * result
    assert lacking(of_model()) == []


@with_both
def test_drafters_of_an_engine_have_its_runner(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(environment.RUNNER, "1")
    one = SimpleNamespace(pipeline_parallel_size=1)
    engine = config("v1", model_config=object(), speculative_config=None, parallel_config=one)
    envs.enable_envs_cache()  # As an engine of this process has done.
    try:
        model_runner.publish(engine)
        assert envs.VLLM_USE_V2_MODEL_RUNNER is False
    finally:
        envs.disable_envs_cache()
    assert model_runner.choice(engine) == (False, "additional_config")
    monkeypatch.setattr("vllm.config.get_current_vllm_config_or_none", lambda: engine)
    assert model_runner.choice(config("v2")) == (False, "additional_config")


@with_both
def test_configuration_can_be_replaced() -> None:
    """As vLLM does for a drafter; it refuses attributes that are no fields
    (``vllm/config/utils.py``)."""
    engine = VllmConfig(additional_config=config("v1").additional_config)
    engine.model_config = object()  # type: ignore[assignment]
    model_runner.publish(engine)
    del engine.model_config
    assert replace(engine).additional_config == engine.additional_config


def test_v2_below_its_first_version_is_refused_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_VERSION", "0.32.0")
    with pytest.raises(
        extension.RefusedError,
        match=r"additional_config\) requires vLLM >= 0.33, found 0.32.0; fix: ",
    ):
        model_runner.check(config("v2", model_config=object()))


@pytest.mark.parametrize(
    ("method", "stages", "result"),
    [("mtp", 2, True), ("mtp", 1, False), ("draft_model", 2, True), ("ngram", 2, False)],
)
def test_drafters_with_layers_are_refused_with_pipelines(
    method: str, stages: int, result: bool
) -> None:
    given: Any = SimpleNamespace(
        parallel_config=SimpleNamespace(pipeline_parallel_size=stages),
        speculative_config=SimpleNamespace(method=method),
    )
    name = "speculative decoding other than by n-grams with pipeline parallelism"
    row = next(row for row in features.rows() if row.name == name)
    assert row.runners == features.V1 + features.V2
    assert row.asked(given) == result
