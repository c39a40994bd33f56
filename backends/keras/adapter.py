"""The Keras adapter: each verb of `polyamp`, and the function that does it."""

from typing import Any

import keras

from polyamp.adapters import AdapterTable
from polyamp.backends.keras.backend import describe
from polyamp.backends.keras.casting import cast
from polyamp.backends.keras.convert import convert
from polyamp.backends.keras.operations import OPERATIONS
from polyamp.backends.keras.steps.optimizer import (
    load_loss_scale,
    loss_scale_of,
    scale_loss,
    wrap_optimizer,
)
from polyamp.backends.keras.steps.statistics import guard_steps
from polyamp.policies import Policy


def convert_and_guard(model: Any, policy: Policy) -> Any:
    """Convert a model; if it is compiled, its training steps restore averages when they are skipped."""
    converted = convert(model, policy)
    if converted.compiled:
        guard_steps(converted)
    return converted


adapter = AdapterTable(
    "keras",
    OPERATIONS,
    owns=(keras.Layer, keras.optimizers.Optimizer, keras.Variable),
    runs_on=keras.backend.backend(),
    verbs={
        "describe": describe,
        "cast": cast,
        "convert": convert_and_guard,
        "wrap_optimizer": wrap_optimizer,
        "scale_loss": scale_loss,
        "loss_scale_of": loss_scale_of,
        "load_loss_scale": load_loss_scale,
        "explain": "polyamp.backends.keras.delegated:explain",
        "record": "polyamp.backends.keras.delegated:record",
        "facts": "polyamp.backends.keras.delegated:facts",
    },
    instead={
        "rewrite": "rewrite a function that calls the model, or its step: model.train_step = "
        "polyamp.rewrite(model.train_step, policy=policy); or polyamp.convert(model, policy)",
        "autocast_context": "polyamp.convert(model, policy), or the autocast of Keras' backend around what calls it",
    },
)
