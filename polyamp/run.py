"""`polyamp run`: run a script as Python would, supply what it lacks, and under a policy train it in 16 bits.

For each package that a script imports, a function in the entry-point group ``polyamp.scripts`` prepares the
package: after ``import torch``, parts of torch are replaced. The folders ``backends/*/supplied`` come last on
``sys.path``, with what a script imports although it is not installed, such as ``apex``.
"""

from __future__ import annotations

import functools
import os
import runpy
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.metadata import entry_points
from pathlib import Path
from traceback import walk_stack
from types import ModuleType
from typing import Any, NoReturn

from polyamp import backends
from polyamp.diagnosis.health import health
from polyamp.errors import UsageError, is_users, warn_once
from polyamp.formats import format_of
from polyamp.policies import Policy
from polyamp.report import Report

OWN_PRECISION = "the script has mixed precision of its own"
WITHOUT_POLICY = "leave out --policy: polyamp run then only supplies what the script lacks; or remove this line"
_SUPPLIED = sorted(folder for path in backends.__path__ for folder in Path(path).glob("*/supplied"))


class Refused(BaseException):
    """Ends a script that cannot be run safely. No ``except Exception`` in the script catches it."""


class Session(ExitStack):
    """One run: its policy, what it changed, and what its report is made of. When it ends, all is as it was before."""

    def __init__(self, policy: Policy | None = None) -> None:
        super().__init__()
        self.policy = policy
        self.holders: list[Any] = []  # wrapped optimizers and scalers, whose health is reported
        self.is_applied = policy is None or not format_of(policy.compute).is_low  # else once a model ran under it
        self.refusal: UsageError | None = None
        self.replace(sys.modules[__name__], "_current", self)

    def refuse(self, what: str, *, found: object = None, fix: str) -> NoReturn:
        """End the run: the script cannot be run safely."""
        self.refusal = UsageError(what, where=script_line() or "polyamp run", found=found, fix=fix)
        raise Refused(self.refusal)

    def replace(self, owner: Any, name: str, value: Any) -> None:
        """Set an attribute of a module or class until the run ends."""
        before = vars(owner).get(name, self)  # itself if there is none
        setattr(owner, name, value)
        self.callback(lambda: delattr(owner, name) if before is self else setattr(owner, name, before))

    def refuse_call(
        self, owner: Any, name: str, *, unless_by: str, what: str = OWN_PRECISION, fix: str = WITHOUT_POLICY
    ) -> None:
        """Under a policy, refuse calls of a function, unless by one package or with ``enabled=False``."""
        if self.policy is None:
            return
        original, free = getattr(owner, name), ("polyamp", unless_by)

        @functools.wraps(original)
        def refusing(*args: Any, **kwargs: Any) -> Any:
            package = str(sys._getframe(1).f_globals.get("__name__")).partition(".")[0]
            if package not in free and kwargs.get("enabled", True):
                self.refuse(what, found=f"{owner.__name__}.{name}", fix=fix)
            return original(*args, **kwargs)

        self.replace(owner, name, refusing)


_current: Session | None = None


def current() -> Session | None:
    """Return the session of the script that is running; None outside `polyamp run`."""
    return _current


def note_own_precision(interface: str) -> None:
    """Refuse a script that runs under a policy and has mixed precision of its own; outside `polyamp run` do nothing."""
    if _current is not None and _current.policy is not None:
        _current.refuse(OWN_PRECISION, found=interface, fix=WITHOUT_POLICY)


def script_line() -> str:
    """Return the innermost line of the user's script that is running, as ``train.py:12``; empty without one."""
    calls = ((frame.f_code.co_filename, line) for frame, line in walk_stack(sys._getframe()))
    return next((f"{file}:{line}" for file, line in calls if is_users(file)), "")


class Finder(MetaPathFinder):
    """Finds modules as Python does, and calls the functions of ``polyamp.scripts`` when their packages are imported."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._entries = {entry.name: entry for entry in entry_points(group="polyamp.scripts")}

    def install(self) -> None:
        """Become the first finder until the session ends, and set up packages imported before."""
        sys.meta_path.insert(0, self)
        self._session.callback(sys.meta_path.remove, self)
        for name in self._entries.keys() & sys.modules.keys():
            self._begin(name)

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """Return the other finders' spec; its loader loads the package, then calls its function."""
        if fullname not in self._entries:
            return None
        others = (one.find_spec(fullname, path, target) for one in sys.meta_path if one is not self)
        spec = next(filter(None, others), None)
        loader: Any = spec and spec.loader
        if hasattr(loader, "exec_module"):
            load = loader.exec_module

            def exec_module(module: ModuleType) -> None:
                del loader.exec_module
                load(module)
                self._begin(fullname)

            loader.exec_module = exec_module
        return spec

    def _begin(self, name: str) -> None:
        entry = self._entries.pop(name, None)
        try:
            if entry is not None:
                entry.load()(self._session)
        except ImportError as error:
            warn_once(f"polyamp's support for {name} cannot be loaded: {error}; see polyamp doctor")


def run_script(
    target: str,
    arguments: Sequence[str] = (),
    *,
    is_module: bool = False,
    policy: Policy | None = None,
    report: Path | None = None,
) -> BaseException | None:
    """Run a script, report at the end, and return the exception that ended it, without the frames that called it."""
    session, error, file = Session(policy), None, Path(target).absolute()
    with session:
        session.replace(sys, "argv", [target, *arguments])
        session.replace(sys, "path", [*sys.path, *(str(one) for one in _SUPPLIED)])
        if not sys.flags.safe_path and (is_module or file.is_file()):  # runpy adds a folder itself
            sys.path[0] = str(Path.cwd() if is_module else file.resolve().parent)
        try:
            Finder(session).install()
            if is_module:
                runpy.run_module(target, run_name="__main__", alter_sys=True)
            else:
                runpy.run_path(str(file), run_name="__main__")
        except BaseException as raised:
            error = raised
        if os.environ.get("RANK", "0") == "0":  # of the ranks that torchrun starts, the first one reports
            made = _RunReport(session, target, error)
            print(end="", flush=True)
            print(made, file=sys.stderr, flush=True)
            if report is not None:
                made.save(report)
    if session.refusal is not None:
        raise session.refusal from None  # also if the script caught it
    while error is not None and (trace := error.__traceback__) and not is_users(trace.tb_frame.f_code.co_filename):
        error.__traceback__ = trace.tb_next
    return error


class _RunReport(Report):
    """Reports how a script ended, what its loss scale did, and what went badly."""

    def __init__(self, session: Session, target: str, error: BaseException | None) -> None:
        self._session, self._script = session, target
        self._health = [health(one) for one in session.holders]
        ended = "ended" if error is None else f"{type(error).__name__}: {error}".partition("\n")[0]
        self._exit = ended if session.refusal is None else "refused"

    def as_dict(self) -> dict[str, Any]:
        return {
            "script": self._script,
            "policy": None if self._session.policy is None else str(self._session.policy),
            "exit": self._exit,
            "health": [one.as_dict() for one in self._health],
            "verdicts": list(self._find_verdicts()),
        }

    def heading(self) -> str:
        lines = [f"loss scale: {one}" for one in self._health]
        return "\n".join([f"polyamp run {self._script}: {self._exit}; {self._session.policy or 'no policy'}", *lines])

    def sentences(self) -> list[str]:
        return [f"verdict: {one}" for one in self._find_verdicts()]

    def _find_verdicts(self) -> Iterator[str]:
        for one in self._health:
            if one.steps and one.skipped == one.steps:
                yield f"All {one.steps:,} steps were skipped, so nothing was trained. {one.finding}"
            elif one.alarming:
                yield f"Loss scaling: {one.why}. {one.finding}"
        if not self._session.is_applied and self._session.refusal is None:
            yield "No model ran in 16 bits: nothing changed. Start processes with torchrun; others are not followed."
