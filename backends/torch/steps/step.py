"""One step of a wrapped optimizer, and the ways to do it.

A step does this, in this order:

1. The loss was scaled before, by `LossScalers.scale`.
2. The gradients are tested for inf and NaN, and
3. divided by the loss scale, in float32: `unscale`.
4. They are clipped to ``max_grad_norm``: `prepare`.
5. The optimizer updates the parameters or their masters, or skips: `Stepper`.
6. The loss scale advances, and a new window begins: `finish`. Operators have advanced the scale on the device already.

`step` asks once which way these are done: by torch (`_plain`), by torch with polyamp's operators for single parts
(`_with_operators`), by the operators alone (`_by_operators`), or around a closure (`_with_closure`). For example, a
loss of 0.5 under a scale of 1024 and an `SGD` on the CPU, the plain way:

    backward(loss)   512 is differentiated; a gradient is 3072
    2., 3., 4.       3072 is finite; it becomes 3.0, and under ``max_grad_norm=1`` 1.0
    5.               the parameter moves by the learning rate times 1.0
    6.               one more finite step; after ``LossScale(interval=)`` of them the scale doubles
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from polyamp.backends.torch.dtypes import SIXTEEN_BIT
from polyamp.backends.torch.kernels.control import applied_flag, scale_on
from polyamp.backends.torch.steps import overflow, refusals
from polyamp.backends.torch.steps.closures import evaluates_once, step_reevaluating
from polyamp.backends.torch.steps.fused import Scaled
from polyamp.backends.torch.steps.gradients import Gradients
from polyamp.backends.torch.steps.guards import check_scaled
from polyamp.backends.torch.steps.operands import NO_MASTERS, Batch
from polyamp.backends.torch.steps.scaler import LossScaler
from polyamp.backends.torch.steps.wrapped import WrappedOptimizer
from polyamp.scale import StepResult

Closure = Callable[[], Any]


def step(optimizer: WrappedOptimizer, closure: Closure | None, scaled: bool | None) -> Any:
    """Make one step of a wrapped optimizer; see `LossScaledOptimizer.step`."""
    if closure is not None:
        return _with_closure(optimizer, closure, scaled)
    report_earlier_step(optimizer)
    declare(optimizer, scaled)
    optimizer.steps_now = True
    try:
        if not optimizer.operators.are_used():
            return _plain(optimizer)
        batches = _scaled_batches(optimizer)
        return _with_operators(optimizer) if batches is None else _by_operators(optimizer, batches)
    finally:
        optimizer.steps_now = False


def _plain(optimizer: WrappedOptimizer) -> Any:
    flag, gradients = prepare(optimizer)
    result, finite = optimizer.stepper.step(flag, gradients)
    finish(optimizer, finite)
    return result


def _with_operators(optimizer: WrappedOptimizer) -> Any:
    """Step from gradients that the operators cannot read while they are scaled, or whose update they do not have."""
    flag, gradients = prepare(optimizer, at_once=True)
    stepper = optimizer.stepper
    stepped = None if stepper.on_device is False else optimizer.operators.step_unscaled(flag)
    result, finite = stepper.step(flag, gradients) if stepped is None else stepped
    finish(optimizer, finite)
    return result


def _by_operators(optimizer: WrappedOptimizer, batches: Sequence[Batch]) -> None:
    """Do everything from 2 to 6 in two operators, which read the model's own scaled gradients."""
    check_not_consumed(optimizer)
    check_gradients(optimizer, batches[0].first if batches else None)
    scaler, state, _ = optimizer.window.scaling_or(optimizer.scaler)
    device: torch.device = batches[0].device if batches else optimizer.param_groups[0]["params"][0].device
    checks, control, suspects = scaler.settings.check, scaler.control_on(device), optimizer.window.suspects(scaler)
    scaled = Scaled(
        scale=scale_on(state, device),
        settings=scaler.settings,
        control=control,
        advance=checks and scaler.opens_round(optimizer),
        losses=suspects if checks else (),
        max_norm=optimizer.max_grad_norm,
        process_group=optimizer.process_group,
    )
    report, overflowed = optimizer.operators.step_scaled(batches, scaled)
    applied = applied_flag(report) if checks else True
    if scaled.advance:
        scaler.advanced(report, optimizer)
    else:
        scaler.advance(applied, optimizer, suspects)
    if optimizer.masters is not None:
        optimizer.masters.note_versions()
    _close(optimizer, scaler, applied, overflow.later(optimizer, suspects, overflowed))


def _scaled_batches(optimizer: WrappedOptimizer) -> Sequence[Batch] | None:
    """Return the calls of a step by operators alone; None if gradients have to be unscaled first, or already are."""
    masters, window = optimizer.masters, optimizer.window
    checks = window.scaling_or(optimizer.scaler).scaler.settings.check
    if not window.is_untouched:
        return None
    if masters is None and not checks:
        return None  # nothing to unscale or to round: the optimizer's own kernel is as fast
    clips = optimizer.max_grad_norm is not None
    if clips and optimizer.norm_group is not None:
        return None  # other ranks may take another way, and all have to sum the norm alike
    return optimizer.operators.scaled_batches(
        lambda: NO_MASTERS if masters is None else masters.parameters_by_master(), clips=clips
    )


def _with_closure(optimizer: WrappedOptimizer, closure: Closure, scaled: bool | None) -> Any:
    """Step with a closure, which makes the gradients: once before the step, or whenever the optimizer calls it."""
    if evaluates_once(optimizer.inner):
        with torch.enable_grad():
            loss = closure()
        step(optimizer, None, scaled)
        return loss

    def are_finite() -> bool:
        declare(optimizer, scaled)
        flag, _ = prepare(optimizer, at_once=optimizer.operators.are_used())
        return not flag

    return step_reevaluating(optimizer, closure, are_finite, functools.partial(finish, optimizer))


def report_earlier_step(optimizer: WrappedOptimizer) -> None:
    """Report what has arrived from the device since the last step."""
    for scaler in optimizer.scalers:
        if scaler.awaits_report:
            scaler.report_earlier_step(functools.partial(overflow.explain, optimizer), alone=optimizer.is_alone)


def declare(optimizer: WrappedOptimizer, scaled: bool | None) -> None:
    """Record whether the user declares that the gradients are scaled."""
    if scaled is None:
        return
    if not isinstance(scaled, bool):
        raise refusals.wrong_declaration(scaled)
    if scaled and optimizer.window.is_unscaled:
        raise refusals.unscaled_already(where="step(scaled=True)", fix="leave scaled= out after unscale_()")
    optimizer.window.declared = scaled


def collect(optimizer: WrappedOptimizer) -> Gradients:
    """Return the gradients of the parameters that the inner optimizer trains, masters included."""
    check_not_consumed(optimizer)
    if not optimizer.window.is_unscaled:
        optimizer.take_gradients()
    gradients = optimizer.gradients()
    check_gradients(optimizer, gradients.first if gradients else None)
    return gradients


def check_not_consumed(optimizer: WrappedOptimizer) -> None:
    """Raise if the gradients are those of the last step."""
    if optimizer.is_consumed:
        raise refusals.no_backward("the gradients of the last step")


def check_gradients(optimizer: WrappedOptimizer, first: Tensor | None) -> None:
    """Raise if there are no gradients, if their loss was not scaled, or if they have 16 bits without masters."""
    if first is None:
        if not optimizer.window.has_aside and optimizer.is_alone:  # peers wait for this rank
            raise refusals.no_backward("no parameter with a gradient")
        return
    if not optimizer.window.is_unscaled:
        check_scaled(optimizer)
    if first.dtype in SIXTEEN_BIT and optimizer.masters is None and optimizer.masters_wanted is not False:
        raise refusals.converted_too_late(first.dtype)


def prepare(optimizer: WrappedOptimizer, *, at_once: bool = False) -> tuple[Tensor, Gradients]:
    """Unscale, test and clip the gradients; parts that were done before are not repeated."""
    norm, gradients = optimizer.max_grad_norm, collect(optimizer)
    is_local = optimizer.norm_group is None
    if at_once and norm is not None and is_local and optimizer.window.is_untouched:
        scaler, state, _ = optimizer.window.scaling_or(optimizer.scaler)
        if scaler.settings.check and optimizer.operators.can_clip(gradients):
            scale = scale_on(state, gradients.first.device)
            optimizer.window.note(scaler, optimizer.operators.unscale_and_clip(gradients, scale, norm))
            return optimizer.window.combine(gradients, optimizer.process_group)
    flag, gradients = unscale(optimizer, gradients)
    if norm is not None:
        gradients.clip(norm, skipped=flag)
    return flag, gradients


def unscale(optimizer: WrappedOptimizer, gradients: Gradients) -> tuple[Tensor, Gradients]:
    """Unscale and test the gradients, unless they are unscaled already; return the same as `prepare`."""
    window = optimizer.window
    if window.overflow is not None:
        return window.overflow, gradients
    if not window.scaling_or(optimizer.scaler).scaler.settings.check:
        return window.pass_untested(), gradients
    optimizer.unscale_gradients(gradients)
    combined = window.combine(gradients, optimizer.process_group)
    window.unscaled_from = optimizer.first_gradient()
    return combined


def finish(optimizer: WrappedOptimizer, finite: bool | Tensor) -> None:
    """Round the masters into the model after an applied step, advance the loss scale, and report a skipped step."""
    window, losses_were_finite, explain = optimizer.window, True, None
    scaler = window.scaling_or(optimizer.scaler).scaler
    if finite is False:
        losses_were_finite = window.losses_were_finite()
        known = losses_were_finite if window.scaling is not None else None
        explain = overflow.now(optimizer, known, window.overflowed)
    else:
        optimizer.update_model()
    if isinstance(finite, Tensor):
        explain = overflow.later(optimizer, window.suspects(scaler), window.overflowed)
    for each, was_finite in window.finite_by_scaler(finite):
        each.advance(was_finite, optimizer, window.suspects(each))
    _close(optimizer, scaler, finite, explain)
    if not losses_were_finite:
        scaler.report_loss("inf or NaN", alone=optimizer.is_alone, where="scaling the loss")
    scaler.report(explain)


def _close(
    optimizer: WrappedOptimizer, scaler: LossScaler, finite: bool | Tensor, explain: Callable[[], str] | None
) -> None:
    if finite is not False:
        torch.clear_autocast_cache()  # else an autocast region would go on using the old weights
    optimizer.last_step = StepResult(scaler.state, finite, explain)
    optimizer.close_window()
