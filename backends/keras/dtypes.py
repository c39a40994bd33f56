"""The floating-point formats that Keras tensors and variables have, by name."""

from __future__ import annotations

from typing import Any

from keras.backend import standardize_dtype

SIXTEEN_BIT = ("float16", "bfloat16")
CASTABLE = ("float32", *SIXTEEN_BIT)
"""The formats between which polyamp casts; data in other formats, such as float64, stay as they are."""


def is_sixteen_bit(value: Any) -> bool:
    """Return whether a tensor or variable is stored in a 16-bit floating-point format."""
    return standardize_dtype(value.dtype) in SIXTEEN_BIT
