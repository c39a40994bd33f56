"""Count the magnitudes of tensors by their exponents, in the graph that computes them.

Everything is counted on the bits of float32, as integers, so devices that flush subnormal numbers to zero lose none.

For example, 3.0 is ``1.5 * 2**1``: its exponent field, 128, selects a bin, to which one element and the mantissa bits
of the fraction 0.5 are added. The host computes the counts and magnitudes of a `Spread` from these sums.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import tensorflow as tf

from polyamp.diagnosis.spread import FIELDS, SAMPLE, Spread, stride

_MAGNITUDE, _MANTISSA = 0x7FFFFFFF, 0x007FFFFF  # of float32's bits
_MANTISSA_BITS, _LOWEST_NORMAL = 23, -126

_BINS = FIELDS + 1  # zeros, then one bin for each exponent field; field 0 has the subnormal numbers
_SUMS = 2 * _BINS + 3  # elements and mantissas of each bin; then elements, inf and NaN of the whole tensor

TURNS = 64
"""A loop's body is sampled as if the loop had this many iterations; they share `polyamp.diagnosis.spread.SAMPLE`."""

_numbers = itertools.count(1)  # numbers of totals, for names that are unique in the process


class Totals:
    """The counts of tensors, a row for each, in variables that a graph finds by name."""

    # So a called function or a loop's body can add to them without taking them as arguments. A loop's body adds at
    # every iteration.

    def __init__(self, rows: int) -> None:
        self.rows = rows
        self._name = f"polyamp_totals_{next(_numbers)}"

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Keep the totals for the duration of the context; they start at 0."""
        handles = self._handles()
        for handle, shape in zip(handles, self._shapes, strict=True):
            tf.raw_ops.AssignVariableOp(resource=handle, value=tf.zeros(shape))
        try:
            yield
        finally:
            for handle in handles:
                tf.raw_ops.DestroyResourceOp(resource=handle)

    def add(self, rows: Sequence[int], tensors: Sequence[tf.Tensor], turns: int = 1) -> None:
        """Count tensors, each in its row; call it while a graph is built."""
        groups = _by_size([tf.reshape(tf.cast(tensor, tf.float32), [-1]) for tensor in tensors])
        counted = [_counted(list(group.values()), turns) for group in groups]
        sums, largest = (tf.concat(parts, 0) for parts in zip(*counted, strict=True))
        places = [rows[index] for group in groups for index in group]
        handles = self._handles()
        tf.raw_ops.ResourceScatterAdd(resource=handles[0], indices=places, updates=sums)
        tf.raw_ops.ResourceScatterMax(resource=handles[1], indices=places, updates=largest)

    def spreads(self) -> list[Spread]:
        """Return the spread of every row, with one transfer to the host."""
        sums, largest = (tf.raw_ops.ReadVariableOp(resource=one, dtype=tf.float32) for one in self._handles())
        return list(map(_spread, tf.concat([sums, largest[:, None]], 1).numpy()))

    @property
    def _shapes(self) -> tuple[list[int], list[int]]:
        return [self.rows, _SUMS], [self.rows]

    def _handles(self) -> list[tf.Tensor]:
        return [
            tf.raw_ops.VarHandleOp(dtype=tf.float32, shape=shape, shared_name=f"{self._name}_{index}", container="")
            for index, shape in enumerate(self._shapes)
        ]


def _spread(row: Any) -> Spread:
    counts, mantissas = row[:_BINS].astype(np.float64), row[_BINS : 2 * _BINS].astype(np.float64)
    elements, inf, nan, largest = row[2 * _BINS :]
    fields = np.maximum(np.arange(FIELDS), 1) + (_LOWEST_NORMAL - 1 - _MANTISSA_BITS)
    whole = counts[1:] * (np.arange(FIELDS) > 0)  # a normal number has 1 before its mantissa
    mass = np.ldexp(whole * 2.0**_MANTISSA_BITS + mantissas[1:], fields)
    in_fields = [counts[0] + counts[1], *counts[2:]]
    seen, zeros = round(counts.sum()), round(counts[0])
    return Spread.of_fields(round(elements), seen, zeros, round(inf), round(nan), float(largest), in_fields, mass)


def _by_size(tensors: Sequence[tf.Tensor]) -> list[dict[int, tf.Tensor]]:
    """Group tensors, with their indices: those of the same size together, and each of unknown size alone."""
    groups: dict[Any, dict[int, tf.Tensor]] = {}
    for index, tensor in enumerate(tensors):
        size = tensor.shape.num_elements()
        groups.setdefault(("unknown", index) if size is None else size, {})[index] = tensor
    return list(groups.values())


def _counted(tensors: Sequence[tf.Tensor], turns: int) -> tuple[tf.Tensor, tf.Tensor]:
    """Return, for tensors of one size, the sums ``[tensors, _SUMS]`` and largest finite magnitudes ``[tensors]``."""
    step = _stride(tensors[0], turns)
    sampled = tf.stack([tensor[::step] if step is not None else tensor for tensor in tensors])
    largest, inf, nan = _extremes(tensors, None if step is not None else sampled)
    elements = tf.fill([len(tensors)], tf.cast(tf.size(tensors[0]), tf.float32))
    return tf.concat([_histograms(sampled), tf.stack([elements, inf, nan], 1)], 1), largest


def _stride(tensor: tf.Tensor, turns: int) -> Any:
    """Return the step between counted elements; None if all are counted."""
    size = tensor.shape.num_elements()
    if size is not None:
        return stride(size * turns) if size * turns > SAMPLE else None
    many = -(-tf.size(tensor) * turns // SAMPLE)
    return tf.maximum(1, tf.bitwise.bitwise_or(many, 1))  # odd, as in `stride`


def _histograms(values: tf.Tensor) -> tf.Tensor:
    """Return the number of each row's elements in each bin, and the sum of their mantissas; ``[rows, 2 * _BINS]``."""
    bits = tf.bitwise.bitwise_and(tf.bitcast(values, tf.int32), _MAGNITUDE)
    bins = tf.bitwise.right_shift(bits, _MANTISSA_BITS) + tf.minimum(bits, 1)
    mantissas = tf.cast(tf.bitwise.bitwise_and(bits, _MANTISSA), tf.float32)
    counted = partial(tf.raw_ops.DenseBincount, input=bins, size=_BINS)
    counts = tf.cast(counted(weights=tf.constant([], tf.int32)), tf.float32)
    return tf.concat([counts, counted(weights=mantissas)], 1)


def _extremes(tensors: Sequence[tf.Tensor], stacked: tf.Tensor | None) -> tuple[tf.Tensor, ...]:
    """Return each tensor's largest finite magnitude, and its numbers of inf and NaN elements."""

    def reduced(reduce: Callable[..., tf.Tensor]) -> tf.Tensor:
        return tf.stack(list(map(reduce, tensors))) if stacked is None else reduce(stacked, 1)

    # If a sum is finite, so are all elements: the common case needs only three plain reductions.
    sums, high, low = map(reduced, (tf.reduce_sum, tf.reduce_max, tf.reduce_min))
    most = tf.maximum(tf.maximum(high, -low), 0.0)
    none = tf.zeros_like(most)
    found: tuple[tf.Tensor, ...] = tf.cond(
        tf.reduce_all(tf.math.is_finite(sums) & tf.math.is_finite(most)),
        lambda: (most, none, none),
        lambda: _looked_through(tf.stack(tensors) if stacked is None else stacked),
    )
    return found


def _looked_through(values: tf.Tensor) -> tuple[tf.Tensor, ...]:
    finite = tf.where(tf.math.is_finite(values), tf.abs(values), 0.0)
    inf, nan = (tf.reduce_sum(tf.cast(test(values), tf.float32), 1) for test in (tf.math.is_inf, tf.math.is_nan))
    return tf.maximum(tf.reduce_max(finite, 1), 0.0), inf, nan
