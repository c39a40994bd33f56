"""The layers inside a layer, and which of them return its outputs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import keras

from polyamp.backends.keras.layers.kinds import is_from_keras
from polyamp.backends.keras.unstable import layers_inside


def walk(layer: Any) -> Iterator[Any]:
    """Return a layer and all layers inside, outer ones first."""
    yield layer
    for child in children(layer):
        yield from walk(child)


def children(layer: Any) -> list[Any]:
    """Return the layers directly inside a layer, without the input layers of functional models."""
    return [child for child in layers_inside(layer) if not isinstance(child, keras.layers.InputLayer)]


def runs_code(layer: Any) -> bool:
    """Return whether a layer calls the layers inside from a user's Python code, which casts nothing."""
    # Functional and sequential models, and Keras' own layers, cast the inputs of each layer inside.
    if not children(layer) or isinstance(layer, keras.Sequential) or getattr(layer, "output_names", None):
        return False
    return not is_from_keras(layer)


def heads(layer: Any) -> list[Any]:
    """Return the layers directly inside that return a layer's outputs; none if its own Python code makes them."""
    if isinstance(layer, keras.Sequential):
        return list(layer.layers[-1:])
    if isinstance(layer, keras.Model):
        names = getattr(layer, "output_names", None) or ()  # only functional models have names
        return [child for child in layer.layers if child.name in names]
    return children(layer) if is_from_keras(layer) else []
