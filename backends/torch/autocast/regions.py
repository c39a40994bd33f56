"""The autocast regions of a process: what each does, its number, and its mark in native autocast's own state.

A `Region` is the part of a policy that operations need. Equal policies share one. `frames` has the regions that a
thread is in, `history` those in which autograd's nodes were recorded.

Compiled code needs a mark of its region. Dynamo guards what it compiles by native autocast's state, such as the dtype
for each device type; it does not look at Python's variables. So polyamp writes the number of the region into that
state, as the autocast dtypes of two device types that this machine does not have (`MARKED`). With dtypes numbered in
alphabetical order, the mark of region 3 is ``(_DTYPES[6], _DTYPES[0])``, and code that was compiled in region 2 is
compiled again in region 3. ``(_DTYPES[7], _DTYPES[0])`` marks region 3 where compiled code itself enters it, since that
code has no Python state when it runs.
"""

from __future__ import annotations

import hashlib
import threading
from itertools import islice
from typing import NamedTuple

import torch

from polyamp.errors import InvalidValueError
from polyamp.flow import Rule


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
        """The region of the whole policy, to find the way back from inside a module."""
        return Region(self.dtype, self.rules_outside) if self.rules_outside else self


# Numbers and marks.

Marks = tuple[torch.dtype, torch.dtype]

_ELSEWHERE = [device for device in ("ipu", "maia", "hpu") if device != ACCELERATOR]
MARKED = _ELSEWHERE[0], _ELSEWHERE[1]
UNMARKED = (torch.get_autocast_dtype(MARKED[0]), torch.get_autocast_dtype(MARKED[1]))
_DTYPES = sorted({one for one in vars(torch).values() if isinstance(one, torch.dtype)} - set(UNMARKED), key=str)

LIMIT = len(_DTYPES) ** 2 // 2  # the number of different regions that a process can have

_numbers: dict[Region, int] = {}
_of_mark: dict[Marks, Region] = {}
_traced: set[Marks] = set()
_lock = threading.Lock()


def number_of(region: Region) -> int:
    """Return the number of a region that has a mark."""
    return _numbers[region]


def numbered(number: int) -> Region:
    """Return the region with a number."""
    return next(islice(_numbers, number, None))


def mark_of(region: Region | None, *, traced: bool = False) -> Marks:
    """Return the mark of a region; a region that is entered inside compiled code has another one."""
    if region is None:
        return UNMARKED
    with _lock:
        number = _numbers.setdefault(region, len(_numbers))
        new = number == len(_numbers) - 1
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


def marked(marks: Marks) -> Region | None:
    """Return the region that has these marks."""
    return _of_mark.get(marks)


def traced_region(marks: Marks) -> Region | None:
    """Return the region that compiled code entered with these marks; None for all other marks."""
    return _of_mark[marks] if marks in _traced else None


def may_be_traced() -> bool:
    """Return whether any region was ever entered inside compiled code."""
    return bool(_traced)


def marks_here() -> Marks:
    """Return the marks in this thread's native autocast."""
    return torch.get_autocast_dtype(MARKED[0]), torch.get_autocast_dtype(MARKED[1])


def set_marks(marks: Marks) -> None:
    """Set the marks in this thread's native autocast."""
    for device, dtype in zip(MARKED, marks, strict=True):
        torch.set_autocast_dtype(device, dtype)


def _too_many() -> InvalidValueError:
    return InvalidValueError(
        "too many policies with different rules in one process",
        where="autocast(policy)",
        found=f"more than {LIMIT}",
        allowed=f"at most {LIMIT}",
        fix="create each policy once and reuse it",
    )


_registered: list[str] = []
_tag = ""


def tag_caches(registration: str) -> None:
    """Make compiled code that is cached on disk depend on a registration, which AOTAutograd's keys do not include."""
    global _tag
    if registration in _registered:
        return
    _registered.append(registration)
    users = torch.compiler.config.cache_key_tag.removesuffix(_tag)
    _tag = f"|polyamp {hashlib.sha256(repr(_registered).encode()).hexdigest()[:16]}"
    torch.compiler.config.cache_key_tag = users + _tag
