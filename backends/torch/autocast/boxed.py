"""The compiled kernels of overridden operations (``csrc/autocast.cpp``), if the extension is used.

They replace the kernels of `overrides` and `weights`, at a fraction of the cost. They ask Python for the region of a
function that a checkpoint runs again, and for the class of an operator in a region, which they remember.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from typing import Any

import torch

from polyamp.backends.torch import extension, unstable
from polyamp.backends.torch.autocast import regions
from polyamp.backends.torch.autocast.behaviours import behaviour
from polyamp.backends.torch.autocast.regions import LIMIT, MARKED, find_region
from polyamp.errors import ExtensionError

_UNKNOWN_REGION = -2
_NATIVE, _WIDEST = 1, 5  # of the ``Behaviour`` in ``csrc/autocast.cpp``, where 0 is undecided
_WHERE_REFUSED = {"norm": 9, "full mixed": 10, "lower mixed": 11}
_Choose = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int64, ctypes.c_int64)


class Kernels:
    """The loaded library; a process has only one, since kernels stay registered."""

    def __init__(self, library: ctypes.CDLL) -> None:
        # A PyDLL keeps the interpreter's lock: releasing it would take longer than these functions.
        self._library = ctypes.PyDLL(library._name, handle=library._handle)
        self._registered: list[tuple[str, str]] = []
        self._choose = _Choose(self._answer)
        self.state = self._function("state", ctypes.c_int64)
        self.become = self._function("become", None, ctypes.c_int64, ctypes.c_int64)
        self.forget = self._function("forget", None)
        self.forgotten = self._function("forgotten", ctypes.c_int64)
        set_up = self._registering("set_up", ctypes.c_char_p, ctypes.c_char_p, ctypes.c_int64, _Choose)
        self._override = self._registering("override", *[ctypes.c_char_p] * 2, ctypes.c_int64, *[ctypes.c_int] * 2)
        self._watch = self._registering("watch", ctypes.c_char_p, ctypes.c_char_p)
        first, second = MARKED
        set_up(first.encode(), second.encode(), LIMIT, self._choose)

    def override(self, name: str, device_type: str, *, listed: bool, only_the_first: bool) -> None:
        """Register a kernel for an operator on one device type."""
        self._registered.append((name, device_type))
        self._override(name.encode(), device_type.encode(), len(self._registered) - 1, listed, only_the_first)

    def watch(self, name: str, device_type: str) -> None:
        """Register a kernel that drops casts of weights when an operator updates its first argument."""
        self._watch(name.encode(), device_type.encode())

    @unstable.never_compiled
    def _answer(self, index: int, number: int) -> int:
        name, device_type = self._registered[index]
        region = regions.current(device_type) if number == _UNKNOWN_REGION else find_region(number)
        op_class = None if region is None else behaviour(name, region, device_type)
        if region is None or op_class is None:
            return _NATIVE
        low = region.dtype is torch.bfloat16
        numbers = {
            "lower": 2 + low,
            "full": 4,
            "keep": 6,
            "inner": 7 + low,
            "norm": 9,
            "full mixed": 10,
            "lower mixed": 11,
        }
        return numbers.get(op_class, _WIDEST)

    def _function(self, name: str, result: Any, *arguments: Any) -> Any:
        function = getattr(self._library, f"polyamp_autocast_{name}")
        function.restype, function.argtypes = result, arguments
        return function

    def _registering(self, name: str, *arguments: Any) -> Callable[..., None]:
        function = self._function(name, ctypes.c_char_p, *arguments)

        def register(*values: Any) -> None:
            failure = function(*values)
            if failure is not None:
                raise _not_registered(values[0].decode(), failure.decode())

        return register


_lock = threading.Lock()
_kernels: Kernels | None = None


def kernels(*, required: bool = True) -> Kernels | None:
    """Return the compiled kernels, and load them at the first call; None if the extension is not in use."""
    global _kernels
    with _lock:
        if _kernels is None:
            library = extension.library("autocast", required=required)
            if library is not None:
                try:
                    _kernels = Kernels(library)
                except AttributeError as error:
                    raise _not_registered("any operation", str(error)) from error
                regions.tell(_kernels)
        return _kernels


def forget_casts() -> None:
    """Drop the casts that the kernels keep for this thread."""
    if _kernels is not None:
        _kernels.forget()


def forgotten() -> int:
    """Return how often the kernels have dropped this thread's casts."""
    return 0 if _kernels is None else int(_kernels.forgotten())


def _not_registered(name: str, failure: str) -> ExtensionError:
    return ExtensionError(
        "PyTorch refused the compiled autocast kernel",
        where=f"autocast(policy), for {name}",
        found=failure.partition("\n")[0],
        allowed="a library that was built for this torch",
        fix="build it again: python -m polyamp.backends.torch.build, or set POLYAMP_EXTENSION=off",
    )
