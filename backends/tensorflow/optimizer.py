"""Any ``tf.compat.v1.train`` optimizer with all parts of a mixed-precision step, and the verbs of `polyamp` on it."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

import tensorflow as tf

from polyamp.backends.tensorflow.scaler import LossScaler
from polyamp.backends.tensorflow.skipping import places
from polyamp.errors import UsageError, no_loss_scale, no_method, no_optimizer, wrapped_already
from polyamp.policies import Policy
from polyamp.provenance import pairs_in
from polyamp.scale import StepResult
from polyamp.settings import LossScale, LossScaleState

_KEPT = 16  # most calls to keep


@dataclass(eq=False)  # tuples would compare tensors
class _Call:
    """One call of `compute_gradients`: what was traced around it, its variables, and whether all was finite."""

    place: Any  # None in eager code
    variables: set[Any]
    finite: Any
    is_applied: bool = False


class LossScaledOptimizer(tf.compat.v1.train.Optimizer):
    """An optimizer that unscales, tests, clips, updates or skips, and advances the loss scale, always in that order.

    It is a ``tf.compat.v1.train.Optimizer``, for graphs of a ``Session``, ``tf.function`` and eager code. Its state and
    master weights are variables, which a ``Saver`` or a ``tf.train.Checkpoint`` saves.

    >>> weight = tf.Variable([1.0, 1.0])
    >>> sgd = tf.compat.v1.train.GradientDescentOptimizer(0.5)
    >>> opt = LossScaledOptimizer(sgd, LossScale(init=8.0), max_grad_norm=1.0)
    >>> opt.minimize(lambda: tf.reduce_sum(weight * [3.0, 4.0]), var_list=[weight])
    >>> weight.numpy(), opt.last_step
    (array([0.7, 0.6], dtype=float32), StepResult(applied=True, scale=8.0, skipped_in_a_row=0))

    Args:
        optimizer: any ``tf.compat.v1.train.Optimizer``. It does not see a skipped step, and ``global_step`` does not
            change.
        loss_scale: None means ``LossScale()``. With ``LossScale.none()`` it does exactly what ``optimizer`` does.
        max_grad_norm: clip unscaled gradients to this global L2 norm.
        master_weights: train float32 copies of 16-bit variables; False updates the variables themselves.
        policy: the policy that it is wrapped for, which reports name; None if nobody chose one.

    Raises:
        InvalidTypeError: ``optimizer`` is not such an optimizer.
        UsageError: it is wrapped already.
    """

    def __init__(
        self,
        optimizer: tf.compat.v1.train.Optimizer,
        loss_scale: LossScale | None = None,
        max_grad_norm: float | None = None,
        *,
        master_weights: bool | None = None,
        policy: Policy | None = None,
    ) -> None:
        _check_optimizer(optimizer)
        super().__init__(use_locking=False, name=optimizer.get_name())
        settings = LossScale() if loss_scale is None else loss_scale
        self.inner = optimizer
        self.scaler = LossScaler(settings, max_grad_norm, master_weights=master_weights, policy=policy)
        self._calls: list[_Call] = []
        # The names under which TensorFlow's own wrappers register objects for checkpoints; there is no public way.
        self._track_trackable(self.inner, "inner")
        self._track_trackable(self.scaler, "scaler")

    def __getattr__(self, name: str) -> Any:
        raise no_method(self, name)

    def scale_loss(self, loss: Any) -> tf.Tensor:
        """Scale a loss as `LossScaler.scale` does; `minimize` and `compute_gradients` do it themselves."""
        return self.scaler.scale(loss)

    def compute_gradients(self, loss: Any, *args: Any, **kwargs: Any) -> list[tuple[Any, Any]]:
        """Return pairs of an unscaled gradient and its variable, for `apply_gradients`.

        As with TensorFlow's own wrapper, code may clip or sum gradients between the two calls. Gradients are
        tested here, before that, and `apply_gradients` skips the step if they were not finite.

        >>> weight = tf.Variable([1.0, 1.0])
        >>> opt = LossScaledOptimizer(tf.compat.v1.train.GradientDescentOptimizer(1.0))
        >>> pairs = opt.compute_gradients(lambda: tf.reduce_sum(weight * [3.0, 4.0]), var_list=[weight])
        >>> pairs[0][0].numpy()
        array([3., 4.], dtype=float32)
        >>> opt.apply_gradients([(tf.clip_by_norm(grad, 1.0), one) for grad, one in pairs])
        >>> weight.numpy().round(4)
        array([0.4, 0.2], dtype=float32)

        Arguments are those of ``tf.compat.v1.train.Optimizer``; errors are its own and those of `LossScaler.scale`.
        """
        scaled = (lambda: self.scaler.scale(loss())) if callable(loss) else self.scaler.scale(loss)
        pairs: list[tuple[Any, Any]] = self.inner.compute_gradients(scaled, *args, **kwargs)
        grads = [grad for grad, _ in pairs]
        if not self.scaler.settings.check or all(grad is None for grad in grads):
            return pairs
        plain, finite = self.scaler.unscale(grads)
        place, *_ = [*places(), None]
        self._calls = [*self._calls, _Call(place, {variable.ref() for _, variable in pairs}, finite)][-_KEPT:]
        return [(grad, variable) for grad, (_, variable) in zip(plain, pairs, strict=True)]

    def apply_gradients(
        self, grads_and_vars: Iterable[tuple[Any, Any]], global_step: Any = None, name: str | None = None
    ) -> tf.Operation | None:
        """Run one step: unscale scaled gradients, test, clip, update or skip, advance the loss scale.

        Args:
            grads_and_vars: the result of `compute_gradients`, clipped or not; or gradients of a loss that `scale_loss`
                scaled.
            global_step: a variable that counts applied steps.
            name: name of the operation.

        Returns:
            In a graph, the operation that runs the step; in eager code None, since the step has run.

        Raises:
            LossScaleError: in eager code on the CPU; otherwise see `last_step`.
            UsageError: `compute_gradients` was called in another function.
        """
        grads, variables = pairs_in(grads_and_vars, "apply_gradients(grads_and_vars)")
        pairs = zip(grads, variables, strict=True)
        finite = self._was_finite(variables)
        result = self.scaler.step(self.inner, pairs, unscaled=finite, global_step=global_step, name=name)
        return None if tf.executing_eagerly() else tf.group(result.scale, name=name)

    def _was_finite(self, variables: Sequence[tf.Variable]) -> Any:
        """Return whether `compute_gradients` found these variables' gradients finite; None if it computed none here."""
        wanted, around = {variable.ref() for variable in variables}, places() or [None]
        calls = [call for call in self._calls if call.variables & wanted]
        here = [call for call in calls if any(call.place is place for place in around)]
        if not here and any(not call.is_applied for call in calls):
            self._calls.clear()
            raise UsageError(
                "compute_gradients was called elsewhere, and its gradients were not applied there",
                where="apply_gradients(grads_and_vars)",
                found="gradients of another function, or of eager code next to a compiled function",
                allowed="both calls in one function, and neither inside a loop",
                fix="make both calls in one function. To only look at gradients, call scaler.unscale(grads). polyamp "
                "now ignores the first call",
            )
        for call in here:
            call.is_applied = True
        if tf.executing_eagerly():  # which has no end: the next gradients of these variables are others
            self._calls = [call for call in self._calls if call not in here]
        return reduce(operator.and_, [call.finite for call in here]) if here else None

    @property
    def loss_scale(self) -> float:
        """The scale of the next loss; see `LossScaler.loss_scale`."""
        return self.scaler.loss_scale

    def __repr__(self) -> str:
        return f"LossScaledOptimizer({type(self.inner).__name__}, {self.scaler.settings!r}, policy={self.policy})"

    @property
    def policy(self) -> Policy | None:
        """The policy that the optimizer was wrapped for; None if nobody chose one."""
        return self.scaler.policy

    @property
    def last_step(self) -> StepResult:
        """The result of the last step; see `LossScaler.last_step`."""
        return self.scaler.last_step

    def variables(self) -> list[tf.Variable]:
        """Return the inner optimizer's variables, the loss scale with its counters, and the master weights."""
        return [*self.inner.variables(), *self.scaler.variables]

    def get_slot(self, var: tf.Variable, name: str) -> tf.Variable | None:
        """Return the inner optimizer's slot for a variable."""
        # `get_slot_names` is not forwarded: a checkpoint would find the inner optimizer's slots twice, and fail.
        return self.inner.get_slot(var, name)


def _check_optimizer(optimizer: Any) -> None:
    wrappers = LossScaledOptimizer | tf.compat.v1.mixed_precision.MixedPrecisionLossScaleOptimizer
    if isinstance(optimizer, wrappers):
        raise wrapped_already(type(optimizer).__qualname__)
    if not isinstance(optimizer, tf.compat.v1.train.Optimizer):
        is_keras_2 = any(kind.__module__.partition(".")[0] == "tf_keras" for kind in type(optimizer).__mro__)
        keras = "an optimizer of Keras 3 (this one is of Keras 2, tf_keras)" if is_keras_2 else "a Keras 3 optimizer"
        raise no_optimizer(
            optimizer,
            allowed=f"an instance of tf.compat.v1.train.Optimizer, or {keras}; any other with apply_gradients is "
            "stepped by polyamp.backends.tensorflow.LossScaler",
        )


def wrap_optimizer(
    optimizer: Any,
    policy: Policy | None,
    *,
    loss_scale: LossScale,
    max_grad_norm: float | None,
    master_weights: bool | None = None,
) -> LossScaledOptimizer:
    """Return a wrapped optimizer of ``tf.compat.v1.train``; see `polyamp.backends.tensorflow.LossScaledOptimizer`."""
    return LossScaledOptimizer(optimizer, loss_scale, max_grad_norm, master_weights=master_weights, policy=policy)


def scale_loss(loss: Any, holder: Any) -> tf.Tensor:
    """Return the loss in float32 times the loss scale; see `LossScaler.scale`."""
    return _scaler(holder, "scale_loss(holder)").scale(loss)


def loss_scale_of(holder: Any) -> tuple[LossScale, LossScaleState]:
    """Return the settings of a wrapped optimizer or a `LossScaler`, and its state on the host. Not inside a graph."""
    scaler = _scaler(holder, "loss_scale_of(holder)")
    return scaler.settings, scaler.host_state


def load_loss_scale(holder: Any, saved: Mapping[str, Any]) -> Any:
    """Return ``holder`` itself, with the saved state; see `LossScaler.load_loss_scale`."""
    _scaler(holder, "load_loss_scale(holder)").load_loss_scale(saved)
    return holder


def _scaler(holder: Any, where: str) -> LossScaler:
    scaler = holder.scaler if isinstance(holder, LossScaledOptimizer) else holder
    if not isinstance(scaler, LossScaler):
        allowed = "the result of polyamp.wrap_optimizer, or a polyamp.backends.tensorflow.LossScaler"
        raise no_loss_scale(holder, where=where, allowed=allowed)
    return scaler
