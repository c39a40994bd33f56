"""`FixedLossScale` and `DynamicLossScale`: the loss scales of TensorFlow 1, which TensorFlow 2 removed.

They are settings for `MixedPrecisionLossScaleOptimizer` and `enable_mixed_precision_graph_rewrite`; called, they return
the scale. The rule is `polyamp.loss_scale.advance`.
"""

from __future__ import annotations

import abc
from typing import Any

import tensorflow as tf

from polyamp.backends.tensorflow.steps.gradients import all_finite
from polyamp.backends.tensorflow.steps.scaler import LossScaler
from polyamp.backends.tensorflow.steps.skipping import after
from polyamp.errors import warn_deprecated
from polyamp.given_scales import dynamic
from polyamp.loss_scale import LossScale as Settings


class LossScale(tf.Module, metaclass=abc.ABCMeta):
    """The base class of `FixedLossScale` and `DynamicLossScale`.

    Attributes:
        settings: the settings of the rule.
        scaler: the state: that of the optimizer which this scale was passed to, else its own.
    """

    def __init__(self, settings: Settings, instead: str) -> None:
        super().__init__(name="loss_scale")
        kind = type(self).__name__
        warn_deprecated(f"tf.mixed_precision.experimental.{kind}", instead, stacklevel=4)
        self.settings = settings
        with tf.init_scope():
            self.scaler = LossScaler(settings)

    def __call__(self) -> tf.Tensor:
        """Return the loss scale; scalar float32 tensor."""
        return tf.convert_to_tensor(self.scaler.scalars[0])

    @abc.abstractmethod
    def update(self, grads: Any) -> tuple[Any, Any]:
        """Advance the scale after a step with these gradients; return an operation, and whether to apply them."""

    @abc.abstractmethod
    def get_config(self) -> dict[str, Any]:
        """Return the arguments."""

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> LossScale:
        """Make a loss scale from the result of `get_config`."""
        return cls(**config)


class FixedLossScale(LossScale):
    """A loss scale that never changes.

    >>> float(FixedLossScale(128)())
    128.0

    Args:
        loss_scale_value: the scale, at least 1.

    Raises:
        ValueError: it is less than 1, as in TensorFlow; or not a number.
    """

    def __init__(self, loss_scale_value: float) -> None:
        settings = Settings.fixed(loss_scale_value)
        if settings.init < 1:
            raise ValueError("loss_scale_value must be at least 1.")
        super().__init__(settings, f"polyamp.LossScale.fixed({loss_scale_value})")

    def __call__(self) -> tf.Tensor:
        """Return the loss scale; scalar float32 tensor."""
        return tf.constant(self.settings.init)

    def update(self, grads: Any) -> tuple[Any, bool]:
        """Return an operation that does nothing, and True. An optimizer skips gradients that are inf or NaN anyway."""
        return tf.no_op(), True

    def get_config(self) -> dict[str, Any]:
        """Return the arguments."""
        return {"loss_scale_value": self.settings.init}

    def __repr__(self) -> str:
        return f"FixedLossScale({self.settings.init})"


class DynamicLossScale(LossScale):
    """A loss scale that grows while gradients are finite, and backs off when they overflow, to no less than 1.

    >>> scale = DynamicLossScale(initial_loss_scale=8.0)
    >>> _, should_apply = scale.update([tf.constant(float("inf"))])
    >>> float(scale()), bool(should_apply)
    (4.0, False)

    Args:
        initial_loss_scale: the first scale.
        increment_period: finite steps between growths.
        multiplier: the factor of growth; back-off divides by it.

    Raises:
        InvalidValueError: an argument is outside what `polyamp.LossScale` allows.
    """

    def __init__(
        self, initial_loss_scale: float = 2.0**15, increment_period: int = 2000, multiplier: float = 2.0
    ) -> None:
        settings = dynamic(float(initial_loss_scale), int(increment_period), float(multiplier))
        super().__init__(settings, f"polyamp.{settings!r}")

    @property
    def initial_loss_scale(self) -> float:
        """The first scale."""
        return self.settings.init

    @property
    def increment_period(self) -> int:
        """The number of finite steps between growths."""
        return self.settings.interval

    @property
    def multiplier(self) -> float:
        """The factor of growth."""
        return self.settings.growth

    def update(self, grads: Any) -> tuple[Any, tf.Tensor]:
        """Advance the scale after a step with these gradients; return what runs it, and whether they are finite.

        Args:
            grads: gradients, in any structure.

        Returns:
            In a graph, a tensor that advances the scale when it is evaluated; in eager code None. And a scalar bool.
        """
        finite = all_finite(tf.nest.flatten(grads))
        with after(self.scaler.advance(finite)):
            return None if tf.executing_eagerly() else tf.identity(finite), finite

    def get_config(self) -> dict[str, Any]:
        """Return the arguments."""
        return {
            "initial_loss_scale": self.initial_loss_scale,
            "increment_period": self.increment_period,
            "multiplier": self.multiplier,
        }

    def __repr__(self) -> str:
        arguments = ", ".join(f"{name}={value}" for name, value in self.get_config().items())
        return f"DynamicLossScale({arguments})"
