"""Guards that refuse an update from gradients with an unexpected scale, before anything is changed.

Without them each of these cases results in finite but wrong numbers: a loss that was not scaled, `torch.amp.GradScaler`
around an optimizer that scales itself, a direct step of the inner optimizer, and clipping of scaled gradients.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from polyamp.backends.torch.autocast.regions import LAST
from polyamp.backends.torch.recording.reach import is_recorded
from polyamp.backends.torch.steps import refusals
from polyamp.backends.torch.steps.wrapped import WrappedOptimizer
from polyamp.backends.torch.unstable import before_clipping
from polyamp.policies import report_missing_scale


def check_scaled(optimizer: WrappedOptimizer) -> None:
    """Refuse gradients that include an unscaled loss, unless the user has declared what they are."""
    window, witness = optimizer.window, optimizer.witness
    if window.declared is not None or not optimizer.scaler.multiplies:
        return
    if not window.may_be_scaled:
        raise refusals.loss_not_scaled()
    if witness is None or not (window.follows_all and witness.unscaled and witness.is_current):
        return
    if witness.scaled or not (window.is_own and window.saw_pass):
        raise refusals.loss_not_scaled(partly=witness.scaled)


def check_no_scaler(optimizer: WrappedOptimizer) -> None:
    """Refuse a step by `torch.amp.GradScaler`, which sets its scale as attributes of an optimizer that can skip."""
    given = vars(optimizer)
    if "found_inf" in given or "grad_scale" in given:
        given.pop("found_inf", None)
        given.pop("grad_scale", None)
        raise refusals.scaled_twice(optimizer.inner, where="torch.amp.GradScaler.step(optimizer)")


def report_forgotten_scale(optimizer: WrappedOptimizer, alive: Iterable[WrappedOptimizer]) -> None:
    """Warn once if a region since the last step needs a loss scale, and no wrapped optimizer has one."""
    # If another optimizer has one, the region may have been for that one.
    if LAST.count == optimizer.regions_before:
        return
    optimizer.regions_before = LAST.count
    if not optimizer.scaler.multiplies and not any(one.scaler.multiplies for one in list(alive)):
        report_missing_scale(optimizer.scaler.settings, optimizer.scaler.compute, LAST.policy, stacklevel=5)


class InnerStep:
    """A hook before the inner optimizer's step: only the wrapped optimizer may call it while gradients are scaled."""

    is_polyamps = True  # see `has_step_pre_hooks`

    def __init__(self, optimizer: WrappedOptimizer) -> None:
        self._optimizer = weakref.ref(optimizer)

    def __call__(self, *_: Any) -> None:
        optimizer = self._optimizer()
        if optimizer is None or optimizer.steps_now:
            return
        if _has_scaled_gradients(optimizer):
            raise refusals.inner_stepped(optimizer.inner)


def guard(optimizer: WrappedOptimizer, alive: Callable[[], Iterable[WrappedOptimizer]]) -> None:
    """Guard an optimizer that scales losses or has masters, for as long as it lives."""
    # The first call also starts to guard clipping. Only an optimizer that scales losses can be stepped wrongly.
    before_clipping(
        "optimizers", lambda params, limit, *, measured: _clipped(params, limit, alive(), measured=measured)
    )
    inner = optimizer.inner
    has_hooks = hasattr(inner, "_optimizer_step_pre_hooks")  # some that wrap others have not run torch's own set-up
    if optimizer.scaler.multiplies and has_hooks:
        handle = inner.register_step_pre_hook(InnerStep(optimizer))
        weakref.finalize(optimizer, handle.remove).atexit = False


def _clipped(params: list[Tensor], limit: float, alive: Iterable[WrappedOptimizer], *, measured: bool) -> list[Tensor]:
    """Return the parameters whose gradients are clipped: masters, which have the unscaled ones, for their parameters.

    Args:
        params: those that torch's function was called with.
        limit: infinite if the call only measures.
        alive: all wrapped optimizers in this process.
        measured: whether the norm of ``params`` is known already, so that others would be clipped by a wrong norm.

    Raises:
        UsageError: gradients of a window that is not unscaled yet, or masters whose norm was not measured.
    """
    if is_recorded() or torch.compiler.is_compiling():
        return params
    clipped: set[int] | None = None
    masters_of: dict[int, Tensor] = {}
    for optimizer in list(alive):
        masters = optimizer.masters
        scaled = not math.isinf(limit) and _has_scaled_gradients(optimizer)
        if not scaled and (masters is None or not optimizer.window.is_unscaled):
            continue
        clipped = {id(param) for param in params} if clipped is None else clipped
        if scaled:
            aside = optimizer.window.has_aside
            graded = (param for param in optimizer.model_parameters() if aside or param.grad is not None)
            later = [] if masters is None else masters.masters  # they get their gradients later
            if any(id(param) in clipped for param in (*graded, *later)):
                raise refusals.clipped_before_unscaling()
        elif masters is not None:
            masters_of |= {param: master for param, master in masters.by_parameter().items() if param in clipped}
    if masters_of and measured:
        raise refusals.clipped_without_masters()
    return [masters_of.get(id(param), param) for param in params] if masters_of else params


def _has_scaled_gradients(optimizer: WrappedOptimizer) -> bool:
    """Return whether a scaled loss has produced gradients that are not unscaled yet, as far as this is known."""
    window, witness = optimizer.window, optimizer.witness
    if window.is_unscaled or not optimizer.scaler.multiplies:
        return False
    if window.scaling is not None:
        return True
    seen = window.others_scaling is not None and witness is not None and witness.scaled and witness.is_current
    return seen and not optimizer.is_consumed
