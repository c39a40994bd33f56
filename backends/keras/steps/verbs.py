"""The verbs of `polyamp` on Keras' optimizers: wrap one, scale a loss, and read, save and load a loss scale."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import keras

from polyamp.backends.keras.steps.optimizer import LossScaledOptimizer
from polyamp.backends.keras.steps.settings import check_factor
from polyamp.loss_scale import LossScale, LossScaleState
from polyamp.policies import Policy
from polyamp.refusals import no_loss_scale


def wrap_optimizer(
    optimizer: Any,
    policy: Policy,
    *,
    loss_scale: LossScale,
    max_grad_norm: float | None,
    master_weights: bool | None = None,
) -> LossScaledOptimizer:
    """Return a wrapped optimizer; see `polyamp.backends.keras.LossScaledOptimizer`."""
    check_factor(optimizer)
    wrapped = LossScaledOptimizer(optimizer, loss_scale, max_grad_norm=max_grad_norm, master_weights=master_weights)
    wrapped.scaler.compute = policy.compute
    return wrapped


def scale_loss(loss: Any, holder: Any) -> Any:
    """Return the loss in float32 times the loss scale; see `LossScaledOptimizer.scale_loss`."""
    return _wrapped(holder, "scale_loss(holder)").scale_loss(loss)


def loss_scale_of(holder: Any) -> tuple[LossScale, LossScaleState]:
    """Return the settings of a wrapped optimizer, or of a model's, and its state on the host; waits for the device."""
    scaler = _wrapped(holder, "loss_scale_of(holder)").scaler
    return scaler.settings, scaler.host_state


def load_loss_scale(holder: Any, saved: Mapping[str, Any]) -> LossScaledOptimizer:
    """Return the same optimizer, with the saved state."""
    wrapped = _wrapped(holder, "load_loss_scale(holder)")
    wrapped.scaler.load(saved)
    return wrapped


def _wrapped(holder: Any, where: str) -> LossScaledOptimizer:
    found = getattr(holder, "optimizer", None) if isinstance(holder, keras.Model) else holder
    if not isinstance(found, LossScaledOptimizer):
        allowed = "the result of polyamp.wrap_optimizer, or a model compiled with it"
        raise no_loss_scale(found, where=where, allowed=allowed)
    return found
