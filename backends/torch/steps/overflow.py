"""Names of the parameters whose gradients were not finite in a skipped step. Applied steps run nothing of this."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from polyamp.backends.torch.steps.gradients import dense, local
from polyamp.limits import NONFINITE_LOSS

SHOWN = 5  # names in a message; `overflowed` returns all of them


class Overflow(NamedTuple):
    """One parameter whose gradient was not finite.

    Attributes:
        name: name of the parameter.
        inf: number of infinite elements of its gradient.
        nan: number of NaN elements.
        elements: number of all elements.
    """

    name: str
    inf: int
    nan: int
    elements: int

    def __str__(self) -> str:
        counts = [f"{count} {kind}" for count, kind in ((self.inf, "inf"), (self.nan, "NaN")) if count]
        return f"{self.name} ({', '.join(counts)} of {self.elements})"


class NonFinite(NamedTuple):
    """The data of `Overflow` before the parameter's name is looked up."""

    param: Tensor
    inf: int
    nan: int
    elements: int


def find(param_groups: Iterable[Mapping[str, Any]]) -> list[NonFinite]:
    """Return the parameters whose gradient has inf or NaN now. Waits for the device once, and again for each of them.

    >>> weight = torch.ones(3, requires_grad=True)
    >>> weight.grad = torch.tensor([1.0, float("inf"), float("nan")])
    >>> [found[1:] for found in find([{"params": [weight]}])]
    [(1, 1, 3)]
    """
    params = [param for group in param_groups for param in group["params"] if param.grad is not None]
    grads = [local(dense(param)) for param in params]
    flags = [grad.isfinite().all() for grad in grads]
    finite = torch.stack([flag.to(flags[0].device) for flag in flags]).tolist() if flags else []
    return [
        NonFinite(param, int(grad.isinf().sum()), int(grad.isnan().sum()), grad.numel())
        for param, grad, was_finite in zip(params, grads, finite, strict=True)
        if not was_finite
    ]


def named(found: Iterable[NonFinite], names: Mapping[Tensor, str]) -> list[Overflow]:
    """Return the result of `find` with names."""
    return [Overflow(names[param], *counts) for param, *counts in found]


def describe(found: Sequence[Overflow], loss_was_finite: bool | None = None) -> str:
    """Return a line about what overflowed and what follows for the loss scale.

    >>> describe([Overflow("head.bias", 2, 0, 10)], loss_was_finite=True)
    'head.bias (2 inf of 10); the loss was finite: the backward pass overflowed at this loss scale'

    Args:
        found: result of `named`.
        loss_was_finite: None if the loss was not seen.
    """
    if loss_was_finite is False:
        return "; ".join(filter(None, [NONFINITE_LOSS, _shown(found)]))
    verdict = "the loss was finite: the backward pass overflowed at this loss scale" if loss_was_finite else ""
    return "; ".join(filter(None, [_shown(found) or "no parameter of this rank", verdict]))


def _shown(found: Sequence[Overflow]) -> str:
    shown = [str(one) for one in found[:SHOWN]]
    if len(found) > SHOWN:
        shown.append(f"and {len(found) - SHOWN} more parameters")
    return ", ".join(shown)


def names_of(
    param_groups: Sequence[Mapping[str, Any]],
    given: Mapping[str, Tensor] | None = None,
    masters: Mapping[Tensor, Tensor] | None = None,
) -> dict[Tensor, str]:
    """Name each parameter.

    Tried in order: the given names; the optimizer's own names, from ``named_parameters()``; the name in a module of
    this process that has the parameter; its index.

    >>> model = nn.Sequential(nn.Linear(2, 2))
    >>> list(names_of([{"params": list(model.parameters())}]).values())
    ['0.weight', '0.bias']

    Args:
        param_groups: an optimizer's groups.
        given: the user's names.
        masters: for master weights in the groups, their parameters.
    """
    known = {param: name for name, param in (given or {}).items()}
    for group in param_groups:
        known.update(zip(group["params"], group.get("param_names", ()), strict=False))
    stored = {param: (masters or {}).get(param, param) for group in param_groups for param in group["params"]}
    if any(param not in known and own not in known for param, own in stored.items()):
        known = {**_names_in_modules(), **known}
    return {
        param: known.get(param)
        or known.get(stored[param])
        or f"group {place}, parameter {index} of shape {tuple(param.shape)}"
        for place, group in enumerate(param_groups)
        for index, param in enumerate(group["params"])
    }


def _names_in_modules() -> dict[Tensor, str]:
    """Return names from all live modules, since an optimizer only knows tensors. Takes tenths of a second."""
    modules = [obj for obj in gc.get_objects() if issubclass(type(obj), nn.Module)]
    inner = {id(child) for module in modules for child in module.children()}
    roots = [module for module in modules if id(module) not in inner]
    return {param: name for root in roots for name, param in root.named_parameters()}
