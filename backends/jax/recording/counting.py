"""Sample tensors inside compiled programs, and count the samples on the host.

For example, the tensor ``[0.5, 0.0]`` is its own sample; the host finds one zero and one element with the exponent
field of 0.5, and makes a `Spread` of these counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax

from polyamp.diagnosis.spread import Spread, stride

_INFINITE = 0x7F800000  # float32's bits without the sign: those of finite numbers are smaller, those of NaN larger
_LEAST = 64  # elements that are sampled in each iteration of a loop, however many iterations it has


class Sample(NamedTuple):
    """The sample of tensors of one size: a pytree with axes for iterations, which loops and branches can return.

    XLA compiles kernels for every sample. Tensors that are sampled together share them.
    """

    values: Any  # some of the elements, or all; f32[..., tensors, elements]
    # how often each tensor was computed, how many of all its elements are inf, how many NaN, and the bits of the
    # largest finite magnitude; i32[..., tensors, 4]
    totals: Any

    def after(self, earlier: Sample) -> Sample:
        """Return the sample of the last iteration that computed the tensor, with the totals of all iterations."""
        values = jnp.where(self.totals[..., :1] > 0, self.values, earlier.values)
        counts = self.totals[..., :3] + earlier.totals[..., :3]
        totals = jnp.concatenate([counts, jnp.maximum(self.totals[..., 3:], earlier.totals[..., 3:])], -1)
        return Sample(values, totals)


def stride_of(size: int, turns: int) -> int:
    """Return the step between the sampled elements of a tensor that is computed ``turns`` times."""
    return min(stride(size * turns), max(stride(size), size // _LEAST | 1))


def sample(tensors: Sequence[Any], step: int) -> Sample:
    """Stack vectors of one length; return every ``step``-th element of each, and totals over all elements."""
    stacked = jnp.stack(tensors)
    return Sample(stacked[:, ::step], _totals(stacked))


def _totals(values: Any) -> Any:
    bits = lax.bitcast_convert_type(values, jnp.int32) & 0x7FFFFFFF
    finite = jnp.where(bits < _INFINITE, bits, 0)
    flags = [(bits == _INFINITE).astype(jnp.int32), (bits > _INFINITE).astype(jnp.int32)]
    zero = jnp.int32(0)
    found = lax.reduce((*flags, finite), (zero, zero, zero), _merge, (1,))  # in one pass
    return jnp.stack([jnp.ones_like(found[0]), *found], -1)


def _merge(one: Any, other: Any) -> tuple[Any, Any, Any]:
    return one[0] + other[0], one[1] + other[1], jnp.maximum(one[2], other[2])


def spread_of(found: Sample, member: int, elements: int) -> Spread | None:
    """Return the spread of one tensor of a sample, counted on the host; None if the program did not compute it."""
    turns = found.values[..., member, :].reshape(-1, found.values.shape[-1])
    totals = found.totals[..., member, :].reshape(-1, 4)
    (times, inf, nan), largest = totals[:, :3].sum(0).tolist(), totals[:, 3].max()
    if not times:
        return None
    computed = turns[totals[:, 0] > 0]
    return Spread.of_sample(elements * times, computed, inf, nan, float(np.int32(largest).view(np.float32)))
