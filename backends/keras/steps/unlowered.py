"""A warning for models that train in float32 although their optimizer was wrapped for 16 bits."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

import keras

from polyamp import registry
from polyamp.backends.keras.convert import own_policy, report_waiting, was_converted
from polyamp.dispatch import IS_LOWERING
from polyamp.errors import warn_once
from polyamp.formats import format_of

_ADAPTERS = "polyamp.backends."


def report_unlowered(model: Any, optimizers: Any) -> None:
    """Warn once if a step's optimizers were wrapped under a 16-bit policy and nothing computes in 16 bits.

    Call it while the step is traced, or when it runs without being traced.
    """
    report_waiting(model)
    wanted = {one.scaler.compute for one in optimizers if one.scaler.compute is not None}
    low = next((name for name in sorted(wanted) if format_of(name).is_low), None)
    if low is None or was_converted(model) or own_policy(model) is not None or lowers_here():
        return
    warn_once(
        f"{model.name!r} trains in float32: its optimizer was wrapped under a policy that computes in {low}, and none "
        "of its layers does. Call polyamp.convert(model, policy), or give the model a rewritten step: "
        "model.train_step = polyamp.rewrite(model.train_step, policy=policy)."
    )


def lowers_here() -> bool:
    """Return whether a rewrite or autocast of Keras' backend is active in the calling code.

    >>> lowers_here()
    False
    """
    adapter = registry.adapter_named(keras.backend.backend())
    is_ambient = IS_LOWERING.find(adapter)
    if is_ambient and is_ambient():
        return True
    if adapter.name == "torch":
        import torch

        return torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda")
    return _is_within(f"{_ADAPTERS}{adapter.name}.")


def _is_within(package: str) -> bool:
    """Return whether a function of a package is on the call stack: a rewrite that traces, or a transformation."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if str(frame.f_globals.get("__name__", "")).startswith(package):
            return True
        frame = frame.f_back
    return False
