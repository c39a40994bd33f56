"""Run float16 products on a CPU as Tensor Cores do: summed up in float32, and rounded once.

PyTorch's float16 convolutions for CPUs without float16 instructions take 10 to 50 times as long as float32's, and their
gradients of weights have 4 to 6 times the error of one rounding. XLA's CPU backend does what this mode does.

>>> x, weight = torch.randn(8, 512, dtype=torch.float16), torch.randn(512, 4, dtype=torch.float16)
>>> with SummedInFloat32():
...     found = x @ weight
>>> found.dtype, torch.equal(found, (x.float() @ weight.float()).half())
(torch.float16, True)
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

import polyamp

ATEN = torch.ops.aten
PRODUCTS = {
    ATEN.convolution.default,
    ATEN.convolution_backward.default,
    *(getattr(ATEN, name).default for name in ("mm", "addmm", "bmm", "baddbmm")),
}


class SummedInFloat32(TorchDispatchMode):
    """While it is entered, products of float16 tensors on a CPU, and their gradients, are computed in float32."""

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if func not in PRODUCTS or not any(map(_is_float16_on_cpu, args)):
            return func(*args, **kwargs or {})
        found = func(*map(_float32, args), **kwargs or {})
        return tuple(map(_float16, found)) if isinstance(found, tuple) else _float16(found)


def summed_in_float32(policy: polyamp.Policy) -> AbstractContextManager[Any]:
    """Return the mode for a policy that computes in float16, and nothing for any other: a mode costs time."""
    return SummedInFloat32() if policy.compute_dtype == "float16" else nullcontext()


def _is_float16_on_cpu(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype == torch.float16 and value.device.type == "cpu"


def _float32(value: Any) -> Any:
    return value.float() if _is_float16_on_cpu(value) else value


def _float16(found: torch.Tensor | None) -> torch.Tensor | None:
    """Return a result in float16; a gradient that was not asked for is None."""
    return found if found is None else found.half()
