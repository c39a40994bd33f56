"""Read the argument ``loss_scale`` of old interfaces of TensorFlow: a word, a number, or an object with a config."""

from __future__ import annotations

from typing import Any

from polyamp.errors import InvalidTypeError
from polyamp.loss_scale import LossScale
from polyamp.validation import is_number, shown


def loss_scale_of(given: Any, *, where: str) -> LossScale:
    """Return the settings that an old program means, with the limits of TensorFlow's rule."""
    if isinstance(given, LossScale):
        return given
    if isinstance(given, str) and given == "dynamic":
        return LossScale.like("tensorflow")
    if is_number(given):
        return LossScale.fixed(given)
    config = given.get_config() if hasattr(given, "get_config") else {}
    if "loss_scale_value" in config:
        return LossScale.fixed(config["loss_scale_value"])
    if "initial_loss_scale" in config:
        return dynamic(config["initial_loss_scale"], config["increment_period"], config["multiplier"])
    raise InvalidTypeError(
        "this is not a loss scale",
        where=where,
        found=shown(given),
        allowed='"dynamic", a number, a polyamp.LossScale, or a FixedLossScale or DynamicLossScale of '
        "tf.compat.v1.mixed_precision",
        fix='leave it out, which is "dynamic"',
    )


def dynamic(init: float = 2.0**15, interval: int = 2000, factor: float = 2.0) -> LossScale:
    """Return the settings of TensorFlow's dynamic rule: it never falls below 1, or below a smaller first scale."""
    rule = LossScale.like("tensorflow")
    limits = {"min": min(rule.min, init), "max": max(rule.max, init)} if is_number(init) and init > 0 else {}
    return LossScale.like("tensorflow", init=init, interval=interval, growth=factor, backoff=1 / factor, **limits)
