"""Keeps what objects hold, so that a step which is only looked at leaves no trace in them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from copy import copy
from typing import Any


def keep(objects: Iterable[Any]) -> Callable[[], None]:
    """Note what objects hold, dicts, lists and sets by their elements, and give what brings it back.

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
