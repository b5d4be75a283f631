# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Snapshot of the weights to serve: as before processing, from the device if processing left them
unchanged."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from ascend_model_loader.chunks import chunk_digests
from ascend_model_loader.loader import Snapshot, scalar_attributes
from ascend_model_loader.wire import PeerError
from torch import nn
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase


class Method(QuantizeMethodBase):
    """Quantize method whose ``process_weights_after_loading`` is ``act``."""

    def __init__(self, act: Callable[[nn.Module], None]) -> None:
        self.process_weights_after_loading = act  # type: ignore[method-assign]

    def create_weights(self, *_: Any, **__: Any) -> None: ...

    def apply(self, *_: Any, **__: Any) -> torch.Tensor:
        raise NotImplementedError


def replace(layer: nn.Module) -> None:
    layer.weight = nn.Parameter(layer.weight.data.t().contiguous(), requires_grad=False)


def double(layer: nn.Module) -> None:
    layer.weight.data.mul_(2)


def leave(layer: nn.Module) -> None:
    layer.derived = layer.weight.sum()


def drop(layer: nn.Module) -> None:
    del layer.weight


class Model(nn.Module):
    def __init__(self, device: str, method: Any) -> None:
        super().__init__()
        self.plain = nn.Linear(30, 20, device=device)
        self.plain.quant_method = UnquantizedLinearMethod()
        self.layer = nn.Linear(30, 20, device=device)
        self.layer.quant_method = method
        self.tied = self.plain
        self.register_buffer("cache", torch.ones(3), persistent=False)


@pytest.mark.parametrize("device", ["cpu", "npu"])
@pytest.mark.parametrize(
    ("act", "kept"),
    [
        (leave, []),
        (replace, ["layer.weight"]),
        (double, ["layer.weight"]),
        (drop, ["layer.weight"]),
    ],
)
def test_replaced_weights_are_copied_to_the_host(
    device: str, act: Callable[[nn.Module], None], kept: list[str]
) -> None:
    model = Model(device, Method(act))
    before = {
        name: each.detach().cpu().clone()
        for name, each in model.state_dict().items()
        if not name.startswith("tied")
    }
    snapshot = Snapshot(model, "xxh3")
    model.layer.quant_method.process_weights_after_loading(model.layer)
    snapshot.release_unchanged(model)
    assert [*snapshot.host_copies] == kept
    assert [*snapshot.tensors] == [*before]
    assert all(
        torch.equal(each.detach().cpu(), before[name]) for name, each in snapshot.tensors.items()
    )
    assert {
        name
        for name, each in snapshot.tensors.items()
        if each.device.type == device or name in kept
    } == {*before}
    assert snapshot.digests == chunk_digests(before, "xxh3", torch.device("cpu"))


def test_replaced_weights_without_a_host_copy_are_not_served() -> None:
    model = Model("cpu", Method(leave))
    snapshot = Snapshot(model, "xxh3")
    replace(model.plain)
    with pytest.raises(
        PeerError,
        match=(
            r"^process_weights_after_loading replaced plain.weight, of which there is no host copy$"
        ),
    ):
        snapshot.release_unchanged(model)


def test_meta_weights_are_not_served() -> None:
    with pytest.raises(
        PeerError, match=r"^plain.weight is a Parameter on meta, which cannot be sent as bytes$"
    ):
        Snapshot(Model("meta", Method(leave)), "xxh3")


def test_attributes_set_by_load_weights_are_detected() -> None:
    model = Model("cpu", Method(leave))
    before = scalar_attributes(model)
    assert scalar_attributes(model) == before
    model.layer.scale = 0.5
    assert set(scalar_attributes(model).items()) - set(before.items()) == {("layer.scale", "0.5")}
