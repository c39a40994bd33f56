"""Distinguish gradients that ``compute_gradients`` unscaled from scaled ones, so that none is divided twice.

The method's results may be clipped, or summed over towers, before they are applied: then they are other tensors. So
three things are recorded of a call: its input tensors, its results, and its place: eager code, or a certain graph.

For example, ``apply_gradients`` gets ``tf.minimum(g, 0.5)`` in the graph in which ``compute_gradients`` returned ``g``:
it is not one of the recorded tensors, but the place is the same, so it counts as unscaled.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import tensorflow as tf

from polyamp.backends.tensorflow.unstable import graphs_around
from polyamp.errors import UsageError

_KEPT = 16  # most calls to keep whose gradients were never applied


@dataclass(eq=False)  # tuples would compare tensors
class _Call:
    """One call: its place, weak references to its inputs and results, its finite flag, and whether it was used."""

    place: Any
    inputs: list[weakref.ref[Any]]
    results: list[weakref.ref[Any]]
    finite: Any
    is_applied: bool = field(default=False)


class UnscaledGradients:
    """The calls of ``compute_gradients``: in a graph all of them, in eager code those that are not applied yet."""

    def __init__(self) -> None:
        self._calls: list[_Call] = []

    def remember(self, inputs: Sequence[Any], results: Sequence[Any], finite: Any) -> None:
        """Record a call with its arguments, its results, and whether the arguments were finite; scalar bool."""
        place = None if tf.executing_eagerly() else weakref.ref(tf.compat.v1.get_default_graph())
        self._calls = [call for call in self._calls if call.place is None or call.place() is not None]
        self._calls.append(_Call(place, _weak(inputs), _weak(results), finite))
        waiting = [call for call in self._calls if not call.is_applied]
        for old in waiting[:-_KEPT]:
            self._calls.remove(old)

    def claim(self, grads: Sequence[Any]) -> Any:
        """Return whether the scaled gradients that these come from were finite; None if these are scaled themselves."""
        if any(_shares(call.inputs, grads) for call in self._calls):
            return None
        own = [call for call in self._calls if _shares(call.results, grads)] or self._here()
        if not own:
            self._check_elsewhere()
            return None
        for call in own:
            call.is_applied = True
        self._calls = [call for call in self._calls if not (call.is_applied and call.place is None)]
        return tf.reduce_all(tf.stack([call.finite for call in own]))

    def _here(self) -> list[_Call]:
        if tf.executing_eagerly():
            return [call for call in self._calls if call.place is None]
        around = list(map(id, graphs_around()))
        return [call for call in self._calls if call.place is not None and id(call.place()) in around]

    def _check_elsewhere(self) -> None:
        waiting = [call for call in self._calls if not call.is_applied]
        if waiting:
            self._calls = [call for call in self._calls if call.is_applied]
            raise UsageError(
                "compute_gradients was called elsewhere, and its gradients were not applied there",
                where="apply_gradients(grads_and_vars)",
                found="gradients of another function, or of eager code next to a compiled function",
                allowed="computing and applying in one function",
                fix="make both calls in one function; to only look at gradients, call opt.scaler.unscale(grads). "
                "polyamp now ignores the first call",
            )


def _weak(grads: Sequence[Any]) -> list[weakref.ref[Any]]:
    return [weakref.ref(grad) for grad in grads if grad is not None]


def _shares(references: Sequence[weakref.ref[Any]], grads: Sequence[Any]) -> bool:
    known = {id(alive) for reference in references if (alive := reference()) is not None}
    return any(id(grad) in known for grad in grads)
