"""Capture a function as a graph: trace it as it is written, in float32 and without autocast."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tensorflow as tf

from polyamp.backends.tensorflow.autocast.interception import intercept
from polyamp.backends.tensorflow.autocast.lowering import entered
from polyamp.backends.tensorflow.graphs.refusals import check_captures, tracing

FUNCTION: Any = type(tf.function(lambda: None))
"""The class of a ``tf.function``."""


def name_of(fn: Any) -> str:
    """Return a function's name with the place where it was written, because many have the name ``<lambda>``."""
    plain = inspect.unwrap(getattr(fn, "python_function", fn))
    name, code = getattr(plain, "__name__", "function"), getattr(plain, "__code__", None)
    return f"{name} ({Path(code.co_filename).name}:{code.co_firstlineno})" if code is not None else name


def concrete_of(fn: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Trace ``fn`` as it is written, without autocast."""
    intercept()
    function = fn if isinstance(fn, FUNCTION) else tf.function(fn)
    with tracing(fn), entered(None):
        concrete = function.get_concrete_function(*args, **kwargs)
    check_captures(fn, concrete)
    return concrete
