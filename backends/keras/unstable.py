"""All uses that polyamp makes of Keras beyond its public interface, in one place.

Keras may change any of it in a release, without notice; the tests of this file's users then fail.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import keras
from keras.src.backend import AutocastScope


def layers_inside(layer: Any) -> list[Any]:
    """Return the layers directly inside a layer, as Keras' own trainers find them.

    ``layers`` is public only on models, but layers such as ``MultiHeadAttention`` also have inner layers.

    >>> import keras
    >>> model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1, name="one")])
    >>> [layer.name for layer in layers_inside(model) if layer.name == "one"]
    ['one']
    """
    found: list[Any] = layer._flatten_layers(include_self=False, recursive=False)
    return found


def autocast_variables(format_name: str) -> AbstractContextManager[Any]:
    """Return a context in which a layer reads its floating-point variables in this format."""
    context: AbstractContextManager[Any] = AutocastScope(format_name)
    return context


def added_weights(layer: Any) -> list[Any]:
    """Return the variables that layers made as not trainable, without frozen trainable ones and without seeds.

    >>> import keras
    >>> norm = keras.layers.BatchNormalization()
    >>> norm.build((None, 2))
    >>> norm.trainable = False
    >>> [variable.name for variable in added_weights(norm)]
    ['moving_mean', 'moving_variance']
    """
    layers = {id(one): one for one in layer._flatten_layers()}
    found = (variable for one in layers.values() for variable in one._non_trainable_variables)
    return list({id(variable): variable for variable in found if "float" in str(variable.dtype)}.values())


_STEP = "_polyamp_step"


def intercept_compile(compiled: Callable[[Any], None]) -> None:
    """Call a function with every model that is compiled from now on; once for each process."""
    # Patched where it is defined, not on `keras.Model`: Keras does not compile a loaded model with another `compile`.
    owner = next(kind for kind in keras.Model.__mro__ if "compile" in vars(kind))
    original = vars(owner)["compile"]
    if hasattr(original, _STEP):
        return

    @functools.wraps(original)
    def compile(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        compiled(self)
        return result

    setattr(compile, _STEP, True)
    owner.compile = compile


def build_loss(model: Any, batch: Sequence[Any]) -> None:
    """Make a compiled model build its loss now; else it does so at its first step, inside a trace.

    Args:
        model: a model.
        batch: ``(x, y)`` and perhaps more.
    """
    loss = getattr(model, "_compile_loss", None)
    if loss is not None and not loss.built and len(batch) > 1:
        loss.build(batch[1], model(batch[0], training=False))
