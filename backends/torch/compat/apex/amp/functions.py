"""Functions whose format the program chooses: decorators, and functions of modules by their names."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import BuiltinFunctionType, MethodDescriptorType, ModuleType
from typing import Any, TypeVar

import torch

from polyamp.backends.torch.casting import cast_to, leaves
from polyamp.backends.torch.compat.apex.amp.regions import is_here, turned_off
from polyamp.errors import InvalidValueError, warn_deprecated

Fn = TypeVar("Fn", bound=Callable[..., Any])
Choice = Callable[[Any], Any]

_INSTEAD = 'polyamp.policy("mixed_float16", rules={"name": "full"}), or "lower"'

_BUILT_IN = (BuiltinFunctionType, MethodDescriptorType)

_registered: dict[tuple[Any, str], Choice] = {}


def half_function(fn: Fn) -> Fn:
    """Let a function take its floating arguments in float16, wherever O1 is active.

    >>> half_function(torch.relu)(torch.ones(1)).dtype  # O1 is not active
    torch.float32
    """
    warn_deprecated("apex.amp.half_function", _INSTEAD)
    return _choosing(fn, _to_half)


def float_function(fn: Fn) -> Fn:
    """Let a function take its floating arguments in float32, wherever O1 is active."""
    warn_deprecated("apex.amp.float_function", _INSTEAD)
    return _choosing(fn, _to_float)


def promote_function(fn: Fn) -> Fn:
    """Let a function take its floating arguments in the widest of their types, wherever O1 is active."""
    warn_deprecated("apex.amp.promote_function", _INSTEAD)
    return _choosing(fn, _to_widest)


def register_half_function(module: Any, name: str) -> None:
    """Let a function of a module run in float16, from the next `initialize` or `init` on.

    Args:
        module: a module or class, such as ``torch``.
        name: the name of the function in it.

    Raises:
        InvalidValueError: there is no such function.
    """
    _register("register_half_function", module, name, _to_half)


def register_float_function(module: Any, name: str) -> None:
    """Let a function of a module run in float32, from the next `initialize` or `init` on."""
    _register("register_float_function", module, name, _to_float)


def register_promote_function(module: Any, name: str) -> None:
    """Let a function of a module run in the widest type of its arguments, from the next `initialize` or `init` on."""
    _register("register_promote_function", module, name, _to_widest)


def replace_registered() -> list[tuple[Any, str, Any]]:
    """Replace the functions that were registered, and return their owners, names and originals."""
    replaced = []
    for (owner, name), choice in _registered.items():
        original = getattr(owner, name)
        replaced.append((owner, name, original))
        setattr(owner, name, _choosing(original, choice))
    _registered.clear()
    return replaced


def _register(function: str, module: Any, name: str, choice: Choice) -> None:
    warn_deprecated(f"apex.amp.{function}(module, name)", _INSTEAD, stacklevel=4)
    if not hasattr(module, name):
        raise InvalidValueError(
            "the module has no function of this name",
            where=f"amp.{function}(module, name)",
            found=repr(name),
            allowed=f"a function of {module.__name__ if isinstance(module, ModuleType) else module!r}",
        )
    _registered[module, name] = choice


def _choosing(fn: Fn, choice: Choice) -> Fn:
    """Return the function with its arguments cast.

    A function of PyTorch runs in this format itself. The operations of any other function have the formats of O1.
    """
    is_torchs = str(getattr(fn, "__module__", "")).startswith("torch") or isinstance(fn, _BUILT_IN)

    def chosen(*args: Any, **kwargs: Any) -> Any:
        if not is_here():
            return fn(*args, **kwargs)
        args, kwargs = choice((args, kwargs))
        if not is_torchs:
            return fn(*args, **kwargs)
        with turned_off():
            return fn(*args, **kwargs)

    return functools.wraps(fn)(chosen)  # type: ignore[return-value]


def _to_half(tree: Any) -> Any:
    return cast_to(tree, torch.float16, modules=False)


def _to_float(tree: Any) -> Any:
    return cast_to(tree, torch.float32, modules=False)


def _to_widest(tree: Any) -> Any:
    dtypes = {leaf.dtype for leaf in leaves(tree) if isinstance(leaf, torch.Tensor) and leaf.is_floating_point()}
    widest = functools.reduce(torch.promote_types, dtypes) if dtypes else None
    return tree if widest is None else cast_to(tree, widest, modules=False)
