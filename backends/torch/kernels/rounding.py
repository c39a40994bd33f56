"""Between float32 and 16 bits, by the bits: what rounding leaves over is kept, or decides by chance."""

from __future__ import annotations

import torch
from torch import Tensor

_DROPPED = {torch.bfloat16: 16, torch.float16: 13}  # bits of a float32 significand that the format has no room for
_TIE = 0x8000  # half a unit in the last place of bfloat16, in those of float32
_SMALLEST_NORMAL = 2.0**-14  # of float16 (IEEE 754 binary16)


def split(values: Tensor) -> tuple[Tensor, Tensor]:
    """Float32 as bfloat16 and the 16 bits that rounding leaves over.

    The bits of a value are ``(bits of its rounding << 16) + remainder``. Rounding is to nearest, and at a tie away from
    zero, so that the remainder of a tie is always -32768 and fits. (To even, as torch rounds, it would be +32768 for
    every other one.) Every value comes back from `join` bit for bit; of a NaN, that it is one.

    >>> rounded, remainder = split(torch.tensor([1.0, 1.0 + 2**-8, 1.0 + 2**-7 + 2**-23]))
    >>> rounded.tolist(), remainder.tolist()
    ([1.0, 1.0078125, 1.0078125], [0, -32768, 1])

    Args:
        values: float32 of any shape.

    Returns:
        The rounded values, bfloat16, and the remainders, int16; both of the shape of ``values``.
    """
    rounded = values.bfloat16()
    left_over = values.view(torch.int32) - rounded.float().view(torch.int32)
    rounded.view(torch.int16).bitwise_or_(left_over == _TIE)  # the bits of a tie that went to even end in 0
    return rounded, left_over.to(torch.int16)  # which takes _TIE to -_TIE


def join(rounded: Tensor, remainder: Tensor) -> Tensor:
    """The float32 values that `split` took apart, and for any other remainder a value that rounds to ``rounded``.

    >>> join(*split(torch.tensor([0.1, -3e-45]))).tolist() == torch.tensor([0.1, -3e-45]).tolist()
    True
    """
    return add_remainder_(rounded.float(), remainder)


def add_remainder_(values: Tensor, remainder: Tensor) -> Tensor:
    """`join` in place: ``values`` are rounded ones, already in float32."""
    values.view(torch.int32).add_(remainder)
    return values


def round_stochastically(
    values: Tensor, dtype: torch.dtype, generator: torch.Generator | None = None, noise: Tensor | None = None
) -> Tensor:
    """Float32 in 16 bits: up or down by chance, so that the expectation is the value itself.

    An update far below half a unit in the last place is then made now and then, where rounding to nearest would never
    make it (Gupta et al., "Deep Learning with Limited Numerical Precision", ICML 2015). Values that 16 bits hold stay
    as they are, whatever the chance, and so do inf, NaN and the sign of zero.

    >>> halfway = torch.full((10_000,), 1 + 2**-8)
    >>> rounded = round_stochastically(halfway, torch.bfloat16, torch.Generator().manual_seed(0))
    >>> rounded.unique().tolist(), round(rounded.double().mean().item(), 3)
    ([1.0, 1.0078125], 1.004)

    Args:
        values: float32 of any shape.
        dtype: bfloat16 or float16. For float16 the expectation is met to 2**-13 units in the last place.
        generator: of the device of ``values``; None is torch's own.
        noise: the chance itself, instead of a generator: integers of the shape of ``values``, of whose last 16 bits
            (13 for float16) each is set or not with equal chance.

    Returns:
        The rounded values, of the shape of ``values``.
    """
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
    """Without so many last bits. Noise that was added to them carries over as often as they are large."""
    noise = noise.int() & ~(-1 << bits)
    return noise.add_(values.view(torch.int32)).bitwise_and_(-1 << bits).view(torch.float32)


def _lift(values: Tensor) -> Tensor:
    """What brings values that float16 holds as subnormals to where its numbers have the same spacing, but are normal:
    there a fixed number of bits is dropped."""
    lift = torch.full_like(values, _SMALLEST_NORMAL).copysign_(values)
    return torch.where(values.abs() < _SMALLEST_NORMAL, lift, 0.0)
