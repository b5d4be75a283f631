"""Linear algebra and distances."""

import pytest
import torch

CASES = {
    "inverse": torch.inverse,
    "slogdet": lambda a: tuple(torch.slogdet(a)),
    "cholesky": lambda a: torch.linalg.cholesky(a @ a.mT),
    "cholesky, upper": lambda a: torch.linalg.cholesky(a @ a.mT, upper=True),
    "cross": lambda a: torch.linalg.cross(a[:3, :3], a[1:4, :3]),
    "qr": lambda a: _product(torch.linalg.qr(a[:, :3])),
    "complete qr": lambda a: _product(torch.linalg.qr(a[:, :3], "complete")),
    "r of qr": lambda a: torch.linalg.qr(a, "r")[1].abs(),
    "svd": lambda a: _assembled(*torch.linalg.svd(a[:, :3], full_matrices=False)),
    "svdvals": torch.linalg.svdvals,
    "triangular solve": lambda a: torch.linalg.solve_triangular(a.tril(), a[:, :2].contiguous(), upper=False),
    "pdist": torch.pdist,
    "pdist of order 1": lambda a: torch.pdist(a, 1.0),
    "addr": lambda a: a.clone().addr_(a[0], a[1], beta=0.5, alpha=2),
    "renorm": lambda a: torch.renorm(a, 2, 1, 2.5),
    "renorm in place": lambda a: a.clone().renorm_(1, 0, 3),
    "histc": lambda a: torch.histc(a, 5, -1, 3),
    "logspace": lambda a: torch.logspace(-1, 2, 7, base=3.0, device=a.device),
    "complex": lambda a: torch.view_as_real(torch.complex(a, a.mT.contiguous())),
    "polar": lambda a: torch.view_as_real(torch.polar(a.abs(), a)),
}


def _product(factors):
    return factors[0] @ factors[1]


def _assembled(u, s, v):
    return (u * s) @ v, s


def test_renorm_of_order_zero():
    """By the number of elements that are not 0, which ATen does not take for an order on the CPU."""
    a = torch.tensor([[3.0, 0, 0, 0], [1, 2, 0, 4], [0, 0, 0, 0]])
    expected = a * torch.tensor([[1], [2 / 3], [1]])
    torch.testing.assert_close(torch.renorm(a.npu(), 0, 0, 2.0).cpu(), expected)
    torch.testing.assert_close(a.npu().renorm_(0, 0, 2.0).cpu(), expected)


@pytest.mark.parametrize("name", CASES)
def test_case(agree, name):
    # Its condition number is small, so that an inverse is accurate.
    a = torch.randn(5, 5) / 4 + torch.diag(torch.arange(1.0, 6.0))
    agree(CASES[name], a, ulps=512)
