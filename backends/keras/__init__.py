"""Keras 3, on its TensorFlow, JAX and torch backends: one wrapped optimizer, and policies for built models.

Importing this registers the optimizer's class, so that ``keras.saving.load_model`` finds it in ``.keras`` files, and
makes ``fit`` guard the statistics of every model, and ``fit`` and ``evaluate`` add up the losses of layers in float32.

>>> import keras, polyamp.backends.keras as amp
>>> opt = amp.LossScaledOptimizer(keras.optimizers.Adam(1e-3))
>>> isinstance(opt, keras.optimizers.LossScaleOptimizer), opt.loss_scale
(True, 65536.0)
"""

from polyamp.errors import importing

with importing("keras", extra="keras"):
    import keras  # noqa: F401

from polyamp.backends.keras.adapter import adapter
from polyamp.backends.keras.callbacks import HealthCallback
from polyamp.backends.keras.convert import convert
from polyamp.backends.keras.guard import guard, keep_statistics, widen_loaded
from polyamp.backends.keras.native import cast
from polyamp.backends.keras.optimizer import LossScaledOptimizer
from polyamp.backends.keras.unstable import before_testing, before_training

before_training(guard)
before_testing(widen_loaded)

__all__ = ["HealthCallback", "LossScaledOptimizer", "adapter", "cast", "convert", "keep_statistics"]
