"""Recognize what a layer does, by its class: its canonical operation, and the casts that Keras' own code makes."""

from __future__ import annotations

import re
from typing import Any

import keras

from polyamp.backends.keras.dtypes import CASTABLE
from polyamp.backends.keras.operations import ACTIVATIONS, OPERATIONS
from polyamp.backends.keras.unstable import layers_inside

_NORM = re.compile(r"(batch|layer|group|instance|rms|unit)?_?norm(alization|alize|alizer)?(_?\d+d)?$", re.IGNORECASE)
_NORMS = {"batch": "batch_norm", "layer": "layer_norm", "group": "group_norm"}
_CAST_INSIDE = ("BatchNormalization", "LayerNormalization", "GroupNormalization")


def operation_of(layer: Any) -> str:
    """Return the canonical name of a layer's work; empty if the table does not have it, as for most user layers."""
    if isinstance(layer, keras.layers.Activation):
        return ACTIVATIONS.get(getattr(layer.activation, "__name__", ""), "")
    names = (kind.__name__ for kind in type(layer).__mro__)
    return next((OPERATIONS[name] for name in names if name in OPERATIONS), "") or norm_of(layer)


def norm_of(layer: Any) -> str:
    """Return the canonical name of a user's own normalization layer, known by its class; empty if it is not one."""
    if layers_inside(layer):
        return ""
    for kind in type(layer).__mro__[: type(layer).__mro__.index(keras.layers.Layer)]:
        if found := _NORM.search(kind.__name__):
            return _NORMS.get((found[1] or "").lower(), "rms_norm")
    return ""


def is_from_keras(layer: Any) -> bool:
    """Return whether a layer's class is part of Keras. The code of such classes casts the inputs of their inner layers.

    >>> is_from_keras(keras.layers.Dense(2))
    True
    """
    return type(layer).__module__.partition(".")[0] == "keras"


def casts_inside(layer: Any) -> bool:
    """Return whether Keras' code of a layer computes in float32 and returns 16 bits under a 16-bit policy."""
    kinds = (kind for kind in type(layer).__mro__ if kind.__module__.partition(".")[0] == "keras")
    own = next(kinds)
    return own.__name__ in _CAST_INSIDE and type(layer).call is vars(own).get("call")


def is_wide_inside(layer: Any, operation: str) -> bool:
    """Return whether a layer with 16-bit inputs computes in float32 by itself, and returns 16 bits."""
    # TensorFlow's average pooling on CPUs and XLA's windows add up in the format of their data; torch's kernels use
    # float32.
    pools = operation == "avg_pool" and keras.backend.backend() == "torch"
    return pools or operation in ("sigmoid", "tanh") or casts_inside(layer)


def can_compute(layer: Any) -> bool:
    """Return whether polyamp may choose a layer's compute format: it is not quantized, and not float64."""
    return layer.quantization_mode is None and layer.compute_dtype in CASTABLE
