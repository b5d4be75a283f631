"""Sleep mode: tensors freed and restored, with a worker that has only a model and KV caches."""

import gc
from types import SimpleNamespace

import pytest
import torch
import torch_npu
from ascend_platform.worker.sleep_mode import StorageBackend

NZ, ND = 29, 2


class Model(torch.nn.Module):
    """A tied weight, a buffer and a derived tensor."""

    def __init__(self):
        super().__init__()
        self.first = torch.nn.Linear(64, 32, bias=False, device="npu")
        self.second = torch.nn.Linear(64, 32, bias=False, device="npu")
        self.second.weight = self.first.weight
        self.register_buffer("table", torch.arange(100.0, device="npu"))
        self.derived = self.first.weight.detach() * 2
        self.plain = "no tensor"


@pytest.fixture
def worker():
    model = Model()
    cache = torch.ones(1 << 20, device="npu")
    graphs = []
    runner = SimpleNamespace(get_model=lambda: model, kv_caches=list(cache.split(1 << 19)), graphs=graphs)
    runner.free_graphs = lambda: graphs.append(("dropped", model.first.weight.untyped_storage().nbytes() > 0))
    runner.capture_model = lambda: graphs.append(("captured", runner.kv_caches[0].untyped_storage().nbytes() > 0))
    return SimpleNamespace(model_runner=runner, get_draft_model=lambda: None)


def values(model):
    return [
        tensor.cpu().clone() for tensor in (model.first.weight.detach(), model.second.weight.detach(), model.table, model.derived)
    ]


@pytest.mark.parametrize("level", [1, 2])
def test_all_tensors_are_restored(worker, level):
    model, backend = worker.model_runner.get_model(), StorageBackend(worker)
    gc.collect()  # tensors of former tests
    before, allocated = values(model), torch.npu.memory_allocated()
    backend.suspend(level)
    assert backend.state() == "SUSPENDED"
    freed = 4 * (2 * 64 * 32 + 100 + (1 << 20))
    assert allocated - torch.npu.memory_allocated() >= freed
    backend.resume()
    assert backend.state() == "RUNNING"
    assert torch.npu.memory_allocated() == allocated
    wanted = before if level == 1 else [torch.zeros_like(tensor) for tensor in before]
    torch.testing.assert_close(values(model), wanted, rtol=0, atol=0)
    assert not worker.model_runner.kv_caches[1].any()
    model.first.weight.data.fill_(3)
    assert (model.second.weight == 3).all()


def test_graphs_are_freed_first_and_captured_last(worker):
    backend = StorageBackend(worker)
    backend.discard(("kv_cache",))
    backend.suspend()
    backend.resume(["weights"])
    assert [what for what, _ in worker.model_runner.graphs] == ["dropped", "dropped"]
    backend.resume(["kv_cache"])
    assert worker.model_runner.graphs == [("dropped", True), ("dropped", True), ("captured", True)]


def test_tags(worker):
    model, backend = worker.model_runner.get_model(), StorageBackend(worker)
    before = values(model)
    backend.discard(("kv_cache",))
    torch.testing.assert_close(values(model), before)
    assert worker.model_runner.kv_caches[0].untyped_storage().nbytes() == 0
    backend.suspend(1)
    backend.resume(["kv_cache"])
    assert backend.state() == "SUSPENDED"
    assert worker.model_runner.kv_caches[0].untyped_storage().nbytes() == 4 << 20
    backend.resume(["weights"])
    assert backend.state() == "RUNNING"
    torch.testing.assert_close(values(model), before, rtol=0, atol=0)
    with pytest.raises(ValueError, match="unknown sleep mode tag 'kv'; supported: weights, kv_cache"):
        backend.resume(["kv"])


def test_private_format_is_restored(worker):
    """torch_npu refuses to resize the storage of such a tensor."""
    model, backend = worker.model_runner.get_model(), StorageBackend(worker)
    before = torch.randn(64, 48).half()
    torch.npu.config.allow_internal_format = True
    try:
        model.first.weight = torch.nn.Parameter(torch_npu.npu_format_cast(before.npu(), NZ))
        assert int(torch_npu.get_npu_format(model.first.weight)) == NZ
        allocated = torch.npu.memory_allocated()
        backend.suspend(1)
        assert model.first.weight.numel() == 0
        assert torch.npu.memory_allocated() < allocated
        backend.resume()
        assert int(torch_npu.get_npu_format(model.first.weight)) == NZ
        torch.testing.assert_close(torch_npu.npu_format_cast(model.first.weight.data, ND).cpu(), before, rtol=0, atol=0)
    finally:
        torch.npu.config.allow_internal_format = False  # torch_npu's default
