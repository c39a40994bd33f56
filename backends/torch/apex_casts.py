"""The formats of Apex' O1: a region that holds until it is turned off.

Apex replaced PyTorch's functions for the whole process, which covers losses outside of the model's forward pass. A
region of polyamp belongs to a thread. An `AmpHandle` enters it in the thread that makes it, and in each thread that
calls a model of `amp.initialize`, and leaves it when it is deactivated.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import nn

from polyamp.backends.torch.autocast.casts import forget_casts
from polyamp.backends.torch.autocast.context import autocast_context
from polyamp.policies import policy

_FLOAT16, _FLOAT32 = policy("mixed_float16"), policy("float32")


class _Here(threading.local):
    """The region that this thread has entered, and the handle that it belongs to."""

    entered: tuple[AmpHandle, AbstractContextManager[None]] | None = None


_HERE = _Here()


class AmpHandle:
    """What turns O1 on, in this thread and in others that ask for it, until ``_deactivate()``."""

    def __init__(self) -> None:
        self.is_open = True

    def enter(self) -> None:
        """Enter the region in this thread."""
        if not self.is_open or (_HERE.entered is not None and _HERE.entered[0] is self):
            return
        _leave_here()
        entered = autocast_context(_FLOAT16)
        entered.__enter__()
        torch.set_autocast_cache_enabled(False)  # a cast without gradients would be used later with them
        _HERE.entered = (self, entered)

    def watch(self, model: nn.Module) -> None:
        """Let the model's calls be in the region, with casts of weights that are kept during a call."""
        model.register_forward_pre_hook(self._call_begins)
        model.register_forward_hook(_call_ends, always_call=True)

    def _call_begins(self, model: nn.Module, args: Any) -> None:
        if self.is_open:
            self.enter()
            forget_casts()
            torch.set_autocast_cache_enabled(True)

    def _deactivate(self) -> None:
        # Other threads leave the region when they ask for another.
        self.is_open = False
        if _HERE.entered is not None and _HERE.entered[0] is self:
            _leave_here()


def _call_ends(model: nn.Module, args: Any, outputs: Any) -> None:
    if _HERE.entered is not None:
        torch.set_autocast_cache_enabled(False)


def _leave_here() -> None:
    if _HERE.entered is not None:
        _HERE.entered[1].__exit__(None, None, None)
        _HERE.entered = None
        torch.set_autocast_cache_enabled(True)


@contextmanager
def casts_off() -> Iterator[None]:
    """Run operations as they are written, for an optimizer's step."""
    if _HERE.entered is None:
        yield
        return
    with autocast_context(_FLOAT32):
        yield
