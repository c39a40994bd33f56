"""`LossScaledOptimizer`: any Keras optimizer, with the order of a mixed-precision step in one place."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import keras

from polyamp.backends.keras.backend import is_distributed, platform_of, update_if
from polyamp.backends.keras.gradients import all_finite, clip_factor, is_sixteen_bit, multiplied
from polyamp.backends.keras.masters import MasterWeights
from polyamp.backends.keras.scaler import LossScaler
from polyamp.errors import InvalidValueError, UnsupportedError, UsageError
from polyamp.loss_scale import LossScale
from polyamp.refusals import no_optimizer, wrapped_already
from polyamp.result import StepResult
from polyamp.verbs import norm_limit


@keras.saving.register_keras_serializable(package="polyamp")
class LossScaledOptimizer(keras.optimizers.LossScaleOptimizer):
    """An optimizer that unscales, tests, clips, then updates or skips, then moves the loss scale: always in that order.

    It is a `keras.optimizers.LossScaleOptimizer`, so that ``compile`` leaves it as it is and ``fit`` scales the loss by
    it, on Keras' TensorFlow, JAX and torch backends; the algorithm is polyamp's. The loss scale, its counters and the
    master weights are variables, which ``.keras`` files and checkpoints keep.

    >>> from keras import ops
    >>> weight = keras.Variable([1.0, 1.0])
    >>> opt = LossScaledOptimizer(keras.optimizers.SGD(0.5), LossScale(init=8.0), max_grad_norm=1.0)
    >>> _ = opt.apply_gradients([(ops.array([24.0, 32.0]), weight)])  # of the loss times 8
    >>> weight.numpy().round(4), opt.last_step
    (array([0.7, 0.6], dtype=float32), StepResult(applied=True, scale=8.0, skipped_in_a_row=0))

    Args:
        inner_optimizer: any `keras.optimizers.Optimizer`. Its own clipping, gradient accumulation and moving averages
            work on unscaled gradients, and a skipped step is none of its steps.
        loss_scale: None is ``LossScale()``. ``LossScale.none()`` makes this do exactly what ``inner_optimizer`` does.
        max_grad_norm: clip unscaled gradients to this global L2 norm (of their sum, where replicas share a step).
        master_weights: train float32 copies of 16-bit variables. None does so where there are such variables; False
            updates them as they are.
        name: as of any Keras optimizer.

    Raises:
        InvalidTypeError: no Keras optimizer.
        InvalidValueError: ``inner_optimizer`` scales the loss itself, or accumulates gradients beside a
            ``max_grad_norm``; or that is no positive finite number.
        UsageError: it is wrapped already.
    """

    def __init__(
        self,
        inner_optimizer: keras.optimizers.Optimizer,
        loss_scale: LossScale | None = None,
        max_grad_norm: float | None = None,
        master_weights: bool | None = None,
        name: str | None = None,
    ) -> None:
        _check_optimizer(inner_optimizer, max_grad_norm)
        settings = LossScale() if loss_scale is None else loss_scale
        super().__init__(inner_optimizer, settings.init, settings.interval, name=name)
        self.scaler = LossScaler(settings, self.add_variable)
        self.dynamic_scale, self.step_counter, *_ = self.scaler.variables
        self.max_grad_norm = norm_limit(max_grad_norm, where="LossScaledOptimizer(max_grad_norm=)")
        self.master_weights = master_weights

    def build(self, var_list: Sequence[Any]) -> None:
        """Make the inner optimizer's variables and the master weights; Keras calls this before the first step."""
        wanted = self.master_weights is not False and any(map(is_sixteen_bit, var_list))
        if wanted:
            _check_masters(self.inner_optimizer)
        self._masters = MasterWeights(var_list if wanted else (), self.add_variable)
        self.inner_optimizer.build(self._masters.trained(var_list))
        super(keras.optimizers.LossScaleOptimizer, self).build(var_list)  # Keras' own would add two scalars of its own

    def scale_loss(self, loss: Any) -> Any:
        """The loss in float32 (float64 stays) times the loss scale.

        >>> float(LossScaledOptimizer(keras.optimizers.SGD()).scale_loss(keras.ops.array(0.5)))
        32768.0

        Raises:
            InvalidTypeError: no floating tensor.
            NonFiniteLossError: inf or NaN, where the loss is on the CPU and no function is being traced. Elsewhere the
                step is skipped, and `last_step` says so.
        """
        return self.scaler.scale(loss)

    def apply_gradients(self, grads_and_vars: Iterable[tuple[Any, Any]]) -> Any:
        """`apply` for pairs; returns the count of steps that were applied, `iterations`."""
        super().apply_gradients(grads_and_vars)
        return self.iterations

    def apply(self, grads: Sequence[Any], trainable_variables: Sequence[Any] | None = None) -> None:
        """One step with the gradients of the scaled loss: unscale, test, clip, update or skip, move the loss scale.

        Works in a ``tf.function``, in ``jax.jit`` through ``stateless_apply``, and outside of them.

        Args:
            grads: gradients, dense or sparse, None where there is none.
            trainable_variables: the variables they belong to; None for those that the optimizer was built on.

        Raises:
            LossScaleError: outside of traced functions, with values on the CPU; see `last_step` for elsewhere.
            UsageError: the optimizer is not built, and there are no variables to build it on.
        """
        grads, variables = list(grads), self._build_on(trainable_variables)
        prepared = self._prepared(grads, variables)
        if not self.scaler.settings.check or all(grad is None for grad in grads):
            self._update(prepared, variables)
            return
        finite = self._all_finite(grads)
        touched = [*self._trainable_variables, *self._masters.variables, *self.inner_optimizer.variables]
        update_if(finite, lambda chosen: self._update(chosen, variables), prepared, touched)
        self.scaler.advance(finite)

    def stateless_apply(
        self, optimizer_variables: list[Any], grads: Sequence[Any], trainable_variables: list[Any]
    ) -> tuple[list[Any], list[Any]]:
        """`apply` as a pure function, for ``jax.jit``.

        Args:
            optimizer_variables: values of `variables`.
            grads: gradients of the scaled loss.
            trainable_variables: values of the variables that the optimizer was built on.

        Returns:
            The new values of the trainable variables, and those of `variables`.
        """
        plain: Any = super(keras.optimizers.LossScaleOptimizer, self)  # Keras' own calls none of our methods
        trained, state = plain.stateless_apply(optimizer_variables, grads, trainable_variables)
        return trained, state

    def finalize_variable_values(self, var_list: Sequence[Any]) -> None:
        """Let the inner optimizer end training, for example by its moving averages."""
        trained = self._trained(var_list)
        self.inner_optimizer.finalize_variable_values(trained)
        self._masters.round_into(var_list, trained)

    @property
    def loss_scale(self) -> float:
        """The scale that the next loss is multiplied by. Reading it waits for the device, if it lives on one."""
        return self.scaler.host_state.scale

    @property
    def last_step(self) -> StepResult:
        """What the last step did.

        Outside of traced functions, reading it waits for the device, and reports what ``LossScale(on_min=)`` and
        ``max_skips=`` ask for: compiled steps, such as those of ``fit``, cannot. Inside, its properties are the traced
        values.

        Raises:
            LossScaleError: by `polyamp.limits.report_limits`.
        """
        traced = platform_of(self.dynamic_scale) is None
        return StepResult(self.scaler.state if traced else self.scaler.report())

    def get_config(self) -> dict[str, Any]:
        """The arguments as JSON values, for `from_config` and ``.keras`` files."""
        return {
            "name": self.name,
            "inner_optimizer": keras.saving.serialize_keras_object(self.inner_optimizer),
            "loss_scale": self.scaler.settings.to_dict(),
            "max_grad_norm": self.max_grad_norm,
            "master_weights": self.master_weights,
        }

    @classmethod
    def from_config(
        cls, config: Mapping[str, Any], custom_objects: Mapping[str, Any] | None = None
    ) -> LossScaledOptimizer:
        """The inverse of `get_config`."""
        inner = keras.saving.deserialize_keras_object(config["inner_optimizer"], custom_objects=custom_objects)
        settings = LossScale.from_dict(config["loss_scale"])
        return cls(**{**config, "inner_optimizer": inner, "loss_scale": settings})

    def _build_on(self, trainable_variables: Sequence[Any] | None) -> list[Any]:
        if not self.built:
            if trainable_variables is None:
                raise UsageError(
                    "the optimizer does not know its variables yet",
                    where="apply(grads)",
                    fix="call build(trainable_variables), or give apply(grads, trainable_variables)",
                )
            with keras.name_scope(self.name, caller=self):
                self.build(list(trainable_variables))
        return list(self._trainable_variables if trainable_variables is None else trainable_variables)

    def _prepared(self, grads: list[Any], variables: list[Any]) -> list[Any]:
        """Unscaled and clipped, all but what Keras' float8 layers pass as gradients of their own scales."""
        own = [getattr(variable, "overwrite_with_gradient", False) for variable in variables]
        scaled = [None if is_own else grad for grad, is_own in zip(grads, own, strict=True)]
        plain = self.scaler.unscale(scaled)
        if self.max_grad_norm is not None:
            plain = multiplied(plain, clip_factor(self._summed(plain), self.max_grad_norm))
        return [grad if is_own else new for grad, new, is_own in zip(grads, plain, own, strict=True)]

    def _all_finite(self, grads: list[Any]) -> Any:
        finite = all_finite(grads)
        if not is_distributed():
            return finite
        from polyamp.backends.keras.replicas import all_replicas

        return all_replicas(finite)

    def _summed(self, grads: list[Any]) -> list[Any]:
        if not is_distributed():
            return grads
        from polyamp.backends.keras.replicas import summed

        return summed(grads)

    def _update(self, grads: Sequence[Any], variables: Sequence[Any]) -> None:
        trained = self._trained(variables)
        self._masters.follow(variables, trained)
        self.inner_optimizer.apply(list(grads), trained)
        self._masters.round_into(variables, trained)

    def _trained(self, variables: Sequence[Any]) -> list[Any]:
        if not self._masters.variables:
            return list(variables)
        return self._masters.trained(variables, [self._get_variable_index(variable) for variable in variables])


def _check_optimizer(inner: Any, max_grad_norm: float | None) -> None:
    where, kind = "wrap_optimizer(optimizer)", type(inner)
    if isinstance(inner, keras.optimizers.LossScaleOptimizer):
        raise wrapped_already(kind.__qualname__)
    if not isinstance(inner, keras.optimizers.Optimizer):
        raise no_optimizer(inner, allowed="an instance of keras.optimizers.Optimizer")
    if inner.loss_scale_factor is not None:
        raise InvalidValueError(
            "two loss scales",
            where=where,
            found=f"{kind.__qualname__}(loss_scale_factor={inner.loss_scale_factor!r})",
            allowed="loss_scale_factor=None",
            fix="leave it out, and give wrap_optimizer(loss_scale=LossScale.fixed(...))",
        )
    if max_grad_norm is not None and inner.gradient_accumulation_steps:
        raise InvalidValueError(
            "gradients would be clipped before they are accumulated",
            where="wrap_optimizer(max_grad_norm=)",
            found=f"{kind.__qualname__}(gradient_accumulation_steps={inner.gradient_accumulation_steps})",
            allowed="max_grad_norm=None with gradient accumulation",
            fix=f"let the optimizer clip what it accumulated: {kind.__qualname__}(global_clipnorm={max_grad_norm})",
        )


def _check_masters(inner: Any) -> None:
    if inner.built:
        raise UsageError(
            "the optimizer was built on 16-bit variables already",
            where=f"wrap_optimizer({type(inner).__name__})",
            fix="wrap it before its first step, so that it trains float32 master weights",
        )
    if is_distributed():
        raise UnsupportedError(
            "master weights are not kept over several replicas",
            where="a tf.distribute strategy",
            found="variables of 16 bits",
            allowed="float32 variables",
            fix='build the model under "mixed_float16" or "mixed_bfloat16", which store float32',
        )
