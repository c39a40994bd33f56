"""Count the values that `polyamp.diagnosis.spread.Spread` consists of, on the device and inside compiled programs.

The step returns a sample of each tensor, and a second program counts all samples in one loop: XLA takes longer to
compile one histogram for each tensor than to run them.

For example, the tensor ``[0.5, 0.0]`` becomes one zero and one element with the exponent field of 0.5; the host makes a
`Spread` of these counts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from polyamp.diagnosis.spread import FIELDS, Spread, stride

_INFINITE = 0x7F800000  # float32's bits without the sign: those of finite numbers are smaller, those of NaN larger
_ZEROS, _NAN, _NOTHING, _COLUMNS = FIELDS, FIELDS + 1, FIELDS + 2, FIELDS + 3  # after the fields; inf is the last field
_LEAST = 64  # elements that are sampled in each iteration of a loop, however many iterations it has
_ROW, _BLOCK = 2**8, 2**18  # elements that are counted together: of one tensor, and at once


class Sample(NamedTuple):
    """The sample of one tensor: a pytree, so that loops and branches can return it, with an axis for iterations."""

    values: Any  # some of the elements, or all; [..., elements]
    present: Any = None  # whether they were computed; bool[...]; None if they certainly were
    # how often the tensor was computed, how many of all its elements are inf, how many NaN, and the bits of the largest
    # finite magnitude; i32[..., 4]; None if ``values`` are all elements
    totals: Any = None

    def complete(self) -> Sample:
        """Return the sample with the default values of all fields written out."""
        totals = _totals(self.values) if self.totals is None else self.totals
        return Sample(self.values, jnp.bool_(True) if self.present is None else self.present, totals)


def sample(array: Any, turns: int = 1) -> Sample:
    """Return a sample of a floating-point array."""
    flat = array.reshape(-1)
    step = min(stride(flat.size * turns), max(stride(flat.size), flat.size // _LEAST | 1))
    return Sample(flat[::step], totals=_totals(flat)) if step > 1 else Sample(flat)


def nothing(like: Sample) -> Sample:
    """Return the sample of a tensor that was not computed; ``like`` has the shapes."""
    return Sample(*(jnp.zeros(field.shape, field.dtype) for field in like))


def merged(one: Any, other: Any) -> Any:
    """Merge the totals of two samples of a tensor."""
    return jnp.concatenate([one[:3] + other[:3], jnp.maximum(one[3:], other[3:])])


def _totals(values: Any) -> Any:
    bits = _bits(values)
    finite = jnp.where(bits < _INFINITE, bits, 0)
    flags = [(bits == _INFINITE).astype(jnp.int32), (bits > _INFINITE).astype(jnp.int32)]
    zero = jnp.int32(0)
    found = lax.reduce((*flags, finite), (zero, zero, zero), _merge, (0,))  # in one pass
    return jnp.stack([jnp.int32(1), *found])


def _merge(one: Any, other: Any) -> tuple[Any, Any, Any]:
    return one[0] + other[0], one[1] + other[1], jnp.maximum(one[2], other[2])


def _bits(values: Any) -> Any:
    return lax.bitcast_convert_type(values.astype(jnp.float32), jnp.int32) & 0x7FFFFFFF


class Table(NamedTuple):
    """The counts that are copied to the host."""

    # for each tensor and column, the number of sampled elements in it, and the sum of their magnitudes; f32[tensors,
    # columns, 2]
    fields: Any
    totals: Any  # as in `Sample`; i32[tensors, 4]


@jax.jit
def counted(samples: Sequence[Sample]) -> Table:
    """Count all samples of a step."""
    if not samples:
        return Table(jnp.zeros((0, _COLUMNS, 2)), jnp.zeros((0, 4), jnp.int32))
    fields, tops = _summed(_in_rows(samples), len(samples))
    turns = jnp.array([math.prod(one.values.shape[:-1]) for one in samples], jnp.int32)
    totals = jnp.stack([turns, *fields[:, (FIELDS - 1, _NAN), 0].T.astype(jnp.int32), tops], 1)
    given = {index: _over_turns(one.totals) for index, one in enumerate(samples) if one.totals is not None}
    return Table(fields, totals.at[np.array([*given], int)].set(jnp.stack([*given.values()])) if given else totals)


def _over_turns(totals: Any) -> Any:
    each = totals.reshape(-1, 4)
    return jnp.concatenate([each[:, :3].sum(0), each[:, 3:].max(0)])


class _Rows(NamedTuple):
    """Values in rows; each row belongs to one tensor."""

    # row after row, each padded, and flat: XLA would compile reshaped values to one loop with a case for each tensor,
    # which takes ten times as long; f32[rows * _ROW]
    values: Any
    tensors: Any  # the tensor that a row belongs to; i32[rows]
    filled: Any  # number of elements in a row; i32[rows]


def _in_rows(samples: Sequence[Sample]) -> _Rows:
    shapes = [(1, one.values.size) if one.present is None else _by_turns(one) for one in samples]
    filled = [np.tile(_filled(size), turns) for turns, size in shapes]
    starts = np.cumsum([0, *map(len, filled)]).tolist()
    rows = -(-starts[-1] // _height(starts[-1])) * _height(starts[-1])
    values = jnp.zeros(rows * _ROW)
    counts = jnp.zeros(rows, jnp.int32).at[: starts[-1]].set(np.concatenate(filled))
    for one, (turns, size), own, start in zip(samples, shapes, filled, starts, strict=False):
        padding = ((0, 0), (0, -size % _ROW if turns > 1 else 0))
        part = jnp.pad(one.values.reshape(turns, size).astype(jnp.float32), padding).reshape(-1)
        values = lax.dynamic_update_slice(values, part, (start * _ROW,))
        if one.present is not None:
            present = jnp.repeat(one.present.reshape(-1), len(own) // turns)
            counts = lax.dynamic_update_slice(counts, jnp.where(present, own, 0), (start,))
    tensors = np.zeros(rows, np.int32)
    tensors[: starts[-1]] = np.repeat(np.arange(len(samples)), [len(own) for own in filled])
    return _Rows(values, jnp.asarray(tensors), counts)


def _by_turns(one: Sample) -> tuple[int, int]:
    size: int = one.values.shape[-1]
    return one.values.size // size, size


def _filled(size: int) -> Any:
    """Return the number of elements in each of the rows that hold ``size`` elements."""
    return np.minimum(_ROW, size - np.arange(0, size, _ROW)).astype(np.int32)


def _height(rows: int) -> int:
    return min(_BLOCK // _ROW, rows)


def _summed(rows: _Rows, tensors: int) -> tuple[Any, Any]:
    """Return fields and largest magnitudes, with one scatter of pairs for each block."""
    # Sorting, comparing with all columns, or multiplying one-hot rows takes at least ten times as long on a CPU.
    height = _height(rows.filled.size)

    def add(index: Any, found: tuple[Any, Any]) -> tuple[Any, Any]:
        bits = _bits(lax.dynamic_slice(rows.values, (index * height * _ROW,), (height * _ROW,))).reshape(height, _ROW)
        tensor, filled = (lax.dynamic_slice(part, (index * height,), (height,)) for part in rows[1:])
        there = jnp.arange(_ROW) < filled[:, None]
        special = jnp.where(bits == 0, _ZEROS, jnp.where(bits > _INFINITE, _NAN, bits >> 23))
        columns = jnp.where(there, special, _NOTHING) + tensor[:, None] * _COLUMNS
        magnitudes = lax.bitcast_convert_type(bits.reshape(-1), jnp.float32)
        pairs = jnp.stack([jnp.ones_like(magnitudes), magnitudes], 1)
        largest = jnp.where(there & (bits < _INFINITE), bits, 0).max(1)
        fields = found[0].at[columns.reshape(-1)].add(pairs, mode="promise_in_bounds")
        return fields, found[1].at[tensor].max(largest, mode="promise_in_bounds")

    empty = jnp.zeros((tensors * _COLUMNS, 2)), jnp.zeros(tensors, jnp.int32)
    fields, tops = lax.fori_loop(0, rows.filled.size // height, add, empty)
    return fields.reshape(tensors, _COLUMNS, 2), tops


def spreads(table: Table, shapes: Sequence[tuple[int, ...]]) -> list[Spread | None]:
    """Return a spread for each tensor of a table on the host; None for a tensor that was not computed."""
    largest = np.ascontiguousarray(table.totals[:, 3]).view(np.float32).tolist()
    rows = zip(table.fields, table.totals[:, :3].tolist(), largest, shapes, strict=True)
    return [
        _spread(fields, totals, top, math.prod(shape)) if totals[0] else None for fields, totals, top, shape in rows
    ]


def _spread(fields: Any, totals: Sequence[int], largest: float, elements: int) -> Spread:
    times, inf, nan = totals
    counts, mass = fields[:FIELDS, 0].tolist(), fields[:FIELDS, 1].tolist()
    zeros, seen = int(fields[_ZEROS, 0]), round(float(fields[:_NOTHING, 0].sum()))
    counts[0] += zeros
    return Spread.of_fields(elements * times, seen, zeros, inf, nan, largest, counts, mass)
