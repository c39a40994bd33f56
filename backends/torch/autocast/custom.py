"""Autocast for users' own operations, `torch.autograd.Function` and custom operators, by class instead of by dtype."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from polyamp.backends.torch import unstable
from polyamp.backends.torch.autocast import casts, overrides, regions
from polyamp.backends.torch.autocast.behaviours import class_name
from polyamp.backends.torch.autocast.regions import (
    ACCELERATOR,
    BY_MARK,
    DEVICE_TYPES,
    Marks,
    Region,
    marked,
    marks_here,
    tag_caches,
)
from polyamp.errors import InvalidTypeError, InvalidValueError
from polyamp.operations import CLASSES

Fn = TypeVar("Fn", bound=Callable[..., Any])

CLASSES_OF: dict[str, str] = {}  # users' operators and functions, by the names that rules use, with their classes


def register_autocast(op: Any, op_class: str) -> None:
    """Make a custom operator autocast in every region, polyamp's and torch.autocast's, on every device type here.

    A policy's rules can set another class for its name: ``{"mylib::attend": "full"}``.

    >>> import torch, polyamp
    >>> @torch.library.custom_op("polyamp_docs::twice", mutates_args=())
    ... def twice(x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    ...     return x + x + bias
    >>> register_autocast(twice, "lower")
    >>> with polyamp.autocast("mixed_bfloat16"):
    ...     print(twice(torch.ones(2), torch.ones(2)).dtype)
    torch.bfloat16

    Args:
        op: an operator: a result of `torch.library.custom_op`, an object such as ``torch.ops.mylib.attend``, one of its
            overloads, or its qualified name.
        op_class: a class of `polyamp.operations.CLASSES`; ``promote``, ``follow`` and ``neutral`` run in the widest
            type of the inputs. Arguments that the operator changes are never cast.

    Raises:
        InvalidTypeError: ``op`` is not an operator.
        InvalidValueError: the class is unknown, or the operator is one of PyTorch's own; use a rule for those.
    """
    _check_class(op_class, where="register_autocast(op, op_class)")
    overloads = unstable.overloads_of(op)
    if not overloads:
        raise InvalidTypeError(
            "not an operator",
            where="register_autocast(op, op_class)",
            found=repr(op),
            allowed="a custom operator, an overload of one, or its name, such as 'mylib::attend'",
            fix="define it first, with torch.library.custom_op or torch.library.define",
        )
    for overload in overloads:
        name = overload.name()
        if name.startswith("aten::"):
            raise InvalidValueError(
                "PyTorch's own operators already have classes",
                where="register_autocast(op, op_class)",
                found=name,
                allowed="an operator of your own",
                fix=f"add a rule to the policy: rules={{{class_name(name)!r}: {op_class!r}}}",
            )
        CLASSES_OF[class_name(name)] = op_class
        tag_caches(f"{class_name(name)}={op_class}")
        for device_type in DEVICE_TYPES:
            overrides.register_custom(overload, device_type, _kernel)


def _kernel(op: Any, device_type: str) -> Callable[..., Any]:
    key, name, written = unstable.AutocastKey(device_type), class_name(op.name()), unstable.written_arguments(op)

    @unstable.never_compiled
    def kernel(*args: Any, **kwargs: Any) -> Any:
        op_class = _class_in(regions.current(device_type), name, CLASSES_OF[name])
        dtype = torch.get_autocast_dtype(device_type)
        cast_args, cast_kwargs = casts.cast_all(args, kwargs, op_class, device_type, dtype)
        for position, argument in written:  # the operator has to change these, not a cast of them
            if position < len(args):
                cast_args = (*cast_args[:position], args[position], *cast_args[position + 1 :])
            elif argument in kwargs:
                cast_kwargs = {**cast_kwargs, argument: kwargs[argument]}
        with key.excluded():
            out = op(*cast_args, **cast_kwargs)
        return casts.rounded(out, device_type, dtype) if op_class == "inner" and not written else out

    return kernel


def custom_fwd(forward: Fn | None = None, *, op_class: str | None = None) -> Any:
    """Decorate the ``forward`` of a `torch.autograd.Function`, to run it in the formats of the region of its call.

    Without a class it runs as any code in the region does. With one, its floating inputs are cast as those of an
    operation of that class, and nothing inside autocasts. A policy's rules can set another class for the name of the
    function's class. `custom_bwd` runs ``backward`` in the same way, wherever the backward pass is called.

    >>> import torch, polyamp
    >>> class Product(torch.autograd.Function):
    ...     @staticmethod
    ...     @custom_fwd(op_class="lower")
    ...     def forward(ctx, a, b):
    ...         ctx.save_for_backward(a, b)
    ...         return a @ b
    ...     @staticmethod
    ...     @custom_bwd
    ...     def backward(ctx, grad):
    ...         a, b = ctx.saved_tensors
    ...         return grad @ b.t(), a.t() @ grad
    >>> with polyamp.autocast("mixed_bfloat16"):
    ...     print(Product.apply(torch.ones(2, 2), torch.ones(2, 2)).dtype)
    torch.bfloat16

    Args:
        forward: the function, with the context as its first argument.
        op_class: a class of `polyamp.operations.CLASSES`, or None.

    Raises:
        InvalidValueError: the class is unknown.
    """
    if op_class is not None:
        _check_class(op_class, where="custom_fwd(op_class=)")
    if forward is None:
        return functools.partial(custom_fwd, op_class=op_class)
    function, name = forward, forward.__qualname__.rpartition(".")[0].rpartition(".")[2]

    if op_class is not None:
        CLASSES_OF[name] = op_class

    @functools.wraps(function)
    def cast_forward(ctx: Any, *args: Any, **kwargs: Any) -> Any:
        state = _here(args, name, op_class)
        ctx.polyamp_autocast = state
        with _restored(state):
            if state.op_class is not None and state.dtype is not None:
                args, kwargs = casts.cast_all(args, kwargs, state.op_class, state.device_type, state.dtype)
            out = function(ctx, *args, **kwargs)
        if state.op_class == "inner" and state.dtype is not None:
            return casts.rounded(out, state.device_type, state.dtype)
        return out

    return cast_forward


def custom_bwd(backward: Fn) -> Fn:
    """Decorate the ``backward`` of a function whose ``forward`` has `custom_fwd`, to run it in the same formats."""

    @functools.wraps(backward)
    def cast_backward(ctx: Any, *grads: Any) -> Any:
        state: _State = ctx.polyamp_autocast
        with _restored(state):
            if state.op_class == "inner" and state.dtype is not None:
                grads, _ = casts.cast_all(grads, {}, "full", state.device_type, state.dtype)
            return backward(ctx, *grads)

    return cast_backward  # type: ignore[return-value]


class _State(NamedTuple):
    """The autocast state in which a function's forward ran."""

    device_type: str  # the device type of its tensors
    dtype: torch.dtype | None  # native autocast's dtype for that device type; None if it is off
    op_class: str | None  # the class of the function; None if the operations inside autocast instead
    native: dict[str, tuple[torch.dtype, bool]]  # native autocast's dtype, and whether it is on, by device type
    marks: Marks  # the region's marks; see `regions`
    region: Region | None  # polyamp's region; None in compiled code


def _here(args: tuple[Any, ...], name: str, op_class: str | None) -> _State:
    device_type = next((value.device.type for value in args if isinstance(value, Tensor)), "cpu")
    native = {device: (torch.get_autocast_dtype(device), torch.is_autocast_enabled(device)) for device in DEVICE_TYPES}
    dtype, enabled = native.get(device_type, (None, False))
    marks = marks_here()
    compiling = torch.compiler.is_compiling()
    region = None if compiling or not enabled else regions.current(device_type)
    if op_class is not None:
        op_class = _class_in_graph(name, op_class, *marks) if compiling else _class_in(region, name, op_class)
    return _State(device_type, dtype if enabled else None, op_class, native, marks, region)


@contextmanager
def _restored(state: _State) -> Iterator[None]:
    """Restore native autocast and polyamp's region; or turn both off, if the function is one operation."""
    on = state.op_class is None
    region = marked(state.marks) if torch.compiler.is_compiling() else _entered(state.region if on else None)
    with _native("cpu", state, on), _native(ACCELERATOR, state, on), region:
        yield


def _native(device_type: str | None, state: _State, on: bool) -> AbstractContextManager[Any]:
    if device_type is None:
        return nullcontext()
    dtype, enabled = state.native[device_type]
    return torch.autocast(device_type, dtype=dtype, enabled=enabled and on)


@contextmanager
def _entered(region: Region | None) -> Iterator[None]:
    frame = regions.enter(region)
    try:
        yield
    finally:
        regions.leave(frame)


def _class_in(region: Region | None, name: str, op_class: str) -> str:
    rules = () if region is None else region.rules
    return next((rule.op_class for rule in rules if rule.matches(name)), op_class)


@unstable.constant_when_compiled
def _class_in_graph(name: str, op_class: str, first: torch.dtype, second: torch.dtype) -> str:
    return _class_in(BY_MARK.get((first, second)), name, op_class)


def _check_class(op_class: object, *, where: str) -> None:
    if op_class not in CLASSES:
        raise InvalidValueError(
            "unknown class of operations",
            where=where,
            found=repr(op_class),
            allowed=", ".join(CLASSES),
            fix="choose one of those",
        )
