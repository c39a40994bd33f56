"""Steps with a closure, including optimizers that evaluate it several times and move in between (LBFGS, SAM).

Gradients have to be unscaled and tested before such an optimizer reads them. LBFGS starts with an evaluation, so we
evaluate the closure before its step and pass it the result. SAM starts from the existing gradients, moves the
parameters and only then evaluates: a result from before the move would be wrong there, so it is not passed on.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from polyamp.errors import check_callable

if TYPE_CHECKING:
    from polyamp.backends.torch.step.optimizer import LossScaledOptimizer

Closure = Callable[[], Any]


def evaluates_once(inner: torch.optim.Optimizer) -> bool:
    """Return whether the closure is called once, before anything else, as by all of torch's optimizers except LBFGS."""
    return type(inner).__module__.startswith("torch.optim.") and not isinstance(inner, torch.optim.LBFGS)


def step_with_closure(optimizer: LossScaledOptimizer, closure: Closure, scaled: bool | None) -> Any:
    """Step with a closure, which makes the gradients: once before the step, or whenever the optimizer calls it."""
    allowed, fix = "a function that computes the loss and returns it, or None", "give the function itself"
    check_callable(closure, where="step(closure)", allowed=allowed, fix=fix)
    if not evaluates_once(optimizer.inner):
        try:
            return _step_reevaluating(optimizer, closure, scaled)
        except Exception:
            optimizer.tell_peers()
            raise
        finally:
            optimizer.is_decided = False
    with torch.enable_grad():
        loss = closure()
    optimizer.make_step(scaled)
    return loss


class _Overflow(Exception):
    """Exception that leaves the inner optimizer's step from inside the closure."""


def _step_reevaluating(optimizer: LossScaledOptimizer, closure: Closure, scaled: bool | None) -> Any:
    """Step with a closure that is evaluated several times. A later evaluation that overflows undoes the whole step."""
    # This needs one copy of parameters and state.
    is_first = isinstance(optimizer.inner, torch.optim.LBFGS) or not _has_gradients(optimizer)
    first = _evaluate(optimizer, closure) if is_first else None
    found = optimizer.scaling_of_gradients(scaled)
    if found is None:
        optimizer.close(optimizer.scaler, True, None)
        return first
    scaling = found
    if optimizer.prepare(scaling)[0]:
        optimizer.finish(False, scaling)
        return first
    before = _Snapshot(optimizer.inner)
    is_passed_on = not is_first

    def prepared_closure() -> Any:
        nonlocal is_passed_on, scaling
        passes_on, is_passed_on = not is_passed_on and before.is_current(optimizer.inner), True
        if passes_on:
            return first
        if optimizer.masters is not None:
            optimizer.masters.update_model()
        _clear_as_masters(optimizer)
        loss = _evaluate(optimizer, closure)
        scaling = optimizer.scaling_of_gradients(scaled) or scaling
        if optimizer.prepare(scaling)[0]:
            raise _Overflow
        return loss

    result, applied = first, False
    try:
        result = optimizer.inner.step(prepared_closure)
        applied = True
    except _Overflow:
        pass  # `finally` undoes the step, and finish(False) reports it
    finally:
        if not applied:
            before.restore(optimizer.inner)
            if optimizer.masters is not None:
                optimizer.masters.update_model()
    optimizer.finish(applied, scaling)
    return result


def _has_gradients(optimizer: LossScaledOptimizer) -> bool:
    """Return whether a scaled loss has already produced gradients for this step."""
    witness = optimizer.witness
    made = witness.scaling is not None and not witness.from_last_step
    return made and optimizer.first_with_gradient() is not None


def _clear_as_masters(optimizer: LossScaledOptimizer) -> None:
    """Clear the model's gradients if the inner optimizer, which only knows the masters, cleared theirs."""
    masters = optimizer.masters
    if masters is not None and not any(one.grad is not None and one.grad.any() for one in masters.masters):
        masters.zero_grad(set_to_none=True)


def _evaluate(optimizer: LossScaledOptimizer, closure: Closure) -> Any:
    optimizer.forget_gradients()
    with torch.enable_grad():
        return closure()


class _Snapshot:
    """A copy of an optimizer's parameters, state and options that can be restored."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self._params = [param.detach().clone() for param in _params(inner)]
        self._state = {key: copy.deepcopy(value) for key, value in inner.state.items()}
        self._options = [
            {key: copy.deepcopy(value) for key, value in group.items() if key != "params"}
            for group in inner.param_groups
        ]
        self._versions = _versions(inner)

    def is_current(self, inner: torch.optim.Optimizer) -> bool:
        """Return whether parameters and their gradients are unchanged since the copy."""
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
    """Return values that show every write to parameters and gradients, except writes to their ``data``."""
    return [(p._version, None if (grad := p.grad) is None else (id(grad), grad._version)) for p in _params(inner)]
