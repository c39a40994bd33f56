"""Float16 products on a CPU, and their gradients, have the error of one rounding; other formats stay as they are."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

sys.path.append(str(Path(__file__).parents[3] / "examples"))

from models.on_torch.products import SummedInFloat32

PRODUCTS: dict[str, tuple[Callable[..., Tensor], list[tuple[int, ...]]]] = {
    "conv1d": (lambda x, w: F.conv1d(x, w, padding=1), [(4, 16, 30), (8, 16, 3)]),
    "conv2d": (lambda x, w: F.conv2d(x, w, padding=1, stride=2), [(4, 16, 12, 12), (8, 16, 3, 3)]),
    "linear": (F.linear, [(64, 300), (8, 300), (8,)]),
    "matmul": (torch.matmul, [(4, 5, 300), (4, 300, 6)]),
}


def with_gradients(name: str, dtype: torch.dtype) -> list[Tensor]:
    """Return a product of fixed numbers that float16 has, and its gradients by every argument."""
    product, shapes = PRODUCTS[name]
    numbers = torch.Generator().manual_seed(0)
    given = [torch.randn(shape, generator=numbers).half().to(dtype).requires_grad_() for shape in shapes]
    found = product(*given)
    upstream = torch.randn(found.shape, generator=numbers).half().to(dtype)
    return [found.detach(), *torch.autograd.grad(found, given, upstream)]


@pytest.mark.parametrize("name", PRODUCTS)
def test_a_product_and_its_gradients_are_rounded_once(name: str) -> None:
    with SummedInFloat32():
        found = with_gradients(name, torch.float16)
    for one, exact in zip(found, with_gradients(name, torch.float64), strict=True):
        assert one.dtype == torch.float16
        torch.testing.assert_close(one.double(), exact, rtol=2**-11 * 1.01, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_other_formats_are_left_to_pytorch(dtype: torch.dtype) -> None:
    with SummedInFloat32():
        found = with_gradients("conv2d", dtype)
    assert all(map(torch.equal, found, with_gradients("conv2d", dtype)))
