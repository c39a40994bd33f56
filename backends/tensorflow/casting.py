"""Cast the floating-point tensors and variables in containers, and leave everything else unchanged."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from polyamp.formats import format_of
from polyamp.nesting import check_tree

_STORED_AS = {"tensorfloat32": "float32"}  # a format of products, not of storage


def cast(tree: Any, format_name: str) -> Any:
    """Return ``tree`` with its floating-point tensors and variables in a format. Variables become tensors.

    >>> cast = cast({"w": tf.Variable([1.0]), "step": tf.constant(3), "name": "a"}, "float16")
    >>> cast["w"].dtype, cast["step"].dtype, cast["name"]
    (tf.float16, tf.int32, 'a')

    The cast is differentiable.

    Args:
        tree: any nest of ``tf.nest``: tensors, variables, ``tf.IndexedSlices``, sparse and ragged tensors, and NumPy
            arrays (which stay NumPy arrays) in dicts, lists, tuples and named tuples. Eager or in a graph.
        format_name: a format of `polyamp.formats.FORMATS`.

    Raises:
        InvalidValueError: the format is unknown.
    """
    check_tree(tree, "policy.cast_to_...(tree)")
    name = format_of(format_name).name
    dtype = tf.as_dtype(_STORED_AS.get(name, name))
    return tf.nest.map_structure(lambda leaf: _cast_leaf(leaf, dtype), tree)


def _cast_leaf(leaf: Any, dtype: tf.DType) -> Any:
    is_array = tf.is_tensor(leaf) or isinstance(leaf, np.ndarray)
    if not is_array or not tf.as_dtype(leaf.dtype).is_floating:
        return leaf
    if isinstance(leaf, np.ndarray):
        with np.errstate(over="ignore"):  # beyond the format's range the result is inf, as in IEEE 754
            return leaf.astype(dtype.as_numpy_dtype)
    return tf.cast(leaf, dtype)
