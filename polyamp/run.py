"""`polyamp run`: run a script as Python would, supply what it lacks, and under a policy train it in 16 bits.

Functions in the entry-point group ``polyamp.scripts`` do it, one for each package that a script may import:

    import torch  ->  Python imports torch, and then `begin(session)` of the torch adapter replaces parts of it
    import apex   ->  is not installed: the function returns modules of that name, and the script gets them

For example, ``begin(session)`` calls ``session.replace(torch.cuda.amp, "GradScaler", ours)``, which is undone when the
run ends, or ``session.refuse("it scales its loss by itself", fix="leave out --policy")``, which ends it.
"""

from __future__ import annotations

import ast
import importlib.util
import io
import runpy
import sys
import sysconfig
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from contextvars import ContextVar
from functools import partial
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.metadata import entry_points
from pathlib import Path
from types import FrameType, ModuleType, TracebackType
from typing import Any, NamedTuple, NoReturn

import polyamp
from polyamp.errors import InvalidValueError, UsageError
from polyamp.plan import PlannedOperation
from polyamp.policies import Policy

_FOLDERS = {Path(polyamp.__file__).parent, Path(polyamp.__file__).parent / "backends"}
_OURS = tuple(f"{one}/" for folder in _FOLDERS for one in (folder, folder.resolve()))
_PYTHON = tuple(f"{sysconfig.get_path(name)}/" for name in ("stdlib", "platstdlib"))
_IMPORTS, _MISSING = "<frozen importlib", object()


class Use(NamedTuple):
    """An import or a call in a source file."""

    name: str  # in full, such as torch.amp.GradScaler; .half, where the object is not known
    where: str
    arguments: dict[str, str] | None = None  # of a call, by keyword or position: full names and literals


class Session:
    """One run: its policy, what it changed, and what its report is made of."""

    def __init__(self, policy: Policy | None = None) -> None:
        self.policy = policy
        self.holders: list[Any] = []  # wrapped optimizers and scalers, whose health is reported
        self.interfaces: list[dict[str, str]] = []  # mixed precision of the script's own, and the lines that use it
        self.supplied: list[str] = []
        self.begun: list[str] = []
        self.operations: dict[str, list[PlannedOperation]] = {}  # what ran in which format, by what was looked at
        self.notes: list[str] = []
        self.shared: dict[str, Any] = {}  # what one adapter leaves for another, which cannot import it
        self.has_low = False  # whether something ran in 16 bits that is not among the operations
        self.last_loss: Callable[[], float | None] = lambda: None
        self.refusal: UsageError | None = None  # stays here if the script catches it
        self.folder = ""  # of an installed package that was started as a script
        self._as_written = ContextVar("as_written", default=False)
        self._undo: list[Callable[[], object]] = []
        self._files: list[Path] = []
        self._checks: list[Callable[[Use], None]] = []

    def add(self, holder: Any) -> None:
        """Report the health of a wrapped optimizer or scaler at the end."""
        self.holders.append(holder)

    def found(self, interface: str) -> None:
        """Record that the script uses mixed precision of its own; refuse it under a policy."""
        one = {"interface": interface, "where": script_line()}
        if one not in self.interfaces:
            self.interfaces.append(one)
        if self.policy is not None:
            self.refuse(
                "the script has mixed precision of its own",
                found=interface,
                fix="leave out --policy: polyamp run then only supplies what the script lacks; or remove this line",
            )

    def note(self, text: str) -> None:
        """Add a sentence to the report, once."""
        if text not in self.notes:
            self.notes.append(text)

    def refuse(self, what: str, *, found: object = None, fix: str | None = None, where: str | None = None) -> NoReturn:
        """End the run: the script cannot be run safely."""
        self.refusal = UsageError(what, where=where or script_line() or "polyamp run", found=found, fix=fix)
        raise self.refusal

    def check(self) -> None:
        """Raise the refusal again if the script caught it: nothing may train after it."""
        if self.refusal is not None:
            raise self.refusal

    def check_sources(self, check: Callable[[Use], None]) -> None:
        """Call a function with what the script and its local modules import and call, before they run."""
        self._checks.append(check)
        for file in self._files:
            for use in uses_in(file):
                check(use)

    def add_source(self, file: Path) -> None:
        """Check a source file of the script that is about to run."""
        self._files.append(file)
        for use in uses_in(file) if self._checks else ():
            for check in self._checks:
                check(use)

    @property
    def is_as_written(self) -> bool:
        """Whether the calling code is inside `as_written`, in this thread or async task."""
        return self._as_written.get()

    @contextmanager
    def as_written(self) -> Iterator[None]:
        """Leave gradients that are taken and applied in this block alone: their loss is scaled already."""
        token = self._as_written.set(True)
        try:
            yield
        finally:
            self._as_written.reset(token)

    def replace(self, owner: Any, name: str, value: Any) -> None:
        """Set an attribute of a module or class until the run ends."""
        before = vars(owner).get(name, _MISSING)
        setattr(owner, name, value)

        def put_back() -> None:
            if before is not _MISSING:
                setattr(owner, name, before)
            else:
                with suppress(AttributeError):
                    delattr(owner, name)

        self.at_end(put_back)

    def at_end(self, undo: Callable[[], object]) -> None:
        """Call a function after the run and its report, in the reverse order of these calls."""
        self._undo.append(undo)

    def close(self) -> None:
        """Undo what was changed for this run."""
        while self._undo:
            self._undo.pop()()


_current: Session | None = None


def current() -> Session | None:
    """Return the session of the script that is running; None outside `polyamp run`."""
    return _current


def found(interface: str) -> None:
    """Call `Session.found` of the running script; outside `polyamp run` do nothing."""
    if _current is not None:
        _current.found(interface)


@contextmanager
def running(session: Session) -> Iterator[Session]:
    """Make a session the current one, and undo what it changed at the end."""
    global _current
    before, _current = _current, session
    try:
        yield session
    finally:
        _current = before
        session.close()


# Which code is the script's.


def is_script(file: str) -> bool:
    """Return whether a file belongs neither to polyamp, nor to Python, nor to an installed package."""
    if _current is not None and _current.folder and file.startswith(_current.folder):
        return True
    return not file.startswith(("<", *_OURS, *_PYTHON)) and "-packages/" not in file


def script_line() -> str:
    """Return the innermost line of the user's script that is running, as ``train.py:12``; empty without one."""
    frames = (frame for frame in _frames() if is_script(frame.f_code.co_filename))
    return next((f"{frame.f_code.co_filename}:{frame.f_lineno}" for frame in frames), "")


def _frames() -> Iterator[FrameType]:
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        yield frame
        frame = frame.f_back


def uses_in(file: Path) -> Iterator[Use]:
    """Yield what a source file imports and calls. Nothing is imported or run."""
    try:
        nodes = list(ast.walk(ast.parse(file.read_bytes(), str(file))))
    except (SyntaxError, ValueError, OSError):  # Python reports it when it runs the file
        return
    names: dict[str, str] = {}  # what this file's names stand for
    for node in nodes:
        if isinstance(node, ast.Import):
            for alias in node.names:
                root = alias.name.partition(".")[0]
                names[alias.asname or root] = alias.name if alias.asname else root
                yield Use(alias.name, f"{file}:{node.lineno}")
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                names[alias.asname or alias.name] = f"{node.module}.{alias.name}"
                yield Use(f"{node.module}.{alias.name}", f"{file}:{node.lineno}")
    for node in nodes:
        if isinstance(node, ast.Call):
            given = [(str(place), value) for place, value in enumerate(node.args)]
            given += [(keyword.arg or "**", keyword.value) for keyword in node.keywords]
            arguments = {name: _full_name(value, names) for name, value in given}
            yield Use(_full_name(node.func, names), f"{file}:{node.lineno}", arguments)


def _full_name(node: ast.expr, names: dict[str, str]) -> str:
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.insert(0, node.attr)
        node = node.value
    if isinstance(node, ast.Name) and node.id in names:
        return ".".join([names[node.id], *parts])
    if isinstance(node, ast.Constant):
        return repr(node.value)
    return f".{parts[-1]}" if parts else node.id if isinstance(node, ast.Name) else ""


# Imports.


class Finder(MetaPathFinder):
    """Finds modules as Python does; supplies missing ones, and calls the functions of ``polyamp.scripts``."""

    def __init__(self, session: Session) -> None:
        self._session, self._modules = session, dict[str, ModuleType]()
        self._entries = {entry.name: entry for entry in entry_points(group="polyamp.scripts")}
        self._roots = frozenset(self._entries)

    def install(self) -> None:
        """Become the first finder until the session ends, and begin with what was imported before."""
        sys.meta_path.insert(0, self)
        self._session.at_end(partial(sys.meta_path.remove, self))
        for root in self._roots & sys.modules.keys():
            self.begin(root)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return what the other finders find, or the spec of a module that polyamp supplies."""
        others = [one for one in sys.meta_path if one is not self and hasattr(one, "find_spec")]
        spec = next((spec for one in others if (spec := one.find_spec(fullname, path, target)) is not None), None)
        root, parent = fullname.partition(".")[0], fullname.rpartition(".")[0]
        if parent in self._session.supplied:
            spec = None  # what is on the path of polyamp's module would be a second copy
        if root in self._roots and (spec is None or (spec.loader is None and spec.origin is None)):
            return self._supplied(fullname) or spec  # a folder without code, such as a checkout, is not the package
        if fullname in self._entries and spec is not None and spec.loader is not None:
            spec.loader = _ThenBegin(spec.loader, self, fullname)
        elif spec is not None and spec.origin is not None and is_script(spec.origin):
            self._session.add_source(Path(spec.origin))
        return spec

    def begin(self, root: str, *, is_missing: bool = False) -> None:
        """Call the function of a package that was imported, or that is missing, once."""
        entry = self._entries.pop(root, None)
        if entry is None:
            return
        try:
            function = entry.load()
        except ImportError as error:
            if is_missing:
                return
            what = f"polyamp's support for {root} cannot be loaded"
            if self._session.policy is not None:
                self._session.refuse(what, found=error, fix="see polyamp doctor; or leave out --policy")
            self._session.note(f"{what}: {error}")
        else:
            self._session.begun.append(root)
            self._modules |= function(self._session) or {}

    def _supplied(self, name: str) -> ModuleSpec | None:
        if not self._is_the_scripts():
            return None
        if name in self._roots:
            self.begin(name, is_missing=True)
        module = self._modules.get(name)
        if module is None:
            return None
        self._session.supplied.append(name)
        self._session.at_end(partial(_forget, name, module))
        return ModuleSpec(name, _Supplied(module), is_package=any(one.startswith(f"{name}.") for one in self._modules))

    def _is_the_scripts(self) -> bool:
        """Return whether the script asks for a module: an installed package finds what is installed, as always."""
        for frame in _frames():
            file = frame.f_code.co_filename
            if is_script(file):
                return True
            package = file.rpartition("-packages/")[2].partition("/")[0]
            if "-packages/" in file and package not in self._roots:  # torch.load imports what a file names
                return False
        return False


class _Supplied(Loader):
    """Loads a module that exists, under another name."""

    def __init__(self, module: ModuleType) -> None:
        self._module, self._spec = module, module.__spec__

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return self._module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._spec or module.__spec__  # the import system has set the spec of the other name


class _ThenBegin(Loader):
    """Loads a framework as its own loader does, and then calls the function of its adapter."""

    def __init__(self, loader: Any, finder: Finder, root: str) -> None:
        self._loader, self._finder, self._root = loader, finder, root

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        made: ModuleType | None = self._loader.create_module(spec)
        return made

    def exec_module(self, module: ModuleType) -> None:
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        module.__loader__ = self._loader
        self._loader.exec_module(module)
        self._finder.begin(self._root)


def _forget(name: str, module: ModuleType) -> None:
    parent, _, child = name.rpartition(".")
    sys.modules.pop(name, None)
    kept_by = sys.modules.get(parent)
    if kept_by is not None and vars(kept_by).get(child) is module:  # an installed package that lacked this part
        delattr(kept_by, child)


# The run.


class NoScriptError(InvalidValueError):
    """There is no such file or module."""

    def __init__(self, found: str) -> None:
        super().__init__(
            "there is no such script",
            where="polyamp run",
            found=found,
            allowed="a Python file, or a folder with __main__.py; after -m the name of a module",
            fix="options of polyamp run come before the script, the script's own after it",
        )


def execute(session: Session, target: str, arguments: Sequence[str], is_module: bool) -> None:
    """Run the code as ``__main__``, with its arguments and its folder on ``sys.path``."""
    given = Path(target)
    file = given / "__main__.py" if given.is_dir() else given
    if not is_module and not file.is_file():
        raise NoScriptError(target)
    with ExitStack() as after:
        for owner, name in ((sys, "argv"), (sys, "path")):
            after.callback(setattr, owner, name, getattr(owner, name))
        sys.argv = [target, *arguments]
        sys.path = list(sys.path)
        if not sys.flags.safe_path:
            folder = Path.cwd() if is_module else given.absolute() if given.is_dir() else file.resolve().parent
            sys.path[0:1] = [str(folder)]
        after.callback(_wait_for_threads)
        if is_module:
            session.folder = _folder_of_module(target)
            runpy.run_module(target, run_name="__main__", alter_sys=True)
            return
        main = ModuleType("__main__")
        vars(main).update(__file__=str(file.absolute()), __builtins__=__builtins__)
        after.callback(sys.modules.__setitem__, "__main__", sys.modules["__main__"])
        sys.modules["__main__"] = main
        session.add_source(file.absolute())
        with io.open_code(str(file.absolute())) as opened:
            code = compile(opened.read(), str(file.absolute()), "exec", dont_inherit=True)
        exec(code, vars(main))


def _folder_of_module(name: str) -> str:
    """Return the folder of a module if it belongs to an installed package, whose code counts as the script's then."""
    try:
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.submodule_search_locations is not None:
            spec = importlib.util.find_spec(f"{name}.__main__")
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise
        spec = None
    if spec is None or spec.origin is None:
        raise NoScriptError(f"-m {name}")
    return "" if is_script(spec.origin) else f"{Path(spec.origin).parent}/"


def _wait_for_threads() -> None:
    """Wait as Python does at its end: a thread of the script may still train. Idle workers of executors end later."""
    workers = getattr(sys.modules.get("concurrent.futures.thread"), "_threads_queues", ())
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and not thread.daemon and thread not in workers:
            thread.join()


def without_own_frames(error: BaseException) -> BaseException:
    """Remove the frames of `polyamp run` from the tracebacks of a script's error and of its causes."""
    waiting, met = [error], set[int]()
    while waiting:
        one = waiting.pop()
        met.add(id(one))
        traces, trace, kept = list[TracebackType](), one.__traceback__, None
        while trace is not None:
            traces.append(trace)
            trace = trace.tb_next
        for trace in reversed(traces):
            file = trace.tb_frame.f_code.co_filename
            runs = file.startswith(("<frozen runpy", _IMPORTS)) or (file.startswith(_OURS) and file.endswith("/run.py"))
            if not runs:
                kept = TracebackType(kept, trace.tb_frame, trace.tb_lasti, trace.tb_lineno)
        one.__traceback__ = kept
        waiting += [other for other in (one.__cause__, one.__context__) if other is not None and id(other) not in met]
    return error
