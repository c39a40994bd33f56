"""Which optimizers polyamp's operators stand in for, and under which of their options."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from polyamp.backends.torch.kernels.arguments import DECOUPLED, MAXIMIZE, NESTEROV, SGD, Adam

Group = Mapping[str, Any]


class UpdateRule(NamedTuple):
    """How an operator makes the step of an optimizer.

    Attributes:
        operator: of ``torch.ops.polyamp``.
        numbers: those of a parameter group, in the order of the operator's ``rules``; None for options that the
            operator does not have.
        moments: the names under which the optimizer keeps a group's moments for each parameter.
        counts: whether it keeps the number of steps.
        lists: how many lists of such state the operator takes, empty ones too.
    """

    operator: str
    numbers: Callable[[Group], tuple[Any, ...] | None]
    moments: Callable[[Group], tuple[str, ...]]
    counts: bool
    lists: int


def update_rule_of(optimizer: torch.optim.Optimizer) -> UpdateRule | None:
    """How to make an optimizer's step; None where no operator does. Subclasses may do other things in theirs.

    >>> weight = torch.ones(1, requires_grad=True)
    >>> update_rule_of(torch.optim.AdamW([weight])).operator, update_rule_of(torch.optim.Adagrad([weight]))
    ('adam_step_', None)
    """
    patched = vars(optimizer).get("step")
    if patched is not None and not getattr(patched, "_wrapped_by_lr_sched", False):
        return None
    return _RULES.get(type(optimizer))


def _adam(group: Group) -> tuple[Any, ...] | None:
    beta1, beta2 = group["betas"]
    numbers = beta1, beta2, group["eps"], group["weight_decay"]
    if group["amsgrad"] or group["differentiable"] or not _are_numbers(group["lr"], *numbers):
        return None
    return Adam(group["lr"], *numbers, DECOUPLED * bool(group.get("decoupled_weight_decay")) + _maximize(group))


def _sgd(group: Group) -> tuple[Any, ...] | None:
    numbers = group["momentum"], group["weight_decay"]
    if group["dampening"] or group["differentiable"] or not _are_numbers(group["lr"], *numbers):
        return None
    return *SGD(group["lr"], *numbers, NESTEROV * bool(group["nesterov"]) + _maximize(group)), 0.0, 0.0


def _are_numbers(lr: Any, *numbers: Any) -> bool:
    """The learning rate may also be a scalar tensor, which a captured CUDA graph reads anew at every replay."""
    whole = isinstance(lr, Tensor) and lr.numel() == 1 and lr.is_floating_point()
    return (whole or isinstance(lr, float | int)) and all(isinstance(number, float | int) for number in numbers)


def _maximize(group: Group) -> int:
    return MAXIMIZE * bool(group["maximize"])


_RULES: dict[type, UpdateRule] = {
    torch.optim.Adam: UpdateRule("adam_step_", _adam, lambda _: ("exp_avg", "exp_avg_sq"), counts=True, lists=3),
    torch.optim.AdamW: UpdateRule("adam_step_", _adam, lambda _: ("exp_avg", "exp_avg_sq"), counts=True, lists=3),
    torch.optim.SGD: UpdateRule(
        "sgd_step_", _sgd, lambda group: ("momentum_buffer",) if group["momentum"] else (), counts=False, lists=1
    ),
}
