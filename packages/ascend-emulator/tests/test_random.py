# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Random numbers: their range, distribution and repeatability. The numbers themselves are the
emulator's own."""

import pytest
import torch

FLOATS = [torch.float32, torch.float16, torch.bfloat16]
COUNT = 20000
# Draws from N values; each mean is held to five standard errors, each to its own support.
DRAWS = {
    "rand": (lambda: torch.rand(COUNT, device="npu"), 0.5, 12**-0.5, 0, 1),
    "uniform_": (lambda: torch.empty(COUNT, device="npu").uniform_(2, 5), 3.5, 3 * 12**-0.5, 2, 5),
    "randn": (lambda: torch.randn(COUNT, device="npu"), 0, 1, -9, 9),
    "normal_": (lambda: torch.empty(COUNT, device="npu").normal_(3, 2), 3, 2, -20, 25),
    "normal_ of whole numbers": (
        lambda: torch.empty(COUNT, dtype=torch.int32, device="npu").normal_(0, 20),
        0,
        20,
        -200,
        200,
    ),
    "normal": (lambda: torch.normal(3.0, 2.0, (COUNT,), device="npu"), 3, 2, -20, 25),
    "normal around a tensor": (
        lambda: torch.normal(torch.full((COUNT,), 3.0, device="npu"), 2.0),
        3,
        2,
        -20,
        25,
    ),
    "normal by a tensor": (
        lambda: torch.normal(3.0, torch.full((COUNT,), 2.0, device="npu")),
        3,
        2,
        -20,
        25,
    ),
    "normal of tensors": (
        lambda: torch.normal(*torch.tensor([3.0, 2.0], device="npu").expand(COUNT, 2).t()),
        3,
        2,
        -20,
        25,
    ),
    "exponential_": (lambda: torch.empty(COUNT, device="npu").exponential_(0.5), 2, 2, 0, 60),
    "randint": (lambda: torch.randint(3, 8, (COUNT,), device="npu"), 5, 2**0.5, 3, 7),
    "random_": (lambda: torch.empty(COUNT, device="npu").random_(10), 4.5, 8.25**0.5, 0, 9),
    "bernoulli_": (lambda: torch.empty(COUNT, device="npu").bernoulli_(0.3), 0.3, 0.21**0.5, 0, 1),
    "bernoulli": (
        lambda: torch.bernoulli(torch.full((COUNT,), 0.3, device="npu")),
        0.3,
        0.21**0.5,
        0,
        1,
    ),
    "multinomial": (
        lambda: torch.multinomial(torch.arange(4.0, device="npu"), COUNT, replacement=True),
        7 / 3,
        (5 / 9) ** 0.5,
        1,
        3,
    ),
}


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(1234)


@pytest.mark.parametrize("name", DRAWS)
def test_distribution(name):
    draw, mean, deviation, low, high = DRAWS[name]
    values = draw().cpu().double()
    assert values.shape == (COUNT,)
    assert low <= values.min()
    assert values.max() <= high
    assert abs(values.mean().item() - mean) < 5 * deviation / COUNT**0.5
    assert abs(values.std().item() / deviation - 1) < 0.05
    # Neighbours are not correlated.
    centred = values - values.mean()
    assert abs((centred[1:] * centred[:-1]).mean().item()) < 5 * deviation**2 / COUNT**0.5


@pytest.mark.parametrize("name", DRAWS)
def test_a_seed_repeats_the_numbers_and_each_call_has_others(name):
    draw = DRAWS[name][0]
    first, second = draw(), draw()
    torch.manual_seed(1234)
    assert torch.equal(draw(), first)
    assert not torch.equal(first, second)
    torch.npu.manual_seed(99)
    assert not torch.equal(draw(), first)


def test_a_generator_of_ones_own_and_its_state():
    generator = torch.Generator("npu").manual_seed(5)
    first = torch.rand(9, device="npu", generator=generator)
    state = generator.get_state()
    second = torch.rand(9, device="npu", generator=generator)
    generator.set_state(state)
    assert torch.equal(torch.rand(9, device="npu", generator=generator), second)
    assert torch.equal(
        torch.rand(9, device="npu", generator=torch.Generator("npu").manual_seed(5)), first
    )


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_narrow_types(dtype):
    values = torch.rand(4096, dtype=dtype, device="npu").float().cpu()
    assert values.min() >= 0
    assert values.max() < 1
    assert torch.randn(4096, dtype=dtype, device="npu").float().std().item() == pytest.approx(
        1, abs=0.06
    )


def test_randperm_is_a_permutation():
    order = torch.randperm(500, device="npu").cpu()
    assert torch.equal(order.sort().values, torch.arange(500))
    assert not torch.equal(order, torch.arange(500))


def test_multinomial_without_replacement_draws_no_index_twice():
    rows = torch.multinomial(torch.ones(50, 8, device="npu"), 8).cpu()
    assert torch.equal(rows.sort(-1).values, torch.arange(8).expand(50, 8))


def test_a_strided_part_is_filled_and_the_rest_left():
    x = torch.zeros(100, 2, device="npu")
    x[:, 1].uniform_(1, 2)
    assert not x[:, 0].any()
    assert x[:, 1].min().item() >= 1


# In graphs, where seed and offset are read at each replay.
CAPTURED = ["rand", "randn", "multinomial", "random_", "randint"]


@pytest.mark.parametrize("name", CAPTURED)
def test_each_replay_draws_anew_and_a_seed_repeats_it(name):
    draw, mean, deviation, low, high = DRAWS[name]
    graph = torch.npu.NPUGraph()
    torch.npu.synchronize()
    with torch.npu.graph(graph):
        first, second = draw(), draw()

    def replayed():
        graph.replay()
        return [first.cpu(), second.cpu()]

    torch.npu.manual_seed(3)
    one, two = replayed(), replayed()
    for values in (*one, *two):
        assert abs(values.double().mean().item() - mean) < 5 * deviation * COUNT**-0.5
        assert low <= values.min().item() <= values.max().item() <= high
    assert not any(
        torch.equal(a, b)
        for a, b in ((one[0], one[1]), (one[0], two[0]), (one[1], two[0]), (one[1], two[1]))
    )
    torch.npu.manual_seed(3)
    assert all(map(torch.equal, one, replayed()))


def test_dropout_in_a_graph():
    x, graph = torch.ones(COUNT, device="npu"), torch.npu.NPUGraph()
    torch.npu.synchronize()
    with torch.npu.graph(graph):
        y = torch.nn.functional.dropout(x, 0.25)
    kept = []
    for _ in range(2):
        graph.replay()
        kept.append(y.cpu() != 0)
        assert abs(kept[-1].float().mean().item() - 0.75) < 0.02
    assert not torch.equal(*kept)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_dropout(dtype):
    x = torch.ones(COUNT, dtype=dtype).npu().requires_grad_()
    y = torch.nn.functional.dropout(x, 0.25)
    kept = y != 0
    assert abs(kept.float().mean().item() - 0.75) < 0.02
    assert torch.equal(y, (kept.float() / 0.75).to(dtype))
    y.backward(torch.full_like(y, 3))
    torch.testing.assert_close(x.grad, kept.to(dtype) * 4)
    assert torch.equal(torch.nn.functional.dropout(x, 0.25, training=False), x)
