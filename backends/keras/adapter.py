"""The Keras adapter: a table from each verb of `polyamp` to its function."""

import keras

from polyamp.adapters import AdapterTable
from polyamp.backends.keras.convert import convert
from polyamp.backends.keras.native import BACKEND, cast, describe
from polyamp.backends.keras.operations import OPERATIONS
from polyamp.backends.keras.optimizer import load_loss_scale, loss_scale_of, scale_loss, wrap_optimizer

adapter = AdapterTable(
    "keras",
    OPERATIONS,
    owns=(keras.Layer, keras.optimizers.Optimizer, keras.Variable),
    runs_on=BACKEND,
    verbs={
        "describe": describe,
        "cast": cast,
        "convert": convert,
        "wrap_optimizer": wrap_optimizer,
        "scale_loss": scale_loss,
        "loss_scale_of": loss_scale_of,
        "load_loss_scale": load_loss_scale,
        "explain": "polyamp.backends.keras.models:explain",
        "record": "polyamp.backends.keras.models:record",
        "holder": "polyamp.backends.keras.models:holder",
    },
    instead={
        "rewrite": "rewrite a function that calls the model, or its step: model.train_step = "
        "polyamp.rewrite(model.train_step, policy=policy); or polyamp.convert(model, policy)",
    },
)
