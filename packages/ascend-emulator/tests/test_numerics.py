# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Results under ``run --numerics jitter:SEED``: which move, by how much, and that a seed decides."""

import re
import subprocess
import sys

import pytest
import torch
from ascend_emulator.build import SOURCES
from ascend_emulator.coverage import entry_points
from ascend_emulator.verify import environment

PROGRAM = """
import sys, torch, torch_npu
torch.manual_seed(0)
npu = torch.ops.npu
x = torch.randn(64, 96)
w = torch.randn(96, 32)
out = {}
for dtype in (torch.float16, torch.bfloat16, torch.float32):
    a, b = x.to(dtype).npu(), w.to(dtype).npu()
    name = str(dtype)[6:]
    out["moved exp " + name] = a.exp()
    out["moved exp_ " + name] = a.clone().exp_()
    out["moved matmul " + name] = a @ b
    out["moved transposed " + name] = torch.empty(32, 64, dtype=dtype, device="npu").t()
    torch.matmul(a, b, out=out["moved transposed " + name])
    out["moved sum " + name] = a.sum(1)
    out["moved softmax " + name] = a.softmax(1)
    out["moved sigmoid " + name] = a.sigmoid()
    out["moved norm " + name], out["moved rstd " + name] = npu.npu_rms_norm(a, a[0])
    out["kept copy " + name] = a.clone()
    out["kept add " + name] = a + a
    out["kept max " + name] = a.amax(1)
    out["kept indices " + name] = a.topk(4)[1]
    out["kept counts " + name] = torch.ones_like(a[:, :64]).sum(1)
    ends = torch.tensor([0.0, float("inf"), -float("inf"), float("nan")], dtype=dtype).npu()
    out["kept ends " + name] = torch.stack([ends.exp(), ends.tanh(), ends.sin()])
    subnormal = torch.full((8,), torch.finfo(dtype).smallest_normal, dtype=dtype).npu()
    out["kept positive " + name] = subnormal.sqrt() > 0
    again = a.exp()
    graph, side = torch.npu.NPUGraph(), torch.npu.Stream()
    with torch.npu.graph(graph, stream=side):
        captured = a.exp()
    graph.replay()
    first = captured.clone()
    graph.replay()
    torch.npu.synchronize()
    assert torch.equal(again, out["moved exp " + name])
    assert torch.equal(first, again) and torch.equal(captured, again)
torch.save({key: value.cpu() for key, value in out.items()}, sys.argv[1])
"""


def bits(value: torch.Tensor) -> torch.Tensor:
    """Numbers in the order of the values, neighbours differing by one."""
    form = {2: torch.int16, 4: torch.int32}[value.element_size()]
    pattern = value.contiguous().view(form).long()
    return torch.where(pattern < 0, -(pattern & torch.iinfo(form).max), pattern)


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Results of the program by the value of ``--numerics``; `again` is a second run of seed 1."""
    directory = tmp_path_factory.mktemp("numerics")
    out = {}
    for name in ("", "jitter:1", "again", "jitter:2"):
        numerics = name.replace("again", "jitter:1")
        file = directory / (name or "none")
        command = [sys.executable, "-m", "ascend_emulator.cli", "run"]
        command += ["--numerics", numerics] if numerics else []
        done = subprocess.run(
            [*command, "--", sys.executable, "-c", PROGRAM, str(file)],
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        line = done.stderr.splitlines()[0]
        assert line.endswith(f" with numerics {numerics}" if numerics else ")"), line
        out[name] = torch.load(file)
    return out


@pytest.mark.parametrize("seed", ["jitter:1", "jitter:2"])
def test_listed_results_move_by_at_most_one_ulp(results, seed):
    for name, plain in results[""].items():
        moved = results[seed][name]
        if name.startswith("kept"):
            assert torch.equal(moved.nan_to_num(7), plain.nan_to_num(7)), name
            continue
        by = (bits(moved) - bits(plain)).abs()
        assert by.max() == 1, name
        assert by.double().mean() > 0.3, name


def test_same_seed_gives_the_same_bits_and_another_does_not(results):
    for name, first in results["jitter:1"].items():
        assert torch.equal(first.nan_to_num(7), results["again"][name].nan_to_num(7)), name
        if name.startswith("moved"):
            assert not torch.equal(first, results["jitter:2"][name]), name


def test_rows_name_operators_and_their_parameters():
    """A misspelled name moves nothing."""
    source = (SOURCES / "operator" / "jitter.cpp").read_text()
    rows = source[source.index("kRows[]") : source.index("\n};", source.index("kRows[]"))]
    texts = re.findall(r'\{("[^{}]*?"),\s*("[^{}]*")\}', rows)
    assert len(texts) > 10
    listed = [name for _, names in texts for name in "".join(re.findall(r'"(.*?)"', names)).split()]
    assert len(listed) == len(set(listed)), "an operator is listed twice"
    computed = {each.name for each in entry_points() if each.state == "computed"}
    assert {f"aclnn{name}" for name in listed} <= computed


REDUCTION = """
import sys, torch, torch_npu, torch.distributed as dist
rank = int(sys.argv[1])
torch.npu.set_device(rank)
dist.init_process_group("hccl", rank=rank, world_size=4, init_method="file://" + sys.argv[2])
torch.manual_seed(rank)
value = torch.randn(1 << 15)
exact = torch.randint(-9, 9, (64,)).float()
sums = [each.npu() for each in (value, value[:64].clone(), exact)]
for each in sums:
    dist.all_reduce(each)
torch.save([each.cpu() for each in sums], sys.argv[3] + str(rank))
"""


def test_collectives_add_in_an_order_of_the_seed(tmp_path):
    """All ranks in the same one, whether a collective takes one step or two."""
    sums = {}
    for numerics in ("", "jitter:1"):
        name = numerics.replace(":", "-") or "plain"
        command = [sys.executable, "-m", "ascend_emulator.cli", "run", "--npus", "4"]
        command += ["--numerics", numerics] if numerics else []
        command += ["--", sys.executable, "-c", REDUCTION]
        ranks = [
            subprocess.Popen(
                [*command, str(rank), str(tmp_path / f"store-{name}"), str(tmp_path / name)]
            )
            for rank in range(4)
        ]
        assert [rank.wait(100) for rank in ranks] == [0] * 4
        first, *later_ranks = (torch.load(tmp_path / f"{name}{rank}") for rank in range(4))
        for other in later_ranks:
            assert all(map(torch.equal, first, other))
        sums[numerics] = first
    for plain, other in zip(sums[""][:2], sums["jitter:1"][:2], strict=True):
        assert not torch.equal(plain, other)
        torch.testing.assert_close(plain, other)
    assert torch.equal(sums[""][2], sums["jitter:1"][2])


@pytest.mark.parametrize("numerics", ["jitter:1", ""])
def test_a_report_of_verify_says_which_numerics_it_has(monkeypatch, numerics):
    monkeypatch.setenv("ASCEND_EMULATOR_NUMERICS", numerics)
    facts = environment.PROGRAMS["environment"]({})["facts"]
    assert facts.get("numerics", "") == numerics
