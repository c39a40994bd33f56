"""The old places of removed parts of Keras: ``tf.keras.mixed_precision`` and its ``experimental``."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any

import keras

from polyamp.backends.keras.compat import experimental
from polyamp.backends.keras.compat.loss_scale_optimizer import LossScaleOptimizer
from polyamp.backends.keras.unstable import choose_optimizers
from polyamp.given_scales import dynamic
from polyamp.scripts.session import Session

# TensorFlow's name for Keras is a second package of the same files, and each import path has its own module objects.
_PLACES = (
    "keras.mixed_precision",
    "keras._tf_keras.keras.mixed_precision",
    "tensorflow.keras.mixed_precision",
)


def install() -> Callable[[], None]:
    """Put the removed classes and functions into Keras, under their old names; return a function that takes them out.

    `polyamp run` does this for a script.

    >>> uninstall = install()
    >>> opt = keras.mixed_precision.LossScaleOptimizer(keras.optimizers.SGD(), dynamic=False, initial_scale=8)
    >>> keras.mixed_precision.experimental.Policy("mixed_float16").name
    'mixed_float16'
    >>> uninstall()
    >>> hasattr(keras.mixed_precision, "experimental")
    False
    """
    session = Session()
    put_in_place(session)
    return session.close


def put_in_place(session: Session) -> None:
    """Put the removed classes and functions into Keras until the session ends."""
    for place in _PLACES:
        name = f"{place}.experimental"
        sys.modules[name] = experimental
        session.at_end(partial(sys.modules.pop, name, None))
        if place.startswith("tensorflow.") and "tensorflow" not in sys.modules:
            continue
        try:
            module = import_module(place)
        except ImportError:  # a later Keras has fewer
            continue
        session.replace(module, "experimental", experimental)
        session.replace(module, "LossScaleOptimizer", LossScaleOptimizer)
    session.at_end(choose_optimizers(_with_old_methods))


def _with_old_methods(model: Any, optimizer: Any) -> Any:
    """Return the optimizer for a model that Keras would wrap: with `get_scaled_loss`, which old steps call."""
    by_name = type(model.dtype_policy) is keras.DTypePolicy and model.dtype_policy.name == "mixed_float16"
    if not by_name or isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        return None
    return LossScaleOptimizer(optimizer, loss_scale=dynamic())
