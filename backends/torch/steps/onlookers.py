"""Callbacks for the start of an optimizer's update, where the recording of a step ends."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

Closure = Callable[[], Any]
Onlooker = Callable[[Closure | None, float | None], None]

_onlookers: list[Onlooker] = []


def update_begins(closure: Closure | None = None, scale: Callable[[], float] | None = None) -> None:
    """Call the callbacks, before anything is read or changed. If one raises, the update ends.

    >>> with told(lambda closure, scale: print("an update begins", scale)):
    ...     update_begins(scale=lambda: 8.0)
    an update begins 8.0

    Args:
        closure: the function that computes the gradients, if the optimizer uses one.
        scale: returns the loss scale if a scaler makes the update and the optimizer does not know the scale.
    """
    for onlooker in _onlookers:
        onlooker(closure, None if scale is None else scale())


@contextmanager
def told(onlooker: Onlooker) -> Iterator[None]:
    """Call a function at every update while this context is active."""
    _onlookers.append(onlooker)
    try:
        yield
    finally:
        _onlookers.remove(onlooker)


def are_looking() -> bool:
    """Return whether there are callbacks: then the step is only observed.

    >>> are_looking()
    False
    """
    return bool(_onlookers)
