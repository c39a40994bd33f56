"""The region that this thread is in.

Each entered region is a `Frame` on the thread's stack. `current` answers for an overridden operation, in this order:

1. The innermost frame, if native autocast's state is still as `enter` left it.
2. If it is not, the region of the marks in that state: compiled code entered it, without any Python.
3. In a backward pass, the region in which the running node was recorded: checkpointing runs a function again.
4. None: the user's own `torch.autocast` region is innermost, or no region was entered.

For example::

    with autocast(policy):                        # one frame, with the policy's region
        torch.softmax(x, 0)                       # current() is that region (1)
        with torch.autocast("cpu", enabled=False):
            torch.softmax(x, 0)                   # None (4): nested one deeper than the frame
        loss = checkpoint(block, x)
    loss.backward()                               # block runs again: the region by the node's number (3)

The compiled kernels know the innermost frame without asking Python: a `Mirror` is told of every change.
"""

from __future__ import annotations

import threading
from collections import deque
from typing import Any, Protocol

import torch

from polyamp.backends.torch import unstable
from polyamp.backends.torch.autocast.history import History
from polyamp.backends.torch.autocast.regions import (
    MARKED,
    UNMARKED,
    Region,
    mark_of,
    marks_here,
    may_be_traced,
    number_of,
    set_marks,
    traced_region,
)


class Frame:
    """One entered region of a thread, with what `leave` restores."""

    __slots__ = ("before", "casts", "checkpointed", "depth", "grad", "marked", "marks", "outer", "region", "state")

    def __init__(self, region: Region | None, outer: Frame | None) -> None:
        self.region = region
        self.outer = outer
        self.depth = nesting()
        self.grad = torch.is_grad_enabled()
        self.checkpointed = unstable.checkpointing() is not None
        self.casts: dict[Any, Any] = {} if outer is None else outer.casts
        self.marks = mark_of(region)
        self.before = marks_here()
        self.marked = [torch.is_autocast_enabled(device) for device in MARKED]
        self.state = 0


class _Thread(threading.local):
    frame: Frame | None = None
    history: History | None = None


_here = _Thread()


@unstable.never_compiled
def enter(region: Region | None) -> Frame:
    """Make a region this thread's innermost one. Native autocast was entered for it before; `leave` undoes this."""
    frame = Frame(region, _here.frame)
    set_marks(frame.marks)
    for device in MARKED:
        torch.set_autocast_enabled(device, region is not None)
    frame.state = 0 if _mirror is None else _mirror.state()
    _become(frame)
    return frame


@unstable.never_compiled
def leave(frame: Frame) -> None:
    """Undo `enter`."""
    if frame.outer is None:
        frame.casts.clear()  # the history keeps frames for longer
    set_marks(frame.before)
    for device, enabled in zip(MARKED, frame.marked, strict=True):
        torch.set_autocast_enabled(device, enabled)
    _become(frame.outer)


def current(device_type: str = "cpu") -> Region | None:
    """Return the region that an operation on a device type runs in; None in native autocast's own regions."""
    frame = _here.frame
    marks = marks_here() if frame is not None or may_be_traced() else UNMARKED
    if frame is not None and frame.marks == marks and frame.depth == nesting():
        return frame.region
    region = traced_region(marks)
    if region is None:
        number = unstable.running_sequence_number()
        region = None if number is None else _recorded(number)
    return region if region is not None and region.dtype == torch.get_autocast_dtype(device_type) else None


def lost_gradients() -> bool:
    """Return whether gradients were turned off inside the region, as reentrant checkpointing does for its functions."""
    frame = _here.frame
    return frame is not None and frame.grad and not torch.is_grad_enabled()


def casts_here() -> dict[Any, Any] | None:
    """Return the casts that are kept until this thread's outermost region ends; None outside of regions."""
    return None if _here.frame is None else _here.frame.casts


def nesting() -> int:
    """Return how many native autocast regions this thread is in; enabled or not."""
    torch.autocast_increment_nesting()
    return torch.autocast_decrement_nesting()


def _become(frame: Frame | None) -> None:
    """Make a frame the innermost one, and notify the mirror and the history."""
    _here.frame = frame
    if _mirror is not None:
        _mirror.become(*_in_mirror(frame))
    if unstable.running_sequence_number() is not None:
        return  # code that runs again in a backward pass does not run a third time
    if _here.history is None:
        _here.history = History()
        _histories.append(_here.history)
    _here.history.add(unstable.next_sequence_number(), frame)


_histories: deque[History] = deque(maxlen=64)  # also of threads that may have ended before the backward pass


def _recorded(number: int) -> Region | None:
    """Return the region in which a node was recorded, or in which its checkpointed function was called."""
    # A node's number does not tell which thread recorded it. This thread's history comes first, since the CPU's
    # backward pass runs in the thread that called it.
    own = _here.history
    histories = [own] if own is not None else reversed(_histories)
    frames: Any = (history.frame_at(number) for history in histories)
    frame: Frame | None = next((frame for frame in frames if frame is not None), None)
    while frame is not None and frame.checkpointed:  # the function entered it, and enters it again
        frame = frame.outer
    return None if frame is None else frame.region


# The mirror.

NO_REGION, OUTSIDE = -1, -3


class Mirror(Protocol):
    """Kernels that know this thread's innermost region without Python."""

    def state(self) -> int:
        """Return native autocast's state in this thread, as a number."""

    def become(self, region: int, state: int) -> None:
        """Set the region of this thread, which holds as long as native autocast has that state."""


_mirror: Mirror | None = None


def mirror_in(kernels: Mirror) -> None:
    """Notify kernels of every region that is entered or left from now on."""
    global _mirror
    _mirror = kernels


def _in_mirror(frame: Frame | None) -> tuple[int, int]:
    if frame is None:
        return OUTSIDE, 0
    return NO_REGION if frame.region is None else number_of(frame.region), frame.state
