"""Any Keras optimizer with loss scaling: all parts of a mixed-precision step in order, and the verbs of `polyamp`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import keras
from keras import ops

from polyamp.arrays import has_sixteen_bits
from polyamp.backends.keras.native import (
    BACKEND,
    in_all_replicas,
    in_strategy,
    is_recording,
    platform_of,
    summed,
    update_if,
    update_scope,
)
from polyamp.backends.keras.scaler import (
    SKIPPED,
    LossScaler,
    master_of,
    settings_of,
    skipped,
)
from polyamp.backends.keras.unstable import built_on, index_in, update_variables
from polyamp.errors import (
    InvalidValueError,
    UnsupportedError,
    UsageError,
    check_master_weights,
    no_loss_scale,
    no_method,
    no_optimizer,
    norm_limit,
    warn_once,
    wrapped_already,
)
from polyamp.policies import Policy
from polyamp.policies import policy as make_policy
from polyamp.provenance import gradients_in, pairs_in
from polyamp.scale import StepResult
from polyamp.settings import LossScale, LossScaleState
from polyamp.skips import report_limits


@keras.saving.register_keras_serializable(package="polyamp")
class LossScaledOptimizer(keras.optimizers.LossScaleOptimizer):
    """An optimizer that unscales, tests, clips, updates or skips, and advances the loss scale, always in that order.

    It is a `keras.optimizers.LossScaleOptimizer`, so ``compile`` does not wrap it again and ``fit`` scales the loss by
    it, on Keras' TensorFlow, JAX and torch backends; the algorithm is polyamp's. The loss scale, its counters and the
    master weights are variables, which ``.keras`` files and checkpoints contain.

    >>> from keras import ops
    >>> weight = keras.Variable([1.0, 1.0])
    >>> from polyamp import LossScale
    >>> opt = LossScaledOptimizer(keras.optimizers.SGD(0.5), LossScale(init=8.0), max_grad_norm=1.0)
    >>> _ = opt.apply_gradients([(ops.array([24.0, 32.0]), weight)])  # of the loss times 8
    >>> weight.numpy().round(4), opt.last_step
    (array([0.7, 0.6], dtype=float32), StepResult(applied=True, scale=8.0, skipped_in_a_row=0))

    It takes the arguments of Keras' class in the same positions, so that it can replace that class: ``initial_scale``,
    ``dynamic_growth_steps``, and a number as second argument.

    Args:
        inner_optimizer: any `keras.optimizers.Optimizer`. Its own clipping, gradient accumulation and moving averages
            work on unscaled gradients, and it does not see a skipped step. Its own ``loss_scale_factor`` is removed, as
            Keras does, with a warning.
        loss_scale: None means ``LossScale()``. With ``LossScale.none()`` it does exactly what ``inner_optimizer`` does.
            A number is Keras' ``initial_scale``.
        dynamic_growth_steps: Keras' name for ``LossScale(interval=)``.
        name: as for any Keras optimizer.
        initial_scale: Keras' name for ``LossScale(init=)``.
        max_grad_norm: clip unscaled gradients to this global L2 norm (of their sum, if replicas share a step).
        master_weights: train float32 copies of 16-bit variables. None does so if there are such variables; False
            updates the variables themselves.
        policy: the policy that it is wrapped for, which its config and reports name; None if nobody chose one.
        **unused: arguments that Keras' constructor accepts only for old files, at their defaults.

    Raises:
        InvalidTypeError: ``inner_optimizer`` is not a Keras optimizer.
        InvalidValueError: ``loss_scale`` and Keras' names contradict each other; ``inner_optimizer`` accumulates
            gradients although ``max_grad_norm`` is set; ``max_grad_norm`` is not positive and finite; an argument is
            unknown.
        UsageError: it is wrapped already.
    """

    __module__ = "polyamp.backends.keras"  # what to import before a file is loaded; Keras' error names it

    def __init__(
        self,
        inner_optimizer: keras.optimizers.Optimizer,
        loss_scale: LossScale | float | None = None,
        dynamic_growth_steps: int | None = None,
        name: str | None = None,
        *,
        initial_scale: float | None = None,
        max_grad_norm: float | None = None,
        master_weights: bool | None = None,
        policy: Policy | str | None = None,
        **unused: Any,
    ) -> None:
        norm = norm_limit(max_grad_norm, "LossScaledOptimizer")
        _check_optimizer(inner_optimizer, norm)
        settings = settings_of(loss_scale, initial_scale, dynamic_growth_steps)
        factor = inner_optimizer.loss_scale_factor
        try:  # Keras removes the factor at the end, after its own checks
            super().__init__(inner_optimizer, settings.init, settings.interval, name=name, **unused)
        except ValueError as error:
            raise InvalidValueError(
                str(error),
                where="LossScaledOptimizer(...)",
                found=", ".join(f"{key}={value!r}" for key, value in unused.items()),
                fix="pass it to the optimizer that is wrapped; a loss scale that does not change is "
                "LossScale.fixed(...)",
            ) from error
        if factor is not None:
            warn_once(
                f"{type(inner_optimizer).__name__}(loss_scale_factor={factor!r}) is ignored: the optimizer that wraps "
                "it scales the loss. Remove it; LossScale.fixed(...) is a factor that does not change."
            )
        self.scaler = LossScaler(settings, self.add_variable, None if policy is None else make_policy(policy))
        self.dynamic_scale, self.step_counter, *_ = self.scaler.stored
        self.max_grad_norm = norm
        check_master_weights(master_weights)
        self.master_weights = master_weights

    @property
    def policy(self) -> Policy | None:
        """The policy that the optimizer was wrapped for; None if nobody chose one."""
        return self.scaler.policy

    def __repr__(self) -> str:
        inner = type(self.inner_optimizer).__name__
        return f"LossScaledOptimizer({inner}, {self.scaler.settings!r}, policy={self.policy})"

    def build(self, var_list: Sequence[Any]) -> None:
        """Make the inner optimizer's variables and the master weights. Keras calls this before the first step."""
        self._has_masters = self.master_weights is not False and any(map(has_sixteen_bits, var_list))
        trained = list(var_list)
        if self._has_masters:
            _check_masters(self.inner_optimizer)
            trained = [master_of(one, self.add_variable) if has_sixteen_bits(one) else one for one in var_list]
        self.inner_optimizer.build(trained)
        super(keras.optimizers.LossScaleOptimizer, self).build(var_list)  # Keras' own would add two more scalars

    def __getattr__(self, name: str) -> Any:
        raise no_method(self, name)

    def scale_loss(self, loss: Any) -> Any:
        """Return the loss in float32 (float64 stays) times the loss scale.

        >>> float(LossScaledOptimizer(keras.optimizers.SGD()).scale_loss(keras.ops.array(0.5)))
        32768.0

        Raises:
            InvalidTypeError: the loss is not a floating-point tensor.
            NonFiniteLossError: the loss is inf or NaN under ``nonfinite_loss="raise"``, on the CPU and outside traced
                functions. Without that setting, it warns in the same cases. A step with such a loss is skipped.
        """
        return self.scaler.scale(loss)

    def apply_gradients(self, grads_and_vars: Iterable[tuple[Any, Any]]) -> Any:
        """Run `apply` on pairs; return `iterations`, the number of applied steps."""
        self.apply(*pairs_in(grads_and_vars, "apply_gradients(grads_and_vars)"))
        return self.iterations

    def apply(self, grads: Sequence[Any], trainable_variables: Sequence[Any] | None = None) -> None:
        """Run one step with gradients of the scaled loss: unscale, test, clip, update or skip, advance the loss scale.

        Works in a ``tf.function``, in ``jax.jit`` through ``stateless_apply``, and outside both.

        Args:
            grads: gradients, dense or sparse; None if there is none.
            trainable_variables: the gradients' variables; None for those that the optimizer was built on.

        Raises:
            LossScaleError: outside traced functions, with values on the CPU; otherwise see `last_step`.
            InvalidTypeError: ``grads`` is not a list of gradients.
            InvalidValueError: there are more or fewer gradients than variables.
            UsageError: the optimizer is not built, and there are no variables to build it on.
        """
        grads = gradients_in(grads, "apply(grads)")
        variables = self._variables_of(grads, trainable_variables)
        with update_scope():  # after all variables are made, since their names would contain the scope
            self._step(grads, variables)

    def stateless_apply(
        self, optimizer_variables: list[Any], grads: Sequence[Any], trainable_variables: list[Any]
    ) -> tuple[list[Any], list[Any]]:
        """Run `apply` as a pure function, for ``jax.jit``.

        Args:
            optimizer_variables: values of `variables`.
            grads: gradients of the scaled loss.
            trainable_variables: values of the variables that the optimizer was built on.

        Returns:
            The new values of the trainable variables, and those of `variables`.
        """
        plain: Any = super(keras.optimizers.LossScaleOptimizer, self)  # Keras' own does not call this class' methods
        trained, state = plain.stateless_apply(optimizer_variables, grads, trainable_variables)
        return trained, state

    def stateless_select(
        self, before: Sequence[Any], after: Sequence[Any], new: Sequence[Any], old: Sequence[Any]
    ) -> list[Any]:
        """Return ``new`` if the step from ``before`` to ``after`` was applied, and ``old`` if it was skipped.

        It is for other state of a training loop in ``jax.jit``, such as a model's non-trainable variables, including
        the statistics of batch normalisation. ``fit`` does it itself.

        >>> opt = LossScaledOptimizer(keras.optimizers.SGD())
        >>> before = [ops.copy(variable.value) for variable in opt.variables]
        >>> opt.scaler.advance(ops.array(False))
        >>> after = [variable.value for variable in opt.variables]
        >>> float(opt.stateless_select(before, after, [ops.array(2.0)], [ops.array(1.0)])[0])
        1.0

        Args:
            before: values of `variables` before `stateless_apply`.
            after: the values that `stateless_apply` returned for them.
            new: values after the step.
            old: the same values before it.
        """
        counters = self.scaler.stored.counters
        place = next(place for place, variable in enumerate(self.variables) if variable is counters)
        was_skipped = skipped([before[place][SKIPPED]], [after[place][SKIPPED]])
        return [ops.where(was_skipped, kept, value) for value, kept in zip(new, old, strict=True)]

    def finalize_variable_values(self, var_list: Sequence[Any]) -> None:
        """Let the inner optimizer finish training, for example by using its moving averages."""
        trained = self._trained(var_list)
        self.inner_optimizer.finalize_variable_values(trained)
        self.scaler.round_into(var_list, trained)

    @property
    def dynamic_scale(self) -> Any:
        """The variable with the scale of the next loss, under Keras' name; you may multiply a loss by it.

        After a read on Keras' torch backend, a step whose loss nobody scaled is not reported any more.
        """
        variable = self.__dict__.get("dynamic_scale")  # TensorFlow's checkpoints look before it is assigned
        if variable is not None and (BACKEND == "torch" or is_recording()):
            self.scaler.note_by_hand()
        return variable

    @dynamic_scale.setter
    def dynamic_scale(self, variable: Any) -> None:
        self.__dict__["dynamic_scale"] = variable

    @property
    def loss_scale(self) -> float:
        """The scale of the next loss. Waits for the device that holds it.

        On Keras' torch backend, only log this number: a loss multiplied by it would be reported as not scaled.
        """
        if is_recording():
            self.scaler.note_by_hand()
        return self.scaler.host_state.scale

    @property
    def last_step(self) -> StepResult:
        """The result of the last step.

        Outside traced functions, reading it waits for the device, and warns or raises at the limits
        ``LossScale(on_min=)`` and ``max_skips=``, as compiled steps, such as those of ``fit``, cannot. Inside, its
        properties are the traced values.

        Raises:
            LossScaleError: from `polyamp.skips.report_limits`.
        """
        applied = None if self.scaler.settings.check else True  # unchecked steps are not counted
        if platform_of(self.scaler.stored.dynamic_scale) is None:
            return StepResult(self.scaler.state, applied)
        state = self.scaler.host_state
        report_limits(self.scaler.settings, state)
        return StepResult(state, applied, explain=self.scaler.losses.why)

    def get_config(self) -> dict[str, Any]:
        """Return the arguments as JSON values, Keras' and polyamp's, for `from_config` and ``.keras`` files."""
        config = super().get_config()
        settings = self.scaler.settings
        if settings != settings_of(None, self.initial_scale, self.dynamic_growth_steps).in_float32():
            config["loss_scale"] = settings.to_dict()
        named = None if self.policy is None else str(self.policy)
        own = {"max_grad_norm": self.max_grad_norm, "master_weights": self.master_weights, "policy": named}
        return config | {key: value for key, value in own.items() if value is not None}

    @classmethod
    def from_config(
        cls, config: Mapping[str, Any], custom_objects: Mapping[str, Any] | None = None
    ) -> LossScaledOptimizer:
        """Make an optimizer from the result of `get_config`, also from that of Keras' class."""
        arguments = dict(config)
        inner = arguments.pop("inner_optimizer")
        if "loss_scale" in arguments:
            arguments["loss_scale"] = LossScale.from_dict(arguments["loss_scale"])
        return cls(keras.saving.deserialize_keras_object(inner, custom_objects=custom_objects), **arguments)

    def _variables_of(self, grads: Sequence[Any], trainable_variables: Sequence[Any] | None) -> list[Any]:
        """Return the variables that gradients belong to; build the optimizer on these if it is not built."""
        if not self.built and trainable_variables is None:
            raise UsageError(
                "the optimizer does not know its variables yet",
                where="apply(grads)",
                fix="call build(trainable_variables), or apply(grads, trainable_variables)",
            )
        variables = list(built_on(self) if trainable_variables is None else trainable_variables)
        if len(grads) != len(variables):
            raise InvalidValueError(
                "a step needs one gradient for each variable",
                where="apply(grads, trainable_variables)",
                found=f"gradients: {len(grads)}, variables: {len(variables)}",
                fix="give both lists in the same order, with None where there is no gradient",
            )
        if not self.built:
            with keras.name_scope(self.name, caller=self):
                self.build(variables)
        return variables

    def _step(self, grads: list[Any], variables: list[Any]) -> None:
        prepared = self._prepared(grads, variables)
        if not self.scaler.settings.check or all(grad is None for grad in grads):
            self._update(prepared, variables)
            return
        finite = in_all_replicas(self.scaler.are_finite(grads))
        inner = self.inner_optimizer
        touched = {id(one): one for one in (*built_on(self), *built_on(inner), *inner.variables)}
        losses = (self.scaler.losses, self.scaler.settings, self.scaler.compute)
        update_if(finite, lambda chosen: self._update(chosen, variables), prepared, list(touched.values()), losses)
        self.scaler.advance(finite)

    def _prepared(self, grads: list[Any], variables: list[Any]) -> list[Any]:
        """Return gradients unscaled and clipped; those that are scales of Keras' float8 layers stay unchanged."""
        own = [getattr(variable, "overwrite_with_gradient", False) for variable in variables]
        scaled = [None if is_own else grad for grad, is_own in zip(grads, own, strict=True)]
        plain = self.scaler.divide(scaled, variables)
        if self.max_grad_norm is not None:
            plain = self.scaler.clip(plain, self.max_grad_norm, summed(plain))
        return [grad if is_own else new for grad, new, is_own in zip(grads, plain, own, strict=True)]

    def _update(self, grads: Sequence[Any], variables: Sequence[Any]) -> None:
        trained = self._trained(variables)
        self.scaler.follow(variables, trained)
        self.inner_optimizer.apply(list(grads), trained)
        self.scaler.round_into(variables, trained)

    def _trained(self, variables: Sequence[Any]) -> list[Any]:
        """Return the variables that the inner optimizer trains: a master weight in place of one with 16 bits."""
        if not self._has_masters:
            return list(variables)
        trained = built_on(self.inner_optimizer)
        return [trained[index_in(self, variable)] for variable in variables]


def _check_optimizer(inner: Any, max_grad_norm: float | None) -> None:
    """Raise if this optimizer cannot be wrapped."""
    kind = type(inner)
    if isinstance(inner, keras.optimizers.LossScaleOptimizer):
        raise wrapped_already(kind.__qualname__)
    if not isinstance(inner, keras.optimizers.Optimizer):
        raise no_optimizer(inner, allowed="an instance of keras.optimizers.Optimizer")
    if max_grad_norm is not None and inner.gradient_accumulation_steps:
        raise InvalidValueError(
            "gradients would be clipped before they are accumulated",
            where="wrap_optimizer(max_grad_norm=)",
            found=f"{kind.__qualname__}(gradient_accumulation_steps={inner.gradient_accumulation_steps})",
            allowed="max_grad_norm=None with gradient accumulation",
            fix=f"let the optimizer clip what it accumulated: {kind.__qualname__}(global_clipnorm={max_grad_norm})",
        )


def _check_masters(inner: Any) -> None:
    """Raise if float32 master weights cannot be trained in place of 16-bit variables."""
    if inner.built:
        raise UsageError(
            "the optimizer is built on 16-bit variables already",
            where=f"wrap_optimizer({type(inner).__name__})",
            fix="wrap it before its first step, so that it trains float32 master weights",
        )
    if in_strategy():
        raise UnsupportedError(
            "master weights do not work with replicas",
            where="a tf.distribute strategy",
            found="16-bit variables",
            allowed="float32 variables",
            fix='build the model under "mixed_float16" or "mixed_bfloat16", which store float32',
        )


def wrap_optimizer(
    optimizer: Any,
    policy: Policy | None,
    *,
    loss_scale: LossScale,
    max_grad_norm: float | None,
    master_weights: bool | None = None,
) -> LossScaledOptimizer:
    """Return a wrapped optimizer; see `polyamp.backends.keras.LossScaledOptimizer`."""
    factor = getattr(optimizer, "loss_scale_factor", None)
    if factor is not None:
        raise InvalidValueError(
            "two loss scales",
            where="wrap_optimizer(optimizer)",
            found=f"{type(optimizer).__qualname__}(loss_scale_factor={factor!r})",
            allowed="loss_scale_factor=None",
            fix="remove it, and pass wrap_optimizer(loss_scale=LossScale.fixed(...))",
        )
    return LossScaledOptimizer(
        optimizer, loss_scale, max_grad_norm=max_grad_norm, master_weights=master_weights, policy=policy
    )


def scale_loss(loss: Any, holder: Any) -> Any:
    """Return the loss in float32 times the loss scale; see `LossScaledOptimizer.scale_loss`."""
    return _wrapped(holder, "scale_loss(holder)").scale_loss(loss)


def loss_scale_of(holder: Any) -> tuple[LossScale, LossScaleState]:
    """Return the settings of a wrapped optimizer, or of a model's, and its state on the host; waits for the device."""
    scaler = _wrapped(holder, "loss_scale_of(holder)").scaler
    if isinstance(holder, keras.Model):
        update_variables(holder)
    return scaler.settings, scaler.host_state


def load_loss_scale(holder: Any, saved: Mapping[str, Any]) -> LossScaledOptimizer:
    """Return the same optimizer, with the saved state."""
    wrapped = _wrapped(holder, "load_loss_scale(holder)")
    wrapped.scaler.load_loss_scale(saved)
    return wrapped


def _wrapped(holder: Any, where: str) -> LossScaledOptimizer:
    found = getattr(holder, "optimizer", None) if isinstance(holder, keras.Model) else holder
    if not isinstance(found, LossScaledOptimizer):
        allowed = "the result of polyamp.wrap_optimizer, or a model compiled with it"
        raise no_loss_scale(found, where=where, allowed=allowed)
    return found
