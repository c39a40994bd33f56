"""Promotion: an operation that TensorFlow refuses because its inputs mix float32 and 16 bits runs in float32.

TensorFlow raises there, where JAX, torch and Keras' own operations promote. With promotion, a user's layer runs on all
of them. What TensorFlow runs as it is, stays as it is: an operation is promoted only after it was refused.

For example, ``x * mask`` of a float16 ``x`` and a float32 ``mask`` calls ``gen_math_ops.mul``, which raises; then it is
called again with ``x`` in float32. For this the functions that make operations are replaced, once and for all, by ones
that look whether they are called inside `promoting`.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import tensorflow as tf

from polyamp.backends.tensorflow import unstable
from polyamp.backends.tensorflow.operations import OPERATIONS

REFUSALS = (TypeError, ValueError, tf.errors.InvalidArgumentError)
"""The errors by which TensorFlow refuses mixed formats."""


@contextmanager
def promoting() -> Iterator[None]:
    """Promote float32 with 16 bits inside the context."""
    _intercept()
    token = _promotes.set(True)
    try:
        yield
    finally:
        _promotes.reset(token)


_promotes: ContextVar[bool] = ContextVar("polyamp_tensorflow_promotes", default=False)


@functools.cache
def _intercept() -> None:
    """Replace the functions that make operations, and the division that compares types before it makes one."""
    functions = [function for native in OPERATIONS for function in unstable.generated_functions(native)]
    originals = [*functions, unstable.true_division()]
    unstable.replace_functions({original: _looking(original) for original in originals})


def _looking(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def run(*args: Any, **kwargs: Any) -> Any:
        return _run_promoted(original, args, kwargs) if _promotes.get() else original(*args, **kwargs)

    return run


def _run_promoted(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
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
    """Return the line of an error that refuses to mix float32 with 16 bits; None for any other error."""
    text = str(error).partition("Arguments received by")[0]  # which Keras adds, with the formats of all arguments
    lines = (
        line for line in text.splitlines() if re.search(r"float16|half", line) and re.search(r"float(32)?\b", line)
    )
    return next(lines, None)


def _widened(value: Any) -> Any:
    return tf.cast(value, tf.float32) if _is_low(value) else value


def _is_low(value: Any) -> bool:
    return getattr(value, "dtype", None) in ("float16", "bfloat16")
