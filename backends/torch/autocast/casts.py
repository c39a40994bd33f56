"""The casts of an overridden operation's arguments and results, one function for each behaviour."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from polyamp.backends.torch.autocast.weights import cast_weight
from polyamp.backends.torch.unstable import schema_arguments

Call = Callable[..., Any]

# Their kernels take 16-bit inputs with float32 weights, and update statistics in float32 buffers: casting more than the
# input would lose the update.
ONLY_THE_INPUT = {"batch_norm", "instance_norm"}


def lower(op: Any, canonical: str, device_type: str, dtype: torch.dtype) -> Call:
    """Return a function that calls ``op`` with its floating inputs in a 16-bit type."""
    cast = _caster(device_type, canonical)
    return lambda args, kwargs: op(*cast(args, dtype), **_cast_named(kwargs, dtype, device_type))


def full(op: Any, canonical: str, device_type: str, dtype: torch.dtype) -> Call:
    """Return a function that calls ``op`` with floating inputs in float32, unless the caller passes a ``dtype=``."""
    cast, passes_dtype = _caster(device_type, canonical), _dtype_test(op)

    def call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if passes_dtype(args, kwargs):
            return op(*args, **kwargs)
        return op(*cast(args, torch.float32), **_cast_named(kwargs, torch.float32, device_type))

    return call


def inner(op: Any, canonical: str, device_type: str, dtype: torch.dtype) -> Call:
    """Return a function that calls ``op`` in float32, with its first result in 16 bits, unless it gets a ``dtype=``."""
    in_float32, passes_dtype = full(op, canonical, device_type, dtype), _dtype_test(op)

    def call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        out = in_float32(args, kwargs)
        return out if passes_dtype(args, kwargs) else rounded(out, device_type, dtype)

    return call


def rounded(out: Any, device_type: str, dtype: torch.dtype) -> Any:
    """Cast the result of an operation; of a tuple only the first result, of a list all results."""
    if not isinstance(out, tuple):
        return _cast(out, dtype, device_type)
    results = [_cast(out[0], dtype, device_type), *out[1:]]
    return type(out)(*results) if hasattr(out, "_fields") else type(out)(results)


def widest(op: Any, canonical: str, device_type: str, dtype: torch.dtype) -> Call:
    """Return a function that calls ``op`` in the widest type of its inputs: float32 for float16 with bfloat16."""
    cast = _caster(device_type, canonical)

    def call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if _agree(args, kwargs, device_type):
            return op(*args, **kwargs)
        return op(*cast(args, torch.float32), **_cast_named(kwargs, torch.float32, device_type))

    return call


def as_written(op: Any, canonical: str, device_type: str, dtype: torch.dtype) -> Call:
    """Return a function that calls ``op`` with its inputs unchanged."""
    return lambda args, kwargs: op(*args, **kwargs)


def cast_all(
    args: tuple[Any, ...], kwargs: dict[str, Any], op_class: str, device_type: str, dtype: torch.dtype
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Cast the arguments of a user's operation as its class requires; containers keep their types."""
    if op_class == "keep" or (op_class not in ("lower", "full", "inner") and _agree(args, kwargs, device_type)):
        return args, kwargs
    to = dtype if op_class == "lower" else torch.float32
    return tuple(_cast_tree(value, to, device_type) for value in args), _cast_tree(kwargs, to, device_type)


def _cast_tree(value: Any, dtype: torch.dtype, device_type: str) -> Any:
    if isinstance(value, dict):
        return {key: _cast_tree(one, dtype, device_type) for key, one in value.items()}
    if isinstance(value, list | tuple):
        cast = [_cast_tree(one, dtype, device_type) for one in value]
        return type(value)(*cast) if hasattr(value, "_fields") else type(value)(cast)
    return _cast(value, dtype, device_type)


def _eligible(tensor: Tensor, device_type: str) -> bool:
    """Return whether autocast casts a tensor: it has 16 or 32 floating bits, on this device type."""
    return tensor.dtype in _CAST_FROM and tensor.device.type == device_type


_CAST_FROM = frozenset({torch.float32, torch.float16, torch.bfloat16})


def _cast(value: Any, dtype: torch.dtype, device_type: str) -> Any:
    if isinstance(value, Tensor):
        if value.dtype is dtype or not _eligible(value, device_type):
            return value
        return cast_weight(value, dtype) if value.requires_grad and value.is_leaf else value.to(dtype)
    if isinstance(value, list | tuple):
        return [_cast(one, dtype, device_type) for one in value]
    return value


def _caster(device_type: str, canonical: str) -> Callable[[tuple[Any, ...], torch.dtype], Iterable[Any]]:
    if canonical in ONLY_THE_INPUT:
        return lambda args, dtype: [_cast(args[0], dtype, device_type), *args[1:]]
    return lambda args, dtype: [_cast(value, dtype, device_type) for value in args]


def _cast_named(kwargs: dict[str, Any], dtype: torch.dtype, device_type: str) -> dict[str, Any]:
    return {name: _cast(value, dtype, device_type) for name, value in kwargs.items()} if kwargs else kwargs


def _agree(args: tuple[Any, ...], kwargs: dict[str, Any], device_type: str) -> bool:
    """Return whether the tensors that autocast would cast have the same type."""
    common = None
    for value in (*args, *kwargs.values()) if kwargs else args:
        for one in value if isinstance(value, list | tuple) else (value,):
            if isinstance(one, Tensor) and one.dtype is not common and _eligible(one, device_type):
                if common is not None:
                    return False
                common = one.dtype
    return True


def _dtype_test(op: Any) -> Callable[[tuple[Any, ...], dict[str, Any]], bool]:
    """Return a test for calls of an operator that pass a ``dtype=``."""
    names = [argument.name for argument in schema_arguments(op) if not argument.kwarg_only]
    position = names.index("dtype") if "dtype" in names else None

    def passes_dtype(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        placed = position is not None and len(args) > position and args[position] is not None
        return placed or kwargs.get("dtype") is not None

    return passes_dtype
