"""The part of a step that serves its recording: a call where the update begins, and a copy of the state to restore.

A recording runs a step up to its optimizer's update, then undoes it:

    restore = keep(optimizer.holders())
    with told(end):  # `end` raises, so that the update does not happen
        step()
    restore()
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from copy import copy
from typing import Any

Closure = Callable[[], Any]
Listener = Callable[[Closure | None, float | None], None]

_listeners: list[Listener] = []


def update_begins(closure: Closure | None = None, scale: Callable[[], float] | None = None) -> None:
    """Call the listeners, before an optimizer reads or changes anything. If one raises, the update ends."""
    for listener in _listeners:
        listener(closure, None if scale is None else scale())


@contextmanager
def told(listener: Listener) -> Iterator[None]:
    """Call a function at every update while this context is active."""
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.remove(listener)


def is_recorded() -> bool:
    """Return whether there are listeners: then the step is only observed."""
    return bool(_listeners)


def keep(objects: Iterable[Any]) -> Callable[[], None]:
    """Save the attributes of objects, with copies of dicts, lists and sets, and return a function that restores them.

    >>> class Holder:
    ...     losses = [1]
    >>> holder = Holder()
    >>> holder.losses = [1]
    >>> restore = keep([holder])
    >>> holder.losses.append(2)
    >>> restore(), holder.losses
    (None, [1])
    """
    kept = [(one, {name: _copied(value) for name, value in vars(one).items()}) for one in objects]

    def restore() -> None:
        for one, attributes in kept:
            vars(one).clear()
            vars(one).update(attributes)

    return restore


def _copied(value: Any) -> Any:
    return copy(value) if isinstance(value, dict | list | set) else value
