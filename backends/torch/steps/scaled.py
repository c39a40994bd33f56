"""Steps of a wrapped optimizer directly from scaled gradients, if polyamp's operators support them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from polyamp.backends.torch.kernels.control import applied_flag, scale_on
from polyamp.backends.torch.steps import reasons
from polyamp.backends.torch.steps.fused import NO_MASTERS, Scaled
from polyamp.backends.torch.steps.operands import Batch

if TYPE_CHECKING:
    from polyamp.backends.torch.steps.windowed import WindowedOptimizer


def calls_of(optimizer: WindowedOptimizer) -> Sequence[Batch] | None:
    """Return the calls that make the step; None if gradients have to be unscaled first, or already are."""
    masters, stepper = optimizer.masters, optimizer.stepper
    config = optimizer.window.scaling_or(optimizer.scaler).scaler.config
    if not optimizer.window.is_untouched or (config.check and stepper.skip_on_device is False):
        return None
    if masters is None and not config.check:
        return None  # nothing to unscale or to round: the optimizer's own kernel is as fast
    clips = optimizer.max_grad_norm is not None
    return stepper.operators.calls(lambda: NO_MASTERS if masters is None else masters.standing(), clips=clips)


def step_scaled(optimizer: WindowedOptimizer, calls: Sequence[Batch]) -> None:
    """Make one step of a wrapped optimizer; see `LossScaledOptimizer.step`."""
    optimizer.check_gradients(calls[0].first if calls else None)
    window = optimizer.window
    scaler, state, _ = window.scaling_or(optimizer.scaler)
    device = _device(optimizer, calls)
    checks, control, suspects = scaler.config.check, scaler.control_on(device), window.suspects(scaler)
    scaled = Scaled(
        scale=scale_on(state, device),
        config=scaler.config,
        control=control,
        advance=checks and scaler.opens_round(optimizer),
        losses=_losses_on(device, suspects) if checks else (),
        max_norm=optimizer.max_grad_norm,
        process_group=optimizer.process_group,
    )
    if optimizer.masters is not None:
        optimizer.masters.count_in(control)
    report = optimizer.stepper.operators.step_scaled(calls, scaled)
    applied = applied_flag(report) if checks else True
    if scaled.advance:
        scaler.advanced(report, optimizer)
    else:
        scaler.advance(applied, optimizer, suspects)
    if optimizer.masters is not None:
        optimizer.masters.note_versions()
    optimizer.close(scaler, applied, reasons.later(optimizer, suspects))


def _losses_on(device: torch.device, losses: Sequence[Tensor]) -> list[Tensor]:
    """Return losses in the dtypes that operators test: non-finite values of float64 losses become NaN."""
    narrow = [loss - loss if loss.dtype == torch.float64 else loss for loss in losses]
    return [loss.to(device, torch.float32 if loss.dtype == torch.float64 else loss.dtype) for loss in narrow]


def _device(optimizer: WindowedOptimizer, calls: Sequence[Batch]) -> torch.device:
    device: torch.device = calls[0].device if calls else optimizer.param_groups[0]["params"][0].device
    return device
