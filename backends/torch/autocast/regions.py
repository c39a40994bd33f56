"""Which region of ours an operation runs in: in this thread, while code is compiled, and when it is run once more.

Three things have to know it. Overridden operations ask `current` at call time, which answers from a thread-local stack.
Compiled code is guarded by native autocast's own state, so a region leaves a mark there: as the autocast dtype of
device types that this machine does not have. And a checkpointed function runs again in a backward pass that may be
outside of the region and in another thread: there the number of the autograd node says when it was recorded.
"""

from __future__ import annotations

import hashlib
import threading
from bisect import bisect_right
from collections import deque
from itertools import islice
from typing import Any, NamedTuple, Protocol

import torch

from polyamp.backends.torch import unstable
from polyamp.errors import InvalidValueError
from polyamp.rules import Rule


def _accelerator() -> str | None:
    device = torch.accelerator.current_accelerator(check_available=True)
    return device.type if device is not None and torch.amp.is_autocast_available(device.type) else None


ACCELERATOR = _accelerator()  # the device type beside the CPU that has autocast here: cuda, xpu, mps, ...
DEVICE_TYPES = ("cpu",) if ACCELERATOR is None else ("cpu", ACCELERATOR)


Marks = tuple[torch.dtype, torch.dtype]


class Region(NamedTuple):
    """What an operation has to know of the policy: equal for policies that autocast alike.

    Attributes:
        dtype: the 16-bit type of ``lower`` operations.
        rules: the policy's own rules; beyond them native autocast's lists hold.
        of: in a module whose path some of them match, and where they are about every operation: the policy's rules.
    """

    dtype: torch.dtype
    rules: tuple[Rule, ...] = ()
    of: tuple[Rule, ...] = ()

    @property
    def policy(self) -> Region:
        """The region of the whole policy."""
        return Region(self.dtype, self.of) if self.of else self


class Frame:
    """One entered region of a thread, and what was before it."""

    __slots__ = ("before", "casts", "checkpointed", "depth", "grad", "marked", "marks", "outer", "region", "state")

    def __init__(self, region: Region | None, outer: Frame | None) -> None:
        self.region = region
        self.outer = outer
        self.depth = _nesting()
        self.grad = torch.is_grad_enabled()
        self.checkpointed = unstable.checkpointing() is not None
        self.casts: dict[Any, Any] = {} if outer is None else outer.casts
        self.marks = mark_of(region)
        self.before = marks_here()
        self.marked = [torch.is_autocast_enabled(device) for device in MARKED]
        self.state = 0


class _Thread(threading.local):
    frame: Frame | None = None
    history: _History | None = None


_here = _Thread()


@unstable.never_compiled
def enter(region: Region | None) -> Frame:
    """Make a region this thread's innermost one, after native autocast was entered for it; see `leave`."""
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
    """The region that an operation on a device type runs in; None in native autocast's own regions."""
    frame = _here.frame
    marks = marks_here() if frame is not None or _traced else _UNMARKED
    if frame is not None and frame.marks == marks and frame.depth == _nesting():
        return frame.region
    region = marked(marks) if marks in _traced else None  # else the user's torch.autocast lies between
    if region is None:
        number = unstable.running_sequence_number()
        region = None if number is None else _recorded(number)
    return region if region is not None and region.dtype == torch.get_autocast_dtype(device_type) else None


def lost_gradients() -> bool:
    """Whether gradients are off since the region was entered, as in functions under reentrant checkpointing."""
    frame = _here.frame
    return frame is not None and frame.grad and not torch.is_grad_enabled()


def casts_here() -> dict[Any, Any] | None:
    """What is kept until this thread's outermost region ends; None outside of regions."""
    return None if _here.frame is None else _here.frame.casts


class Mirror(Protocol):
    """Kernels that know this thread's innermost region without Python."""

    def state(self) -> int:
        """What native autocast's own state in this thread is, as a number."""

    def become(self, region: int, state: int) -> None:
        """Have the region with a number be this thread's, as long as native autocast has that state.

        Args:
            region: `NO_REGION` in regions that turn autocast off, `OUTSIDE` where none is entered.
            state: what `state` gave inside.
        """


NO_REGION, OUTSIDE = -1, -3

_mirror: Mirror | None = None


def mirror_in(kernels: Mirror) -> None:
    """Tell kernels of every region that is entered or left from now on."""
    global _mirror
    _mirror = kernels


def _nesting() -> int:
    torch.autocast_increment_nesting()
    return torch.autocast_decrement_nesting()


# Marks. Dynamo compares the autocast dtypes of enabled device types before it runs compiled code, and AOTAutograd's
# cache has them in its keys. A policy could be guarded nowhere else: Python state is compared only where it is read.


_ELSEWHERE = [device for device in ("ipu", "maia", "hpu") if device != ACCELERATOR]
MARKED = _ELSEWHERE[0], _ELSEWHERE[1]
_UNMARKED = (torch.get_autocast_dtype(MARKED[0]), torch.get_autocast_dtype(MARKED[1]))
_DTYPES = sorted({one for one in vars(torch).values() if isinstance(one, torch.dtype)} - set(_UNMARKED), key=str)

LIMIT = len(_DTYPES) ** 2 // 2  # of different regions in a process

_regions: dict[Region, int] = {}
_of_mark: dict[Marks, Region] = {}
_traced: set[Marks] = set()
_lock = threading.Lock()


def mark_of(region: Region | None, *, traced: bool = False) -> Marks:
    """A region's mark; another one for regions that are entered inside compiled code, which has no Python state.

    Raises:
        InvalidValueError: there are more different regions in this process than marks.
    """
    if region is None:
        return _UNMARKED
    with _lock:
        number = _regions.setdefault(region, len(_regions))
        new = number == len(_regions) - 1
    if new:
        tag_caches(repr(region))
    page, line = divmod(2 * number + traced, len(_DTYPES))
    if page >= len(_DTYPES):
        raise _too_many()
    mark = _DTYPES[line], _DTYPES[page]
    _of_mark[mark] = region
    if traced:
        _traced.add(mark)
    return mark


def marks_here() -> Marks:
    """The marks that this thread's native autocast has now."""
    return torch.get_autocast_dtype(MARKED[0]), torch.get_autocast_dtype(MARKED[1])


def set_marks(marks: Marks) -> None:
    """Give this thread's native autocast other marks."""
    for device, dtype in zip(MARKED, marks, strict=True):
        torch.set_autocast_dtype(device, dtype)


def numbered(number: int) -> Region:
    """The region with a number, as a `Mirror` has it."""
    return next(islice(_regions, number, None))


def marked(mark: Marks) -> Region | None:
    """The region with a mark."""
    return _of_mark.get(mark)


_registered: list[str] = []
_tag = ""


def tag_caches(registration: str) -> None:
    """Have compiled code that is cached on disk belong to what is registered: AOTAutograd knows nothing of it."""
    global _tag
    if registration in _registered:
        return
    _registered.append(registration)
    users = torch.compiler.config.cache_key_tag.removesuffix(_tag)
    _tag = f"|polyamp {hashlib.sha256(repr(_registered).encode()).hexdigest()[:16]}"
    torch.compiler.config.cache_key_tag = users + _tag


def _too_many() -> InvalidValueError:
    return InvalidValueError(
        "too many policies with different rules in one process",
        where="autocast(policy)",
        found=f"more than {LIMIT}",
        allowed="that many",
        fix="make policies once and use them again",
    )


# History. Checkpointing restores native autocast's state before it runs a function again, and nothing of ours.

_LONGEST = 1 << 16


class _History:
    """In which frames a thread's autograd nodes were recorded: from which sequence number on which frame held."""

    def __init__(self) -> None:
        self.numbers: list[int] = []
        self.frames: list[Frame | None] = []

    def add(self, number: int, frame: Frame | None) -> None:
        if self.numbers and self.numbers[-1] == number:
            self.frames[-1] = frame
            return
        if len(self.numbers) == _LONGEST:
            del self.numbers[: _LONGEST // 2], self.frames[: _LONGEST // 2]
        self.numbers.append(number)
        self.frames.append(frame)

    def frame_at(self, number: int) -> Frame | None:
        index = bisect_right(self.numbers, number) - 1
        return self.frames[index] if index >= 0 else None


_histories: deque[_History] = deque(maxlen=64)  # of threads that may be gone when the backward pass comes


def _become(frame: Frame | None) -> None:
    _here.frame = frame
    if _mirror is not None:
        _mirror.become(*_in_mirror(frame))
    if unstable.running_sequence_number() is not None:
        return  # what is recorded while a function is run again is not run a third time
    if _here.history is None:
        _here.history = _History()
        _histories.append(_here.history)
    _here.history.add(unstable.next_sequence_number(), frame)


def _in_mirror(frame: Frame | None) -> tuple[int, int]:
    if frame is None:
        return OUTSIDE, 0
    return NO_REGION if frame.region is None else _regions[frame.region], frame.state


def _recorded(number: int) -> Region | None:
    """The region in which the node with this number was recorded, or the checkpointed function that it is part of.

    A node has its number from the thread that recorded it, and does not say which that was: this thread's history
    comes first, since the CPU's backward pass runs where it was called.
    """
    own = _here.history
    histories = [own] if own is not None else reversed(_histories)
    frames = (history.frame_at(number) for history in histories)
    frame = next((frame for frame in frames if frame is not None), None)
    while frame is not None and frame.checkpointed:  # entered by the function, which enters it again
        frame = frame.outer
    return None if frame is None else frame.region
