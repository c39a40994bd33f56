"""The formats of Apex' levels: models that are cast, O1's region, and functions whose format the program chooses.

For O1, Apex replaced PyTorch's functions for the whole process, which covers losses outside of the model's forward
pass. A region of polyamp belongs to a thread, so `HANDLE` enters it in the thread that calls `amp.initialize`, and in
each thread that calls one of its models.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from types import BuiltinFunctionType, MethodDescriptorType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from polyamp.backends.torch.autocast.context import autocast_context
from polyamp.backends.torch.autocast.weights import forget_casts
from polyamp.backends.torch.casting import cast_tensor, cast_to, leaves
from polyamp.backends.torch.convert import convert
from polyamp.backends.torch.dtypes import SIXTEEN_BIT
from polyamp.errors import InvalidValueError, shown, unreported, warn_deprecated
from polyamp.policies import policy
from polyamp.run import current

Fn = TypeVar("Fn", bound=Callable[..., Any])
Cast = Callable[[Any], Any]

FORMATS = {torch.float16: "float16", torch.bfloat16: "bfloat16", torch.float32: "float32"}

_FLOAT16, _FLOAT32 = policy("mixed_float16"), policy("float32")
_INSTEAD = 'polyamp.policy("mixed_float16", rules={"name": "full"}), or "lower"'


def cast_model(model: nn.Module, dtype: Any, keep_batchnorm_fp32: bool | None, outputs: torch.dtype | None) -> None:
    """Cast a model as the options want, and its inputs and outputs on every call."""
    if dtype:  # all layers, except batch norms if they are kept
        rules = {**({"batch_norm": "inner"} if keep_batchnorm_fp32 else {}), "*_norm": "lower"}
        form, output = FORMATS[dtype], FORMATS[outputs or torch.float32]
        with unreported():  # a model without norms is not a mistake
            convert(model, policy(param=form, compute=form, output=output, rules=rules))
        for module in model.modules():
            module.register_state_dict_post_hook(_show_float32)  # type: ignore[no-untyped-call]
    elif outputs is not None:
        model.register_forward_hook(lambda _, __, out: cast_to(out, outputs, modules=False))


def _show_float32(module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
    """Replace 16-bit values of a state dict by float32 ones."""
    for key, value in state.items():
        if key.startswith(prefix) and isinstance(value, Tensor) and value.dtype in SIXTEEN_BIT:
            state[key] = cast_tensor(value, torch.float32)


class _Here(threading.local):
    region: AbstractContextManager[None] | None = None  # that this thread has entered


_HERE = _Here()


class AmpHandle:
    """O1, which is active from `amp.initialize` until ``_deactivate()``."""

    def __init__(self) -> None:
        self.is_active = False
        self._replaced: list[tuple[Any, str, Any]] = []

    def activate(self, models: Iterable[nn.Module]) -> None:
        """Enter the region here and in the models' calls, and replace the functions that were registered so far."""
        for (owner, name), cast in _registered.items():
            original = getattr(owner, name)
            self._replaced.append((owner, name, original))
            setattr(owner, name, _casting(original, cast=cast))
        _registered.clear()
        if not self.is_active and (session := current()) is not None:
            session.callback(self._deactivate)
        self.is_active = True
        self._enter()
        for model in models:
            model.register_forward_pre_hook(self._call_begins)
            model.register_forward_hook(self._call_ends, always_call=True)

    def is_here(self) -> bool:
        """Return whether this thread is in the region with autocast still on."""
        return self.is_active and _HERE.region is not None and torch.is_autocast_enabled("cpu")

    def _enter(self) -> None:
        if _HERE.region is None:
            _HERE.region = autocast_context(_FLOAT16)
            _HERE.region.__enter__()
            torch.set_autocast_cache_enabled(False)  # a cast without gradients would be used later with them

    def _call_begins(self, model: nn.Module, args: Any) -> None:
        if self.is_active:  # casts of weights are kept during a call
            self._enter()
            forget_casts()
            torch.set_autocast_cache_enabled(True)

    def _call_ends(self, model: nn.Module, args: Any, outputs: Any) -> None:
        if _HERE.region is not None:
            torch.set_autocast_cache_enabled(False)

    def _deactivate(self) -> None:
        self.is_active = False
        if _HERE.region is not None:
            _HERE.region.__exit__(None, None, None)
            _HERE.region = None
            torch.set_autocast_cache_enabled(True)
        while self._replaced:
            setattr(*self._replaced.pop())


HANDLE = AmpHandle()


def casts_off() -> AbstractContextManager[None]:
    """Run operations as they are written, for an optimizer's step and for functions that chose their format."""
    return nullcontext() if _HERE.region is None else autocast_context(_FLOAT32)


# Functions whose format the program chooses.


_to_half = functools.partial(cast_to, dtype=torch.float16, modules=False)
_to_float = functools.partial(cast_to, dtype=torch.float32, modules=False)


def _to_widest(tree: Any) -> Any:
    dtypes = [leaf.dtype for leaf in leaves(tree) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
    return cast_to(tree, functools.reduce(torch.promote_types, dtypes), modules=False) if dtypes else tree


def half_function(fn: Fn) -> Fn:
    """Return the function with floating arguments cast to float16 where O1 is active."""
    return _decorated("half_function", fn, _to_half)


def float_function(fn: Fn) -> Fn:
    """Return the function with floating arguments cast to float32 where O1 is active."""
    return _decorated("float_function", fn, _to_float)


def promote_function(fn: Fn) -> Fn:
    """Return the function with floating arguments cast to their widest type where O1 is active."""
    return _decorated("promote_function", fn, _to_widest)


def register_half_function(module: Any, name: str) -> None:
    """Let a function of a module or class run in float16, from the next `amp.initialize` on."""
    _register("register_half_function", module, name, _to_half)


def register_float_function(module: Any, name: str) -> None:
    """Let a function of a module run in float32; see `register_half_function`."""
    _register("register_float_function", module, name, _to_float)


def register_promote_function(module: Any, name: str) -> None:
    """Let a function of a module run in the widest type of its arguments; see `register_half_function`."""
    _register("register_promote_function", module, name, _to_widest)


_registered: dict[tuple[Any, str], Cast] = {}


def _register(function: str, module: Any, name: str, cast: Cast) -> None:
    warn_deprecated(f"apex.amp.{function}(module, name)", _INSTEAD)
    if not hasattr(module, name):
        where, allowed = f"amp.{function}(module, name)", f"a function of {shown(module)}"
        raise InvalidValueError("the module has no function of this name", where=where, found=name, allowed=allowed)
    _registered[module, name] = cast


def _decorated(function: str, fn: Fn, cast: Cast) -> Fn:
    warn_deprecated(f"apex.amp.{function}", _INSTEAD)
    return _casting(fn, cast=cast)


def _casting(fn: Fn, *, cast: Cast) -> Fn:
    """Return the function with its arguments cast."""
    # A function of PyTorch runs in this format itself. The operations of any other function have the formats of O1.
    is_torchs = str(getattr(fn, "__module__", "")).startswith("torch")
    is_torchs = is_torchs or isinstance(fn, BuiltinFunctionType | MethodDescriptorType)

    def casting(*args: Any, **kwargs: Any) -> Any:
        is_here = HANDLE.is_here()
        args, kwargs = cast((args, kwargs)) if is_here else (args, kwargs)
        with casts_off() if is_here and is_torchs else nullcontext():
            return fn(*args, **kwargs)

    return functools.wraps(fn)(casting)  # type: ignore[return-value]
