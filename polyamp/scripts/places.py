"""Tells a user's script from polyamp, Python and installed packages, by the files of the running frames."""

from __future__ import annotations

import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import polyamp

_POLYAMP = Path(polyamp.__file__).parent
_OURS = tuple({f"{folder}/" for part in (".", "backends") for folder in (_POLYAMP / part, (_POLYAMP / part).resolve())})
_PACKAGES = tuple(
    {f"{path}/" for path in (*map(sysconfig.get_path, ("purelib", "platlib")), *sys.path) if "-packages" in path}
)
_PYTHON = tuple({f"{sysconfig.get_path(name)}/" for name in ("stdlib", "platstdlib")})

SCRIPTS: set[str] = set()
"""Folders of installed packages that were started as scripts, with ``polyamp run -m package``."""


def is_script(file: str) -> bool:
    """Return whether a file belongs neither to polyamp, nor to Python, nor to an installed package.

    >>> is_script("/home/me/train.py"), is_script(sysconfig.__file__), is_script("<frozen importlib._bootstrap>")
    (True, False, False)
    """
    return file.startswith(tuple(SCRIPTS)) or not file.startswith(("<", *_OURS, *_PACKAGES, *_PYTHON))


def script_line() -> str:
    """Return the innermost line of the user's script that is running, as ``train.py:12``; empty without one.

    >>> ":" in script_line() or script_line() == ""
    True
    """
    frames = (frame for frame in _frames() if is_script(frame.f_code.co_filename))
    return next((f"{frame.f_code.co_filename}:{frame.f_lineno}" for frame in frames), "")


def calling_package(besides: frozenset[str]) -> str:
    """Return the installed package whose code is running; empty if it is the user's script.

    >>> calling_package(frozenset()) in ("", "pytest", "_pytest", "pluggy")
    True

    Args:
        besides: packages that are passed over, as polyamp and Python are: the code that called them counts.
    """
    for frame in _frames():
        file = frame.f_code.co_filename
        if is_script(file):
            return ""
        for folder in _PACKAGES:
            package = file.removeprefix(folder).partition("/")[0].removesuffix(".py")
            if file.startswith(folder) and package not in besides and not file.startswith(_OURS):
                return package
    return ""


def _frames() -> Iterator[FrameType]:
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        yield frame
        frame = frame.f_back
