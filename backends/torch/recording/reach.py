"""Find what a step can reach: modules, optimizers, scalers, tensors; and the names of its parameters."""

from __future__ import annotations

import functools
import inspect
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

Kind = TypeVar("Kind")

_LEAVES = (nn.Module, torch.optim.Optimizer, torch.amp.GradScaler, Tensor)
_FAR = 20_000  # limit of visited objects, for steps that hold a whole application


class Reach:
    """The objects that are found from a step (a function, method or callable object) and from its arguments."""

    # Functions are followed into closures, defaults and the globals that they name; containers and plain objects into
    # their contents.

    def __init__(self, *roots: Any) -> None:
        self._found = [one for one in _walk(roots) if isinstance(one, _LEAVES)]

    def all_of(self, kind: type[Kind]) -> list[Kind]:
        """Return the objects of a type, in the order in which they were found."""
        return [one for one in self._found if isinstance(one, kind)]

    def modules(self) -> list[nn.Module]:
        """Return the outermost modules: those that are not inside another module."""
        return outermost(self.all_of(nn.Module))

    def parameters(self) -> Iterator[Tensor]:
        """Yield all tensors that can have a gradient: in modules, in optimizers' groups, and by themselves."""
        for module in self.modules():
            yield from module.parameters()
        for optimizer in self.all_of(torch.optim.Optimizer):
            yield from (param for group in optimizer.param_groups for param in group["params"])
        yield from (one for one in self.all_of(Tensor) if one.is_leaf and one.requires_grad)


def _walk(roots: Iterable[Any]) -> Iterator[Any]:
    seen: dict[int, Any] = {}
    waiting = list(roots)
    while waiting and len(seen) < _FAR:
        one = waiting.pop(0)
        if id(one) not in seen:
            seen[id(one)] = one
            yield one
            waiting += _held_by(one)


def _held_by(one: Any) -> Iterable[Any]:
    if isinstance(one, _LEAVES):
        return ()
    if isinstance(one, FunctionType):
        return _of_function(one)
    if isinstance(one, MethodType):
        return one.__self__, one.__func__
    if isinstance(one, functools.partial):
        return one.func, *one.args, *one.keywords.values()
    if isinstance(one, Mapping):
        return one.values()
    if isinstance(one, list | tuple | set):
        return one
    return _of_object(one)


def _of_function(function: FunctionType) -> Iterator[Any]:
    yield from function.__defaults__ or ()
    yield from (function.__kwdefaults__ or {}).values()
    yield getattr(function, "__wrapped__", None)
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # a variable without a value yet
            continue
    if _is_users(function.__module__):
        names = set(_names_in(function.__code__))
        for value in (function.__globals__[name] for name in names & function.__globals__.keys()):
            yield value
            if isinstance(value, ModuleType) and _is_users(value.__name__):
                yield from (vars(value)[name] for name in names & vars(value).keys())


def _names_in(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names_in(constant)


def _of_object(one: Any) -> Iterable[Any]:
    """Return the objects that a user's object holds. Classes and modules are shared, so they are not followed."""
    if isinstance(one, type | ModuleType) or not _is_users(type(one).__module__):
        return ()
    return (*getattr(one, "__dict__", {}).values(), inspect.getattr_static(type(one), "__call__", None))


_OTHERS = frozenset({*sys.stdlib_module_names, "torch", "polyamp", "numpy", "builtins"}) - {"__main__"}


def _is_users(module: str | None) -> bool:
    return str(module or "").partition(".")[0] not in _OTHERS


# Names of leaves.


def names_of(modules: Iterable[nn.Module], leaves: Sequence[Tensor]) -> dict[Tensor, str]:
    """Return names for leaves, in the order of the modules' parameters; other leaves follow, by number and shape."""
    wanted, named, kinds = set(leaves), dict[Tensor, tuple[str, str]](), Counter[str]()
    for module in outermost(modules):
        kind = type(module).__name__
        prefix = f"{kind}_{kinds[kind]}" if kinds[kind] else kind
        kinds[kind] += 1
        for name, param in module.named_parameters():
            if param in wanted:
                named.setdefault(param, (prefix, name.removeprefix("_orig_mod.")))
    shared = Counter(name for _, name in named.values())
    known = {param: f"{prefix}.{name}" if shared[name] > 1 else name for param, (prefix, name) in named.items()}
    others = [leaf for leaf in leaves if leaf not in known]
    return known | {leaf: f"parameter {place} of shape {tuple(leaf.shape)}" for place, leaf in enumerate(others)}


def outermost(modules: Iterable[nn.Module]) -> list[nn.Module]:
    """Return those of these modules that are inside no other of these, each once."""
    found = list(dict.fromkeys(modules))
    inner = {part for module in found for part in module.modules() if part is not module}
    return [module for module in found if module not in inner]
