"""Refuses what would update from gradients whose scale is another than it is taken for; nothing is changed then.

Each of these gives finite, wrong numbers otherwise: a loss that nobody scaled, `torch.amp.GradScaler` around an
optimizer that scales itself, the optimizer inside stepped directly, and gradients clipped while they are scaled.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from polyamp.backends.torch.steps import onlookers, refusals
from polyamp.backends.torch.unstable import before_clipping

if TYPE_CHECKING:
    from polyamp.backends.torch.steps.windowed import WindowedOptimizer


def check_scaled(optimizer: WindowedOptimizer) -> None:
    """Refuse gradients that no scaled loss left, or not alone, unless somebody has said what they are.

    Raises:
        UsageError: a loss was not scaled.
    """
    window, witness = optimizer.window, optimizer.witness
    if window.said is not None or not optimizer.scaler.multiplies:
        return
    if not window.may_be_scaled:
        raise refusals.loss_not_scaled()
    if witness is None or not (window.follows_all and witness.unscaled and witness.is_current):
        return
    if witness.scaled or not (window.is_own and window.saw_pass):
        raise refusals.loss_not_scaled(partly=witness.scaled)


def check_no_scaler(optimizer: WindowedOptimizer) -> None:
    """Refuse a step by `torch.amp.GradScaler`, which tells an optimizer that can skip of its scale by attributes.

    Raises:
        UsageError: they are there.
    """
    given = vars(optimizer)
    if "found_inf" in given or "grad_scale" in given:
        given.pop("found_inf", None)
        given.pop("grad_scale", None)
        raise refusals.scaled_twice(optimizer.inner, where="torch.amp.GradScaler.step(optimizer)")


class InnerStep:
    """A hook before the inner optimizer's step: only the wrapped one may call it while gradients are scaled.

    Args:
        optimizer: the wrapped one. It is held weakly, and the hook goes with it.
    """

    def __init__(self, optimizer: WindowedOptimizer) -> None:
        self._optimizer = weakref.ref(optimizer)

    def __call__(self, *_: Any) -> None:
        optimizer = self._optimizer()
        if optimizer is None or optimizer.steps_now:
            return
        if _has_scaled_gradients(optimizer):
            raise refusals.inner_stepped(optimizer.inner)


def guard(optimizer: WindowedOptimizer, alive: Callable[[], Iterable[WindowedOptimizer]]) -> None:
    """Watch over an optimizer for as long as it lives, and over clipping from the first one on.

    Args:
        optimizer: the wrapped one.
        alive: gives all of them in this process.
    """
    before_clipping(lambda params, limit: _clips(params, limit, alive()))
    inner = optimizer.inner
    if hasattr(inner, "_optimizer_step_pre_hooks"):  # optimizers that wrap others may have left torch's own set-up out
        handle = inner.register_step_pre_hook(InnerStep(optimizer))
        weakref.finalize(optimizer, handle.remove).atexit = False


def _clips(params: Iterable[Tensor], limit: float, alive: Iterable[WindowedOptimizer]) -> None:
    """Refuse to clip gradients of a window that is not unscaled yet; an infinite limit only measures them."""
    if math.isinf(limit) or onlookers.are_looking() or torch.compiler.is_compiling():
        return
    clipped: set[int] | None = None
    for optimizer in list(alive):
        if not _has_scaled_gradients(optimizer):
            continue
        clipped = {id(param) for param in params} if clipped is None else clipped
        masters = [] if optimizer.masters is None else optimizer.masters.masters  # which have their gradients later
        graded = (param for param in optimizer.model_parameters() if param.grad is not None)
        if any(id(param) in clipped for param in (*graded, *masters)):
            raise refusals.clipped_before_unscaling()


def _has_scaled_gradients(optimizer: WindowedOptimizer) -> bool:
    """Whether a scaled loss has left gradients that are not unscaled yet, as far as can be known."""
    window, witness = optimizer.window, optimizer.witness
    if window.found is not None or not optimizer.scaler.multiplies:
        return False
    if window.scaling is not None:
        return True
    seen = window.follows_others and witness is not None and witness.scaled and witness.is_current
    return seen and not optimizer.is_consumed()
