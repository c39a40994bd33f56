"""Counts, on the device and within a compiled program, what `polyamp.diagnosis.spread.Spread` is made of."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from polyamp.diagnosis.spread import FIELDS, Spread, stride

_INFINITE = 0x7F800000  # float32's bits without the sign: finite ones are smaller, those of NaN are larger
_ABSENT = -1
_ZEROS, _NOTHING, _WIDTH = FIELDS, FIELDS + 1, FIELDS + 2  # columns of a table: after the fields, zeros and absent ones
_LEAST = 64  # elements that are looked at in each turn of a loop, however often it turns
_ROW, _BLOCK = 2**8, 2**18  # elements that are counted together: of one tensor, and at once


class Sample(NamedTuple):
    """What is kept of one tensor until all are counted: a pytree, so that loops and branches can hand it out.

    Attributes:
        bits: of some of the elements, as float32 without the sign; i32[...], -1 where there is no element.
        times: how often the tensor was computed; i32[], as are the others.
        inf, nan: how many of all elements are so.
        largest: bits of the largest finite magnitude.
    """

    bits: Any
    times: Any
    inf: Any
    nan: Any
    largest: Any

    def over_turns(self) -> Sample:
        """Of a loop: each field has the turns as its first axis."""
        return Sample(self.bits, self.times.sum(), self.inf.sum(), self.nan.sum(), self.largest.max())

    def joined(self, other: Sample, bits: Any) -> Sample:
        """With another turn's numbers."""
        largest = jnp.maximum(self.largest, other.largest)
        return Sample(bits, self.times + other.times, self.inf + other.inf, self.nan + other.nan, largest)


def sample(array: Any, turns: int = 1) -> Sample:
    """A sample of a floating array.

    >>> found = sample(jnp.array([1.0, -jnp.inf, 0.0]))
    >>> found.bits.shape, int(found.inf), float(lax.bitcast_convert_type(found.largest, jnp.float32))
    ((3,), 1, 1.0)

    Args:
        array: of any floating dtype and shape.
        turns: how often the loops around it turn; so many times fewer elements are kept of each.
    """
    step = min(stride(array.size * turns), max(stride(array.size), array.size // _LEAST | 1))
    found: Sample = _sample(array, step)
    return found


@functools.partial(jax.jit, static_argnums=1)  # so that tensors of one shape are traced once
def _sample(array: Any, step: int) -> Sample:
    bits = lax.bitcast_convert_type(array.astype(jnp.float32), jnp.int32).reshape(-1) & 0x7FFFFFFF
    finite = jnp.where(bits < _INFINITE, bits, 0)
    flags = [(bits == _INFINITE).astype(jnp.int32), (bits > _INFINITE).astype(jnp.int32)]
    zero = jnp.int32(0)
    largest, inf, nan = lax.reduce((finite, *flags), (zero, zero, zero), _merge, (0,))  # in one pass
    return Sample(bits[::step], jnp.int32(1), inf, nan, largest)


def _merge(one: Any, other: Any) -> tuple[Any, Any, Any]:
    return jnp.maximum(one[0], other[0]), one[1] + other[1], one[2] + other[2]


def nothing(like: Sample) -> Sample:
    """The sample of a tensor that was not computed.

    >>> int(nothing(sample(jnp.ones(2))).times)
    0
    """
    zero = jnp.zeros_like(like.times)
    return Sample(jnp.full_like(like.bits, _ABSENT), zero, zero, zero, zero)


class Table(NamedTuple):
    """What is copied to the host of all tensors of a step.

    Attributes:
        fields: for each tensor and exponent field (then zeros, then nothing) how many elements have it, and the sum of
            their magnitudes; f32[tensors, FIELDS + 2, 2].
        totals: times, inf, nan and the largest magnitude's bits; i32[tensors, 4].
    """

    fields: Any
    totals: Any


def counted(samples: Sequence[Sample]) -> Table:
    """All samples counted by one loop: XLA would need longer to compile a scatter for each than to run them.

    >>> counted([sample(jnp.ones(3))]).totals.shape
    (1, 4)
    """
    if not samples:
        return Table(jnp.zeros((0, _WIDTH, 2)), jnp.zeros((0, 4), jnp.int32))
    totals = jnp.stack([jnp.stack([one.times, one.inf, one.nan, one.largest]) for one in samples])
    blocks = _blocks([one.bits.reshape(-1) for one in samples])
    empty = jnp.zeros((len(samples) * _WIDTH, 2))
    return Table(lax.scan(_add, empty, blocks)[0].reshape(len(samples), _WIDTH, 2), totals)


def _blocks(bits: Sequence[Any]) -> tuple[Any, Any]:
    """Bits in rows of one tensor each, rows in blocks of one size; and where each row's columns start in a table."""
    rows = [_filled(part, -part.size % _ROW).reshape(-1, _ROW) for part in bits]
    starts = np.repeat(np.arange(len(rows), dtype=np.int32) * _WIDTH, [part.shape[0] for part in rows])
    height = min(_BLOCK // _ROW, len(starts))
    missing = -len(starts) % height
    joined = jnp.concatenate(lax.optimization_barrier(rows))  # fused, it would be one loop with hundreds of cases
    joined = _filled(lax.optimization_barrier(joined), missing)
    return joined.reshape(-1, height, _ROW), jnp.asarray(np.pad(starts, (0, missing)).reshape(-1, height))


def _filled(bits: Any, missing: int) -> Any:
    padding = ((0, missing), *((0, 0) for _ in bits.shape[1:]))
    return jnp.pad(bits, padding, constant_values=_ABSENT)


def _add(fields: Any, block: tuple[Any, Any]) -> tuple[Any, None]:
    bits, starts = block
    columns = jnp.where(bits == 0, _ZEROS, jnp.where(bits == _ABSENT, _NOTHING, bits >> 23))
    mass = lax.bitcast_convert_type(bits.reshape(-1), jnp.float32)
    numbers = jnp.stack([jnp.ones_like(mass), mass], 1)
    return fields.at[(columns + starts[:, None]).reshape(-1)].add(numbers, mode="promise_in_bounds"), None


def spreads(table: Table, shapes: Sequence[tuple[int, ...]]) -> list[Spread | None]:
    """Of a table on the host, a spread for each tensor; None for one that was not computed.

    >>> spreads(jax.device_get(counted([sample(jnp.array([0.5, 0.0]))])), [(2,)])[0].largest
    0.5
    """
    largest = np.ascontiguousarray(table.totals[:, 3]).view(np.float32).tolist()
    rows = zip(table.fields, table.totals[:, :3].tolist(), largest, shapes, strict=True)
    return [_spread(fields, *totals, top, math.prod(shape)) if totals[0] else None for fields, totals, top, shape in rows]


def _spread(fields: Any, times: int, inf: int, nan: int, largest: float, elements: int) -> Spread:
    counts, mass = fields[:FIELDS, 0].tolist(), fields[:FIELDS, 1].tolist()
    zeros = int(fields[_ZEROS, 0])
    counts[0] += zeros
    return Spread.of_fields(elements * times, round(sum(counts)), zeros, inf, nan, largest, counts, mass)
