"""TensorFlow: ``tf.compat.v1.train`` optimizers wrapped, and a loss scaler for loops around ``tf.GradientTape``.

>>> import tensorflow as tf, polyamp.backends.tensorflow as amp
>>> scaler = amp.LossScaler("mixed_float16")
>>> scaler.loss_scale
65536.0
"""

from polyamp.registry import missing

try:
    import tensorflow  # noqa: F401
except ModuleNotFoundError as error:
    raise missing("tensorflow", extra="tensorflow") from error

from polyamp.backends.tensorflow.adapter import adapter
from polyamp.backends.tensorflow.casting import cast
from polyamp.backends.tensorflow.optimizer import LossScaledOptimizer
from polyamp.backends.tensorflow.rewrite import Rewritten, explain, rewrite, rewritten_graph
from polyamp.backends.tensorflow.scaler import LossScaler

__all__ = [
    "LossScaledOptimizer",
    "LossScaler",
    "Rewritten",
    "adapter",
    "cast",
    "explain",
    "rewrite",
    "rewritten_graph",
]
