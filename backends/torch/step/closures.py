"""Steps with a closure, including optimizers that evaluate it several times and move in between (LBFGS, SAM).

Gradients have to be unscaled and tested before such an optimizer reads them. LBFGS starts with an evaluation, so
its closure is evaluated before the step and LBFGS gets the result. SAM starts from the existing gradients, moves the
parameters and only then evaluates: a result from before the move would be wrong there, so it is not passed on.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from polyamp.backends.torch.step.gradients import Gradients
from polyamp.backends.torch.step.provenance import WrappedOptimizer
from polyamp.backends.torch.step.scale import Scaling

Closure = Callable[[], Any]


def evaluates_once(inner: torch.optim.Optimizer) -> bool:
    """Return whether an optimizer calls its closure once, before anything else, as all of torch's do except LBFGS."""
    return type(inner).__module__.startswith("torch.optim.") and not isinstance(inner, torch.optim.LBFGS)


class _Overflow(Exception):
    """Exception that leaves the inner optimizer's step from inside the closure."""


def step_reevaluating(
    optimizer: WrappedOptimizer,
    evaluate: Closure,  # clears the gradients, and calls the closure
    judge: Callable[[], Scaling | None],
    prepare: Callable[[Scaling], tuple[Tensor, Gradients]],
    *,
    has_gradients: bool,  # whether a scaled loss has already produced gradients for this step
) -> tuple[Any, bool, Scaling | None]:
    """Step an optimizer that evaluates the closure itself; undo the whole step if an evaluation overflows.

    Return the step's result, whether it was applied, and what the gradients were multiplied by.
    """
    # This needs one copy of parameters and state.
    inner, masters = optimizer.inner, optimizer.masters
    is_first = isinstance(inner, torch.optim.LBFGS) or not has_gradients
    first = evaluate() if is_first else None
    scaling = judge()
    if scaling is None or prepare(scaling)[0]:
        return first, scaling is None, scaling
    before, is_passed_on = _Snapshot(inner), not is_first

    def prepared_closure() -> Any:
        nonlocal is_passed_on, scaling
        passes_on, is_passed_on = not is_passed_on and before.is_current(inner), True
        if passes_on:
            return first
        if masters is not None:
            masters.update_model()
            if not any(one.grad is not None and one.grad.any() for one in masters.masters):
                masters.zero_grad(set_to_none=True)  # as the inner optimizer did, which only knows the masters
        loss = evaluate()
        scaling = judge() or scaling
        if scaling is not None and prepare(scaling)[0]:
            raise _Overflow
        return loss

    result, applied = first, False
    try:
        result = inner.step(prepared_closure)
        applied = True
    except _Overflow:
        pass  # `finally` undoes the step, and the caller reports it
    finally:
        if not applied:
            before.restore(inner)
            if masters is not None:
                masters.update_model()
    return result, applied, scaling


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
