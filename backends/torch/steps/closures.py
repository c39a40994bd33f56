"""Steps with a closure, among them the optimizers that evaluate it several times and move in between (LBFGS, SAM)."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from polyamp.backends.torch.steps.optimizer import LossScaledOptimizer

Closure = Callable[[], Any]


def step_with_closure(optimizer: LossScaledOptimizer, closure: Closure) -> Any:
    """One step of a wrapped optimizer; see `LossScaledOptimizer.step`."""
    if not _evaluates_once(optimizer.inner):
        return _step_reevaluating(optimizer, closure)
    with torch.enable_grad():
        loss = closure()
    optimizer.step()
    return loss


def _evaluates_once(inner: torch.optim.Optimizer) -> bool:
    """torch's own optimizers call the closure once, before anything else; LBFGS is the exception."""
    return type(inner).__module__.startswith("torch.optim.") and not isinstance(inner, torch.optim.LBFGS)


class _Overflow(Exception):
    """Leaves the inner optimizer's step from inside the closure."""


def _step_reevaluating(optimizer: LossScaledOptimizer, closure: Closure) -> Any:
    """Costs one copy of parameters and state: an overflow at a later evaluation takes the whole step back."""
    first = _evaluate(optimizer, closure)
    if not optimizer.prepare_on_host():
        optimizer.finish(False)
        return first
    before = _Snapshot(optimizer.inner)
    given: list[Any] = []

    def prepared_closure() -> Any:
        if not given:
            given.append(first)
            return first
        optimizer.update_model()
        loss = _evaluate(optimizer, closure)
        if not optimizer.prepare_on_host():
            raise _Overflow
        return loss

    result, applied = first, False
    try:
        result = optimizer.inner.step(prepared_closure)
        applied = True
    except _Overflow:
        pass  # `finally` takes the step back, and finish(False) reports it
    finally:
        if not applied:
            before.restore(optimizer.inner)
            optimizer.update_model()
    optimizer.finish(applied)
    return result


def _evaluate(optimizer: LossScaledOptimizer, closure: Closure) -> Any:
    optimizer.open_window()
    with torch.enable_grad():
        return closure()


class _Snapshot:
    """Parameters, state and options of an optimizer, to be put back."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self._params = [param.detach().clone() for param in _params(inner)]
        self._state = {key: copy.deepcopy(value) for key, value in inner.state.items()}
        self._options = [
            {key: copy.deepcopy(value) for key, value in group.items() if key != "params"}
            for group in inner.param_groups
        ]

    @torch.no_grad()
    def restore(self, inner: torch.optim.Optimizer) -> None:
        for param, value in zip(_params(inner), self._params, strict=True):
            param.copy_(value)
        inner.state.clear()
        inner.state.update(self._state)
        for group, options in zip(inner.param_groups, self._options, strict=True):
            group.update(options)


def _params(inner: torch.optim.Optimizer) -> list[Tensor]:
    return [param for group in inner.param_groups for param in group["params"]]
