"""TensorFlow: whole steps rewritten, ``tf.compat.v1.train`` optimizers wrapped, and a loss scaler.

>>> import tensorflow as tf, polyamp.backends.tensorflow as amp
>>> scaler = amp.LossScaler("mixed_float16")
>>> scaler.loss_scale
65536.0
"""

import functools

from polyamp import rewriting
from polyamp.errors import importing

with importing("tensorflow", extra="tensorflow"):
    import tensorflow  # noqa: F401

from polyamp.backends.tensorflow.adapter import adapter
from polyamp.backends.tensorflow.casting import cast
from polyamp.backends.tensorflow.graph_rewrite import (
    disable_mixed_precision_graph_rewrite,
    enable_mixed_precision_graph_rewrite,
)
from polyamp.backends.tensorflow.graphs.rewrite import Rewritten
from polyamp.backends.tensorflow.optimizer import LossScaledOptimizer
from polyamp.backends.tensorflow.scaler import LossScaler

explain = functools.partial(rewriting.explain, backend="tensorflow")
rewrite = functools.partial(rewriting.rewrite, backend="tensorflow")

__all__ = [
    "LossScaledOptimizer",
    "LossScaler",
    "Rewritten",
    "adapter",
    "cast",
    "disable_mixed_precision_graph_rewrite",
    "enable_mixed_precision_graph_rewrite",
    "explain",
    "rewrite",
]
