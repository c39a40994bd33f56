"""`LossScaler`: all parts of a mixed-precision step in order, around any optimizer with ``apply_gradients``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from types import SimpleNamespace
from typing import Any

import tensorflow as tf

from polyamp.arrays import ArrayScaler, all_finite, divided
from polyamp.backends.tensorflow.gradients import MasterWeights, as_dtype
from polyamp.backends.tensorflow.provenance import is_scaled
from polyamp.backends.tensorflow.skipping import (
    after,
    all_replicas,
    apply_gradients,
    decision,
    graph_here,
    outside_update_scope,
    report_of,
    summed,
    update_if,
    update_scope,
)
from polyamp.backends.tensorflow.unstable import is_recording, leave_unconverted
from polyamp.errors import InvalidTypeError, UsageError, check_master_weights, kind_of, norm_limit
from polyamp.policies import Policy
from polyamp.policies import policy as make_policy
from polyamp.provenance import gradients_in, pairs_in
from polyamp.scale import StepResult
from polyamp.settings import LossScale, LossScaleState
from polyamp.skips import report_limits

SCALE = "dynamic_scale"
"""The name of the variable that holds a loss scale: in polyamp, and in Keras' optimizers."""
_SCALING_ALREADY = {"LossScaleOptimizer", "LossScaledOptimizer", "MixedPrecisionLossScaleOptimizer"}


_XP = SimpleNamespace(
    abs=tf.abs,
    all=tf.reduce_all,
    cast=tf.cast,
    convert_to_numpy=lambda tensor: tensor.numpy(),
    convert_to_tensor=tf.convert_to_tensor,
    copy=tf.identity,
    equal=tf.equal,
    is_tensor=tf.is_tensor,
    isfinite=tf.math.is_finite,
    logical_and=tf.logical_and,
    maximum=tf.maximum,
    sqrt=tf.sqrt,
    square=tf.square,
    stack=tf.stack,
    sum=tf.reduce_sum,
    unstack=tf.unstack,
    where=tf.where,
)


class LossScaler(ArrayScaler, tf.Module):
    """A scaler of losses that also runs steps: unscale, test, clip, update or skip, advance the loss scale.

    It is for loops around ``tf.GradientTape``, eager or in a ``tf.function`` (``jit_compile=True`` too), and for graphs
    of a ``Session``, without a host sync. The state and the master weights are variables: a ``tf.train.Checkpoint`` of
    the scaler saves them.

    >>> weight, scaler = tf.Variable([1.0, 1.0]), LossScaler("mixed_float16", max_grad_norm=1.0)
    >>> sgd = tf.compat.v1.train.GradientDescentOptimizer(0.5)
    >>> with tf.GradientTape() as tape:
    ...     scaled = scaler.scale(tf.reduce_sum(weight * [3.0, 4.0]))
    >>> scaler.step(sgd, [(tape.gradient(scaled, weight), weight)])
    StepResult(applied=True, scale=65536.0, skipped_in_a_row=0)
    >>> weight.numpy()
    array([0.7, 0.6], dtype=float32)

    Args:
        settings: a `polyamp.LossScale`; or a policy or its name, to use its loss scale; None is the current policy.
        max_grad_norm: clip unscaled gradients to this global L2 norm (of their sum, if replicas share a step).
        master_weights: train float32 copies of 16-bit variables; False updates the variables themselves.

    Raises:
        InvalidTypeError: ``settings`` is none of these.
        InvalidValueError: ``max_grad_norm`` is not a positive finite number.
    """

    xp = _XP
    counter = "int64"

    def __init__(
        self,
        settings: LossScale | Policy | str | None = None,
        max_grad_norm: float | None = None,
        *,
        master_weights: bool | None = None,
        policy: Policy | None = None,
    ) -> None:
        if not isinstance(settings, LossScale):
            policy = make_policy(settings)
            settings = policy.loss_scale
        tf.Module.__init__(self, name="loss_scaler")
        leave_unconverted()
        ArrayScaler.__init__(self, settings, _new_variable, policy)
        self._applied = None if self.settings.check else True  # unchecked steps are not counted
        self.max_grad_norm = norm_limit(max_grad_norm, "LossScaler")
        check_master_weights(master_weights)
        self._masters = None if master_weights is False else MasterWeights()

    def value(self, variable: Any) -> tf.Tensor:
        """Return the tensor that a variable holds now."""
        return tf.convert_to_tensor(variable)

    def assign(self, variable: tf.Variable, value: Any) -> Any:
        """Assign a value to a variable; return, in a graph, the operation that does it."""
        return variable.assign(tf.cast(value, variable.dtype), read_value=False)

    def platform(self, tensor: Any) -> str | None:
        """Return where a tensor is; None inside traced functions."""
        if tf.is_symbolic_tensor(tensor):
            return None
        return str(tf.DeviceSpec.from_string(tensor.device).device_type).lower()

    def place(self) -> Any:
        """Return the graph that is being built; None in eager code."""
        return graph_here()

    def is_scaled(self, grads: Sequence[Any]) -> bool | None:
        """Return whether gradients are those of a scaled loss; None if that is not known."""
        return is_scaled(grads, self.stored[0])

    def is_one_of_several(self) -> bool:
        """Return whether replicas have a state each."""
        return bool(tf.distribute.has_strategy())

    def add(self, scalars: Sequence[Any]) -> Any:
        """Return the sum of scalars."""
        return tf.add_n(scalars)

    def unscale(self, grads: Sequence[Any]) -> tuple[list[Any], tf.Tensor]:
        """Return unscaled gradients, in float32 or wider, and whether they all were finite in every replica.

        It is for loops that inspect gradients or update by hand; `step` calls it itself.

        >>> grads, finite = LossScaler(LossScale(init=8.0)).unscale([tf.constant([16.0, float("inf")])])
        >>> grads[0].numpy(), bool(finite)
        (array([ 2., inf], dtype=float32), False)

        Args:
            grads: gradients of the scaled loss: tensors, ``tf.IndexedSlices`` or None.

        Raises:
            InvalidTypeError: ``grads`` is not a list of gradients.
        """
        grads = gradients_in(grads, "unscale(grads)")
        if not self.settings.check:
            return grads, tf.constant(True)
        with update_scope():
            finite = self.are_finite(grads)
            return self.divide(grads), decision(all_replicas(finite))

    def step(
        self, optimizer: Any, grads_and_vars: Iterable[tuple[Any, Any]], *, unscaled: Any = None, **options: Any
    ) -> StepResult:
        """Update with the gradients of the scaled loss, or skip, and advance the loss scale.

        Args:
            optimizer: any object with ``apply_gradients(grads_and_vars)``, from ``tf.compat.v1.train``, Keras or you.
            grads_and_vars: pairs of a gradient of the scaled loss, or None, and its variable.
            unscaled: if the gradients come from `unscale`, clipped or not: its second result, whether they all were
                finite.
            **options: options of ``apply_gradients``.

        Returns:
            What the step did. In a graph its properties are tensors; in a graph of a ``Session``, running one of them
            runs the step.

        Raises:
            InvalidTypeError: ``optimizer`` is not an optimizer, or ``grads_and_vars`` are not such pairs.
            LossScaleError: from `polyamp.skips.report_limits`, in eager code on the CPU.
            UsageError: the optimizer scales losses itself.
        """
        _check_optimizer(optimizer)
        grads, variables = pairs_in(grads_and_vars, "step(optimizer, grads_and_vars)")

        def update(chosen: Sequence[Any]) -> Any:
            return self._update(optimizer, chosen, variables, options)

        with update_scope():
            return self._step(update, grads, unscaled)

    @property
    def has_masters(self) -> bool:
        """Whether `step` trains float32 copies of 16-bit variables."""
        return self._masters is not None

    @property
    def state(self) -> LossScaleState:
        """The scalars as tensors, which are symbolic in a graph; you may multiply a loss by the scale."""
        self._note_read()
        return self.tensors()

    @property
    def loss_scale(self) -> float:
        """The scale of the next loss. Only outside graphs; reading it waits for the device."""
        self._note_read()
        return float(self.stored[0].numpy())

    @property
    def last_step(self) -> StepResult:
        """The result of the last step.

        In eager code, reading it waits for the device and reports the limits ``LossScale(on_min=, max_skips=)``, which
        a compiled step cannot do. In a graph its properties are tensors.

        Raises:
            LossScaleError: from `polyamp.skips.report_limits`.
        """
        if not tf.executing_eagerly():
            return StepResult(self.tensors(), self._applied)
        return self._host_result()

    def _step(self, update: Callable[[Sequence[Any]], Any], grads: Sequence[Any], was_finite: Any) -> StepResult:
        plain, finite = self.unscale(grads) if was_finite is None else self._tested(grads, was_finite)
        if self.max_grad_norm is not None:
            plain = self.clip(plain, self.max_grad_norm, summed(plain))
        if not self.settings.check:
            return self._result([update(plain)])
        applied = update_if(finite, update, plain, report_of(self.losses, self.settings, self.compute))
        with after([applied]):  # and therefore after the unscaling has read the scale
            operations = self.advance(finite)
        return self._result(operations)

    def _tested(self, grads: Sequence[Any], was_finite: Any) -> tuple[list[Any], tf.Tensor]:
        """Return unscaled gradients in float32 or wider, and whether they are still finite."""
        wide = divided(self.xp, grads, tf.constant(1.0))
        return wide, decision(tf.logical_and(was_finite, all_replicas(all_finite(self.xp, wide))))

    def _update(self, optimizer: Any, grads: Sequence[Any], variables: list[Any], options: dict[str, Any]) -> Any:
        with outside_update_scope():
            trained = self._masters.trained(variables) if self._masters else variables
        with after(self.follow(variables, trained)):
            pairs = [(as_dtype(grad, one.dtype), one) for grad, one in zip(grads, trained, strict=True)]
            done = apply_gradients(optimizer, pairs, options)
        with after([done]):
            return tf.group(*self.round_into(variables, trained))

    def _note_read(self) -> None:
        """Record that the scale was read, if a tape records: the value can become a factor of the loss."""
        if is_recording():
            self.note_by_hand()

    def _result(self, operations: list[Any]) -> StepResult:
        if tf.executing_eagerly() and self.platform(self.value(self.stored[0])) == "cpu":
            return self._host_result()
        with after(operations):
            return StepResult(LossScaleState(*map(tf.identity, self.tensors())), self._applied)

    def _host_result(self) -> StepResult:
        state = self.host_state
        report_limits(self.settings, state)
        return StepResult(state, self._applied, explain=self.losses.why)


def _new_variable(name: str, value: Any) -> tf.Variable:
    # Counters have 64 bits: TensorFlow keeps 32-bit integers in host memory, where programs that XLA compiled for a GPU
    # cannot reach them. Aggregation would merge the replicas' values; they compute the same ones and do not need it.
    dtype = tf.float32 if isinstance(value, float) else tf.int64
    return tf.Variable(value, trainable=False, dtype=dtype, name=name, aggregation=tf.VariableAggregation.NONE)


def _check_optimizer(optimizer: Any) -> None:
    kinds = type(optimizer).__mro__
    if not callable(getattr(optimizer, "apply_gradients", None)):
        raise InvalidTypeError(
            "step needs an optimizer",
            where="step(optimizer, ...)",
            found=kind_of(optimizer),
            allowed="an object with apply_gradients(grads_and_vars)",
            fix="pass an optimizer of tf.compat.v1.train or of Keras, or write that method",
        )
    if _SCALING_ALREADY & {kind.__name__ for kind in kinds}:
        raise UsageError(
            "this optimizer scales losses itself",
            where="step(optimizer, ...)",
            found=kinds[0].__qualname__,
            fix="pass the plain optimizer, or use the wrapped one without a LossScaler",
        )
