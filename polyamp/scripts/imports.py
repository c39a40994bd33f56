"""The import hook of `polyamp run`: supplies modules that a script lacks, and tells adapters about their frameworks.

Two entry-point groups decide. Under ``polyamp.modules``, ``apex = "polyamp.backends.torch.apex"`` makes
``import apex.amp`` import what ``modules()`` of that module has for the name, where no ``apex.amp`` is installed. An
apex that is installed without its ``amp`` keeps its other parts, and installed packages find what is installed. Under
``polyamp.scripts``, ``torch = "...whole_script:begin"`` is called with the session right after ``torch`` was imported.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.metadata import entry_points
from importlib.util import find_spec
from types import ModuleType
from typing import Any

from polyamp.scripts.places import calling_package
from polyamp.scripts.session import Session

MODULES = "polyamp.modules"
SCRIPTS = "polyamp.scripts"


@contextmanager
def hooked(session: Session) -> Iterator[None]:
    """Supply missing modules and call the adapters' ``begin`` for the imports of this block.

    >>> with hooked(Session()):
    ...     any(isinstance(finder, Finder) for finder in sys.meta_path)
    True
    """
    finder = Finder(session)
    try:
        finder.install()
        yield
    finally:
        sys.meta_path.remove(finder)
        finder.remove_supplied()


class Finder(MetaPathFinder):
    """Finds the modules of both entry-point groups, before Python's own finders, and no others.

    Args:
        session: the run.
    """

    def __init__(self, session: Session) -> None:
        self.session = session
        self.modules = {entry.name: entry.value for entry in entry_points(group=MODULES)}
        self.begins = {entry.name: entry for entry in entry_points(group=SCRIPTS)}
        self._frameworks = frozenset(self.begins)
        self._supplied: list[str] = []

    def install(self) -> None:
        """Become the first finder, and call ``begin`` for the frameworks that were imported before."""
        sys.meta_path.insert(0, self)
        for root in [root for root in self.begins if root in sys.modules]:
            self.begin(root)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of a module that polyamp supplies or waits for; None leaves it to the other finders."""
        if fullname in self.begins:
            return self._watched(fullname, path, target)
        root = fullname.partition(".")[0]
        if root not in self.modules or self._exists(fullname, path, target) or self._is_for_others(root):
            return None
        return self._supplying(fullname)

    def begin(self, root: str) -> None:
        """Call an adapter's ``begin``, once, after its framework was imported.

        Raises:
            UsageError: the adapter refuses the script; or it cannot be loaded, and the run has a policy.
        """
        entry = self.begins.pop(root, None)
        if entry is None:
            return
        try:
            begin = entry.load()
        except ImportError as error:
            if self.session.policy is not None:
                self.session.refuse(
                    f"polyamp's support for {root} cannot be loaded",
                    found=error,
                    fix="see polyamp doctor; or leave out --policy",
                )
            self.session.note(f"polyamp's support for {root} cannot be loaded: {error}")
        else:
            self.session.begun.append(root)
            begin(self.session)

    def remove_supplied(self) -> None:
        """Remove the supplied modules under their old names."""
        for name in reversed(self._supplied):
            parent, _, child = name.rpartition(".")
            ours = sys.modules.pop(name, None)
            kept_by = sys.modules.get(parent)
            if parent not in self._supplied and kept_by is not None and vars(kept_by).get(child) is ours:
                delattr(kept_by, child)
        self._supplied.clear()

    def _watched(self, root: str, path: Sequence[str] | None, target: ModuleType | None) -> ModuleSpec | None:
        spec = _found_by(self._others(), root, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _ThenBegin(spec.loader, self, root)
        return spec

    def _exists(self, name: str, path: Sequence[str] | None, target: ModuleType | None) -> bool:
        """Return whether a module is installed. A folder of that name without code, such as a checkout, is not."""
        if name.rpartition(".")[0] in self._supplied:
            return False  # the path is polyamp's
        spec = _found_by(self._others(), name, path, target)
        return spec is not None and not (spec.loader is None and spec.origin is None)

    def _is_for_others(self, root: str) -> bool:
        """Return whether an installed package asks for a module. Packages find what is installed, as without polyamp.

        Frameworks do not count: `torch.load` imports what a file names, for the script.
        """
        return root not in self._supplied and calling_package(self._frameworks) != ""

    def _others(self) -> list[Any]:
        return [finder for finder in sys.meta_path if finder is not self]

    def _supplying(self, name: str) -> ModuleSpec | None:
        root, _, rest = name.partition(".")
        try:
            known = importlib.import_module(self.modules[root]).modules()
        except AttributeError:  # a package, which has the modules under the same names
            known = None
        except ImportError:  # its framework is not installed
            return None
        if known is not None:
            inside = any(other.startswith(f"{name}.") for other in known)
            return ModuleSpec(name, _Alias(known[name], self), is_package=inside) if name in known else None
        ours = f"{self.modules[root]}.{rest}".rstrip(".")
        try:
            found = find_spec(ours)
        except ImportError:  # its framework is not installed
            found = None
        if found is None:
            return None
        is_package = found.submodule_search_locations is not None
        return ModuleSpec(name, _Alias(ours, self), origin=found.origin, is_package=is_package)

    def supply(self, name: str) -> None:
        """Record that one of polyamp's modules is imported under this name."""
        self._supplied.append(name)
        self.session.supplied.append(name)


class _Alias(Loader):
    """Loads one of polyamp's modules under another name: the same module object, so that its classes are the same."""

    def __init__(self, ours: str | ModuleType, finder: Finder) -> None:
        self._ours, self._finder = ours, finder
        self._spec: ModuleSpec | None = None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = importlib.import_module(self._ours) if isinstance(self._ours, str) else self._ours
        self._spec = module.__spec__
        self._finder.supply(spec.name)
        return module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._spec  # the import system has set the spec of the other name


class _ThenBegin(Loader):
    """Loads a framework as its own loader does, and then calls the adapter's ``begin``."""

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


def _found_by(
    finders: Iterable[Any], name: str, path: Sequence[str] | None, target: ModuleType | None
) -> ModuleSpec | None:
    for finder in finders:
        spec: ModuleSpec | None = finder.find_spec(name, path, target) if hasattr(finder, "find_spec") else None
        if spec is not None:
            return spec
    return None
