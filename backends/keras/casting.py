"""Cast the floating-point variables and tensors of containers, and leave everything else unchanged."""

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

SIXTEEN_BIT = ("float16", "bfloat16")
CASTABLE = ("float32", *SIXTEEN_BIT)
"""The formats between which polyamp casts; data in other formats, such as float64, stay as they are."""


def is_sixteen_bit(value: Any) -> bool:
    """Return whether a tensor or variable is stored in a 16-bit floating-point format."""
    return standardize_dtype(value.dtype) in SIXTEEN_BIT


_STORED_AS = {"tensorfloat32": "float32"}  # a format of products only, not of memory


def cast(tree: Any, format_name: str) -> Any:
    """Return ``tree`` with its floating-point variables and tensors in a format; variables become tensors.

    >>> done = cast({"w": keras.Variable([1.0, 2.0]), "steps": ops.array(3), "name": "a"}, "float16")
    >>> standardize_dtype(done["w"].dtype), standardize_dtype(done["steps"].dtype), done["name"]
    ('float16', 'int32', 'a')

    Args:
        tree: Keras variables, tensors of Keras' backend and NumPy arrays (which stay NumPy arrays) in nested
            containers.
        format_name: a format of `polyamp.formats.FORMATS`.

    Raises:
        InvalidValueError: the format is unknown.
        UnsupportedError: the tree contains layers, whose variables keep their dtypes.
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
            fix="polyamp.convert(model, policy) sets the format that a model computes in",
        )
    is_array = isinstance(leaf, np.ndarray | keras.Variable) or ops.is_tensor(leaf)
    if not is_array or "float" not in standardize_dtype(leaf.dtype):
        return leaf
    if isinstance(leaf, np.ndarray):
        with np.errstate(over="ignore"):  # a value beyond the format's range becomes inf, as in IEEE 754
            return leaf.astype(getattr(ml_dtypes, dtype, dtype))
    return ops.cast(value_of(leaf), dtype)
