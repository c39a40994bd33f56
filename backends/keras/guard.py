"""What every training step of a compiled model gets: averages that a skipped step does not change, and a check.

In a step that overflows, the batch's statistics may be inf or NaN. An average that includes them never recovers: the
model trains on, but ``evaluate`` returns NaN. Layers update their averages in the forward pass, before the gradients
are known. So the averages are copied before the step and restored after it.

For example, when ``fit`` makes the function that it trains with, ``train_step`` is replaced by one that copies
``moving_mean``, runs the original step, and writes the copy back if the optimizer's count of skipped steps has grown.

Then the model and its optimizer are also compared. Two mistakes lose accuracy or speed without an error: layers
compute in float16 and the optimizer does not scale the loss, so gradients underflow; or the optimizer was wrapped
for another format than that of the layers.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import keras
from keras import ops

from polyamp.agreement import report_disagreement
from polyamp.backends.keras.layers import own_policy, walk
from polyamp.backends.keras.losses import widen_losses
from polyamp.backends.keras.native import BACKEND, autocasts, value_of
from polyamp.backends.keras.optimizer import LossScaledOptimizer
from polyamp.backends.keras.scaler import LossScaler, skipped
from polyamp.backends.keras.unstable import added_weights
from polyamp.errors import LossScaleError, NonFiniteLossError, warn_once
from polyamp.policies import Policy
from polyamp.policies import policy as make_policy
from polyamp.skips import report_nonfinite_loss

_PLAIN = "_polyamp_plain"  # the attribute of a guarded step that is the step without its guard

CONVERTED: WeakKeyDictionary[Any, Policy] = WeakKeyDictionary()
"""The models that were converted, and to what: then a model may train in float32, or unscaled, on purpose."""


@contextmanager
def keep_statistics(model: Any, *optimizers: LossScaledOptimizer) -> Iterator[None]:
    """Restore a model's statistics, bit for bit, if a step inside is skipped; for your own training loops.

    ``fit`` and ``train_on_batch`` do this themselves. On Keras' JAX backend, pure functions select the values with
    `LossScaledOptimizer.stateless_select` instead.

    >>> import numpy as np
    >>> from polyamp import wrap_optimizer
    >>> norm = keras.layers.BatchNormalization()
    >>> model = keras.Sequential([keras.Input((2,)), norm])
    >>> opt = wrap_optimizer(keras.optimizers.SGD(0.1), "mixed_float16")
    >>> opt.build(model.trainable_variables)
    >>> with keep_statistics(model, opt):
    ...     _ = model(np.full((4, 2), np.inf, "float32"), training=True)
    ...     opt.apply([ops.full((2,), np.inf), ops.zeros((2,))])
    >>> float(ops.max(norm.moving_mean)), float(ops.min(norm.moving_mean))
    (0.0, 0.0)

    Args:
        model: a layer or a model.
        *optimizers: the wrapped optimizers that step inside; by default the model's.
    """
    checking = [one for one in optimizers or _optimizers_of(model) if one.scaler.settings.check]
    variables = added_weights(model) if checking else []
    if not variables:
        yield
        return
    old_counts = [ops.copy(one.scaler.state.skipped) for one in checking]
    old = [ops.copy(value_of(one)) for one in variables]
    try:
        yield
    except (LossScaleError, NonFiniteLossError):
        for variable, value in zip(variables, old, strict=True):
            variable.assign(value)
        raise
    was_skipped = skipped(old_counts, [one.scaler.state.skipped for one in checking])
    for variable, value in zip(variables, old, strict=True):
        variable.assign(ops.where(was_skipped, value, value_of(variable)))


def guard(model: Any) -> Callable[[Any], None] | None:
    """Check a model that starts to train, and guard its statistics; return a function to call with a step's logs."""
    widen_loaded(model)
    step = getattr(model.train_step, _PLAIN, model.train_step)
    optimizers = _optimizers_of(model)
    if not type(step).__module__.startswith("polyamp.backends."):  # not a rewritten step, which does both itself
        report_unscaled(model)
        _report_mismatch(model, optimizers)
        if optimizers:
            model.train_step = _guarded(model, step)
    checking = (one.scaler for one in optimizers if one.scaler.settings.check)
    return next((functools.partial(_report_loss, one) for one in checking), None)


def widen_loaded(model: Any) -> None:
    """Make the layers of a model that was loaded in 16 bits add their losses in float32, as `convert` does."""
    if own_policy(model) is not None:
        for layer in walk(model):
            widen_losses(layer)


def _report_loss(scaler: LossScaler, logs: Any) -> None:
    """Report a loss that is inf or NaN, which compiled steps cannot do on all devices."""
    loss = logs.get("loss") if isinstance(logs, Mapping) else None
    # JAX reuses the state's memory: an error would lose it.
    is_lost = BACKEND == "jax" and scaler.settings.nonfinite_loss == "raise"
    if loss is not None and not is_lost and not bool(ops.all(ops.isfinite(loss))):
        report_nonfinite_loss(scaler.settings, compute=scaler.compute)


def _guarded(model: Any, step: Any) -> Any:
    """Return a step that restores averages after a skip; a new function at each call, since ``jax.jit`` caches."""
    if BACKEND == "jax":

        @functools.wraps(step)
        def train_step(state: Any, *args: Any, **kwargs: Any) -> Any:
            logs, after = step(state, *args, **kwargs)
            return logs, _kept_state(model, state, after)

    else:

        @functools.wraps(step)
        def train_step(*args: Any, **kwargs: Any) -> Any:
            with keep_statistics(model):
                return step(*args, **kwargs)

    setattr(train_step, _PLAIN, step)
    return train_step


def _kept_state(model: Any, before: Any, after: Any) -> Any:
    """Return a step's result on JAX, with the old statistics if the step was skipped."""
    optimizer = model.optimizer
    if optimizer not in _optimizers_of(model) or not optimizer.scaler.settings.check:
        return after
    _, old, old_optimizer, _ = before
    trainable, new, new_optimizer, metrics = after
    kept = {id(variable) for variable in added_weights(model)}
    places = [place for place, one in enumerate(model.non_trainable_variables) if id(one) in kept]
    chosen = optimizer.stateless_select(
        old_optimizer, new_optimizer, [new[place] for place in places], [old[place] for place in places]
    )
    values = list(new)
    for place, value in zip(places, chosen, strict=True):
        values[place] = value
    return trainable, values, new_optimizer, metrics


def _optimizers_of(model: Any) -> list[LossScaledOptimizer]:
    """Return the wrapped optimizers that are attributes of a model, under any name."""
    found = (value for value in vars(model).values() if isinstance(value, LossScaledOptimizer))
    return list({id(one): one for one in found}.values())


def report_unscaled(model: Any) -> None:
    """Warn if converted layers compute in float16 and the model's optimizer does not scale the loss."""
    # Keras' ``compile`` wraps an optimizer by itself only if the model's own policy is ``mixed_float16``.
    optimizer = getattr(model, "optimizer", None)  # missing until the model is compiled
    if optimizer is None or isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        return
    layers = list(walk(model))
    policies = [CONVERTED[layer] for layer in layers if layer in CONVERTED]
    is_meant = any(policy.compute == "float16" and not policy.loss_scale.scales for policy in policies)
    if policies and not is_meant and any(layer.compute_dtype == "float16" for layer in layers):
        warn_once(
            f"{model.name!r} is compiled with {type(optimizer).__name__}, which does not scale the loss: "
            "gradients in float16 underflow. Compile it with polyamp.wrap_optimizer(optimizer, policy)."
        )


def _report_mismatch(model: Any, optimizers: Sequence[LossScaledOptimizer]) -> None:
    """Warn once if optimizers were wrapped for another format than that in which the model's layers compute."""
    own = own_policy(model)
    trains = (
        f"{model.name!r} trains in float32: so do all its layers. Call polyamp.convert(model, policy), or give "
        "the model a rewritten step: model.train_step = polyamp.rewrite(model.train_step, policy=policy)."
    )
    is_lowered = own is not None or model in CONVERTED or autocasts()
    forward = None if own is None else make_policy(own)
    for one in optimizers:
        report_disagreement(one.policy, forward, one.scaler.settings, in_float32="" if is_lowered else trains)
