"""Conversion between float32 and 16 bits on the bits: the rounding remainder is kept, or rounded stochastically."""

from __future__ import annotations

import torch
from torch import Tensor

_DROPPED = {torch.bfloat16: 16, torch.float16: 13}  # bits of a float32 significand that the format drops
_TIE = 0x8000  # half a unit in the last place of bfloat16, in units of float32
_SMALLEST_NORMAL = 2.0**-14  # of float16 (IEEE 754 binary16)


def split(values: Tensor) -> tuple[Tensor, Tensor]:
    """Split float32 into bfloat16 and the 16 bits that rounding leaves over."""
    # The bits of a value are ``(bits of its rounding << 16) + remainder``. Rounding is to nearest, ties away from zero,
    # so that the remainder of a tie is always -32768 and fits. (Rounding ties to even, as torch does, would make it
    # +32768 for every second tie.) `join` restores every value bit for bit, except that a NaN may become another NaN.
    rounded = values.bfloat16()
    left_over = values.view(torch.int32) - rounded.float().view(torch.int32)
    rounded.view(torch.int16).bitwise_or_(left_over == _TIE)  # a tie that went to even has a last bit of 0
    return rounded, left_over.to(torch.int16)  # converts _TIE to -_TIE


def join(rounded: Tensor, remainder: Tensor) -> Tensor:
    """Return the float32 values that `split` split; for any other remainder, a value that rounds to ``rounded``."""
    return add_remainder_(rounded.float(), remainder)


def add_remainder_(values: Tensor, remainder: Tensor) -> Tensor:
    """Do `join` in place, on rounded ``values`` that are already in float32."""
    values.view(torch.int32).add_(remainder)
    return values


def round_stochastically(
    values: Tensor, dtype: torch.dtype, generator: torch.Generator | None = None, noise: Tensor | None = None
) -> Tensor:
    """Round float32 to 16 bits stochastically: up or down at random, so that the expectation is the value itself."""
    # An update far below half a unit in the last place is then applied sometimes, while rounding to nearest would never
    # apply it (Gupta et al., "Deep Learning with Limited Numerical Precision", ICML 2015). Values that 16 bits
    # represent stay unchanged for all random numbers, and so do inf, NaN and the sign of zero.
    if noise is None:
        size = 1 << _DROPPED[dtype]
        noise = torch.randint(size, values.shape, dtype=torch.int32, device=values.device, generator=generator)
    if dtype == torch.float16:
        lift = _lift(values)
        rounded = (_cut_by_chance(values + lift, _DROPPED[dtype], noise) - lift).copysign_(values)
    else:
        rounded = _cut_by_chance(values, _DROPPED[dtype], noise)
    return torch.where(values.isfinite(), rounded, values).to(dtype)


def _cut_by_chance(values: Tensor, bits: int, noise: Tensor) -> Tensor:
    """Drop the last bits stochastically: noise added to them carries over as often as they are large."""
    noise = noise.int() & ~(-1 << bits)
    return noise.add_(values.view(torch.int32)).bitwise_and_(-1 << bits).view(torch.float32)


def _lift(values: Tensor) -> Tensor:
    """Return an offset for values that are subnormal in float16, which makes them normal with the same spacing."""
    # With the offset a fixed number of bits is dropped.
    lift = torch.full_like(values, _SMALLEST_NORMAL).copysign_(values)
    return torch.where(values.abs() < _SMALLEST_NORMAL, lift, 0.0)
