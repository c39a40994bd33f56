"""Who is to know that an optimizer begins to update: a recorder, whose record of the step ends there."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

Closure = Callable[[], Any]
Onlooker = Callable[[Closure | None, float | None], None]

_onlookers: list[Onlooker] = []


def update_begins(closure: Closure | None = None, scale: Callable[[], float] | None = None) -> None:
    """Tell them, before anything is read or changed. What one raises ends the update.

    >>> with told(lambda closure, scale: print("an update begins", scale)):
    ...     update_begins(scale=lambda: 8.0)
    an update begins 8.0

    Args:
        closure: what the optimizer is to compute the gradients by, if anything.
        scale: gives the loss scale where a scaler makes the update, and the optimizer knows of none.
    """
    for onlooker in _onlookers:
        onlooker(closure, None if scale is None else scale())


@contextmanager
def told(onlooker: Onlooker) -> Iterator[None]:
    """Have a function told of every update while this is entered."""
    _onlookers.append(onlooker)
    try:
        yield
    finally:
        _onlookers.remove(onlooker)


def are_looking() -> bool:
    """Whether anybody is to know: then the step is only looked at.

    >>> are_looking()
    False
    """
    return bool(_onlookers)
