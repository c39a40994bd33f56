"""Steps with a closure, among them the optimizers that evaluate it several times and move in between (LBFGS, SAM).

Gradients have to be unscaled and tested before such an optimizer reads any. LBFGS evaluates its closure first, so that
evaluation is made before its step, and handed to it. SAM begins with the gradients that are there, moves the parameters
and only then evaluates: what was evaluated before it moved would be wrong there, and is not handed on.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from polyamp.backends.torch.steps.optimizer import LossScaledOptimizer

Closure = Callable[[], Any]


def step_with_closure(optimizer: LossScaledOptimizer, closure: Closure, scaled: bool | None = None) -> Any:
    """One step of a wrapped optimizer; see `LossScaledOptimizer.step`."""
    if not _evaluates_once(optimizer.inner):
        return _step_reevaluating(optimizer, closure, scaled)
    with torch.enable_grad():
        loss = closure()
    optimizer.step(scaled=scaled)
    return loss


def _evaluates_once(inner: torch.optim.Optimizer) -> bool:
    """torch's own optimizers call the closure once, before anything else; LBFGS is the exception."""
    return type(inner).__module__.startswith("torch.optim.") and not isinstance(inner, torch.optim.LBFGS)


class _Overflow(Exception):
    """Leaves the inner optimizer's step from inside the closure."""


def _step_reevaluating(optimizer: LossScaledOptimizer, closure: Closure, scaled: bool | None) -> Any:
    """Costs one copy of parameters and state: an overflow at a later evaluation takes the whole step back."""
    is_first = isinstance(optimizer.inner, torch.optim.LBFGS) or not _has_gradients(optimizer)
    first = _evaluate(optimizer, closure) if is_first else None
    if not optimizer.prepare_on_host(scaled):
        optimizer.finish(False)
        return first
    before = _Snapshot(optimizer.inner)
    given = not is_first

    def prepared_closure() -> Any:
        nonlocal given
        hand_on, given = not given and before.is_current(optimizer.inner), True
        if hand_on:
            return first
        optimizer.update_model()
        _clear_as_masters(optimizer)
        loss = _evaluate(optimizer, closure)
        if not optimizer.prepare_on_host(scaled):
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


def _has_gradients(optimizer: LossScaledOptimizer) -> bool:
    """Whether a scaled loss has left gradients for this step already."""
    return optimizer.window.scaling is not None and any(p.grad is not None for p in optimizer.model_parameters())


def _clear_as_masters(optimizer: LossScaledOptimizer) -> None:
    """The inner optimizer clears the gradients that it knows, which are the masters': clear the model's own, too."""
    masters = optimizer.masters
    if masters is not None and not any(one.grad is not None and one.grad.any() for one in masters.masters):
        masters.zero_grad(set_to_none=True)


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
        self._versions = _versions(inner)

    def is_current(self, inner: torch.optim.Optimizer) -> bool:
        """Whether neither parameters nor their gradients were changed since."""
        if isinstance(inner, torch.optim.LBFGS):
            return True  # its first evaluation comes before anything else
        pairs = zip(_params(inner), self._params, strict=True)
        return _versions(inner) == self._versions and all(hasattr(p, "to_local") or torch.equal(p, q) for p, q in pairs)

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


def _versions(inner: torch.optim.Optimizer) -> list[Any]:
    """What changes with parameters and gradients, but where somebody writes to their ``data``."""
    return [(p._version, None if (grad := p.grad) is None else (id(grad), grad._version)) for p in _params(inner)]
