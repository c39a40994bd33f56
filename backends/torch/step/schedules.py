"""Schedules and averages that move only at applied steps, without waiting for the device."""

from __future__ import annotations

from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler

from polyamp.backends.torch.kernels.control import LateValues
from polyamp.errors import InvalidTypeError, shown
from polyamp.scale import StepResult


class AppliedSteps:
    """A learning-rate schedule that moves once for every applied step of an optimizer; skipped steps do not count.

    If the optimizer skips on the device, the schedule follows as soon as the host knows that a step was applied,
    usually one step later.

    >>> from polyamp.backends.torch import LossScaledOptimizer
    >>> weight = torch.ones(1, requires_grad=True)
    >>> opt = LossScaledOptimizer(torch.optim.SGD([weight], lr=1.0))
    >>> schedule = AppliedSteps(torch.optim.lr_scheduler.ExponentialLR(opt, 0.5))
    >>> for grad in (1.0, float("inf"), 1.0):
    ...     weight.grad = torch.full((1,), grad)
    ...     opt.step(scaled=True)
    ...     schedule.step(opt.last_step)
    >>> schedule.get_last_lr()
    [0.25]

    Args:
        scheduler: a scheduler of ``torch.optim.lr_scheduler``; everything except `step` is forwarded to it.

    Raises:
        InvalidTypeError: ``scheduler`` is not a scheduler.
    """

    def __init__(self, scheduler: Any) -> None:
        if not isinstance(scheduler, LRScheduler):
            raise InvalidTypeError(
                "this is not a schedule of the learning rate",
                where="AppliedSteps(scheduler)",
                found=shown(scheduler),
                allowed="an instance of torch.optim.lr_scheduler.LRScheduler",
                fix="give the scheduler, made for the wrapped optimizer or the one inside",
            )
        self.scheduler: LRScheduler = scheduler
        self._seen = 0
        self._applied: Tensor | None = None  # number of applied steps, if only the device knows it
        self._late = LateValues()

    def step(self, result: StepResult) -> None:
        """Record the optimizer's ``last_step``. Call it once after each step."""
        flag = result.flag
        if not isinstance(flag, Tensor):
            self._advance(int(flag))
            return
        counted = flag.to(torch.float64 if flag.device.type != "mps" else torch.float32)
        self._applied = counted if self._applied is None else self._applied + counted
        applied = self._applied
        self._late.send(lambda: applied.reshape(1))
        arrived = self._late.receive()
        if arrived is not None:
            self._advance(int(arrived[0]) - self._seen)
            self._seen = int(arrived[0])

    def _advance(self, steps: int) -> None:
        for _ in range(steps):
            self.scheduler.step()

    def __getattr__(self, name: str) -> Any:
        if name == "scheduler" or name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.scheduler, name)


def select(applied: Any, new: Any, old: Any) -> Any:
    """Return ``new`` if a step was applied and ``old`` if it was skipped, decided on the device, without a host sync.

    >>> from polyamp import LossScale, StepResult
    >>> last_step = StepResult(LossScale().initial_state(), applied=torch.tensor(False))
    >>> select(last_step, {"ema": torch.ones(2)}, {"ema": torch.zeros(2)})
    {'ema': tensor([0., 0.])}

    Args:
        applied: an optimizer's ``last_step``, a bool or a boolean scalar tensor.
        new: tensors in dicts, lists and tuples.
        old: the same, of the same shapes and dtypes.

    Raises:
        InvalidTypeError: ``new`` and ``old`` differ in structure.
    """
    if pytree.tree_structure(new) != pytree.tree_structure(old):
        fix = "pass the same state before and after the step"
        raise InvalidTypeError("new and old values differ in structure", where="select(applied, new, old)", fix=fix)
    flag = applied.flag if isinstance(applied, StepResult) else applied
    if not isinstance(flag, Tensor):
        return new if flag else old
    return pytree.tree_map(lambda one, other: torch.where(flag.to(one.device), one, other), new, old)
