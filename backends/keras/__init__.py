"""Keras 3, on its TensorFlow, JAX and torch backends: one wrapped optimizer, and policies for built models.

Importing this registers the optimizer's class, so that ``keras.saving.load_model`` finds it in ``.keras`` files, and
makes ``compile`` guard the statistics of every model that is compiled from then on.

>>> import keras, polyamp.backends.keras as amp
>>> opt = amp.LossScaledOptimizer(keras.optimizers.Adam(1e-3))
>>> isinstance(opt, keras.optimizers.LossScaleOptimizer), opt.loss_scale
(True, 65536.0)
"""

from polyamp.errors import missing

try:
    import keras  # noqa: F401
except ModuleNotFoundError as error:
    raise missing("keras", extra="keras") from error

from polyamp.backends.keras.adapter import adapter
from polyamp.backends.keras.callbacks import HealthCallback
from polyamp.backends.keras.casting import cast
from polyamp.backends.keras.convert import convert
from polyamp.backends.keras.steps.optimizer import LossScaledOptimizer
from polyamp.backends.keras.steps.statistics import guard_compiled_models, keep_statistics

guard_compiled_models()

__all__ = ["HealthCallback", "LossScaledOptimizer", "adapter", "cast", "convert", "keep_statistics"]
