"""Guards that refuse an update from gradients with an unexpected scale, before anything is changed.

Without the guards each of these cases results in finite but wrong numbers: `torch.amp.GradScaler` around an optimizer
that scales itself, a direct step of the inner optimizer, and clipping of scaled gradients. That a loss was scaled at
all is for ``provenance.py``.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from polyamp.backends.torch.refusals import clipped_by_another_norm, clipped_too_early, inner_stepped, shared_parameter
from polyamp.backends.torch.unstable import ask_before_clipping, leave_clipping

if TYPE_CHECKING:
    from polyamp.backends.torch.optimizer import LossScaledOptimizer
    from polyamp.backends.torch.provenance import Scaling


Closure = Callable[[], Any]
Listener = Callable[[Closure | None, float | None], None]

LISTENERS: list[Listener] = []
"""Functions of recordings, which are called where an update begins; while there are some, steps are only observed."""


def update_begins(closure: Closure | None = None, scale: Callable[[], float] | None = None) -> None:
    """Call the listeners, before an optimizer reads or changes anything. If one raises, the update ends."""
    for listener in LISTENERS:
        listener(closure, None if scale is None else scale())


@contextmanager
def observed(listener: Listener) -> Iterator[None]:
    """Call a function at every update while this context is active."""
    LISTENERS.append(listener)
    try:
        yield
    finally:
        LISTENERS.remove(listener)


def check_not_shared(optimizer: LossScaledOptimizer, scaling: Scaling, alive: Iterable[LossScaledOptimizer]) -> None:
    """Refuse gradients that another optimizer of the same parameters has unscaled: they would be divided again."""
    own: set[int] = set()
    for other in list(alive):
        for gradient, left in () if other is optimizer else other.witness.shared:
            if not gradient.is_there() or (left is not None and left.is_like(scaling)):
                continue
            own = own or {id(param) for param in optimizer.model_parameters() if param.grad is not None}
            if id(gradient.param()) in own:
                raise shared_parameter(optimizer.inner, other.inner)


def guard(optimizer: LossScaledOptimizer, alive: Iterable[LossScaledOptimizer]) -> None:
    """Guard the inner optimizer's step and torch's clipping functions, for as long as an optimizer lives."""
    if not (optimizer.scaler.multiplies or optimizer.masters is not None):
        return
    ask_before_clipping("optimizers", lambda params, limit, measured: _clipped(params, limit, alive, measured))
    weakref.finalize(optimizer, leave_clipping, "optimizers").atexit = False
    inner = optimizer.inner
    if hasattr(inner, "_optimizer_step_pre_hooks"):  # some that wrap others have not run torch's own set-up
        handle = inner.register_step_pre_hook(InnerStep(optimizer))
        weakref.finalize(optimizer, handle.remove).atexit = False


class InnerStep:
    """A hook before the inner optimizer's step: only the wrapped optimizer may call it while gradients are scaled."""

    is_polyamps = True  # see `has_step_pre_hooks`

    def __init__(self, optimizer: LossScaledOptimizer) -> None:
        self._optimizer = weakref.ref(optimizer)

    def __call__(self, *_: Any) -> None:
        optimizer = self._optimizer()
        if optimizer is None or optimizer.is_stepping or not _has_scaled_gradients(optimizer):
            return
        raise inner_stepped(optimizer.inner)


def _has_scaled_gradients(optimizer: LossScaledOptimizer) -> bool:
    """Return whether the gradients are multiplied by another factor than 1, as far as this is known."""
    witness = optimizer.witness
    scaling = witness.presumed
    if scaling is None or scaling.factor == 1.0 or witness.is_consumed or not scaling.scaler.multiplies:
        return False
    return optimizer.first_with_gradient() is not None


def _clipped(params: list[Tensor], limit: float, alive: Iterable[LossScaledOptimizer], measured: bool) -> list[Tensor]:
    """Return the parameters whose gradients are clipped: masters, which have the unscaled ones, for their parameters.

    Args:
        params: those that torch's function was called with.
        limit: infinite if the call only measures.
        alive: all wrapped optimizers in this process.
        measured: whether the norm of ``params`` is known already, so that others would be clipped by a wrong norm.

    Raises:
        UsageError: gradients that are scaled, or masters whose norm was not measured.
    """
    if LISTENERS or torch.compiler.is_compiling():
        return params
    clipped = set(map(id, params))
    masters_of: dict[int, Tensor] = {}
    for optimizer in list(alive):
        masters = optimizer.masters
        if not math.isinf(limit) and _has_scaled_gradients(optimizer):
            later = [] if masters is None else masters.masters  # they get their gradients later
            graded = (param for param in optimizer.model_parameters() if param.grad is not None)
            if any(id(param) in clipped for param in (*graded, *later)):
                raise clipped_too_early()
        elif masters is not None and optimizer.witness.is_unscaled:
            masters_of |= {param: master for param, master in masters.by_parameter().items() if param in clipped}
        elif masters is not None:  # the masters take the gradients later
            masters_of |= {master: model for master, model in masters.models_by_id().items() if master in clipped}
    if masters_of and measured:
        raise clipped_by_another_norm()
    return [masters_of.get(id(param), param) for param in params] if masters_of else params
