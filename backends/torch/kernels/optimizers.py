"""The optimizers that have a fused kernel, and the numbers that the operators ``torch.ops.polyamp.*`` take from them.

`RULES` has a row for each optimizer. For a new one, also touch its schema and update in operators.py; its kernel in
``csrc``: update_rules.h, operators.h and .cpp, abi.h, launch.cu, emulate.cpp; its name in autocast/weights.py.

The numbers travel as tensors on the CPU, the only kind of list that every binding of PyTorch passes without cost.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from polyamp.backends.torch.kernels.control import constant
from polyamp.settings import LossScale

Group = Mapping[str, Any]

DECOUPLED, MAXIMIZE = 1, 2  # the flags of Adam's rules
NESTEROV = 1  # of SGD's rules, with MAXIMIZE


class Settings(NamedTuple):
    """The numbers of ``settings``, in their order."""

    # The others are those of `LossScale`; ``restart`` and ``after_growth`` encode ``late_growth`` as values of
    # ``good_steps``, -1 or 0.

    max_norm: float  # clip to this global L2 norm; inf does not clip
    advance: float  # whether this call, the last one of a step, advances the loss scale
    growth: float
    backoff: float
    min: float
    max: float
    interval: float
    hysteresis: float
    restart: float
    after_growth: float
    consecutive: float

    @classmethod
    def of(cls, config: LossScale, *, max_norm: float = math.inf, advance: bool = True) -> Settings:
        """Return the numbers for a `LossScale`."""
        restart = 0.0 if config.late_growth == "never" else -1.0
        after_growth = -1.0 if config.late_growth == "always" else 0.0
        numbers = (config.growth, config.backoff, config.min, config.max, config.interval, config.hysteresis)
        return cls(max_norm, advance, *numbers, restart, after_growth, config.consecutive)

    @property
    def config(self) -> LossScale:
        """The loss scale settings behind these numbers, as far as the update rule uses them."""
        late = {(0, 0): "never", (-1, 0): "after_overflow", (-1, -1): "always"}
        return LossScale(
            init=self.min,
            min=self.min,
            max=self.max,
            growth=self.growth,
            backoff=self.backoff,
            interval=int(self.interval),
            hysteresis=int(self.hysteresis),
            consecutive=bool(self.consecutive),
            late_growth=late[self.restart, self.after_growth],  # type: ignore[arg-type, index]
        )


class Adam(NamedTuple):
    """The numbers of one group in ``rules`` of ``adam_step_``."""

    lr: float | Tensor
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    flags: float


class SGD(NamedTuple):
    """The numbers of one group in ``rules`` of ``sgd_step_``, which has two more, unused."""

    lr: float | Tensor
    momentum: float
    weight_decay: float
    flags: float


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
    """Return the row of `RULES` for an optimizer; None for others, and for subclasses, whose step can differ."""
    patched = vars(optimizer).get("step")
    if patched is not None and not getattr(patched, "_wrapped_by_lr_sched", False):
        return None
    return RULES.get(type(optimizer))


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
    """Return whether these are numbers. ``lr`` can be a scalar tensor, which a CUDA graph reads at every replay."""
    whole = isinstance(lr, Tensor) and lr.numel() == 1 and lr.is_floating_point()
    return (whole or isinstance(lr, float | int)) and all(isinstance(number, float | int) for number in numbers)


def _maximize(group: Group) -> int:
    return MAXIMIZE * bool(group["maximize"])


RULES: dict[type, UpdateRule] = {
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
        constant(float(lr), torch.float32, device) if _on_host(lr) else lr.detach().reshape(()).float() for lr in lrs
    ]


def _on_host(lr: Any) -> bool:
    return not isinstance(lr, Tensor) or lr.device.type == "cpu"


@functools.lru_cache(maxsize=64)
def _rows(numbers: tuple[tuple[float, ...], ...]) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float64, device="cpu")
