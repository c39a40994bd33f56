"""Why a step was skipped, in words: the parameters whose gradients were not finite, and whether the loss was.

Applied steps run nothing of this. A skipped step finds the parameters, since their gradients may be cleared soon, and
names them only if somebody reads `StepResult.reason`, or if an error is raised:

    block.0.weight (3 inf of 1024); the loss was finite: the backward pass overflowed at this loss scale

From the flag's all-reduce every rank knows which ranks overflowed; only these ranks know their parameters:

    rank 1: block.0.weight (3 inf of 1024); the loss was finite: ...     on rank 1
    rank 1                                                               on the others
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from polyamp.backends.torch.modules import names_of
from polyamp.backends.torch.step.gradients import Gradients, dense, local
from polyamp.backends.torch.step.masters import MasterWeights
from polyamp.backends.torch.step.ranks import RankSet
from polyamp.skips import FINITE_LOSS, NONFINITE_LOSS

SHOWN = 5  # names in a message; `overflowed` returns all of them


class Overflow(NamedTuple):
    """One parameter whose gradient was not finite."""

    name: str  # name of the parameter
    inf: int  # number of infinite elements of its gradient
    nan: int  # number of NaN elements
    elements: int  # number of all elements

    def __str__(self) -> str:
        counts = [f"{count} {kind}" for count, kind in ((self.inf, "inf"), (self.nan, "NaN")) if count]
        return f"{self.name} ({', '.join(counts)} of {self.elements})"


Counts = tuple[int, int, int]
"""The counts of `Overflow`, for a parameter whose name is not looked up yet."""


def find(param_groups: Iterable[Mapping[str, Any]]) -> dict[Tensor, Counts]:
    """Return the parameters whose gradient has inf or NaN now. Waits for the device once, and again for each found.

    >>> weight = torch.ones(3, requires_grad=True)
    >>> weight.grad = torch.tensor([1.0, float("inf"), float("nan")])
    >>> list(find([{"params": [weight]}]).values())
    [(1, 1, 3)]
    """
    params = [param for group in param_groups for param in group["params"] if param.grad is not None]
    grads = [local(dense(param)) for param in params]
    flags = [grad.isfinite().all() for grad in grads]
    finite = torch.stack([flag.to(flags[0].device) for flag in flags]).tolist() if flags else []
    return {
        param: (int(grad.isinf().sum()), int(grad.isnan().sum()), grad.numel())
        for param, grad, was_finite in zip(params, grads, finite, strict=True)
        if not was_finite
    }


def describe(bad: Sequence[Overflow], loss_was_finite: bool | None = None, overflowed: RankSet | None = None) -> str:
    """Return a line on what overflowed, on which ranks, and whether the loss was finite."""
    if overflowed is not None and not overflowed.includes_this():
        return str(overflowed)
    found = ": ".join(filter(None, ["" if overflowed is None else str(overflowed), _shown(bad)]))
    if loss_was_finite is False:
        return "; ".join(filter(None, [NONFINITE_LOSS, found]))
    verdict = FINITE_LOSS if loss_was_finite else ""
    return "; ".join(filter(None, [found or "they have been changed since", verdict]))


def _shown(bad: Sequence[Overflow]) -> str:
    shown = [str(one) for one in bad[:SHOWN]]
    if len(bad) > SHOWN:
        shown.append(f"and {len(bad) - SHOWN} more parameters")
    return ", ".join(shown)


def overflowed(optimizer: torch.optim.Optimizer) -> list[Overflow]:
    """Return the result of `LossScaledOptimizer.overflowed`."""
    return _named(find(_graded(optimizer)), optimizer)


def explanation(
    optimizer: torch.optim.Optimizer,
    loss_was_finite: bool | Tensor | None = True,
    ranks: RankSet | None = None,
    *,
    skipped: bool = False,
) -> Callable[[], str]:
    """Return a function that describes a skipped step: by the gradients now if ``skipped``, else when it is called."""
    # Now if the host skipped the step; else the function is called only if the device did.
    alive, bad = weakref.ref(optimizer), find(_graded(optimizer)) if skipped else None

    def explain() -> str:
        owner = alive()
        finite = None if loss_was_finite is None else bool(loss_was_finite)
        if owner is None or (bad is None and not Gradients(_graded(owner))):
            return describe([], finite, ranks) if finite is False or ranks is not None else ""
        found = find(_graded(owner)) if bad is None else bad
        return describe(_named(found, owner), finite, ranks)

    return explain


def _models(optimizer: torch.optim.Optimizer) -> Mapping[Tensor, Tensor]:
    """Return the model's parameter of each master."""
    masters: MasterWeights | None = getattr(optimizer, "masters", None)
    return {} if masters is None else dict(zip(masters.masters, masters.model, strict=True))


def _graded(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Return the parameter groups. Where a master has no gradient, the model's parameter takes its place."""
    models = {master: model for master, model in _models(optimizer).items() if master.grad is None}
    return [{**group, "params": [models.get(one, one) for one in group["params"]]} for group in optimizer.param_groups]


def _named(found: Mapping[Tensor, Counts], optimizer: torch.optim.Optimizer) -> list[Overflow]:
    models = _models(optimizer)
    names = names_of(optimizer.param_groups, getattr(optimizer, "named", None), models)
    names.update({model: names[master] for master, model in models.items()})
    return [Overflow(names[param], *counts) for param, counts in found.items()]
