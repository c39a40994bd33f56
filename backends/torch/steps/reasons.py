"""The reason why a wrapped optimizer's step was skipped, in words; only computed on demand, or when a step raises."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from polyamp.backends.torch.steps.gradients import Gradients
from polyamp.backends.torch.steps.overflow import NonFinite, Overflow, describe, find, named, names_of
from polyamp.backends.torch.steps.scaler import is_finite

if TYPE_CHECKING:
    from polyamp.backends.torch.steps.windowed import WindowedOptimizer


def overflowed(optimizer: WindowedOptimizer) -> list[Overflow]:
    """Return the result of `LossScaledOptimizer.overflowed`."""
    return named(find(_graded(optimizer)), _names(optimizer))


def explain(optimizer: WindowedOptimizer, loss_was_finite: bool | None = True) -> str:
    """Describe what the current gradients show."""
    return describe(overflowed(optimizer), loss_was_finite)


def now(optimizer: WindowedOptimizer, loss_was_finite: bool | None) -> Callable[[], str]:
    """Describe a step that the host skipped: find the non-finite gradients now, and name them on demand."""
    return functools.partial(_described, optimizer, find(_graded(optimizer)), loss_was_finite)


def later(optimizer: WindowedOptimizer, losses: Sequence[Tensor] = ()) -> Callable[[], str]:
    """Describe a step that the device may have skipped, from its losses and its gradients while they exist."""
    return functools.partial(_explain_later, weakref.ref(optimizer), losses)


def _described(optimizer: WindowedOptimizer, found: list[NonFinite], loss_was_finite: bool | None) -> str:
    return describe(named(found, _names(optimizer)), loss_was_finite)


def _explain_later(optimizer: weakref.ref[WindowedOptimizer], losses: Sequence[Tensor]) -> str:
    alive = optimizer()
    finite = all(map(is_finite, losses)) if losses else None  # None: nobody has tested the loss yet
    if alive is None or not Gradients(_graded(alive)):
        return describe([], False) if finite is False else ""
    return explain(alive, finite)


def _models(optimizer: WindowedOptimizer) -> dict[Tensor, Tensor]:
    """Return the model's parameter of each master."""
    masters = optimizer.masters
    return {} if masters is None else dict(zip(masters.masters, masters.model, strict=True))


def _graded(optimizer: WindowedOptimizer) -> list[dict[str, Any]]:
    """Return the groups, with the model's parameter in place of a master without gradient."""
    models = {master: model for master, model in _models(optimizer).items() if master.grad is None}
    return [{**group, "params": [models.get(one, one) for one in group["params"]]} for group in optimizer.param_groups]


def _names(optimizer: WindowedOptimizer) -> dict[Tensor, str]:
    models = _models(optimizer)
    names = names_of(optimizer.param_groups, optimizer.named, models)
    return {**names, **{model: names[master] for master, model in models.items()}}
