"""Promotion: an operation that TensorFlow refuses because its inputs mix float32 and 16 bits runs in float32.

TensorFlow raises there, where JAX, torch and Keras' own operations promote. With it, the code of a user's layer runs on
all of them. What TensorFlow runs as it is, stays as it is: an operation is promoted only after it was refused.

For example, ``x * mask`` of a float16 ``x`` and a float32 ``mask`` calls ``gen_math_ops.mul``, which raises; then it is
called again with ``x`` in float32.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import tensorflow as tf

REFUSALS = (TypeError, ValueError, tf.errors.InvalidArgumentError)
"""The errors by which TensorFlow refuses mixed formats."""


def run_promoted(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a function of TensorFlow; if it refuses inputs in float32 and in 16 bits, call it with all in float32."""
    try:
        return function(*args, **kwargs)
    except REFUSALS:
        given = [value for value in tf.nest.flatten((args, kwargs)) if hasattr(value, "dtype")]
        if not (any(map(_is_low, given)) and any(value.dtype == "float32" for value in given)):
            raise
        args, kwargs = tf.nest.map_structure(_widened, (args, kwargs))
    return function(*args, **kwargs)


def mixed_formats(error: Exception) -> str | None:
    """Return the line in which TensorFlow refuses to mix float32 with 16 bits; None if an error is another one."""
    text = str(error).partition("Arguments received by")[0]  # which Keras adds, with the formats of all arguments
    lines = (
        line for line in text.splitlines() if re.search(r"float16|half", line) and re.search(r"float(32)?\b", line)
    )
    return next(lines, None)


def _widened(value: Any) -> Any:
    return tf.cast(value, tf.float32) if _is_low(value) else value


def _is_low(value: Any) -> bool:
    return getattr(value, "dtype", None) in ("float16", "bfloat16")
