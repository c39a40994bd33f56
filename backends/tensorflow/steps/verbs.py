"""The verbs of `polyamp` on TensorFlow's optimizers: wrap one, scale a loss, and read, save and load a loss scale."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import tensorflow as tf

from polyamp.backends.tensorflow.steps.optimizer import LossScaledOptimizer
from polyamp.backends.tensorflow.steps.scaler import LossScaler
from polyamp.loss_scale import LossScale, LossScaleState, on_host
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
    """Return a wrapped optimizer of ``tf.compat.v1.train``; see `polyamp.backends.tensorflow.LossScaledOptimizer`."""
    wrapped = LossScaledOptimizer(optimizer, loss_scale, max_grad_norm, master_weights=master_weights)
    wrapped.scaler.compute = policy.compute
    return wrapped


def scale_loss(loss: Any, holder: Any) -> tf.Tensor:
    """Return the loss in float32 times the loss scale; see `LossScaler.scale`."""
    return _scaler(holder, "scale_loss(holder)").scale(loss)


def loss_scale_of(holder: Any) -> tuple[LossScale, LossScaleState]:
    """Return the settings of a wrapped optimizer or a `LossScaler`, and its state on the host. Not inside a graph."""
    scaler = _scaler(holder, "loss_scale_of(holder)")
    return scaler.settings, on_host(scaler.state)


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
