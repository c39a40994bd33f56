"""Warnings for a model and an optimizer that do not fit together: one is set up for 16 bits, and the other is not.

Two cases lose accuracy or speed without an error. The layers compute in float16 and the optimizer does not scale the
loss, so gradients underflow: `report_unscaled`, when the model is converted. Or the optimizer was wrapped for another
format than that of the layers: `report_mismatch`, when a step is traced.

For example, ``polyamp.convert(model, "mixed_float16")`` warns about a model that was compiled with a plain ``"sgd"``.
Tasks of keras_hub compile themselves when they are made; their users often compile them again, so the warning about
them waits until they train.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from types import FrameType
from typing import Any
from weakref import WeakSet

import keras

from polyamp import adapters
from polyamp.backends.keras.layers import own_policy
from polyamp.backends.keras.unstable import is_part_of_a_model
from polyamp.errors import warn_once
from polyamp.formats import format_of
from polyamp.policies import Policy, report_missing_scale
from polyamp.policies import policy as make_policy

_ADAPTERS = "polyamp.backends."
_REMEDY = "gradients in float16 underflow. Compile it with polyamp.wrap_optimizer(optimizer, policy)."

_converted: WeakSet[Any] = WeakSet()
_waiting: WeakSet[Any] = WeakSet()  # models that compiled themselves: warn about them when they train


def note_converted(model: Any) -> None:
    """Record that a model was converted, to whatever policy: then it may train in float32 on purpose."""
    _converted.add(model)


def report_unscaled(model: Any, layers: Sequence[Any], policy: Policy) -> None:
    """Warn if layers compute in float16 and no wrapped optimizer scales the loss."""
    # Keras' ``compile`` wraps an optimizer by itself only if the model's own policy is ``mixed_float16``.
    own_choice = policy.compute == "float16" and not policy.loss_scale.scales
    if own_choice or not any(layer.compute_dtype == "float16" for layer in layers):
        return
    optimizer = getattr(model, "optimizer", None)  # missing until the model is compiled
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        return
    if optimizer is not None and _compiles_itself(model):
        _waiting.add(model)
    elif optimizer is not None:
        warn_once(_compiled_with(model))
    elif model.dtype_policy.name != "mixed_float16":
        warn_once(
            f"{model.name!r} has layers in float16 but is {model.dtype_policy.name} itself, and Keras' compile scales "
            f"the loss only for a model that is mixed_float16 itself: {_REMEDY}"
        )
    elif is_part_of_a_model(model):
        warn_once(
            f"{model.name!r} is part of a larger model, and Keras' compile scales the loss only if the larger "
            f"model is mixed_float16: {_REMEDY.replace('Compile it', 'Compile the larger one')}"
        )


def report_mismatch(model: Any, optimizers: Any) -> None:
    """Warn once if a step's optimizers were wrapped for another format than that in which its layers compute."""
    # Call it while the step is traced, or when it runs without being traced.
    _report_waiting(model)
    own = own_policy(model)
    if own is None:
        _report_unlowered(model, optimizers)
        return
    for one in optimizers:
        report_missing_scale(one.scaler.settings, one.scaler.compute, make_policy(own), stacklevel=3)


def _report_unlowered(model: Any, optimizers: Any) -> None:
    """Warn if optimizers were wrapped under a 16-bit policy and nothing computes in 16 bits."""
    wanted = {one.scaler.compute for one in optimizers if one.scaler.compute is not None}
    low = next((name for name in sorted(wanted) if format_of(name).is_low), None)
    if low is None or model in _converted or lowers_here():
        return
    warn_once(
        f"{model.name!r} trains in float32: its optimizer was wrapped under a policy that computes in {low}, but its "
        "layers compute in float32. Call polyamp.convert(model, policy), or give the model a rewritten step: "
        "model.train_step = polyamp.rewrite(model.train_step, policy=policy)."
    )


def lowers_here() -> bool:
    """Return whether a rewrite or autocast of Keras' backend is active in the calling code."""
    adapter = adapters.adapter_named(keras.backend.backend())
    if hasattr(adapter, "is_lowering") and adapter.is_lowering():
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


def _compiled_with(model: Any) -> str:
    kind = type(model.optimizer).__name__
    return f"{model.name!r} is compiled with {kind}, which does not scale the loss: {_REMEDY}"


def _compiles_itself(model: Any) -> bool:
    """Return whether a model's class compiles it, as tasks of keras_hub do, and it was not trained yet."""
    owner = next(kind for kind in keras.Model.__mro__ if "compile" in vars(kind))
    return type(model).compile is not owner.compile and int(model.optimizer.iterations) == 0


def _report_waiting(model: Any) -> None:
    """Warn about a model that compiled itself, if its optimizer does not scale the loss now that it trains."""
    if model in _waiting:
        _waiting.discard(model)
        if model.optimizer is not None and not isinstance(model.optimizer, keras.optimizers.LossScaleOptimizer):
            warn_once(_compiled_with(model))
