"""Tracks which modules run, by PyTorch's global hooks around every module's forward.

Rules match the path of a module, and a recording names it, but no operation knows the module that called it. While
`ModuleHooks` are entered, every module's forward calls them, and a list has the modules that are running; paths are
those inside the outermost one. In ``model = Sequential(Linear(2, 2), Sequential(ReLU()))`` the ``ReLU`` runs while the
list is ``[model, model[1], model[1][0]]`` and has the path ``1.0``.
"""

from __future__ import annotations

import re
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from polyamp.backends.torch import unstable

_IGNORED = ("ignore", re.compile(r"Using `torch.compile\(module\)` when there are global hooks"), Warning, None, 0)


class ModuleHooks:
    """Functions that are called around every module's forward, while this context is entered at least once."""

    # Code under checkpointing runs again in a backward pass, which may come after the context. So the hooks can stay:
    # as long as an autograd graph lives, or for good.

    def __init__(self, before: Callable[..., None], after: Callable[..., None]) -> None:
        self._before, self._after = before, after
        self._lock = threading.RLock()  # a graph may end anywhere
        self._users = 0
        self._handles: list[Any] = []
        self._graphs: weakref.WeakSet[Any] = weakref.WeakSet()
        self._stays = False

    def __enter__(self) -> None:
        with self._lock:
            self._users += 1
            if not self._handles:
                # The warning does not apply here: the hooks ignore the wrapper that torch.compile(module) returns.
                warnings.filters.insert(0, _IGNORED)  # type: ignore[attr-defined]
                first = register_module_forward_pre_hook(self._before)
                self._handles = [first, register_module_forward_hook(self._after, always_call=True)]

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._users -= 1
            if not self._users:
                self.remove()

    def remove(self) -> None:
        """Remove the hooks, whoever still uses them."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        if _IGNORED in warnings.filters:  # somebody may have replaced them
            warnings.filters.remove(_IGNORED)  # type: ignore[attr-defined]

    def stay(self) -> None:
        """Keep the hooks for good."""
        if not self._stays:
            self._stays = True
            self.__enter__()

    def stay_for(self, graph: Any) -> None:
        """Keep the hooks as long as an object lives, such as the graph of a checkpointed function."""
        if graph not in self._graphs:
            self._graphs.add(graph)
            self.__enter__()
            weakref.finalize(graph, self.__exit__).atexit = False


def paths_in(root: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules of a root with their paths; a module that is used twice comes with each of its paths."""
    for name, module in root.named_modules(remove_duplicate=False):
        yield name.removeprefix("_orig_mod").removeprefix("."), module  # the prefix of torch.compile(module)


class Tracker:
    """The path of the module that runs, for recordings."""

    def __init__(self, on_root: Callable[[nn.Module], None] = lambda _: None) -> None:
        self.roots: list[nn.Module] = []
        self._on_root = on_root
        self._running: list[tuple[nn.Module, str]] = []  # outermost first, each with its path
        self._paths: dict[nn.Module, dict[nn.Module, str]] = {}

    @property
    def path(self) -> str:
        """The path of the innermost module, as ``decoder/0``; empty outside modules, and in an outermost one."""
        return self._running[-1][1] if self._running else ""

    @contextmanager
    def followed(self) -> Iterator[None]:
        """Follow modules while this context is active."""
        with ModuleHooks(self._enter, self._leave):
            yield

    @unstable.never_compiled
    def _enter(self, module: nn.Module, inputs: Any) -> None:
        root = self._running[0][0] if self._running else self._root_of(module)
        self._running.append((module, self._paths_in(root).get(module, "")))

    @unstable.never_compiled
    def _leave(self, module: nn.Module, inputs: Any, output: Any) -> None:
        if self._running and self._running[-1][0] is module:  # else it began before the hooks did
            self._running.pop()

    def _root_of(self, module: nn.Module) -> nn.Module:
        """Return the root of a checkpointed module that runs again in a backward pass; else the module itself."""
        if module not in self._paths and unstable.running_node() is not None:
            return next((root for root in self.roots if module in self._paths[root]), module)
        return module

    def _paths_in(self, root: nn.Module) -> dict[nn.Module, str]:
        if root not in self._paths:
            self._on_root(root)
            self.roots.append(root)
            paths = self._paths[root] = {}
            for path, module in paths_in(root):
                paths.setdefault(module, path.replace(".", "/"))
        return self._paths[root]
