"""What an overridden operation does with its arguments: the behaviours behind the classes of operations."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from polyamp.backends.torch.autocast.weights import cast_weight
from polyamp.backends.torch.unstable import schema_arguments

Call = Callable[..., Any]

# Their statistics are float32 buffers that the operator changes, and their kernels take 16-bit inputs beside float32
# weights: casting more than the input would lose the update.
ONLY_THE_INPUT = {"batch_norm", "instance_norm"}


def lower(op: Any, canonical: str, device_type: str, dtype: torch.dtype) -> Call:
    """``op`` with its floating inputs in a 16-bit type."""
    cast = _caster(device_type, canonical)
    return lambda args, kwargs: op(*cast(args, dtype), **_cast_named(kwargs, dtype, device_type))


def full(op: Any, canonical: str, device_type: str, dtype: torch.dtype) -> Call:
    """``op`` with its floating inputs in float32, unless the caller gives a ``dtype=``."""
    cast, gives_dtype = _caster(device_type, canonical), _dtype_given(op)

    def call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if gives_dtype(args, kwargs):
            return op(*args, **kwargs)
        return op(*cast(args, torch.float32), **_cast_named(kwargs, torch.float32, device_type))

    return call


def inner(op: Any, canonical: str, device_type: str, dtype: torch.dtype) -> Call:
    """``op`` in float32, and its first result in a 16-bit type, unless the caller gives a ``dtype=``."""
    in_float32, gives_dtype = full(op, canonical, device_type, dtype), _dtype_given(op)

    def call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        out = in_float32(args, kwargs)
        return out if gives_dtype(args, kwargs) else rounded(out, device_type, dtype)

    return call


def rounded(out: Any, device_type: str, dtype: torch.dtype) -> Any:
    """The results of an operation, of which the first, or all of a list, is cast."""
    if not isinstance(out, tuple):
        return _cast(out, dtype, device_type)
    results = [_cast(out[0], dtype, device_type), *out[1:]]
    return type(out)(*results) if hasattr(out, "_fields") else type(out)(results)


def widest(op: Any, canonical: str, device_type: str, dtype: torch.dtype) -> Call:
    """``op`` with its floating inputs in the widest of their types; float16 beside bfloat16 gives float32."""
    cast = _caster(device_type, canonical)

    def call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if _agree(args, kwargs, device_type):
            return op(*args, **kwargs)
        return op(*cast(args, torch.float32), **_cast_named(kwargs, torch.float32, device_type))

    return call


def as_written(op: Any, canonical: str, device_type: str, dtype: torch.dtype) -> Call:
    """``op`` with its inputs as they come."""
    return lambda args, kwargs: op(*args, **kwargs)


def cast_all(
    args: tuple[Any, ...], kwargs: dict[str, Any], op_class: str, device_type: str, dtype: torch.dtype
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a user's own operation as its class has them; containers stay of their types."""
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
    """Whether autocast casts a tensor: neither float64, integer, complex or 8-bit values, nor other devices'."""
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
    """Whether the tensors that autocast would cast have one type."""
    common = None
    for value in (*args, *kwargs.values()) if kwargs else args:
        for one in value if isinstance(value, list | tuple) else (value,):
            if isinstance(one, Tensor) and one.dtype is not common and _eligible(one, device_type):
                if common is not None:
                    return False
                common = one.dtype
    return True


def _dtype_given(op: Any) -> Callable[[tuple[Any, ...], dict[str, Any]], bool]:
    """Whether a call of an operator gives a ``dtype=``."""
    names = [argument.name for argument in schema_arguments(op) if not argument.kwarg_only]
    position = names.index("dtype") if "dtype" in names else None

    def gives_dtype(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        placed = position is not None and len(args) > position and args[position] is not None
        return placed or kwargs.get("dtype") is not None

    return gives_dtype
