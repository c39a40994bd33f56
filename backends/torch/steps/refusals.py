"""Errors of the PyTorch adapter's optimizers and scalers, each for its caller to raise."""

from __future__ import annotations

import torch

from polyamp.backends.torch.dtypes import SIXTEEN_BIT
from polyamp.errors import InvalidValueError, UsageError


def cannot_skip(optimizer: torch.optim.Optimizer) -> InvalidValueError:
    """``skip_on_device`` of an optimizer whose kernel cannot skip."""
    return InvalidValueError(
        "this optimizer cannot skip a step on the device",
        where="wrap_optimizer(skip_on_device=)",
        found=type(optimizer).__name__,
        allowed="SGD, Adam or AdamW with fused=True, and others that set _step_supports_amp_scaling",
        fix="make the optimizer with fused=True, or leave skip_on_device= out",
    )


def no_backward(found: str) -> UsageError:
    """A step whose gradients no backward pass has made."""
    return UsageError(
        "a step without a backward pass",
        where="step(), unscale_()",
        found=found,
        allowed="gradients that a backward pass left since the last step",
        fix="call backward(loss), or scale(loss).backward(), before step(), and zero_grad() after it",
    )


def not_cleared() -> UsageError:
    """A backward pass onto the gradients of the last step."""
    return UsageError(
        "the gradients of the last step are still there, unscaled, and a scaled backward would add to them",
        where="backward(loss)",
        fix="call zero_grad() after step(); to accumulate, call backward several times before step()",
    )


def unscaled_already(*, where: str, fix: str) -> UsageError:
    """The gradients of this window are unscaled, and what was called would make them wrong."""
    return UsageError("the gradients of this window are unscaled already", where=where, fix=fix)


def check_width(dtype: torch.dtype) -> None:
    """Refuse gradients of a model that was converted after its optimizer was wrapped.

    Raises:
        UsageError: 16-bit gradients.
    """
    if dtype in SIXTEEN_BIT:
        raise UsageError(
            "parameters had 32 bits when the optimizer was wrapped, and have 16 now",
            where="step()",
            found=f"gradients of {dtype}",
            fix="convert the model before its optimizer is wrapped, or wrap with master_weights=False",
        )


def closure_refused(found: object) -> UsageError:
    """A closure for a step of which only the optimizer's part is scaled."""
    return UsageError(
        "Closure use is not currently supported if GradScaler is enabled: its loss would not be scaled",
        where="GradScaler.step(optimizer, closure)",
        found=repr(found),
        fix="wrap the optimizer instead: polyamp.wrap_optimizer(optimizer).step(closure), where the closure calls "
        "its backward(loss)",
    )


def half_gradients(name: str, dtype: torch.dtype) -> InvalidValueError:
    """Gradients of 16-bit parameters, for a scaler that has no master weights."""
    return InvalidValueError(
        "Attempting to unscale FP16 gradients.",
        where="GradScaler.unscale_(optimizer), which step(optimizer) calls",
        found=f"{name} and its gradient of {dtype}",
        allowed="float32 parameters, run in 16 bits by autocast",
        fix="keep the model in float32, without .half(); or wrap the optimizer, which then trains float32 master "
        "weights: polyamp.wrap_optimizer(optimizer, policy)",
    )


def scaled_twice(inner: torch.optim.Optimizer) -> UsageError:
    """A wrapped optimizer, which has its own loss scale, handed to a scaler."""
    return UsageError(
        "the optimizer is wrapped already, and scales its loss itself",
        where="GradScaler.step(optimizer)",
        found=f"a LossScaledOptimizer around {type(inner).__name__}",
        allowed="one loss scale",
        fix="call its own backward(loss) and step(), or give the plain optimizer to the scaler",
    )


def no_scale(found: object) -> InvalidValueError:
    """A loss scale with which the next step would write NaN."""
    return InvalidValueError(
        "this is no loss scale",
        where="GradScaler.update(new_scale), GradScaler.load_state_dict(saved)",
        found=found,
        allowed="a finite number greater than 0",
        fix="give such a number; a saved scale of 0 comes from a run whose gradients were never finite",
    )
