"""Cast at a layer's border, so that it computes in one format inside Python code that uses another.

Keras casts the inputs of layers and of ``keras.ops``, so in a functional model a float32 layer can follow a 16-bit one
without a cast of its own. Python code, such as ``x + self.norm(x)`` in a user's layer, does not cast, and TensorFlow
does not add float32 to float16. So a layer that such code calls returns the format of that code. Keras' own norms do
the same under Keras' own policies.

For example, a user's RMS norm in a float16 block has ``Border("float32", "float16")``: its ``call`` is replaced by a
`Crossing`, which casts the inputs to float32, calls the original with float32 weights, and casts the result to float16.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import keras
from keras import ops
from keras.backend import standardize_dtype

from polyamp.backends.keras.dtypes import CASTABLE
from polyamp.backends.keras.unstable import autocast_variables


class Border(NamedTuple):
    """The formats on the two sides of a layer's border."""

    inside: str  # the format that the layer computes in
    outside: str = ""  # the format of the layer's outputs; empty if the code that uses the outputs casts them

    @property
    def is_crossed(self) -> bool:
        """Whether outputs have to be cast."""
        return bool(self.outside) and self.outside != self.inside


class Crossing:
    """The ``call`` of a layer with a border around it; it takes the place of the layer's method."""

    # Keras does not save or clone it: a loaded layer computes by its Keras policy.

    def __init__(self, call: Callable[..., Any], border: Border, autocast: bool) -> None:
        self.call, self.border, self.autocast = call, border, autocast

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the layer in the inside format, and return its outputs in the outside format."""
        inside, outside = self.border
        if inside != "float32":
            return _cast(self.call(*args, **kwargs), outside)
        args, kwargs = _cast((args, kwargs), inside)
        with autocast_variables(inside):
            return _cast(self.call(*args, **kwargs), outside)


def set_border(layer: Any, border: Border) -> None:
    """Make a layer's ``call`` cross a border, or remove the one that was set before if this one is not crossed."""
    if isinstance(before := layer.__dict__.get("call"), Crossing):
        layer.autocast = before.autocast
        del layer.__dict__["call"]
    if border.is_crossed:
        layer.call = Crossing(layer.call, border, layer.autocast)
        layer.autocast = layer.autocast and border.inside != "float32"  # else Keras would round float32 inputs first


def border_of(layer: Any) -> Border:
    """Return the formats that a layer has now."""
    call = layer.__dict__.get("call")
    return call.border if isinstance(call, Crossing) else Border(layer.compute_dtype)


def _cast(tree: Any, format_name: str) -> Any:
    return keras.tree.map_structure(lambda leaf: _cast_leaf(leaf, format_name), tree)


def _cast_leaf(leaf: Any, format_name: str) -> Any:
    is_tensor = ops.is_tensor(leaf) or isinstance(leaf, keras.KerasTensor)
    if not is_tensor or standardize_dtype(leaf.dtype) not in CASTABLE or isinstance(leaf, keras.Variable):
        return leaf
    return leaf if standardize_dtype(leaf.dtype) == format_name else ops.cast(leaf, format_name)
