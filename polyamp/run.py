"""`polyamp run`: run a script as Python would, supply what it lacks, and under a policy train it in 16 bits.

Functions in the entry-point group ``polyamp.scripts`` do it, one for each package that a script may import:

    import torch  ->  Python imports torch, and then `begin(session)` of the torch adapter replaces parts of it
    import apex   ->  is not installed: the function returns modules of that name, and the script gets them
"""

from __future__ import annotations

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
from typing import Any, NoReturn

import polyamp
from polyamp.errors import InvalidValueError, UsageError, warn_once
from polyamp.plan import PlannedOperation
from polyamp.policies import Policy

_FOLDERS = {Path(polyamp.__file__).parent, Path(polyamp.__file__).parent / "backends"}
_OURS = tuple(f"{one}/" for folder in _FOLDERS for one in (folder, folder.resolve()))
_PYTHON = tuple(f"{sysconfig.get_path(name)}/" for name in ("stdlib", "platstdlib"))
_MISSING = object()
# Trainers run the loop and choose the precision themselves; each with what serves it.
_PLUGIN, _SETTING = "use polyamp.backends.torch.integrations.", "use its own setting for precision, without --policy"
_TRAINERS = {
    **dict.fromkeys(("lightning", "pytorch_lightning", "lightning_fabric"), f"{_PLUGIN}lightning"),
    **{"accelerate": f"{_PLUGIN}accelerate", "transformers.trainer": f"{_PLUGIN}transformers"},
    **dict.fromkeys(("deepspeed", "composer", "fairscale", "ignite", "colossalai"), _SETTING),
}


class Session:
    """One run: its policy, what it changed, and what its report is made of."""

    def __init__(self, policy: Policy | None = None) -> None:
        self.policy = policy
        self.holders: list[Any] = []  # wrapped optimizers and scalers, whose health is reported
        self.interfaces: list[dict[str, str]] = []  # mixed precision of the script's own, and the lines that use it
        self.supplied: list[str] = []
        self.operations: list[PlannedOperation] = []  # what ran in which format
        self.looked_at = ""  # where the operations are from
        self.own_loops: Any = None  # scales gradients that the script takes itself; of TensorFlow, for Keras
        self.has_low = False  # whether something ran in 16 bits that is not among the operations
        self.refusal: UsageError | None = None  # stays here if the script catches it
        self.folder = ""  # of an installed package that was started as a script
        self._as_written = ContextVar("as_written", default=False)
        self._undo: list[Callable[[], object]] = []

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

    def refuse(self, what: str, *, found: object = None, fix: str | None = None) -> NoReturn:
        """End the run: the script cannot be run safely."""
        self.refusal = UsageError(what, where=script_line() or "polyamp run", found=found, fix=fix)
        raise self.refusal

    def check(self) -> None:
        """Raise the refusal again if the script caught it: nothing may train after it."""
        if self.refusal is not None:
            raise self.refusal

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
        if self._session.policy is not None and fullname in _TRAINERS and self._is_the_scripts(fullname):
            what = f"{fullname} runs the training loop and chooses the precision itself"
            self._session.refuse(what, found=f"import {fullname}", fix=_TRAINERS[fullname])
        others = [one for one in sys.meta_path if one is not self and hasattr(one, "find_spec")]
        spec = next((spec for one in others if (spec := one.find_spec(fullname, path, target)) is not None), None)
        root, parent = fullname.partition(".")[0], fullname.rpartition(".")[0]
        if parent in self._session.supplied:
            spec = None  # what is on the path of polyamp's module would be a second copy
        if root in self._roots and (spec is None or (spec.loader is None and spec.origin is None)):
            return self._supplied(fullname) or spec  # a folder without code, such as a checkout, is not the package
        if fullname in self._entries and spec is not None and spec.loader is not None:
            self._begin_after(spec.loader, fullname)
        return spec

    def _begin_after(self, loader: Any, root: str) -> None:
        load = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            del loader.exec_module
            load(module)
            self.begin(root)

        loader.exec_module = exec_module

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
            warn_once(f"{what}: {error}")
        else:
            self._modules |= function(self._session) or {}

    def _supplied(self, name: str) -> ModuleSpec | None:
        if not self._is_the_scripts(name):
            return None
        if name in self._roots:
            self.begin(name, is_missing=True)
        module = self._modules.get(name)
        if module is None:
            return None
        self._session.supplied.append(name)
        self._session.at_end(partial(_forget, name, module))
        return ModuleSpec(name, _Supplied(module), is_package=any(one.startswith(f"{name}.") for one in self._modules))

    def _is_the_scripts(self, name: str) -> bool:
        """Return whether the script asks for a module: an installed package finds what is installed, as always."""
        through = self._roots | {"polyamp", name.partition(".")[0]}  # torch.load imports what a file names
        files = (frame.f_code.co_filename for frame in _frames())
        packages = (
            "" if is_script(file) else file.rpartition("-packages/")[2].partition("/")[0]
            for file in files
            if is_script(file) or "-packages/" in file
        )
        return next((not package for package in packages if package not in through), False)


class _Supplied(Loader):
    """Loads a module that exists, under another name."""

    def __init__(self, module: ModuleType) -> None:
        self._module, self._spec = module, module.__spec__

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return self._module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._spec or module.__spec__  # the import system has set the spec of the other name


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
            is_own = file.startswith(_OURS) and file.endswith("/run.py")
            if not is_own and not file.startswith(("<frozen runpy", "<frozen importlib")):
                kept = TracebackType(kept, trace.tb_frame, trace.tb_lasti, trace.tb_lineno)
        one.__traceback__ = kept
        waiting += [other for other in (one.__cause__, one.__context__) if other is not None and id(other) not in met]
    return error
