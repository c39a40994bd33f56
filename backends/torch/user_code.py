"""Finds the user's line: of a running call, and of a stack trace."""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Iterator
from pathlib import Path

import torch

from polyamp import errors

# each with a separator, because torchvision is not torch
_ADAPTER = os.path.join(Path(__file__).parent, "")
_LIBRARIES = (*(os.path.join(Path(file).parent, "") for file in (torch.__file__, errors.__file__)), _ADAPTER)
_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<function>\S+)')


def is_users(file: str) -> bool:
    """Return whether a file belongs neither to PyTorch nor to polyamp."""
    return not file.startswith(_LIBRARIES)


def users_line(*, directly: bool = False) -> str:
    """Return the innermost line of the user's code that is running, as ``model.py:12 (forward)``; empty without one.

    With ``directly``, it is empty too if another library called the adapter.
    """
    frame = inspect.currentframe()
    between = _ADAPTER if directly else _LIBRARIES
    while frame is not None and frame.f_code.co_filename.startswith(between):
        frame = frame.f_back
    if frame is None or not is_users(frame.f_code.co_filename):
        return ""
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} ({frame.f_code.co_name})"


def line_in(trace: str) -> str:
    """Return the user's innermost line in the text of a stack trace, as ``model.py:12 (forward)``; empty without one.

    >>> line_in('  File "/home/me/model.py", line 12, in forward')
    'model.py:12 (forward)'
    >>> line_in(f'  File "{os.path.dirname(torch.__file__)}vision/models.py", line 3, in forward')
    'models.py:3 (forward)'
    """
    found = list(_users_frames(trace))
    return f"{Path(found[-1]['file']).name}:{found[-1]['line']} ({found[-1]['function']})" if found else ""


def line_of_error(error: Exception) -> str:
    """Return the user's innermost line in one of Dynamo's errors, as ``/path/model.py:12 (forward)``."""
    stack = getattr(error, "real_stack", None) or ()
    users = [f"{one.filename}:{one.lineno} ({one.name})" for one in stack if is_users(one.filename)]
    users += [f"{one['file']}:{one['line']} ({one['function']})" for one in _users_frames(str(error))]
    return users[-1] if users else "the captured function"


def _users_frames(trace: str) -> Iterator[re.Match[str]]:
    return (frame for frame in _FRAME.finditer(trace) if is_users(frame["file"]))
