"""Runs a script as Python would: its ``__main__``, arguments, first folder of ``sys.path``, errors and exit code."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import io
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType, ModuleType, TracebackType

from polyamp.errors import InvalidValueError
from polyamp.scripts import places

_RUNS_SCRIPTS = (str(Path(__file__).parent), "<frozen ")
"""Files whose frames are not the script's: this package, and Python's import system."""

_PAUSE = 0.02
"""Seconds between two looks at the threads that still run."""


@dataclass(frozen=True)
class Script:
    """What to run.

    Attributes:
        target: a file, a folder with ``__main__.py``, or the name of a module.
        arguments: what the script finds in ``sys.argv[1:]``.
        is_module: whether ``target`` is a module's name, as after ``python -m``.
    """

    target: str
    arguments: tuple[str, ...] = ()
    is_module: bool = False


class Program:
    """A script that is ready to run: its code, and the module that becomes ``__main__``.

    Attributes:
        file: the script's file.
        folder: the folder that becomes the first one of ``sys.path``.

    Args:
        script: what to run.

    Raises:
        InvalidValueError: there is no such file or module.
        SyntaxError: the file is not Python.
    """

    def __init__(self, script: Script) -> None:
        self._script = script
        self.module = ModuleType("__main__")
        if script.is_module:
            self.folder = Path.cwd()
            with self._prepared():  # finding a submodule imports its package
                self.file, self._code = self._find_module(script.target)
        else:
            self.file, self.folder = _file_of(script.target)
            self._code = _compiled(self.file)
            self.module.__loader__ = importlib.machinery.SourceFileLoader("__main__", str(self.file))
        self.module.__file__ = str(self.file)
        vars(self.module)["__builtins__"] = __builtins__

    def run(self) -> None:
        """Run the script, and wait for the threads that it leaves running.

        Raises:
            BaseException: whatever the script raises, ``SystemExit`` included.
        """
        with self._prepared():
            try:
                exec(self._code, vars(self.module))
            finally:
                _wait_for_threads()

    @contextmanager
    def _prepared(self) -> Iterator[None]:
        """Set what belongs to the process, and set it back. ``__main__`` stays if the process ends with the script."""
        argv, path, main = sys.argv, list(sys.path), sys.modules["__main__"]
        sys.argv = [str(getattr(self, "file", "-m")) if self._script.is_module else self._script.target]
        sys.argv += self._script.arguments
        if not sys.flags.safe_path:
            sys.path[0:1] = [str(self.folder)]
        sys.modules["__main__"] = self.module
        try:
            yield
        finally:
            sys.argv, sys.path[:], sys.modules["__main__"] = argv, path, main

    def _find_module(self, name: str) -> tuple[Path, CodeType]:
        try:
            spec = importlib.util.find_spec(name)
            if spec is not None and spec.submodule_search_locations is not None:
                spec = importlib.util.find_spec(f"{name}.__main__")
        except ModuleNotFoundError as error:
            if error.name is None or not f"{name}.".startswith(f"{error.name}."):
                raise
            spec = None
        code = getattr(spec.loader, "get_code", lambda _: None)(spec.name) if spec is not None else None
        if spec is None or spec.origin is None or code is None:
            raise _no_script(f"-m {name}", "the name of a module, or of a package with __main__.py")
        self.module.__spec__, self.module.__loader__ = spec, spec.loader
        self.module.__package__ = spec.parent
        file = Path(spec.origin)
        if not places.is_script(str(file)):
            places.SCRIPTS.add(f"{file.parent}/")
        return file, code


def _file_of(target: str) -> tuple[Path, Path]:
    given = Path(target)
    file = given / "__main__.py" if given.is_dir() else given
    if not file.is_file():
        raise _no_script(target, "a Python file, or a folder with __main__.py; a module's name after -m")
    folder = given if given.is_dir() else given.resolve().parent
    return file.absolute(), folder.absolute()


def _compiled(file: Path) -> CodeType:
    with io.open_code(str(file)) as opened:
        code = compile(opened.read(), str(file), "exec", dont_inherit=True)
    return code


def _wait_for_threads() -> None:
    """Wait as Python does at its end: a thread of the script may still train.

    An idle worker of an executor is not waited for: Python ends it later, and until then it would wait forever.
    """
    idle = 0
    while idle < 2:  # a new thread may not have reached the script's code yet
        others = [one for one in threading.enumerate() if one is not threading.current_thread() and not one.daemon]
        if not others:
            return
        frames = sys._current_frames()
        idle = 0 if any(_runs_script(frames.get(one.ident or 0)) for one in others) else idle + 1
        time.sleep(_PAUSE)


def _runs_script(frame: FrameType | None) -> bool:
    while frame is not None:
        if places.is_script(frame.f_code.co_filename):
            return True
        frame = frame.f_back
    return False


def without_own_frames(error: BaseException) -> BaseException:
    """Remove this package's frames from the traceback of a script's error, and from those of its causes.

    >>> try:
    ...     Program(Script("nothing.py"))
    ... except InvalidValueError as error:
    ...     without_own_frames(error).__traceback__.tb_next is None
    True
    """
    met: set[int] = set()
    waiting: list[BaseException | None] = [error]
    while waiting:
        one = waiting.pop()
        if one is not None and id(one) not in met:
            met.add(id(one))
            one.__traceback__ = _kept(one.__traceback__)
            waiting += [one.__cause__, one.__context__]
    return error


def _kept(traceback: TracebackType | None) -> TracebackType | None:
    kept: TracebackType | None = None
    frames = []
    while traceback is not None:
        frames.append(traceback)
        traceback = traceback.tb_next
    for one in reversed(frames):
        if not one.tb_frame.f_code.co_filename.startswith(_RUNS_SCRIPTS) and not _hides(one):
            kept = TracebackType(kept, one.tb_frame, one.tb_lasti, one.tb_lineno)
    return kept


def _hides(one: TracebackType) -> bool:
    """Return whether a frame belongs to a function that replaces a framework's own for the run."""
    return "__polyamp_run__" in one.tb_frame.f_globals and one.tb_next is not None


def _no_script(found: str, allowed: str) -> InvalidValueError:
    return InvalidValueError(
        "there is no such script",
        where="polyamp run",
        found=found,
        allowed=allowed,
        fix="options of polyamp run come before the script, the script's own after it",
    )
