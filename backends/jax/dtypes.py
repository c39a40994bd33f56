"""JAX's dtypes for the core's formats, and tests of a pytree's leaves."""

from __future__ import annotations

from typing import Any, TypeGuard

import jax
import jax.numpy as jnp
import numpy as np

from polyamp.errors import InvalidValueError
from polyamp.formats import format_of

_NATIVE: dict[str, Any] = {
    "float64": jnp.float64,
    "float32": jnp.float32,
    "tensorfloat32": jnp.float32,  # a way to multiply float32, not a way to store it
    "float16": jnp.float16,
    "bfloat16": jnp.bfloat16,
    "float8_e4m3fn": jnp.float8_e4m3fn,
    "float8_e5m2": jnp.float8_e5m2,
}


def dtype_of(format_name: str) -> np.dtype[Any]:
    """Return the dtype that stores a format."""
    dtype: np.dtype[Any] = np.dtype(_NATIVE[format_of(format_name).name])
    if jax.dtypes.canonicalize_dtype(dtype) != dtype:
        raise InvalidValueError(
            "JAX has float64 switched off",
            where="a cast in JAX",
            found=repr(format_name),
            allowed="float32 and narrower",
            fix='call jax.config.update("jax_enable_x64", True) when the program starts, or choose another format',
        )
    return dtype


def is_array(leaf: object) -> TypeGuard[Any]:
    """Return whether a leaf is a JAX (also traced) or NumPy array or a NumPy scalar; Python numbers are not."""
    return isinstance(leaf, jax.Array | np.ndarray | np.generic)


def is_floating(leaf: object) -> TypeGuard[Any]:
    """Return whether a leaf is a floating-point array, or the description of one (``jax.ShapeDtypeStruct``)."""
    return (is_array(leaf) or isinstance(leaf, jax.ShapeDtypeStruct)) and jnp.issubdtype(leaf.dtype, jnp.floating)


def is_trainable(leaf: object) -> TypeGuard[Any]:
    """Return whether a leaf can have a gradient: a floating-point or complex array."""
    return is_array(leaf) and jnp.issubdtype(leaf.dtype, jnp.inexact)


def is_low(leaf: object) -> TypeGuard[Any]:
    """Return whether a leaf is a floating-point array of 16 bits or fewer."""
    return is_floating(leaf) and leaf.dtype.itemsize <= 2


def is_traced(value: object) -> bool:
    """Return whether a value is being traced and so has no number yet."""
    return isinstance(value, jax.core.Tracer)
