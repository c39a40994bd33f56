"""Distinguish gradients that ``get_unscaled_gradients`` returned from scaled ones, so that none is divided twice.

The method's results may be clipped or summed before they are applied: then they are other tensors. So three things are
recorded of a call: its input tensors, its results, and its place: eager code, or a certain trace.

For example, ``apply`` gets ``ops.minimum(g, 0.5)`` in the trace in which ``get_unscaled_gradients`` returned ``g``. It
is not one of the recorded tensors, but the place is the same, so it counts as unscaled.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from polyamp.backends.keras.backend import traces_around
from polyamp.errors import UsageError

_KEPT = 16  # most calls to keep whose gradients were never applied


@dataclass(frozen=True, eq=False)  # tuples would compare tensors
class _Call:
    """One call: its trace, weak references to its inputs and results, and its finite flag."""

    trace: int
    inputs: list[weakref.ref[Any]]
    results: list[weakref.ref[Any]]
    finite: Any


class UnscaledGradients:
    """The calls whose gradients are not applied yet."""

    def __init__(self) -> None:
        self._calls: list[_Call] = []

    def remember(self, inputs: Sequence[Any], results: Sequence[Any], finite: Any) -> None:
        """Record a call with its arguments, its results, and whether the arguments were finite; scalar bool."""
        self._calls.append(_Call(traces_around(results)[0], _weak(inputs), _weak(results), finite))
        del self._calls[:-_KEPT]

    def claim(self, grads: Sequence[Any]) -> Any:
        """Return whether the originals of unscaled gradients were finite; None if ``grads`` are scaled gradients."""
        for call in reversed(self._calls):
            is_scaled, is_plain = _shares(call.inputs, grads), _shares(call.results, grads)
            if is_scaled and is_plain:
                raise _mixed()
            if is_scaled or is_plain:
                self._calls.remove(call)
                return call.finite if is_plain else None
        return self._claim_by_place(grads)

    def _claim_by_place(self, grads: Sequence[Any]) -> Any:
        """Claim tensors that belong to no call: assume an unclaimed call in the same place, if there is one."""
        if not self._calls:
            return None
        around = traces_around(grads)
        here = [call for call in self._calls if call.trace in around]
        if not here:
            self._calls.clear()
            raise _elsewhere()
        self._calls.remove(here[-1])  # perhaps another replica's: all decide together if all are finite
        return here[-1].finite


def _weak(grads: Sequence[Any]) -> list[weakref.ref[Any]]:
    return [weakref.ref(grad) for grad in grads if grad is not None]


def _shares(references: Sequence[weakref.ref[Any]], grads: Sequence[Any]) -> bool:
    known = {id(alive) for reference in references if (alive := reference()) is not None}
    return any(id(grad) in known for grad in grads)


def _mixed() -> UsageError:
    return UsageError(
        "some of the gradients are scaled, and some are not",
        where="apply(grads)",
        found="both arguments and results of get_unscaled_gradients",
        allowed="gradients of one kind",
        fix="pass all of its results, or only its arguments",
    )


def _elsewhere() -> UsageError:
    return UsageError(
        "get_unscaled_gradients was called elsewhere, and its gradients were not applied there",
        where="apply(grads)",
        found="gradients of another function, or of eager code and a compiled function",
        allowed="unscaling and applying in one function, and neither inside a loop",
        fix="make both calls in that function, or neither: apply unscales by itself. To look at gradients, use "
        "optimizer.scaler.unscale(grads). That call is forgotten now",
    )
