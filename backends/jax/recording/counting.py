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
_ZEROS = FIELDS  # the column after the fields
_LEAST = 64  # elements that are looked at in each turn of a loop, however often it turns


class Tally(NamedTuple):
    """What is counted of one tensor: a pytree, so that loops and branches can hand it out.

    Attributes:
        fields: for each value of the exponent field, then of zeros, how many elements that were looked at have it, and
            the sum of their magnitudes; f32[FIELDS + 1, 2].
        times: how often the tensor was computed; i32[], as are the others.
        inf, nan: how many of all elements are so.
        largest: bits of the largest finite magnitude.
    """

    fields: Any
    times: Any
    inf: Any
    nan: Any
    largest: Any

    def over_turns(self) -> Tally:
        """Of a loop: each field has the turns as its first axis."""
        fields, times, inf, nan = (field.sum(0) for field in self[:-1])
        return Tally(fields, times, inf, nan, self.largest.max(0))

    def joined(self, other: Tally) -> Tally:
        """With what another turn of a loop counted."""
        fields, times, inf, nan = map(jnp.add, self[:-1], other[:-1])
        return Tally(fields, times, inf, nan, jnp.maximum(self.largest, other.largest))


NOT_COUNTED = Tally(None, None, None, None, None)


def tally(array: Any, turns: int = 1) -> Tally:
    """What there is to count in a floating array.

    >>> found = tally(jnp.array([1.0, -jnp.inf, 0.0]))
    >>> int(found.inf), float(lax.bitcast_convert_type(found.largest, jnp.float32)), found.fields[127].tolist()
    (1, 1.0, [1.0, 1.0])

    Args:
        array: of any floating dtype and shape.
        turns: how often the loops around it turn; so many times fewer elements are looked at in each.
    """
    step = min(stride(array.size * turns), max(stride(array.size), array.size // _LEAST | 1))
    found: Tally = _tally(array, step)
    return found


@functools.partial(jax.jit, static_argnums=1)  # so that tensors of one shape are traced once
def _tally(array: Any, step: int) -> Tally:
    bits = lax.bitcast_convert_type(array.astype(jnp.float32), jnp.int32).reshape(-1) & 0x7FFFFFFF
    finite = jnp.where(bits < _INFINITE, bits, 0)
    flags = [(bits == _INFINITE).astype(jnp.int32), (bits > _INFINITE).astype(jnp.int32)]
    zero = jnp.int32(0)
    largest, inf, nan = lax.reduce((finite, *flags), (zero, zero, zero), _merge, (0,))  # one pass, not three
    return Tally(_fields(bits[::step]), jnp.int32(1), inf, nan, largest)


def _merge(one: Any, other: Any) -> tuple[Any, Any, Any]:
    return jnp.maximum(one[0], other[0]), one[1] + other[1], one[2] + other[2]


def _fields(bits: Any) -> Any:
    """By one scatter of pairs: on a CPU comparisons and sorts take ten times as long, products of one-hot rows too."""
    magnitudes = lax.bitcast_convert_type(bits, jnp.float32)
    columns = jnp.where(bits == 0, _ZEROS, bits >> 23)
    pairs = jnp.stack([jnp.ones_like(magnitudes), magnitudes], 1)
    return jnp.zeros((FIELDS + 1, 2), jnp.float32).at[columns].add(pairs, mode="promise_in_bounds")


def nothing(like: Tally) -> Tally:
    """Of a tensor that was not computed; ``like`` has the shapes.

    >>> int(nothing(tally(jnp.ones(2))).times)
    0
    """
    zeros: Tally = jax.tree.map(lambda field: jnp.zeros(field.shape, field.dtype), like)
    return zeros


class Table(NamedTuple):
    """What is copied to the host: the tallies of all tensors; f32[tensors, FIELDS + 1, 2] and i32[tensors, 4]."""

    fields: Any
    totals: Any


def joined(tallies: Sequence[Tally]) -> Table:
    """All tallies of a step.

    >>> joined([tally(jnp.ones(3))]).totals.shape
    (1, 4)
    """
    totals = [jnp.stack(one[1:]) for one in tallies]
    none = Table(jnp.zeros((0, FIELDS + 1, 2)), jnp.zeros((0, 4), jnp.int32))
    return Table(jnp.stack([one.fields for one in tallies]), jnp.stack(totals)) if tallies else none


def spreads(table: Table, shapes: Sequence[tuple[int, ...]]) -> list[Spread | None]:
    """Of a table on the host, a spread for each tensor; None for one that was not computed.

    >>> spreads(jax.device_get(joined([tally(jnp.array([0.5, 0.0]))])), [(2,)])[0].largest
    0.5
    """
    largest = np.ascontiguousarray(table.totals[:, 3]).view(np.float32).tolist()
    rows = zip(table.fields, table.totals[:, :3].tolist(), largest, shapes, strict=True)
    return [
        _spread(fields, totals, top, math.prod(shape)) if totals[0] else None for fields, totals, top, shape in rows
    ]


def _spread(fields: Any, totals: Sequence[int], largest: float, elements: int) -> Spread:
    times, inf, nan = totals
    counts, mass = fields[:FIELDS, 0].tolist(), fields[:FIELDS, 1].tolist()
    zeros = int(fields[_ZEROS, 0])
    counts[0] += zeros
    return Spread.of_fields(elements * times, round(sum(counts)), zeros, inf, nan, largest, counts, mass)
