"""Casts the floating variables and tensors of containers, and leaves everything else as it is."""

from __future__ import annotations

from typing import Any

import keras
import ml_dtypes
import numpy as np
from keras import ops
from keras.backend import standardize_dtype

from polyamp.backends.keras.backend import value_of
from polyamp.errors import UnsupportedError
from polyamp.formats import format_of

_STORED_AS = {"tensorfloat32": "float32"}  # a format of products, not of memory


def cast(tree: Any, format_name: str) -> Any:
    """``tree`` with its floating variables and tensors in a format; variables come back as tensors.

    >>> done = cast({"w": keras.Variable([1.0, 2.0]), "steps": ops.array(3), "name": "a"}, "float16")
    >>> standardize_dtype(done["w"].dtype), standardize_dtype(done["steps"].dtype), done["name"]
    ('float16', 'int32', 'a')

    Args:
        tree: Keras variables, tensors of Keras' backend and NumPy arrays (which stay such) in any nest of containers.
        format_name: a format of `polyamp.FORMATS`.

    Raises:
        InvalidValueError: an unknown format.
        UnsupportedError: the tree holds layers, whose variables keep their dtypes.
    """
    name = format_of(format_name).name
    dtype = _STORED_AS.get(name, name)
    return keras.tree.map_structure(lambda leaf: _cast_leaf(leaf, dtype), tree)


def _cast_leaf(leaf: Any, dtype: str) -> Any:
    if isinstance(leaf, keras.Layer):
        raise UnsupportedError(
            "a built Keras layer keeps the dtypes of its variables",
            where="policy.cast_to_...(tree)",
            found=f"the layer {leaf.name!r}",
            allowed="Keras variables and tensors",
            fix="polyamp.convert(model, policy) sets what a model computes in",
        )
    is_array = isinstance(leaf, np.ndarray | keras.Variable) or ops.is_tensor(leaf)
    if not is_array or "float" not in standardize_dtype(leaf.dtype):
        return leaf
    if isinstance(leaf, np.ndarray):
        with np.errstate(over="ignore"):  # beyond the format's range is inf, as IEEE 754 says
            return leaf.astype(getattr(ml_dtypes, dtype, dtype))
    return ops.cast(value_of(leaf), dtype)
