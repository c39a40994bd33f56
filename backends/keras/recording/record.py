"""Record one step of a compiled model with the adapter of the framework that Keras runs on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import keras
from keras import ops

from polyamp import registry
from polyamp.backends.keras.layers.policies import remaining_policy
from polyamp.backends.keras.layers.writing import amended
from polyamp.backends.keras.recording.tracing import step_of
from polyamp.backends.keras.steps.optimizer import LossScaledOptimizer
from polyamp.backends.keras.unstable import variable_path
from polyamp.diagnosis.recording import Recording
from polyamp.dispatch import having
from polyamp.policies import Policy


def record(
    step: Any,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    policy: Policy,
    *,
    widened: bool,
    scale: float | None = None,
) -> Recording:
    """Record one step of a compiled model; the model does not change."""
    verb = having(registry.adapter_named(keras.backend.backend()), "record").record
    if not isinstance(step, keras.Model):
        return verb(step, args, kwargs, policy, widened=widened, scale=scale)
    made, own = step_of(step, args, kwargs), _scale_of(step)
    used = own if scale is None else scale
    with amended(step, policy):
        recorded = verb(made.function, made.args, {}, remaining_policy(step, policy), widened=widened, scale=used)
    named = (one._replace(name=variable_path(one.name)) for one in recorded.observations)
    return replace(recorded, policy=str(policy), observations=tuple(named), differentiates=own is not None)


def _scale_of(model: Any) -> float | None:
    """Return the factor by which the model's optimizer multiplies the loss; None if it does not."""
    optimizer = getattr(model, "optimizer", None)
    if isinstance(optimizer, LossScaledOptimizer):
        return optimizer.scaler.host_state.scale
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        return float(ops.convert_to_numpy(optimizer.dynamic_scale)) if optimizer.built else optimizer.initial_scale
    factor = getattr(optimizer, "loss_scale_factor", None)
    return None if factor is None else float(factor)
