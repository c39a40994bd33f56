"""Code of a run that is left as it is written, because a framework scales its loss itself."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar


class AsWritten:
    """A mark of code whose loss is scaled already, so that its gradients are left alone.

    >>> steps = AsWritten()
    >>> with steps.as_written():
    ...     print(steps.is_inside)
    True
    >>> steps.is_inside
    False
    """

    def __init__(self) -> None:
        self._is_inside = ContextVar("is_inside", default=False)

    @property
    def is_inside(self) -> bool:
        """Whether the calling code is inside `as_written`, in this thread or async task."""
        return self._is_inside.get()

    @contextmanager
    def as_written(self) -> Iterator[None]:
        """Leave gradients that are taken and applied in this block alone: their loss was scaled."""
        token = self._is_inside.set(True)
        try:
            yield
        finally:
            self._is_inside.reset(token)
