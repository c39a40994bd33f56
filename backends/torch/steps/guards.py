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

from polyamp.backends.torch.recording.hooks import is_recorded
from polyamp.backends.torch.steps import refusals
from polyamp.backends.torch.steps.wrapped import WrappedOptimizer
from polyamp.backends.torch.unstable import before_clipping


def check_scaled(optimizer: WrappedOptimizer) -> None:
    """Refuse gradients that include an unscaled loss, unless the user has declared what they are.

    Raises:
        UsageError: a loss was not scaled.
    """
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
    """Refuse a step by `torch.amp.GradScaler`, which sets its scale as attributes of an optimizer that can skip.

    Raises:
        UsageError: these attributes are set.
    """
    given = vars(optimizer)
    if "found_inf" in given or "grad_scale" in given:
        given.pop("found_inf", None)
        given.pop("grad_scale", None)
        raise refusals.scaled_twice(optimizer.inner, where="torch.amp.GradScaler.step(optimizer)")


class InnerStep:
    """A hook before the inner optimizer's step: only the wrapped optimizer may call it while gradients are scaled.

    Args:
        optimizer: the wrapped optimizer. It is held weakly, and the hook is removed with it.
    """

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
    """Guard an optimizer for as long as it lives; the first call also starts to guard clipping.

    Args:
        optimizer: the wrapped optimizer.
        alive: returns all wrapped optimizers in this process.
    """
    before_clipping(lambda params, limit: _clips(params, limit, alive()))
    inner = optimizer.inner
    if hasattr(inner, "_optimizer_step_pre_hooks"):  # optimizers that wrap others may not have run torch's own set-up
        handle = inner.register_step_pre_hook(InnerStep(optimizer))
        weakref.finalize(optimizer, handle.remove).atexit = False


def _clips(params: Iterable[Tensor], limit: float, alive: Iterable[WrappedOptimizer]) -> None:
    """Refuse to clip gradients of a window that is not unscaled yet; an infinite limit only measures them."""
    if math.isinf(limit) or is_recorded() or torch.compiler.is_compiling():
        return
    clipped: set[int] | None = None
    for optimizer in list(alive):
        if not _has_scaled_gradients(optimizer):
            continue
        clipped = {id(param) for param in params} if clipped is None else clipped
        masters = [] if optimizer.masters is None else optimizer.masters.masters  # they get their gradients later
        graded = (param for param in optimizer.model_parameters() if param.grad is not None)
        if any(id(param) in clipped for param in (*graded, *masters)):
            raise refusals.clipped_before_unscaling()


def _has_scaled_gradients(optimizer: WrappedOptimizer) -> bool:
    """Return whether a scaled loss has produced gradients that are not unscaled yet, as far as this is known."""
    window, witness = optimizer.window, optimizer.witness
    if window.is_unscaled or not optimizer.scaler.multiplies:
        return False
    if window.scaling is not None:
        return True
    seen = window.others_scaling is not None and witness is not None and witness.scaled and witness.is_current
    return seen and not optimizer.is_consumed
