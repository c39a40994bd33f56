"""`LossScaler`: all parts of a mixed-precision step in order, around any optimizer with ``apply_gradients``."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from polyamp.agreement import report_disagreement
from polyamp.arrays import divided, select, widened
from polyamp.backends.tensorflow.gradients import MasterWeights, all_finite, as_dtype, excess
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
from polyamp.errors import InvalidTypeError, UsageError, check_master_weights, kind_of, no_loss, norm_limit
from polyamp.policies import Policy
from polyamp.policies import policy as make_policy
from polyamp.scale import StepResult, advance, can_divide, on_host, report_limits, report_nonfinite_loss
from polyamp.settings import LossScale, LossScaleState
from polyamp.unscaled import ScaledLosses, gradients_in, pairs_in

SCALES = ("loss_scale", "dynamic_scale")
"""Names of the variables that hold a loss scale: in polyamp, and in Keras' optimizers."""
_SCALING_ALREADY = {"LossScaleOptimizer", "LossScaledOptimizer", "MixedPrecisionLossScaleOptimizer"}


class LossScaler(tf.Module):
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

    def __init__(
        self,
        settings: LossScale | Policy | str | None = None,
        max_grad_norm: float | None = None,
        *,
        master_weights: bool | None = None,
        policy: Policy | None = None,
    ) -> None:
        chosen = settings if isinstance(settings, LossScale) else make_policy(settings).loss_scale
        super().__init__(name="loss_scaler")
        leave_unconverted()
        self.settings = chosen.in_float32()
        self.policy = policy if isinstance(settings, LossScale) else make_policy(settings)
        self._losses = ScaledLosses()
        self._applied = None if self.settings.check else True  # unchecked steps are not counted
        self.max_grad_norm = norm_limit(max_grad_norm, "LossScaler")
        names = ("loss_scale", *LossScaleState._fields[1:])
        self.scalars = list(map(_new_scalar, names, self.settings.initial_state()))
        check_master_weights(master_weights)
        self._masters = None if master_weights is False else MasterWeights()

    @property
    def compute(self) -> str | None:
        """The format that forward passes compute in, as far as the policy tells."""
        return None if self.policy is None else self.policy.compute

    def scale(self, loss: Any) -> tf.Tensor:
        """Return the loss in float32 (float64 stays) times the loss scale.

        A loss that is inf or NaN is scaled by inf, so that the step is skipped whatever the gradients are.

        >>> float(LossScaler(LossScale(init=8.0)).scale(tf.constant(2.0)))
        16.0

        Raises:
            InvalidTypeError: the loss is not a floating-point tensor.
            NonFiniteLossError: the loss is inf or NaN under ``nonfinite_loss="raise"``, as an eager tensor on the CPU.

        Warns:
            PolyampWarning: the loss is inf or NaN, as an eager tensor on the CPU; or the scaler was made for another
                format than that of the rewritten function or the region of this call.
        """
        report_disagreement(self.policy, None, self.settings)
        if not self.settings.check:
            return loss
        tensor = _floating(loss)
        finite = all_finite([tensor])
        if not tf.is_symbolic_tensor(tensor) and _is_on_cpu(tensor) and not finite:
            report_nonfinite_loss(self.settings, compute=self.compute, found=tensor.numpy())
        wide = widened(tf, tensor)
        scale = tf.convert_to_tensor(self.scalars[0])
        self._losses.note(graph_here(), None if tf.distribute.has_strategy() else scale, finite)
        return wide * tf.cast(tf.where(finite, scale, float("inf")), wide.dtype)

    def unscale(self, grads: Sequence[Any]) -> tuple[list[Any], tf.Tensor]:
        """Return unscaled gradients, in float32 or wider, and whether they all were finite in every replica.

        It is for loops that inspect gradients or update by hand; `step` calls it itself.

        >>> grads, finite = LossScaler(LossScale(init=8.0)).unscale([tf.constant([16.0, float("inf")])])
        >>> grads[0].numpy(), bool(finite)
        (array([ 2., inf], dtype=float32), False)

        Args:
            grads: gradients of the scaled loss: tensors, ``tf.IndexedSlices`` or None.

        Raises:
            InvalidTypeError: it is not a list of gradients.
        """
        grads = gradients_in(grads, "unscale(grads)")
        if not self.settings.check:
            return grads, tf.constant(True)
        with update_scope():
            scale = tf.convert_to_tensor(self.scalars[0])
            finite = tf.logical_and(all_finite(grads), can_divide(scale))
            if self.settings.scales:
                scale = self._losses.claim(graph_here(), scale, is_scaled(grads, self.scalars[0]))
            return divided(tf, grads, scale), decision(all_replicas(finite))

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
            LossScaleError: from `polyamp.scale.report_limits`, in eager code on the CPU.
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
        return self._tensors()

    @property
    def host_state(self) -> LossScaleState:
        """The scalars as Python numbers. Only outside graphs; reading them waits for the device."""
        return on_host(self._tensors())

    @property
    def loss_scale(self) -> float:
        """The scale of the next loss. Only outside graphs; reading it waits for the device."""
        self._note_read()
        return float(self.scalars[0].numpy())

    @property
    def last_step(self) -> StepResult:
        """The result of the last step.

        In eager code, reading it waits for the device and reports the limits ``LossScale(on_min=, max_skips=)``, which
        a compiled step cannot do. In a graph its properties are tensors.

        Raises:
            LossScaleError: from `polyamp.scale.report_limits`.
        """
        if not tf.executing_eagerly():
            return StepResult(self._tensors(), self._applied)
        return self._host_result()

    def load_loss_scale(self, saved: Mapping[str, Any]) -> None:
        """Continue from a state that `polyamp.save_loss_scale` returned, in any framework. Outside graphs.

        Raises:
            StateError: it is of another kind, lacks fields, or is outside the settings; nothing is changed.
        """
        self._assign(self.settings.from_state_dict(saved))

    def _step(self, update: Callable[[Sequence[Any]], Any], grads: Sequence[Any], was_finite: Any) -> StepResult:
        plain, finite = self.unscale(grads) if was_finite is None else self._tested(grads, was_finite)
        if self.max_grad_norm is not None:
            plain = divided(tf, plain, excess(summed(plain), self.max_grad_norm))
        if not self.settings.check:
            return self._result(self._tensors(), [update(plain)])
        if tf.executing_eagerly() and _is_on_cpu(finite):
            update_if(finite, update, plain)
            before = self.host_state  # Python's arithmetic takes a hundredth of the time of eager operations
            self._assign(advance(self.settings, before, bool(finite)), before)
            return self._host_result()
        state = advance(self.settings, self._tensors(), finite, functools.partial(select, tf, "int64"))
        applied = update_if(finite, update, plain, report_of(self._losses, self.settings, self.compute))
        with after([applied]):  # and therefore after the unscaling has read the scale
            return self._result(state, self._assign(state))

    def _tested(self, grads: Sequence[Any], was_finite: Any) -> tuple[list[Any], tf.Tensor]:
        """Return unscaled gradients in float32 or wider, and whether they are still finite."""
        wide = divided(tf, grads, tf.constant(1.0))
        return wide, decision(tf.logical_and(was_finite, all_replicas(all_finite(wide))))

    def _update(self, optimizer: Any, grads: Sequence[Any], variables: list[Any], options: dict[str, Any]) -> Any:
        with outside_update_scope():
            trained = self._masters.trained(variables) if self._masters else variables
        with after(MasterWeights.follow(variables, trained)):
            pairs = [(as_dtype(grad, one.dtype), one) for grad, one in zip(grads, trained, strict=True)]
            done = apply_gradients(optimizer, pairs, options)
        with after([done]):
            return tf.group(*MasterWeights.round_into(variables, trained))

    def _note_read(self) -> None:
        """Record that a loss may be multiplied by the scale: within a tape, that may become part of the loss."""
        if is_recording():
            self._losses.note_by_hand(graph_here())

    def _assign(self, state: LossScaleState, known: Sequence[Any] = (None,) * len(LossScaleState._fields)) -> list[Any]:
        """Assign the values that are not the known ones, and return the operations in a graph."""
        changed = [triple for triple in zip(self.scalars, state, known, strict=True) if triple[1] != triple[2]]
        return [one.assign(tf.cast(value, one.dtype), read_value=False) for one, value, _ in changed]

    def _result(self, state: LossScaleState, operations: list[Any]) -> StepResult:
        if tf.executing_eagerly() and _is_on_cpu(state.scale):
            return self._host_result()
        with after(operations):
            return StepResult(LossScaleState(*map(tf.identity, state)), self._applied)

    def _tensors(self) -> LossScaleState:
        return LossScaleState(*map(tf.convert_to_tensor, self.scalars))

    def _host_result(self) -> StepResult:
        state = self.host_state
        report_limits(self.settings, state)
        return StepResult(state, self._applied, explain=self._losses.why)


def _new_scalar(name: str, value: float) -> tf.Variable:
    # Counters have 64 bits: TensorFlow keeps 32-bit integers in host memory, where programs that XLA compiled for a GPU
    # cannot reach them. Aggregation would merge the replicas' values; they compute the same ones and do not need it.
    dtype = tf.float32 if isinstance(value, float) else tf.int64
    return tf.Variable(value, trainable=False, dtype=dtype, name=name, aggregation=tf.VariableAggregation.NONE)


def _is_on_cpu(tensor: tf.Tensor) -> bool:
    return tf.DeviceSpec.from_string(tensor.device).device_type == "CPU"


def _floating(loss: Any) -> tf.Tensor:
    if tf.is_tensor(loss) and loss.dtype.is_floating:
        return tf.convert_to_tensor(loss)
    raise no_loss(loss, allowed="a floating tf.Tensor")


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
