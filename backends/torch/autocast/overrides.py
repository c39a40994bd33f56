"""Operations whose class under a policy's own rules is not what native autocast does with them.

Each is registered once, at the first region that needs it, for the whole process. Its kernel asks at every call which
region it is in, and hands over to native autocast's kernel wherever that would do the same.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch

from polyamp.backends.torch import unstable
from polyamp.backends.torch.autocast import boxed, casts
from polyamp.backends.torch.autocast.native_lists import TORCH_VERSION, category, existing, known, registered
from polyamp.backends.torch.autocast.regions import DEVICE_TYPES, Region, current, tag_caches
from polyamp.backends.torch.autocast.weights import library
from polyamp.backends.torch.operations import canonical
from polyamp.errors import warn_once
from polyamp.operations import OPERATIONS
from polyamp.rules import TABLE, Rule, decide

Behaviour = Callable[..., casts.Call]

_OF_CLASS: dict[str, Behaviour] = {
    "lower": casts.lower,
    "inner": casts.inner,
    "full": casts.full,
    "promote": casts.widest,
    "follow": casts.widest,  # eager code does not know what its inputs came from
    "neutral": casts.widest,
    "keep": casts.as_written,
}

# The native categories that do what a class asks for; beside them nothing is overridden.
_DOES: dict[str, set[str]] = {
    "lower": {"lower"},
    "inner": set(),
    "full": {"full", "full_dtype", "full_overload"},
    "promote": set(),  # native kernels refuse float16 beside bfloat16
    "follow": {"unlisted"},
    "neutral": {"unlisted"},
    "keep": {"unlisted"},
}

_CLASS_OF_LIST = {"lower": "lower", "full": "full", "full_dtype": "full", "full_overload": "full", "promote": "promote"}


def prepare(region: Region, device_type: str) -> None:
    """Register the operations that a region needs overridden on a device type; those that are stay."""
    for name in _PROMOTING & registered(device_type):
        leave_to_operator(name, device_type)
    for name in _native_names(region, device_type):
        override(name, device_type, required=False)
    for rule in region.rules:
        for name in operators_of(rule.pattern):
            if _behaviour(name, region, device_type) is not None:
                override(name, device_type)


def _native_names(region: Region, device_type: str) -> Iterator[str]:
    """Operators that no rule names: those that promote or compute variances, and in float16 on the CPU CUDA's list."""
    for name in registered(device_type) - _PROMOTING:
        if category(name, device_type) == "promote" and not _has_named_dimensions(name):
            yield name
    if device_type == "cpu" and region.dtype is torch.float16:
        yield from (name for name in known("cuda").keys() & existing() if _as_on_cuda(name))
    yield from (name for operation in _FULL_HERE for name in _index()[operation])


# What native lists leave out, so that it runs in the type of its input, and squares it there: 300 is too much.
_FULL_HERE = frozenset({"variance"})


def _as_on_cuda(operator: str) -> str | None:
    """The class that CUDA's list gives an operator which the CPU's does not have, and which the CPU can run."""
    if category(operator, "cpu") != "unlisted" or operator in _ONLY_ON_CUDA or _has_named_dimensions(operator):
        return None
    return _CLASS_OF_LIST.get(known("cuda").get(operator, ""))


def _has_named_dimensions(operator: str) -> bool:
    return "dimname" in operator.lower() or ".names" in operator


# These promote their inputs themselves, which native autocast's kernels do before them, refusing what they can do.
_PROMOTING = frozenset({"aten::cat", "aten::stack", "aten::addcmul", "aten::addcdiv", "aten::atan2"})

_ONLY_ON_CUDA = {
    "aten::_cudnn_rnn",
    "aten::cudnn_convolution",
    "aten::cudnn_convolution_transpose",
    "aten::_scaled_dot_product_flash_attention",
    "aten::_thnn_fused_gru_cell",
    "aten::_thnn_fused_lstm_cell",
}


def _behaviour(operator: str, region: Region, device_type: str) -> Behaviour | None:
    """What is done with an operator in a region; None where native autocast does it."""
    native = category(operator, device_type)
    op_class, reason = decide(region.rules, class_name(operator))
    if reason == TABLE or not any(rule.matches(class_name(operator)) for rule in region.rules):
        if native == "promote":
            return None if operator in _PROMOTING else casts.widest
        if class_name(operator) in _FULL_HERE and native == "unlisted":
            return casts.full
        on_cuda = _as_on_cuda(operator) if device_type == "cpu" and region.dtype is torch.float16 else None
        return _OF_CLASS[on_cuda] if on_cuda else None
    if native == "unknown":
        warn_once(
            f"{operator} is in native autocast's list of torch {torch.__version__}, which is newer than the list that "
            f"polyamp knows (torch {TORCH_VERSION}): {reason} does not reach it. Update polyamp."
        )
        return None
    return None if native in _DOES[op_class] else _OF_CLASS[op_class]


@cache
def native_classes(device_type: str, dtype: torch.dtype) -> dict[str, frozenset[str]]:
    """The classes that autocast itself gives canonical operations on a device type, by any of their operators.

    >>> sorted(native_classes("cpu", torch.bfloat16)["matmul"]), "exp" in native_classes("cpu", torch.bfloat16)
    (['lower'], False)
    >>> native_classes("cpu", torch.float16)["exp"]
    frozenset({'full'})
    """
    found: dict[str, set[str]] = {}
    for name in existing():
        op_class = _CLASS_OF_LIST.get(category(name, device_type))
        if op_class is None and device_type == "cpu" and dtype is torch.float16:
            op_class = _as_on_cuda(name)
        if class_name(name) in _FULL_HERE:
            op_class = "full"
        if op_class is not None:
            found.setdefault(class_name(name), set()).add(op_class)
    return {name: frozenset(classes) for name, classes in found.items()}


def class_name(operator: str) -> str:
    """The name by which rules know an operator: the canonical one, or its own where it is a user's.

    >>> class_name("aten::softmax.int"), class_name("mylib::gelu.default"), class_name("mylib::gelu")
    ('softmax', 'mylib::gelu', 'mylib::gelu')
    """
    return canonical(operator) or operator.partition(".")[0]


def operators_of(pattern: str) -> list[str]:
    """The operators that a rule's pattern names, in their functional forms with tensors to cast."""
    rule = Rule(pattern, "keep")
    return [name for operation, names in _index().items() if rule.matches(operation) for name in names]


@cache
def _index() -> dict[str, list[str]]:
    """Every operator that may be overridden, under its canonical name."""
    index: dict[str, list[str]] = {}
    for name in unstable.all_operators():
        operation = canonical(name) if name.startswith("aten::") else None
        if operation is not None and OPERATIONS[operation].op_class != "keep" and _can_be_overridden(name):
            index.setdefault(operation, []).append(name)
    return index


_LEFT_OUT = {"_scaled_mm", "_grouped_mm"}  # of 8-bit inputs with scales of their own


def _can_be_overridden(name: str) -> bool:
    """Forward operators that change and alias none of their arguments; views of 16-bit values are 16-bit values."""
    base, _, overload = name.removeprefix("aten::").partition(".")
    if base.endswith("_") or "backward" in base or base in _LEFT_OUT:
        return False
    if "out" in overload or _has_named_dimensions(name):
        return False
    arguments = unstable.schema_arguments(_overload(name))
    types = [str(argument.type) for argument in arguments]
    return (
        not any(argument.alias_info is not None for argument in arguments)
        and any("Tensor" in one for one in types)
        and not any("Generator" in one for one in types)
    )


def _overload(name: str) -> Any:
    namespace, _, rest = name.partition("::")
    base, _, overload = rest.partition(".")
    return getattr(getattr(getattr(torch.ops, namespace), base), overload or "default")


@contextmanager
def _overriding() -> Iterator[None]:
    """Without the warning that an override is meant to give once for all operators."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Warning only once for all operators")
        yield


_lock = threading.Lock()
_overridden: set[tuple[str, str]] = set()
_left: dict[tuple[str, str], Any] = {}


def leave_to_operator(name: str, device_type: str) -> None:
    """Have native autocast pass an operator by, at no cost; until a rule overrides it."""
    with _lock:
        place = (name, device_type)
        if place in _left or place in _overridden:
            return
        _left[place] = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
        with _overriding():
            key = unstable.AutocastKey(device_type).name
            _left[place].impl(name, torch.library.fallthrough_kernel, key)


def override(name: str, device_type: str, *, required: bool = True) -> None:
    """Register our kernel for one operator on one device type.

    Args:
        name: the operator.
        device_type: whose autocast it belongs to.
        required: whether ``POLYAMP_EXTENSION=require`` requires a compiled one, which is so where a user's rule asks.
    """
    compiled = boxed.kernels(required=required)
    with _lock:
        if (name, device_type) in _overridden:
            return
        left = _left.pop((name, device_type), None)
        if left is not None:
            unstable.withdraw(left)
        if compiled is not None:
            _override_compiled(compiled, name, device_type)
        else:
            kernel, key = _kernel(name, device_type), unstable.AutocastKey(device_type).name
            with _overriding():
                library.impl(name, kernel, key, with_keyset=True)  # type: ignore[no-untyped-call]
        _overridden.add((name, device_type))


def _override_compiled(compiled: boxed.Kernels, name: str, device_type: str) -> None:
    def choice(region: Region | None) -> boxed.Behaviour:
        behaviour = None if region is None else _behaviour(name, region, device_type)
        return boxed.Behaviour.NATIVE if behaviour is None or region is None else _compiled(behaviour, region.dtype)

    only_the_first = class_name(name) in casts.ONLY_THE_INPUT
    compiled.override(name, device_type, choice, listed=_is_listed(name, device_type), only_the_first=only_the_first)


def _compiled(behaviour: Behaviour, dtype: torch.dtype) -> boxed.Behaviour:
    if behaviour not in (casts.lower, casts.inner):
        return _IN_FULL[behaviour]
    name = "FLOAT16" if dtype is torch.float16 else "BFLOAT16"
    return boxed.Behaviour[name if behaviour is casts.lower else f"INNER_{name}"]


_IN_FULL: dict[Behaviour, boxed.Behaviour] = {
    casts.full: boxed.Behaviour.FLOAT32,
    casts.widest: boxed.Behaviour.WIDEST,
    casts.as_written: boxed.Behaviour.AS_WRITTEN,
}


def _is_listed(name: str, device_type: str) -> bool:
    """Whether native autocast's own kernel runs where nothing else is to be done."""
    return name in registered(device_type) - _PROMOTING


def _kernel(name: str, device_type: str) -> Callable[..., Any]:
    op, key = _overload(name), unstable.AutocastKey(device_type)
    native = _native(name, device_type, op, key)
    choices: dict[Region, casts.Call | None] = {}

    @unstable.never_compiled
    def kernel(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        region = current(device_type)
        if region is None:
            return native(keyset, args, kwargs)
        if region not in choices:
            behaviour = _behaviour(name, region, device_type)
            choices[region] = behaviour and behaviour(op, class_name(name), device_type, region.dtype)
        call = choices[region]
        if call is None:
            return native(keyset, args, kwargs)
        with key.excluded():
            return call(args, kwargs)

    return kernel


def _native(name: str, device_type: str, op: Any, key: unstable.AutocastKey) -> Callable[..., Any]:
    """What happens to an operator where it is not overridden: native autocast's kernel, or the next key's."""
    if _is_listed(name, device_type):
        kernel = torch.library.get_kernel(name, key.name)
        return lambda keyset, args, kwargs: kernel.call_boxed(keyset, *args, **kwargs)
    arguments = unstable.schema_arguments(op)
    others = [index for index, argument in enumerate(arguments) if index and str(argument.type) == "Tensor"]

    def plain(keyset: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with key.excluded():
            return op(*args, **kwargs)

    def composite(keyset: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The operators that it consists of autocast themselves; only a plain call takes numbers for tensors."""
        for index in others:
            if index < len(args) and not isinstance(args[index], torch.Tensor):
                return plain(keyset, args, kwargs)
        return op.redispatch(keyset & key.below, *args, **kwargs)

    return composite if unstable.is_composite(name) else plain


@cache
def custom_library(namespace: str) -> Any:
    """Registrations for a user's namespace, for as long as the process lives."""
    return torch.library.Library(namespace, "IMPL")  # type: ignore[no-untyped-call]


CUSTOM: dict[str, str] = {}  # the classes of users' own operators and functions, by the names that rules have for them


def register_custom(op: Any, op_class: str) -> None:
    """Have a custom operator autocast on every device type as its class, or a policy's rule for its name, says."""
    name = class_name(op.name())
    CUSTOM[name] = op_class
    tag_caches(f"{name}={op_class}")
    for device_type in DEVICE_TYPES:
        with _lock:
            if (op.name(), device_type) in _overridden:
                continue
            with _overriding():
                custom_library(op.namespace).impl(
                    op.name(), _custom_kernel(op, device_type), unstable.AutocastKey(device_type).name
                )
            _overridden.add((op.name(), device_type))


def _custom_kernel(op: Any, device_type: str) -> Callable[..., Any]:
    key, name, written = unstable.AutocastKey(device_type), class_name(op.name()), unstable.written_arguments(op)

    @unstable.never_compiled
    def kernel(*args: Any, **kwargs: Any) -> Any:
        region = current(device_type)
        rules = () if region is None else region.rules
        op_class = next((rule.op_class for rule in rules if rule.matches(name)), CUSTOM[name])
        dtype = torch.get_autocast_dtype(device_type)
        cast_args, cast_kwargs = casts.cast_all(args, kwargs, op_class, device_type, dtype)
        for position, argument in written:  # a cast would take the change
            if position < len(args):
                cast_args = (*cast_args[:position], args[position], *cast_args[position + 1 :])
            elif argument in kwargs:
                cast_kwargs = {**cast_kwargs, argument: kwargs[argument]}
        with key.excluded():
            out = op(*cast_args, **cast_kwargs)
        return casts.rounded(out, device_type, dtype) if op_class == "inner" and not written else out

    return kernel
