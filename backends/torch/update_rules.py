"""The optimizers that polyamp's operators can replace, and the numbers that the operators get from their options."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from polyamp.backends.torch.kernels.arguments import DECOUPLED, MAXIMIZE, NESTEROV, SGD, Adam
from polyamp.backends.torch.kernels.control import kept

Group = Mapping[str, Any]


class UpdateRule(NamedTuple):
    """The operator for an optimizer's step, and its inputs."""

    operator: str  # name in ``torch.ops.polyamp``
    # returns the numbers of a parameter group in the order of the operator's ``rules``; None for options that the
    # operator does not support
    numbers: Callable[[Group], tuple[Any, ...] | None]
    moments: Callable[[Group], tuple[str, ...]]  # returns the names of a group's moments in the optimizer's state
    counts: bool  # whether the optimizer keeps the number of steps
    lists: int  # how many lists of such state the operator takes, including empty ones


def update_rule_of(optimizer: torch.optim.Optimizer) -> UpdateRule | None:
    """Return the rule for an optimizer's step; None without an operator. Subclasses have none: they may differ."""
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
    """Return whether these are numbers. ``lr`` may be a scalar tensor, which a CUDA graph reads at every replay."""
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


def rules_of(
    rule: UpdateRule, inner: torch.optim.Optimizer, called: Collection[int], device: torch.device
) -> tuple[Tensor, list[Tensor]]:
    """Return the operator's ``rules``, and its ``lrs`` if a group's learning rate is a tensor on the device."""
    # Groups without a parameter in the call get zeros, since their learning rate may be on another device.
    rows = [(number in called and rule.numbers(group)) or (0.0,) * 6 for number, group in enumerate(inner.param_groups)]
    lrs = [row[0] for row in rows]
    numbers = tuple((float(lr) if _on_host(lr) else 0.0, *row[1:]) for lr, row in zip(lrs, rows, strict=True))
    if all(map(_on_host, lrs)):
        return _rows(numbers), []
    return _rows(numbers), [
        kept(float(lr), torch.float32, device) if _on_host(lr) else lr.detach().reshape(()).float() for lr in lrs
    ]


def _on_host(lr: Any) -> bool:
    return not isinstance(lr, Tensor) or lr.device.type == "cpu"


@functools.lru_cache(maxsize=64)
def _rows(numbers: tuple[tuple[float, ...], ...]) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float64, device="cpu")
