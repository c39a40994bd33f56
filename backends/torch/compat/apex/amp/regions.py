"""The region of O1: operations run in the formats of autocast, from `initialize` until `_deactivate`.

Apex replaced PyTorch's functions for the whole process, which covered losses outside of the model's forward pass. A
region of polyamp belongs to a thread. `Regions` enters it in the thread that calls `initialize`, and in each thread
that calls a model of `initialize`, and leaves it when the handle is deactivated.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from polyamp.backends.torch.autocast.context import autocast_context
from polyamp.backends.torch.autocast.weights import forget_casts
from polyamp.policies import policy

_FLOAT16 = policy("mixed_float16")
_FLOAT32 = policy("float32")


class _Here(threading.local):
    """The region that this thread has entered."""

    entered: tuple[Regions, AbstractContextManager[None]] | None = None


_HERE = _Here()


class Regions:
    """A region that holds in this thread, and in others that ask for it, until it is closed.

    >>> regions, x = Regions(), torch.ones(2, 2)
    >>> regions.enter_here()
    >>> (x @ x).dtype, regions.close(), (x @ x).dtype
    (torch.float16, None, torch.float32)
    """

    def __init__(self) -> None:
        self.is_open = True

    def enter_here(self) -> None:
        """Enter the region in this thread, unless it is entered."""
        if not self.is_open or (_HERE.entered is not None and _HERE.entered[0] is self):
            return
        _leave_here()
        entered = autocast_context(_FLOAT16)
        entered.__enter__()
        torch.set_autocast_cache_enabled(False)  # a cast without gradients would be used later with them
        _HERE.entered = (self, entered)

    def close(self) -> None:
        """Leave the region in this thread, and in other threads when they ask for another."""
        self.is_open = False
        if _HERE.entered is not None and _HERE.entered[0] is self:
            _leave_here()

    def watch(self, model: torch.nn.Module) -> None:
        """Let the model's calls be in the region, with casts of weights that are kept during a call."""
        model.register_forward_pre_hook(self._call_begins)
        model.register_forward_hook(_call_ends, always_call=True)

    def _call_begins(self, model: torch.nn.Module, args: Any) -> None:
        if not self.is_open:
            return
        self.enter_here()
        forget_casts()
        torch.set_autocast_cache_enabled(True)


def _call_ends(model: torch.nn.Module, args: Any, outputs: Any) -> None:
    if _HERE.entered is not None:
        torch.set_autocast_cache_enabled(False)


def _leave_here() -> None:
    if _HERE.entered is not None:
        _HERE.entered[1].__exit__(None, None, None)
        _HERE.entered = None


def is_here() -> bool:
    """Return whether this thread is in an open region, and no inner one turns it off."""
    return _HERE.entered is not None and _HERE.entered[0].is_open and torch.is_autocast_enabled("cpu")


@contextmanager
def turned_off() -> Iterator[None]:
    """Run operations as they are written, for an optimizer's step and for functions that chose their format."""
    if _HERE.entered is None:
        yield
        return
    with autocast_context(_FLOAT32):
        yield
