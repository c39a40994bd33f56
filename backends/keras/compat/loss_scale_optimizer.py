"""``tf.keras.mixed_precision.LossScaleOptimizer`` with the arguments and methods that it had up to TensorFlow 2.15.

Keras 3 dropped ``dynamic=False``, ``get_scaled_loss``, ``get_unscaled_gradients`` and ``minimize``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import keras

from polyamp.backends.keras.backend import value_of
from polyamp.backends.keras.steps.gradients import all_finite
from polyamp.backends.keras.steps.optimizer import LossScaledOptimizer
from polyamp.errors import InvalidTypeError, InvalidValueError, UnsupportedError, warn_deprecated, warn_once
from polyamp.given_scales import dynamic as dynamic_scale
from polyamp.loss_scale import LossScale
from polyamp.scripts.session import current, found
from polyamp.validation import shown

_NAME = "tf.keras.mixed_precision.LossScaleOptimizer"


def _of_inner(name: str) -> property:
    """Return a property that reads and sets a setting of the inner optimizer."""

    def get(self: Any) -> Any:
        return getattr(self.inner_optimizer, name)

    def put(self: Any, value: Any) -> None:
        if "inner_optimizer" in vars(self):  # Keras' constructor sets its own, unused ones before
            setattr(self.inner_optimizer, name, value)

    return property(get, put, doc=f"The inner optimizer's ``{name}``.")


@keras.saving.register_keras_serializable(package="polyamp")
class LossScaleOptimizer(LossScaledOptimizer):
    """`polyamp.wrap_optimizer` with the interface of TensorFlow 2.4 to 2.15, for loops with their own gradients.

    >>> import tensorflow as tf
    >>> weight = keras.Variable([1.0, 1.0])
    >>> opt = LossScaleOptimizer(keras.optimizers.SGD(0.5), dynamic=False, initial_scale=1024)
    >>> with tf.GradientTape() as tape:
    ...     scaled = opt.get_scaled_loss(tf.reduce_sum(weight * [1.0, 2.0]))
    >>> grads = opt.get_unscaled_gradients(tape.gradient(scaled, [weight]))
    >>> _ = opt.apply_gradients(zip(grads, [weight]))
    >>> weight.numpy(), float(opt.loss_scale), opt.dynamic
    (array([0.5, 0. ], dtype=float32), 1024.0, False)

    The rule is TensorFlow's: it starts at 2**15 and never falls below 1. Unlike there, a step with gradients that are
    not finite is skipped under a fixed scale too.

    Args:
        inner_optimizer: any `keras.optimizers.Optimizer`.
        dynamic: whether the scale changes. A number is ``initial_scale``, as in Keras 3.
        initial_scale: the first scale, or the only one; needed if ``dynamic`` is False.
        dynamic_growth_steps: finite steps between growths.
        name: as for any Keras optimizer.
        loss_scale: settings in place of the three above; files contain them.
        **options: those of `polyamp.backends.keras.LossScaledOptimizer`.

    Raises:
        InvalidTypeError: ``inner_optimizer`` is not a Keras optimizer, or ``dynamic`` is not a bool.
        InvalidValueError: the arguments contradict each other, or a number is outside its range.
        UsageError: it is wrapped already.
    """

    clipnorm, clipvalue, global_clipnorm = map(_of_inner, ("clipnorm", "clipvalue", "global_clipnorm"))

    def __init__(
        self,
        inner_optimizer: keras.optimizers.Optimizer,
        dynamic: bool | float = True,
        initial_scale: float | None = None,
        dynamic_growth_steps: int | None = None,
        name: str | None = None,
        *,
        loss_scale: LossScale | None = None,
        **options: Any,
    ) -> None:
        if loss_scale is None:
            warn_deprecated(f"{_NAME}(opt)", 'polyamp.wrap_optimizer(opt, "mixed_float16")')
            found(_NAME)
            loss_scale = _settings(dynamic, initial_scale, dynamic_growth_steps)
        super().__init__(inner_optimizer, loss_scale, name=name, **options)
        self._is_scaling = self._is_unscaling = False
        if not loss_scale.dynamic:
            self.dynamic_growth_steps = None
        session = current()
        if session is not None:
            session.add(self)

    @property
    def loss_scale(self) -> Any:
        """The scale of the next loss; scalar float32 tensor."""
        return value_of(self.dynamic_scale)

    @property
    def dynamic(self) -> bool:
        """Whether the scale changes."""
        return self.scaler.settings.dynamic

    @property
    def dynamic_counter(self) -> Any:
        """The number of finite steps since the scale last changed; None if it never changes."""
        return value_of(self.scaler.variables.good_steps) if self.dynamic else None

    def scale_loss(self, loss: Any) -> Any:
        """Return the loss in float32 (float64 stays) times the loss scale; see `LossScaledOptimizer.scale_loss`."""
        self._is_scaling = True
        return super().scale_loss(loss)

    def get_unscaled_gradients(self, grads: Sequence[Any]) -> list[Any]:
        """Return unscaled gradients, to be applied; see `LossScaledOptimizer.get_unscaled_gradients`."""
        self._is_unscaling = True
        return super().get_unscaled_gradients(grads)

    def apply(self, grads: Sequence[Any], trainable_variables: Sequence[Any] | None = None) -> None:
        """Run one step; see `LossScaledOptimizer.apply`.

        Gradients of a loss that this optimizer never scaled are applied as they are, as in TensorFlow.

        Warns:
            PolyampWarning: it never scaled a loss.
        """
        grads = list(grads)
        if not self._is_scaling:
            warn_once(
                f"{self.name}: gradients are applied of a loss that was not scaled, so they may underflow in float16. "
                "Call get_scaled_loss(loss) before they are taken, and get_unscaled_gradients(grads) after."
            )
            if not self._is_unscaling and any(grad is not None for grad in grads):
                self._unscaled.remember([], grads, all_finite(grads))
        super().apply(grads, trainable_variables)

    def apply_gradients(
        self,
        grads_and_vars: Iterable[tuple[Any, Any]],
        name: str | None = None,
        experimental_aggregate_gradients: bool = True,
    ) -> Any:
        """Run `apply` on pairs; return `iterations`, the number of applied steps.

        Args:
            grads_and_vars: the results of `get_unscaled_gradients`, changed or not, and their variables.
            name: not used.
            experimental_aggregate_gradients: whether replicas share the sum of their gradients.

        Raises:
            UnsupportedError: ``experimental_aggregate_gradients`` is False.
        """
        if not experimental_aggregate_gradients:
            raise UnsupportedError(
                "replicas whose gradients are summed elsewhere are not supported",
                where="apply_gradients(experimental_aggregate_gradients=False)",
                allowed="True",
                fix="leave the sum to apply_gradients",
            )
        return super().apply_gradients(grads_and_vars)

    def minimize(self, loss: Any, var_list: Any, name: str | None = None, tape: Any = None) -> Any:
        """Take the gradients of a loss, scaled, and apply them, as optimizers did up to TensorFlow 2.15.

        >>> weight, opt = keras.Variable(3.0), LossScaleOptimizer(keras.optimizers.SGD(0.5))
        >>> opt.minimize(lambda: weight * weight, [weight]).numpy(), float(weight)
        (np.int64(1), 0.0)

        Args:
            loss: a function that returns the loss; or a tensor, with the tape that recorded it.
            var_list: variables, or a function that returns them.
            name: not used.
            tape: a ``tf.GradientTape``, if ``loss`` is a tensor.

        Raises:
            UnsupportedError: Keras does not run on TensorFlow.
            InvalidValueError: ``loss`` is a tensor and ``tape`` is missing.
        """
        if keras.backend.backend() != "tensorflow":
            raise UnsupportedError(
                "minimize records gradients with TensorFlow", where="minimize(loss)", found=keras.backend.backend()
            )
        import tensorflow as tf

        if not callable(loss) and tape is None:
            raise InvalidValueError(
                "the tape is missing",
                where="minimize(loss, var_list, tape=)",
                found="a tensor without the tape that recorded it",
                fix="pass tape=, or a function that returns the loss",
            )
        tape = tf.GradientTape() if tape is None else tape
        with tape:
            scaled = self.scale_loss(loss() if callable(loss) else loss)
        variables = tf.nest.flatten(var_list() if callable(var_list) else var_list)
        return self.apply_gradients(zip(tape.gradient(scaled, variables), variables, strict=True))

    @classmethod
    def from_config(
        cls, config: Mapping[str, Any], custom_objects: Mapping[str, Any] | None = None
    ) -> LossScaledOptimizer:
        """Make an optimizer from the result of `get_config`, or from that of TensorFlow 2.4 to 2.15."""
        known = dict(config)
        if "loss_scale" in known:  # it has all of them
            known = {key: value for key, value in known.items() if key not in ("initial_scale", "dynamic_growth_steps")}
        return super().from_config(known, custom_objects)


def _whole(steps: Any) -> Any:
    """Return a whole number of steps as an int, which TensorFlow accepts as a float; anything else unchanged."""
    return int(steps) if isinstance(steps, float) and steps.is_integer() else steps


def _settings(dynamic: Any, initial_scale: Any, growth_steps: Any) -> LossScale:
    if not isinstance(dynamic, bool):
        if not isinstance(dynamic, int | float):
            raise InvalidTypeError(
                "dynamic is not a bool", where=f"{_NAME}(dynamic=)", found=shown(dynamic), allowed="True or False"
            )
        dynamic, initial_scale, growth_steps = True, dynamic, initial_scale  # the order of Keras 3
    if dynamic:
        rule = dynamic_scale()
        init = rule.init if initial_scale is None else initial_scale
        return dynamic_scale(init, rule.interval if growth_steps is None else _whole(growth_steps))
    if initial_scale is None or growth_steps is not None:
        raise InvalidValueError(
            "the arguments of a fixed loss scale do not fit",
            where=f"{_NAME}(dynamic=False)",
            found=f"initial_scale={initial_scale!r}, dynamic_growth_steps={growth_steps!r}",
            allowed="initial_scale, and no dynamic_growth_steps",
            fix="give initial_scale, or leave out dynamic=False",
        )
    return LossScale.fixed(initial_scale)
