"""The autocast regions of a process, their numbers and marks, and the region that each thread is in.

A `Region` is the part of a policy that operations need; equal policies share one. Each entered region is a `Frame` on
its thread's stack. `current` answers for an overridden operation, in this order:

1. The innermost frame, if native autocast's state is still as `enter` left it.
2. Else the region whose marks, two dtypes, are in that state: compiled code entered it, without any Python.
3. In a backward pass, the region of the checkpoint that runs its function again, else that of the running node.
4. None: the user's own `torch.autocast` region is innermost, or no region was entered.

For example::

    with autocast(policy):                        # one frame, with the policy's region
        torch.softmax(x, 0)                       # current() is that region (1)
        with torch.autocast("cpu", enabled=False):
            torch.softmax(x, 0)                   # None (4): nested one deeper than the frame
        loss = checkpoint(block, x)
    loss.backward()                               # block runs again: the region that was kept with it (3)

The compiled kernels know the innermost frame without asking Python: they are told of every change.
"""

from __future__ import annotations

import hashlib
import threading
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from polyamp.backends.torch import unstable
from polyamp.errors import InvalidValueError
from polyamp.rules import Rule

if TYPE_CHECKING:
    from polyamp.backends.torch.autocast.boxed import Kernels
    from polyamp.policies import Policy


def _accelerator() -> str | None:
    device = torch.accelerator.current_accelerator(check_available=True)
    return device.type if device is not None and torch.amp.is_autocast_available(device.type) else None


ACCELERATOR = _accelerator()  # the device type other than the CPU that has autocast here: cuda, xpu, mps, ...
DEVICE_TYPES = ("cpu",) if ACCELERATOR is None else ("cpu", ACCELERATOR)


class Region(NamedTuple):
    """The part of a policy that affects autocast. Two policies with equal regions autocast in the same way."""

    dtype: torch.dtype  # the 16-bit type of ``lower`` operations
    # the policy's own rules. For all other operations native autocast's lists hold. Inside a module that a path rule
    # matches, they are the rules that hold there: ``*`` in the place of ``decoder``
    rules: tuple[Rule, ...] = ()
    rules_outside: tuple[Rule, ...] = ()  # inside such a module, the rules of the whole policy; else empty

    @property
    def whole(self) -> Region:
        """The policy's region outside of modules that path rules match."""
        return Region(self.dtype, self.rules_outside) if self.rules_outside else self


_numbers: dict[Region, int] = {}
_lock = threading.Lock()


def find_region(number: int) -> Region:
    """Return the region with a number."""
    return next(islice(_numbers, number, None))


def number_of(region: Region) -> int:
    """Return the number of a region, the next one for a new region."""
    with _lock:
        number = _numbers.setdefault(region, len(_numbers))
    if number >= LIMIT:
        raise InvalidValueError(
            "too many policies with different rules in one process",
            where="autocast(policy)",
            found=f"more than {LIMIT}",
            allowed=f"at most {LIMIT}",
            fix="create each policy once and reuse it",
        )
    return number


# --- marks ------------------------------------------------------------------------------------------------------------
#
# Compiled code needs a mark of its region. Dynamo guards what it compiles by native autocast's state, such as the dtype
# for each device type; it does not look at Python's variables. The dtypes of this machine's device types are formats,
# so the number of the region is written into those of two others (`MARKED`), once a program begins to compile code.
# With dtypes in alphabetical order, `_DTYPES[6]` is the first part of region 3's mark, and code that was compiled in
# region 2 is compiled again in region 3. `_DTYPES[7]` marks region 3 where compiled code itself enters it, since that
# code has no Python state when it runs. The second part is another one only for a number that needs two digits.

Marks = tuple[torch.dtype, torch.dtype]

_ELSEWHERE = [device for device in ("ipu", "maia", "hpu") if device != ACCELERATOR]
MARKED = _ELSEWHERE[0], _ELSEWHERE[1]
UNMARKED = (torch.get_autocast_dtype(MARKED[0]), torch.get_autocast_dtype(MARKED[1]))
_DTYPES = sorted({one for one in vars(torch).values() if isinstance(one, torch.dtype)} - set(UNMARKED), key=str)

LIMIT = len(_DTYPES) ** 2 // 2  # the number of different regions that a process can have

_by_mark: dict[Marks, Region] = {}
_traced: set[Marks] = set()
_marking = False  # whether this program compiles code


@cache
def mark_of(region: Region | None, *, traced: bool = False) -> Marks:
    """Return a region's mark; ``traced`` chooses a second one, for entries inside compiled code."""
    if region is None:
        return UNMARKED
    page, line = divmod(2 * number_of(region) + traced, len(_DTYPES))
    mark = _DTYPES[line], _DTYPES[page] if page else UNMARKED[1]
    _by_mark[mark] = region
    tag_caches(repr(region))
    if traced:
        _traced.add(mark)
    return mark


def marks_here() -> Marks:
    """Return the marks in this thread's native autocast."""
    return torch.get_autocast_dtype(MARKED[0]), torch.get_autocast_dtype(MARKED[1])


@contextmanager
def with_marks(marks: Marks) -> Iterator[None]:
    """Set the marks in a graph that Dynamo captures."""
    (first, second), (one, other) = MARKED, marks
    # enabled, these would refuse the dtypes
    with torch.autocast(first, dtype=one, enabled=False), torch.autocast(second, dtype=other, enabled=False):
        yield


def set_marks(marks: Marks, before: Marks | None = None) -> None:
    """Set the marks in this thread's native autocast."""
    on = marks not in _traced  # Dynamo only looks at the dtypes of what is on
    for device, dtype, unmarked, there in zip(MARKED, marks, UNMARKED, before or (None, None), strict=True):
        if dtype is not there:
            torch.set_autocast_dtype(device, dtype)
            torch.set_autocast_enabled(device, on and dtype is not unmarked)


_registered: list[str] = []
_tag = ""


def tag_caches(registration: str) -> None:
    """Add a registration, which AOTAutograd leaves out, to the keys of compiled code cached on disk."""
    global _tag
    if registration in _registered:
        return
    _registered.append(registration)
    users = torch.compiler.config.cache_key_tag.removesuffix(_tag)
    _tag = f"|polyamp {hashlib.sha256(repr(_registered).encode()).hexdigest()[:16]}"
    torch.compiler.config.cache_key_tag = users + _tag
    unstable.cache_no_code_without_autocast()


# --- the region of an autograd node -----------------------------------------------------------------------------------


class History:
    """The regions in which a thread recorded autograd's nodes.

    Autograd functions can run forward code in the backward pass, and restore only native autocast's state for it. A
    thread numbers its nodes as it records them, and the running node's number is known; so a thread notes from which
    number on it was in which region:

    >>> history = History()
    >>> history.add(10, Region(torch.float16))
    >>> history.add(20, None)
    >>> history.region_at(5), history.region_at(15).dtype, history.region_at(25)
    (None, torch.float16, None)
    """

    LONGEST = 1 << 12

    def __init__(self) -> None:
        self.numbers = [-1]
        self.regions: list[Region | None] = [None]

    def add(self, number: int, region: Region | None) -> None:
        """Note that nodes are recorded in a region from this number on; None is outside of regions."""
        numbers, regions = self.numbers, self.regions
        if numbers[-1] == number:
            regions[-1] = region
            return
        if len(numbers) == 1:
            _histories.append(self)
        if len(numbers) == self.LONGEST:
            del numbers[: self.LONGEST // 2], regions[: self.LONGEST // 2]
        numbers.append(number)
        regions.append(region)

    def region_at(self, number: int) -> Region | None:
        """Return the region in which the node with a number was recorded; None outside of regions, or if not known."""
        return self.regions[max(0, bisect_right(self.numbers, number) - 1)]


_histories: deque[History] = deque(maxlen=64)  # also of threads that may have ended before the backward pass


# --- the region that a thread is in -----------------------------------------------------------------------------------


@dataclass(slots=True, init=False, eq=False)
class Frame:
    """One entered region of a thread, with what `leave` restores."""

    region: Region | None
    outer: Frame | None
    casts: dict[Any, Any]  # of weights, until the outermost region ends
    native: list[tuple[str, bool, torch.dtype]]  # native autocast before, for each device type that was entered
    keeps_casts: bool  # whether native autocast kept casts of weights before
    depth: int  # number of native regions around code in this one
    marks: Marks
    before: Marks
    grad: bool
    again: bool  # in a backward pass: a checkpointed function runs a second time, and that is the last
    state: int  # of native autocast in the compiled kernels
    undo: Callable[[], None] | None


class Thread:
    """The regions that a thread is in, and those in which it recorded autograd's nodes."""

    __slots__ = ("frame", "history", "policy")  # an attribute of a `threading.local` takes thrice as long

    def __init__(self) -> None:
        self.frame: Frame | None = None
        self.history = History()
        # of the last outermost region that was entered with gradients on, since an optimizer was wrapped
        self.policy: Policy | None = None


class _Local(threading.local):
    def __init__(self) -> None:
        self.thread = Thread()


HERE = _Local()
_kernels: Kernels | None = None


def tell(kernels: Kernels) -> None:
    """Tell the compiled kernels from now on when a region is entered or left."""
    global _kernels
    _kernels = kernels


_CACHE_MIXES = torch.__version__ < "2.11"  # autocast's cache holds what a reentrant checkpoint cast without gradients


@unstable.never_compiled
def enter(region: Region | None, device_types: Iterable[str] = ()) -> Frame:
    """Make a region this thread's innermost one, and enter native autocast on device types; `leave` undoes both."""
    here = HERE.thread
    outer = here.frame
    frame = here.frame = Frame()
    frame.region, frame.outer, frame.grad = region, outer, torch.is_grad_enabled()
    frame.casts = {} if outer is None else outer.casts
    # what `torch.autocast` does, in half of the time
    frame.native, depth, frame.keeps_casts = [], 0, torch.is_autocast_cache_enabled()
    for device in device_types:
        frame.native.append((device, torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)))
        torch.set_autocast_enabled(device, region is not None)
        torch.set_autocast_dtype(device, torch.bfloat16 if region is None else region.dtype)
        depth = torch.autocast_increment_nesting()
    if _CACHE_MIXES:
        torch.set_autocast_cache_enabled(False)
    frame.depth = depth or nesting()
    frame.marks = frame.before = UNMARKED
    frame.undo = None
    if _marking:
        _mark(frame)
    frame.state = 0
    if _kernels is not None:
        frame.state = _kernels.state()
        _kernels.become(_NO_REGION if region is None else _numbers[region], frame.state)
    frame.again = _running() != -1
    if not frame.again:
        here.history.add(_next_number(), region)
    return frame


@unstable.never_compiled
def leave(frame: Frame) -> None:
    """Undo `enter`."""
    here, outer = HERE.thread, frame.outer
    if here.frame is not frame and _hand_on(frame, here.frame):
        return
    if frame.marks is not frame.before:
        set_marks(frame.before, frame.marks)
    for device, enabled, dtype in frame.native:
        if torch.autocast_decrement_nesting() == 0:
            torch.clear_autocast_cache()
        torch.set_autocast_enabled(device, enabled)
        torch.set_autocast_dtype(device, dtype)
    torch.set_autocast_cache_enabled(frame.keeps_casts)
    here.frame = outer
    if _kernels is not None:
        if outer is None:
            _kernels.become(_OUTSIDE, 0)
        else:
            _kernels.become(_NO_REGION if outer.region is None else _numbers[outer.region], outer.state)
    if not frame.again:
        here.history.add(_next_number(), None if outer is None else outer.region)
    if frame.undo is not None:
        frame.undo()


def _hand_on(frame: Frame, inner: Frame | None) -> bool:
    """Let the frame inside this one restore what this one would, if this one ends first; return whether it does."""
    inside = []
    while inner is not None and inner is not frame:
        inside.append(inner)
        inner = inner.outer
    if inner is None or len(inside[-1].native) != len(frame.native):
        return False  # it was entered in another thread, or around a module
    for _ in frame.native:
        torch.autocast_decrement_nesting()
    for one in inside:
        one.depth -= len(frame.native)
    after = inside[-1]
    after.outer, after.native, after.keeps_casts = frame.outer, frame.native, frame.keeps_casts
    after.before, after.undo = frame.before, frame.undo
    return True


_running, _next_number = unstable.running_task, unstable.next_sequence_number
_NO_REGION, _OUTSIDE, _MARKS = -1, -3, 0xFFFF  # as in csrc/autocast.cpp


def _mark(frame: Frame) -> None:
    """Mark the region of this frame for compiled code."""
    frame.marks, frame.before = mark_of(frame.region), marks_here()
    set_marks(frame.marks, frame.before)
    frame.undo = unstable.trace_backward_without_autocast() if frame.outer is None else None


@cache
def watch() -> None:
    """Mark regions as soon as this program compiles code, and let each checkpoint keep its call's region."""
    unstable.before_compiling(_begin_marking)
    unstable.keep_in_checkpoints(current)


def _begin_marking() -> None:
    global _marking
    if _marking:
        return
    _marking = True
    frames, frame = [], HERE.thread.frame
    while frame is not None:
        frames.append(frame)
        frame = frame.outer
    for frame in reversed(frames):
        _mark(frame)
        if _kernels is not None:
            frame.state = (frame.state & ~_MARKS) | (_kernels.state() & _MARKS)
            _kernels.become(_NO_REGION if frame.region is None else _numbers[frame.region], frame.state)


def current(device_type: str = "cpu") -> Region | None:
    """Return the region that an operation on a device type runs in; None outside, or in `torch.autocast`'s."""
    frame = HERE.thread.frame
    marks = marks_here() if _marking or _traced else UNMARKED
    if frame is not None and frame.marks == marks and frame.depth == nesting():
        return frame.region
    region = _by_mark[marks] if marks in _traced else _again()
    return region if region is not None and region.dtype == torch.get_autocast_dtype(device_type) else None


def lost_gradients() -> bool:
    """Return whether gradients were turned off inside the region, as reentrant checkpointing does for its functions."""
    frame = HERE.thread.frame
    return frame is not None and frame.grad and not torch.is_grad_enabled()


def casts_here() -> dict[Any, Any] | None:
    """Return the casts that are kept until this thread's outermost region ends; None outside of regions."""
    return None if HERE.thread.frame is None else HERE.thread.frame.casts


def nesting() -> int:
    """Return how many native autocast regions this thread is in; enabled or not."""
    torch.autocast_increment_nesting()
    return torch.autocast_decrement_nesting()


def _again() -> Region | None:
    """Return the region for code in a backward pass: the checkpoint's, else where the running node was recorded."""
    if _running() == -1:
        return None
    kept: list[Region | None] = unstable.kept_by_checkpoint()
    if kept:
        return kept[0]
    # A node's number does not tell which thread recorded it. This thread's history comes first, since the CPU's
    # backward pass runs in the thread that called it.
    number = unstable.sequence_number(unstable.running_node())
    histories = [HERE.thread.history] if len(HERE.thread.history.numbers) > 1 else reversed(_histories)
    found = (history.region_at(number) for history in histories)
    return next((region for region in found if region is not None), None)
