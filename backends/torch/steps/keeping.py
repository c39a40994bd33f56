"""Saves and restores the attributes of objects, so that a step that is only observed leaves no trace."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from copy import copy
from typing import Any


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
