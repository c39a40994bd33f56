"""`polyamp run`: run a script as Python would, supply what it lacks, and under a policy train it in 16 bits.

A function in the entry-point group ``polyamp.scripts`` does it for each package that a script may import: after
``import torch`` it replaces parts of torch; in place of ``import apex``, which is not installed, it returns modules.
"""

from __future__ import annotations

import functools
import os
import runpy
import sys
import sysconfig
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from traceback import walk_stack
from types import ModuleType
from typing import Any, NoReturn

import polyamp
from polyamp.diagnosis.health import health
from polyamp.errors import UsageError, warn_once
from polyamp.policies import Policy
from polyamp.report import Report

_FOLDERS = {Path(polyamp.__file__).parent, Path(polyamp.__file__).parent / "backends"}
_OURS = tuple(f"{one}/" for folder in _FOLDERS for one in (folder, folder.resolve()))
_PYTHON = tuple(f"{sysconfig.get_path(name)}/" for name in ("stdlib", "platstdlib"))
_MISSING = object()


class Session(ExitStack):
    """One run: its policy, what it changed, and what its report is made of. When it ends, all is as it was before."""

    def __init__(self, policy: Policy | None = None) -> None:
        super().__init__()
        self.policy = policy
        self.holders: list[Any] = []  # wrapped optimizers and scalers, whose health is reported
        self.interfaces: dict[str, str] = {}  # mixed precision of the script's own, and the line that first used it
        self.supplied = set[str]()  # names of modules
        self.unchecked: set[str] = set()  # why nothing tests the gradients of a loop
        self.operations = defaultdict[str, Counter[str]](Counter)  # formats of what ran, by name
        self.refusal: UsageError | None = None  # stays here if the script catches it

    def __enter__(self) -> Session:
        self.replace(sys.modules[__name__], "_current", self)
        return self

    def note_own_precision(self, interface: str) -> None:
        """Record that the script uses mixed precision of its own; refuse it under a policy."""
        self.interfaces.setdefault(interface, script_line())
        if self.policy is not None:
            self.refuse(
                "the script has mixed precision of its own",
                found=interface,
                fix="leave out --policy: polyamp run then only supplies what the script lacks; or remove this line",
            )

    def refuse(self, what: str, *, found: object = None, fix: str | None = None) -> NoReturn:
        """End the run: the script cannot be run safely."""
        self.refusal = UsageError(what, where=script_line() or "polyamp run", found=found, fix=fix)
        raise self.refusal

    def leave_unchecked(self, why: str, *, fix: str) -> None:
        """Report that nothing tests the gradients of a loop; refuse it under a policy that has to scale its loss."""
        if self.policy is not None and self.policy.loss_scale.scales:
            self.refuse(why, fix=fix)
        self.unchecked.add(why)

    def check(self) -> None:
        """Raise the refusal again if the script caught it: nothing may train after it."""
        if self.refusal is not None:
            raise self.refusal

    def replace(self, owner: Any, name: str, value: Any) -> None:
        """Set an attribute of a module or class until the run ends."""
        before = vars(owner).get(name, _MISSING)
        setattr(owner, name, value)
        gone = before is _MISSING
        self.callback(lambda: delattr(owner, name) if gone else setattr(owner, name, before))

    def check_calls(
        self, owner: Any, name: str, check: Callable[..., object], by: Callable[[str], bool] | None = None
    ) -> None:
        """Call a check before a function, where code of a file calls it for which ``by`` returns True."""
        original = getattr(owner, name)

        @functools.wraps(original)
        def checked(*args: Any, **kwargs: Any) -> Any:
            if by is None or by(sys._getframe(1).f_code.co_filename):
                check(*args, **kwargs)
            return original(*args, **kwargs)

        self.replace(owner, name, checked)

    def refuse_calls(
        self, owner: Any, *names: str, what: str, fix: str, by: Callable[[str], bool] | None = None
    ) -> None:
        """Refuse scripts that call these functions; see `check_calls`."""
        for name in names:
            refuse = functools.partial(self.refuse, what, found=f"{owner.__name__}.{name}", fix=fix)
            self.check_calls(owner, name, lambda *_, refuse=refuse, **__: refuse(), by)


_current: Session | None = None


def current() -> Session | None:
    """Return the session of the script that is running; None outside `polyamp run`."""
    return _current


def note_own_precision(interface: str) -> None:
    """Call `Session.note_own_precision` of the running script; outside `polyamp run` do nothing."""
    if _current is not None:
        _current.note_own_precision(interface)


def is_script(file: str) -> bool:
    """Return whether a file belongs neither to polyamp, nor to Python, nor to an installed package."""
    return not file.startswith(("<", *_OURS, *_PYTHON)) and "-packages/" not in file


def script_line() -> str:
    """Return the innermost line of the user's script that is running, as ``train.py:12``; empty without one."""
    calls = ((frame.f_code.co_filename, line) for frame, line in walk_stack(sys._getframe()))
    return next((f"{file}:{line}" for file, line in calls if is_script(file)), "")


class Finder(MetaPathFinder, Loader):
    """Finds modules as Python does; supplies missing ones, and calls the functions of ``polyamp.scripts``."""

    def __init__(self, session: Session) -> None:
        self._session, self._modules = session, dict[str, ModuleType]()
        self._entries = {entry.name: entry for entry in entry_points(group="polyamp.scripts")}
        self._roots = frozenset(self._entries)

    def install(self) -> None:
        """Become the first finder until the session ends, and begin with what was imported before."""
        sys.meta_path.insert(0, self)
        self._session.callback(sys.meta_path.remove, self)
        for root in self._roots & sys.modules.keys():
            self._begin(root, self._entries.pop(root))

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return what the other finders find, or the spec of a module that polyamp supplies."""
        others = [one for one in sys.meta_path if one is not self and hasattr(one, "find_spec")]
        spec = next((spec for one in others if (spec := one.find_spec(fullname, path, target)) is not None), None)
        entry = self._entries.pop(fullname, None)
        if spec is not None and spec.origin is not None:
            if entry is not None:
                self._begin_after(spec.loader, fullname, entry)
            return spec
        # Nothing, or a folder without code, such as a checkout, which is not a package.
        if fullname.partition(".")[0] in self._roots and self._is_for_the_script(fullname):
            with suppress(ImportError):
                self._modules |= (entry.load()(self._session) if entry is not None else None) or {}
            if fullname in self._modules:
                self._session.supplied.add(fullname)
                self._session.callback(sys.modules.pop, fullname, None)
                is_package = any(name.startswith(f"{fullname}.") for name in self._modules)
                return ModuleSpec(fullname, self, is_package=is_package, loader_state=self._modules[fullname].__spec__)
        return spec

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Return a module that exists."""
        return self._modules[spec.name]

    def exec_module(self, module: ModuleType) -> None:
        """Give a module its own spec back, which the import system has replaced."""
        assert module.__spec__ is not None
        module.__spec__ = module.__spec__.loader_state or module.__spec__

    def _begin_after(self, loader: Any, root: str, entry: EntryPoint) -> None:
        load = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            del loader.exec_module
            load(module)
            self._begin(root, entry)

        loader.exec_module = exec_module

    def _begin(self, root: str, entry: EntryPoint) -> None:
        """Call the function of a package that was imported."""
        try:
            self._modules |= entry.load()(self._session) or {}
        except ImportError as error:
            what = f"polyamp's support for {root} cannot be loaded"
            if self._session.policy is not None:
                self._session.refuse(what, found=error, fix="see polyamp doctor; or leave out --policy")
            warn_once(f"{what}: {error}")

    def _is_for_the_script(self, name: str) -> bool:
        """Return whether the script asks for a module: an installed package finds what is installed, as always."""
        through = self._roots | {"polyamp", name.partition(".")[0]}  # torch.load imports what a file names
        for frame, _ in walk_stack(sys._getframe()):
            file = frame.f_code.co_filename
            if is_script(file):
                return True
            if "-packages/" in file and file.rpartition("-packages/")[2].partition("/")[0] not in through:
                return False
        return False


def execute(target: str, arguments: Sequence[str], is_module: bool) -> None:
    """Run the code as ``__main__``, with its arguments and its folder on ``sys.path``."""
    file = Path(target).absolute()
    before, sys.argv, sys.path = (sys.argv, sys.path), [target, *arguments], list(sys.path)
    if not sys.flags.safe_path and (is_module or file.is_file()):  # runpy adds a folder itself
        sys.path[0] = str(Path.cwd() if is_module else file.resolve().parent)
    try:
        if is_module:
            runpy.run_module(target, run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(str(file), run_name="__main__")
    finally:
        sys.argv, sys.path = before


def run_script(
    target: str,
    arguments: Sequence[str] = (),
    *,
    is_module: bool = False,
    policy: Policy | None = None,
    report: Path | None = None,
) -> BaseException | None:
    """Run a script, report at the end, and return the exception that ended it, without the frames that called it."""
    session, error = Session(policy), None
    with session:
        try:
            Finder(session).install()
            execute(target, arguments, is_module)
        except BaseException as raised:
            error = raised
        if os.environ.get("RANK", "0") == "0":  # of the ranks that torchrun starts, the first one reports
            made = _RunReport(session, target, arguments, error)
            print(end="", flush=True)
            if sys.stderr is not None:
                print(made, file=sys.stderr, flush=True)
            if report is not None:
                made.save(report)
    if session.refusal is not None:
        raise session.refusal.with_traceback(None) from None  # also if the script caught it
    while error is not None and (trace := error.__traceback__) and not is_script(trace.tb_frame.f_code.co_filename):
        error.__traceback__ = trace.tb_next
    return error


class _RunReport(Report):
    """Reports how a script ended, what it used, what ran in which format, and what went badly."""

    def __init__(self, session: Session, target: str, arguments: Sequence[str], error: BaseException | None) -> None:
        self._session, self._script, self._arguments = session, target, list(arguments)
        self._health = [health(one) for one in session.holders]
        self._exit = "ended" if error is None else f"{type(error).__name__}: {error}".strip().partition("\n")[0]
        if session.refusal is not None:
            self._exit = "refused"
        elif isinstance(error, SystemExit):
            self._exit = f"exit code {int(error.code if isinstance(error.code, int) else error.code is not None)}"
        self._verdicts = list(self._find_verdicts()) if session.refusal is None else []

    def as_dict(self) -> dict[str, Any]:
        session = self._session
        return {
            "script": self._script,
            "arguments": self._arguments,
            "policy": None if session.policy is None else str(session.policy),
            "exit": self._exit,
            "supplied": sorted(session.supplied),
            "interfaces": [{"interface": one, "where": where} for one, where in session.interfaces.items()],
            "operations": session.operations,
            "health": [one.as_dict() for one in self._health],
            "refusal": None if session.refusal is None else str(session.refusal),
            "verdicts": self._verdicts,
        }

    def heading(self) -> str:
        session = self._session
        lines = [f"polyamp run {self._script}: {self._exit}; {session.policy or 'no policy'}"]
        lines += [f"supplied: {', '.join(sorted(session.supplied))}"] if session.supplied else []
        lines += [f"used: {one} at {where}" for one, where in session.interfaces.items()]
        return "\n".join([*lines, *(f"loss scale: {one}" for one in self._health)])

    def rows(self) -> list[tuple[str, ...]]:
        ran = self._session.operations.items()
        rows = [(name, ", ".join(f"{form} {count}" for form, count in forms.most_common())) for name, forms in ran]
        return [("operation", "ran in"), *rows] if rows else []

    def sentences(self) -> list[str]:
        return [f"verdict: {one}" for one in self._verdicts]

    def _find_verdicts(self) -> Iterator[str]:
        session, low = self._session, {"float16", "bfloat16"}
        for one in self._health:
            if one.steps and one.skipped == one.steps:
                yield f"All {one.steps:,} steps were skipped, so nothing was trained. {one.finding}"
            elif one.alarming:
                yield f"Loss scaling: {one.why}. {one.finding}"
        yield from (f"Gradients were not checked: {why}." for why in session.unchecked)
        wants_low = session.policy is not None and session.policy.compute in low and self._exit == "ended"
        if wants_low and all(low.isdisjoint(forms) for forms in session.operations.values()):
            yield "Nothing ran in 16 bits: nothing changed. Start processes with torchrun; others are not followed."
