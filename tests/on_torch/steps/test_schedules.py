"""What moves with the optimizer is held back in skipped steps: schedules, averages, other state."""

import copy
import math
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import StepLR

from polyamp import LossScale, StepResult
from polyamp.backends.torch import AppliedSteps, LossScaledOptimizer, select
from polyamp.errors import InvalidTypeError
from support.harness_torch import skipping_on_device

ONE = torch.ones(2)


def make(on_device: bool) -> tuple[torch.Tensor, LossScaledOptimizer]:
    weight = torch.ones(2, requires_grad=True)
    plain = torch.optim.SGD([weight], lr=1.0, fused=True)
    return weight, skipping_on_device(LossScaledOptimizer(plain, LossScale.fixed(1.0)), on_device)


def step(weight: torch.Tensor, opt: LossScaledOptimizer, finite: bool) -> None:
    weight.grad = torch.full((2,), 1.0 if finite else math.inf)
    opt.step()


@pytest.mark.parametrize("on_device", [False, True])
def test_a_schedule_counts_applied_steps(on_device: bool) -> None:
    weight, opt = make(on_device)
    schedule = AppliedSteps(StepLR(opt, 1, gamma=0.5))
    for finite in (True, False, True, False, False, True):
        step(weight, opt, finite)
        schedule.step(opt.last_step)
    assert schedule.get_last_lr() == [0.125]
    assert opt.param_groups[0]["lr"] == 0.125


def test_a_schedule_is_saved_and_copied_as_it_is() -> None:
    weight, opt = make(on_device=False)
    schedule = AppliedSteps(StepLR(opt, 1, gamma=0.5))
    step(weight, opt, True)
    schedule.step(opt.last_step)
    assert copy.deepcopy(schedule).get_last_lr() == [0.5]
    assert schedule.state_dict()["last_epoch"] == 1
    with pytest.raises(AttributeError):
        _ = schedule.nothing_like_this


@pytest.mark.parametrize("on_device", [False, True])
def test_an_average_stands_still_in_skipped_steps(on_device: bool) -> None:
    weight, opt = make(on_device)
    average = {"weight": weight.detach().clone(), "steps": [torch.tensor(0)]}
    for finite in (True, False, True):
        step(weight, opt, finite)
        moved = {"weight": average["weight"].lerp(weight.detach(), 0.5), "steps": [average["steps"][0] + 1]}
        average = select(opt.last_step, moved, average)
    assert average["steps"] == [torch.tensor(2)]
    assert average["weight"].tolist() == [-0.25, -0.25]


@pytest.mark.parametrize("applied", [True, torch.tensor(True), StepResult(LossScale().initial_state(), True)])
def test_select_takes_flags_of_every_kind(applied: object) -> None:
    assert torch.equal(select(applied, torch.ones(2), torch.zeros(2)), torch.ones(2))


@pytest.mark.parametrize("old", [{"weight": [ONE]}, {"bias": ONE}, [ONE], {}])
def test_select_refuses_states_of_another_structure(old: Any) -> None:
    with pytest.raises(InvalidTypeError, match="structure"):
        select(torch.tensor(True), {"weight": ONE}, old)


def test_what_is_no_schedule_is_refused() -> None:
    with pytest.raises(InvalidTypeError, match="LRScheduler"):
        AppliedSteps(make(on_device=False)[1])
