"""Where a layer computes in one format and Python code around it in another: the layer is cast at its border.

Keras casts what layers and ``keras.ops`` take, so in a functional model a float32 layer may stand between 16-bit ones.
Python code, such as ``x + self.norm(x)`` in a layer of a user's own, does not cast, and TensorFlow adds no float32 to
float16. So a layer that such code calls gives back the format of that code, as Keras' own norms do under Keras' own
policies.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, NamedTuple

import keras
from keras import ops
from keras.backend import standardize_dtype

from polyamp.backends.keras.steps.gradients import SIXTEEN_BIT
from polyamp.backends.keras.unstable import autocast_variables, layers_inside

_FLOATING = ("float32", *SIXTEEN_BIT)
_NORM = re.compile(r"(batch|layer|group|instance|rms|unit)?_?norm(alization|alize|alizer)?(_?\d+d)?", re.IGNORECASE)
_CAST_INSIDE = ("BatchNormalization", "LayerNormalization", "GroupNormalization")


class Border(NamedTuple):
    """What a layer computes in, and what it gives back.

    Attributes:
        inside: the format that it computes in.
        outside: the format that it gives back; empty where whatever takes its outputs casts them.
    """

    inside: str
    outside: str = ""

    @property
    def is_crossed(self) -> bool:
        """Whether outputs have to be cast."""
        return bool(self.outside) and self.outside != self.inside


def norm_of(layer: Any) -> str:
    """Return the canonical name of a user's own normalisation, known by its class; empty where it is not one.

    >>> class LlamaRMSNorm(keras.layers.Layer):
    ...     pass
    >>> norm_of(LlamaRMSNorm()), norm_of(keras.layers.Dense(2))
    ('rms_norm', '')
    """
    if layers_inside(layer):
        return ""
    for kind in type(layer).__mro__[: type(layer).__mro__.index(keras.layers.Layer)]:
        if found := re.search(rf"{_NORM.pattern}$", kind.__name__, _NORM.flags):
            kind_of_norm = (found[1] or "").lower()
            return {"batch": "batch_norm", "layer": "layer_norm", "group": "group_norm"}.get(kind_of_norm, "rms_norm")
    return ""


def casts_inside(layer: Any) -> bool:
    """Whether a layer of Keras computes in float32 and gives back 16 bits by itself, under a 16-bit policy.

    >>> casts_inside(keras.layers.LayerNormalization()), casts_inside(keras.layers.Softmax())
    (True, False)
    """
    kinds = (kind for kind in type(layer).__mro__ if kind.__module__.partition(".")[0] == "keras")
    own = next(kinds)
    return own.__name__ in _CAST_INSIDE and type(layer).call is vars(own).get("call")


def is_wide_inside(layer: Any, operation: str) -> bool:
    """Return whether a layer that is given 16 bits computes in float32 by itself, and returns 16 bits.

    TensorFlow's average pooling on CPUs and XLA's windows add up in the format of their data; torch's kernels do not.

    >>> is_wide_inside(keras.layers.LayerNormalization(), "layer_norm")
    True
    >>> is_wide_inside(keras.layers.Softmax(), "softmax")
    False
    """
    pools = operation == "avg_pool" and keras.backend.backend() == "torch"
    return pools or operation in ("sigmoid", "tanh") or casts_inside(layer)


class Crossing:
    """A layer's ``call`` with a border around it: it takes the place of the layer's method.

    Where Keras saves or clones the layer this is not kept: the layer then computes as its Keras policy says.
    """

    def __init__(self, call: Callable[..., Any], border: Border, autocast: bool) -> None:
        self.call, self.border, self.autocast = call, border, autocast

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the layer in the format inside, and return what it gives in the format outside."""
        inside, outside = self.border
        if inside != "float32":
            return _cast(self.call(*args, **kwargs), outside)
        args, kwargs = _cast((args, kwargs), inside)
        with autocast_variables(inside):
            return _cast(self.call(*args, **kwargs), outside)


def set_border(layer: Any, border: Border) -> None:
    """Have a layer's ``call`` cross a border; one that is not crossed takes away what was set before."""
    if isinstance(before := layer.__dict__.get("call"), Crossing):
        layer.autocast = before.autocast
        del layer.__dict__["call"]
    if border.is_crossed:
        layer.call = Crossing(layer.call, border, layer.autocast)
        layer.autocast = layer.autocast and border.inside != "float32"  # else float32 data were rounded on their way in


def border_of(layer: Any) -> Border:
    """Return what a layer computes in now.

    >>> border_of(keras.layers.Dense(2, dtype="mixed_float16"))
    Border(inside='float16', outside='')
    """
    call = layer.__dict__.get("call")
    return call.border if isinstance(call, Crossing) else Border(layer.compute_dtype)


def _cast(tree: Any, format_name: str) -> Any:
    return keras.tree.map_structure(lambda leaf: _cast_leaf(leaf, format_name), tree)


def _cast_leaf(leaf: Any, format_name: str) -> Any:
    is_tensor = ops.is_tensor(leaf) or isinstance(leaf, keras.KerasTensor)
    if not is_tensor or standardize_dtype(leaf.dtype) not in _FLOATING or isinstance(leaf, keras.Variable):
        return leaf
    return leaf if standardize_dtype(leaf.dtype) == format_name else ops.cast(leaf, format_name)
