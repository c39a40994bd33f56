"""Tracks which module runs, by the hooks that PyTorch calls around every module's forward."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from polyamp.backends.torch import unstable


class Places:
    """The running modules and their paths as rules match them: inside the outermost module that was called.

    >>> import torch
    >>> places = Places()
    >>> model = nn.Sequential(nn.ReLU())
    >>> handle = model[0].register_forward_pre_hook(lambda *_: print(repr(places.path)))
    >>> with places.followed():
    ...     _ = model(torch.ones(1))
    '0'

    Attributes:
        roots: the outermost modules that were called, in order.

    Args:
        on_root: called with each outermost module before its first call.
    """

    def __init__(self, on_root: Callable[[nn.Module], None] = lambda _: None) -> None:
        self.roots: list[nn.Module] = []
        self._on_root = on_root
        self._running: list[tuple[nn.Module, str]] = []
        self._paths: dict[nn.Module, dict[nn.Module, str]] = {}

    @property
    def path(self) -> str:
        """The path of the innermost module; empty outside modules, and in an outermost module itself."""
        return self._running[-1][1] if self._running else ""

    @contextmanager
    def followed(self) -> Iterator[None]:
        """Follow modules while this context is active."""
        # The warning does not apply here: the hooks ignore the wrapper that torch.compile(module) returns.
        warnings.filterwarnings("ignore", r"Using `torch.compile\(module\)` when there are global hooks")
        before = register_module_forward_pre_hook(self._enter)
        after = register_module_forward_hook(self._leave, always_call=True)
        try:
            yield
        finally:
            before.remove()
            after.remove()

    @unstable.never_compiled
    def _enter(self, module: nn.Module, inputs: Any) -> None:
        root = self._running[0][0] if self._running else self._root_of(module)
        self._running.append((module, self._paths_in(root).get(module, "")))

    @unstable.never_compiled
    def _leave(self, module: nn.Module, inputs: Any, output: Any) -> None:
        if self._running and self._running[-1][0] is module:
            self._running.pop()

    def _root_of(self, module: nn.Module) -> nn.Module:
        """Return the module itself; but for a checkpointed module that runs again in a backward pass, its root."""
        if module not in self._paths and unstable.running_node() is not None:
            return next((root for root in self.roots if module in self._paths[root]), module)
        return module

    def _paths_in(self, root: nn.Module) -> dict[nn.Module, str]:
        if root not in self._paths:
            self._on_root(root)
            self.roots.append(root)
            names = {module: name for name, module in root.named_modules()}
            self._paths[root] = {module: _path(name) for module, name in names.items()}
        return self._paths[root]


def _path(name: str) -> str:
    return name.removeprefix("_orig_mod").removeprefix(".").replace(".", "/")  # prefix of torch.compile(module)
