"""The TensorFlow adapter: a table from each verb of `polyamp` to its function."""

import tensorflow as tf

from polyamp.adapters import AdapterTable
from polyamp.backends.tensorflow.casting import cast
from polyamp.backends.tensorflow.devices import describe
from polyamp.backends.tensorflow.graphs.rewrite import explain, rewrite
from polyamp.backends.tensorflow.operations import OPERATIONS
from polyamp.backends.tensorflow.optimizer import (
    load_loss_scale,
    loss_scale_of,
    scale_loss,
    wrap_optimizer,
)

adapter = AdapterTable(
    "tensorflow",
    OPERATIONS,
    owns=(tf.Tensor, tf.Variable, tf.Module, tf.compat.v1.train.Optimizer, tf.compat.v1.GraphDef),
    rewrites_unseen=True,  # the result is a tf.function before it sees arguments
    verbs={
        "describe": describe,
        "least_over_ranks": "polyamp.backends.tensorflow.devices:least_over_ranks",
        "trial": "polyamp.backends.tensorflow.selftest:trial",
        "cast": cast,
        "wrap_optimizer": wrap_optimizer,
        "scale_loss": scale_loss,
        "loss_scale_of": loss_scale_of,
        "load_loss_scale": load_loss_scale,
        "rewrite": rewrite,
        "explain": explain,
        "record": "polyamp.backends.tensorflow.recording.record:record",
        "holder": "polyamp.backends.tensorflow.recording.holder:holder",
        "profiler": "polyamp.backends.tensorflow.profiling:profiler",
    },
)
