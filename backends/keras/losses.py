"""Losses that layers add, in float32: penalties on outputs, penalties on 16-bit variables, and ``add_loss``.

Such a loss is a sum over many values: in float16 it overflows, and TensorFlow does not add it to a loss in float32.

For example, of ``Dense(16, activity_regularizer="l2")`` in float16 the outputs are cast to float32 before they are
squared and summed. Of a user's layer, the values that ``call`` passes to ``add_loss`` are cast to float32; such layers
are of class ``inner`` too, so these values are computed in float32.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import keras
from keras import ops

from polyamp.arrays import has_sixteen_bits


class WideRegularizer:
    """A regularizer that gets 16-bit values in float32; otherwise like the original one, also in Keras' files."""

    def __init__(self, regularizer: Any) -> None:
        functools.update_wrapper(self, regularizer, updated=())

    def __call__(self, values: Any) -> Any:
        """Return the penalty on these values."""
        return self.__wrapped__(_wide(values))

    def __getattr__(self, name: str) -> Any:
        if name == "__wrapped__":  # a copy looks before it is assigned
            raise AttributeError(name)
        return getattr(self.__wrapped__, name)

    def __eq__(self, other: object) -> bool:
        return bool(self.__wrapped__ == getattr(other, "__wrapped__", other))

    def __hash__(self) -> int:
        return hash(self.__wrapped__)

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        return self.__wrapped__.__class__


def widen_losses(layer: Any) -> None:
    """Make a layer add its losses in float32. Nothing has to undo this, since float32 values stay as they are."""
    layer.activity_regularizer = _regularizer(layer.activity_regularizer)
    for variable in filter(has_sixteen_bits, layer.weights):
        variable.regularizer = _regularizer(variable.regularizer)
    if "add_loss" not in vars(layer):
        layer.add_loss = functools.partial(_add_loss, layer.add_loss)


def adds_losses(layer: Any) -> bool:
    """Return whether the user's code of a layer mentions ``add_loss``."""
    kinds = (kind for kind in type(layer).__mro__ if kind.__module__.partition(".")[0] != "keras")
    functions = (inspect.unwrap(one) for kind in kinds for one in vars(kind).values() if callable(one))
    return any("add_loss" in one.__code__.co_names for one in functions if inspect.isfunction(one))


def _regularizer(given: Any) -> Any:
    return given if given is None or type(given) is WideRegularizer else WideRegularizer(given)


def _add_loss(add_loss: Callable[[Any], None], loss: Any) -> None:
    add_loss(keras.tree.map_structure(_wide, loss))


def _wide(values: Any) -> Any:
    return ops.cast(values, "float32") if "float16" in str(getattr(values, "dtype", "")) else values
