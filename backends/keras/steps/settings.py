"""The settings of a wrapped Keras optimizer, in polyamp's form or that of Keras' class, and their checks."""

from __future__ import annotations

from typing import Any

import keras

from polyamp.backends.keras.backend import in_strategy
from polyamp.errors import InvalidValueError, UnsupportedError, UsageError, no_optimizer, wrapped_already
from polyamp.scale import LossScale


def settings_given(
    given: LossScale | float | str | None, initial_scale: float | None, growth_steps: int | None
) -> LossScale:
    """Return the settings; each can be given in polyamp's way or as in `keras.optimizers.LossScaleOptimizer`."""
    if given is not None and not isinstance(given, LossScale):
        if initial_scale not in (None, given):
            raise _contradiction("initial_scale", initial_scale, given)
        given, initial_scale = None, given
    if given is None:
        return _from_keras(initial_scale, growth_steps)
    if initial_scale not in (None, given.init):
        raise _contradiction("initial_scale", initial_scale, given)
    if growth_steps not in (None, given.interval):
        raise _contradiction("dynamic_growth_steps", growth_steps, given)
    return given


def _from_keras(initial_scale: float | None, growth_steps: int | None) -> LossScale:
    default = LossScale()
    interval = default.interval if growth_steps is None else growth_steps
    if initial_scale is None:
        return LossScale(interval=interval)
    is_scale = isinstance(initial_scale, int | float) and 0 < initial_scale < float("inf")
    nearest = initial_scale if is_scale else default.init  # LossScale refuses values that are not scales
    limits = min(default.min, nearest), max(default.max, nearest)
    return LossScale(init=initial_scale, interval=interval, min=limits[0], max=limits[1])


def _contradiction(name: str, found: object, loss_scale: object) -> InvalidValueError:
    return InvalidValueError(
        "two loss scales",
        where=f"LossScaledOptimizer(loss_scale=, {name}=)",
        found=f"{name}={found!r} together with {loss_scale!r}",
        allowed="one of the two, or the same value in both",
        fix=f"remove {name}: LossScale(init=, interval=) sets it",
    )


def check_optimizer(inner: Any, max_grad_norm: float | None) -> None:
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


def check_factor(inner: Any) -> None:
    """Raise if the optimizer scales the loss itself."""
    factor = getattr(inner, "loss_scale_factor", None)
    if factor is not None:
        raise InvalidValueError(
            "two loss scales",
            where="wrap_optimizer(optimizer)",
            found=f"{type(inner).__qualname__}(loss_scale_factor={factor!r})",
            allowed="loss_scale_factor=None",
            fix="remove it, and pass wrap_optimizer(loss_scale=LossScale.fixed(...))",
        )


def check_masters(inner: Any) -> None:
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
