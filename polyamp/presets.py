"""Other libraries' loss-scale rules expressed as our settings, each with its source.

Some libraries have no limit, so that their scale can reach 0 or inf and stay there. For those, the preset's limit is
the last power of two that float32 can divide by; up to there every update is the library's own.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from polyamp.errors import InvalidValueError
from polyamp.validation import did_you_mean

_LOWEST = 2.0**-126  # the smallest normal float32
_HIGHEST = 2.0**127  # the largest power of two in float32


class Preset(NamedTuple):
    """Settings for `LossScale`, and their source."""

    settings: dict[str, Any]
    source: str


PRESETS: dict[str, Preset] = {
    "torch": Preset(
        {"init": 2.0**16, "min": _LOWEST, "max": _HIGHEST},
        "torch.amp.GradScaler and aten _amp_update_scale_, torch 2.13: no minimum, growth to inf refused",
    ),
    "apex": Preset(
        {"init": 2.0**16, "min": _LOWEST, "max": 2.0**24},
        "apex/amp/scaler.py LossScaler at b82c6bd (removed in cb65b8ed): clamped to max_loss_scale = 2**24",
    ),
    "keras": Preset(
        {"init": 2.0**15, "min": _LOWEST, "max": _HIGHEST},
        "keras.optimizers.LossScaleOptimizer, Keras 3.15: no limits",
    ),
    "tensorflow": Preset(
        {"init": 2.0**15, "min": 1.0, "max": _HIGHEST, "on_min": "ignore"},
        "tf.compat.v1.mixed_precision.DynamicLossScale, TensorFlow 2.21: floor of 1, growth to inf refused",
    ),
    "deepspeed": Preset(
        {
            "init": 2.0**16,
            "interval": 1000,
            "hysteresis": 2,
            "min": 1.0,
            "max": _HIGHEST,
            "on_min": "raise",
            "late_growth": "after_overflow",
        },
        "deepspeed/runtime/fp16/loss_scaler.py DynamicLossScaler, 0.19, with the defaults of the fp16 config block",
    ),
    "megatron": Preset(
        {
            "init": 2.0**32,
            "interval": 1000,
            "hysteresis": 2,
            "min": 1.0,
            "max": _HIGHEST,
            "on_min": "ignore",
        },
        "megatron/core/optimizer/grad_scaler.py DynamicGradScaler, 0.16, with the defaults of Megatron-LM's arguments",
    ),
    "flax": Preset(
        {"init": 2.0**16, "min": _LOWEST, "max": (2 - 2.0**-23) * 2.0**127, "late_growth": "always"},
        "flax/training/dynamic_scale.py DynamicScale, flax 0.12: clamped to finfo(float32)",
    ),
    "jmp": Preset(
        {"init": 2.0**15, "min": 1.0, "max": _HIGHEST, "on_min": "ignore"},
        "jmp/_src/loss_scale.py DynamicLossScale, jmp 0.0.4, with the initial scale of its README",
    ),
    "fairseq": Preset(
        {"init": 2.0**15, "min": 2.0**-13, "max": _HIGHEST, "on_min": "raise"},
        "fairseq/optim/dynamic_loss_scaler.py, 0.12: raises before min_loss_scale = 1e-4, so 2**-13 is the last",
    ),
}


OTHER_NAMES: dict[str, str] = {
    "init_scale": "init",
    "initial_scale": "init",
    "initial_loss_scale": "init",
    "loss_scale": "init",
    "scale": "init",
    "growth_factor": "growth",
    "scale_factor": "growth",
    "factor": "growth",
    "multiplier": "growth",
    "growth_interval": "interval",
    "scale_window": "interval",
    "loss_scale_window": "interval",
    "period": "interval",
    "increment_period": "interval",
    "dynamic_growth_steps": "interval",
    "backoff_factor": "backoff",
    "delayed_shift": "hysteresis",
    "consecutive_hysteresis": "consecutive",
    "min_scale": "min",
    "min_loss_scale": "min",
    "minimum_scale": "min",
    "max_scale": "max",
    "max_loss_scale": "max",
}
"""Other libraries' names of settings, and the field of `LossScale` that each one means; for errors."""


def preset(name: str, *, where: str) -> Preset:
    """Return a library's preset."""
    if isinstance(name, str) and name in PRESETS:
        return PRESETS[name]
    raise InvalidValueError(
        "unknown loss-scale preset",
        where=where,
        found=repr(name),
        allowed=", ".join(PRESETS),
        fix=f"{did_you_mean(str(name), PRESETS)}use one of the names above, or write the settings one by one",
    )
