"""Steps with a closure, also where the optimizer evaluates it several times and moves in between."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

import polyamp
from polyamp import LossScale
from polyamp.backends.torch import LossScaledOptimizer
from support.harness_torch import ThirdParty, contents, linear, loss_of
from support.torch_closures import REEVALUATING

MAKERS = {**REEVALUATING, "adam": lambda params: torch.optim.Adam(params, lr=0.1), "third_party": ThirdParty}


def closure_of(model: torch.nn.Module, opt: Any, overflow_at: int = 0) -> Callable[[], torch.Tensor]:
    evaluations = 0

    def closure() -> torch.Tensor:
        nonlocal evaluations
        evaluations += 1
        opt.zero_grad()
        loss = loss_of(model)
        opt.backward(loss) if isinstance(opt, LossScaledOptimizer) else loss.backward()
        if evaluations == overflow_at:
            model.weight.grad[0, 0] = math.nan
        return loss

    return closure


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_a_step_with_a_closure_is_the_plain_one_bit_for_bit(make: Callable[[Any], torch.optim.Optimizer]) -> None:
    plain_model, model = linear(), linear()
    plain, opt = make(plain_model.parameters()), polyamp.wrap_optimizer(make(model.parameters()), "mixed_float16")
    for _ in range(3):
        expected = plain.step(closure_of(plain_model, plain))
        assert torch.equal(opt.step(closure_of(model, opt)), expected)
    assert contents(opt) == contents(plain)
    assert opt.last_step


EVALUATIONS = {
    "lbfgs": 3,
    "lbfgs_line_search": 2,
    "sharpness": 2,
    "adam": 1,
    "third_party": 1,
}  # at least, in each step


@pytest.mark.parametrize(
    ("name", "overflow_at"), [(name, at) for name, count in EVALUATIONS.items() for at in range(1, count + 1)]
)
def test_an_overflow_at_any_evaluation_takes_the_whole_step_back(name: str, overflow_at: int) -> None:
    model = linear()
    opt = polyamp.wrap_optimizer(MAKERS[name](model.parameters()), "mixed_float16")
    if overflow_at > 1:
        opt.step(closure_of(model, opt))
    before = contents(opt)
    loss = opt.step(closure_of(model, opt, overflow_at))
    assert contents(opt) == before
    assert not opt.last_step
    assert opt.loss_scale == 32768.0
    assert torch.equal(loss, loss_of(model))
    opt.step(closure_of(model, opt))
    assert opt.last_step


def test_an_error_in_a_later_evaluation_takes_the_step_back_too() -> None:
    model = linear()
    opt = polyamp.wrap_optimizer(
        REEVALUATING["sharpness"](model.parameters()), loss_scale=LossScale(nonfinite_loss="raise")
    )
    before = contents(opt)
    losses = iter([1.0, math.inf])

    def closure() -> torch.Tensor:
        opt.zero_grad()
        opt.backward(loss_of(model) * next(losses))
        return torch.tensor(0.0)

    with pytest.raises(polyamp.errors.NonFiniteLossError):
        opt.step(closure)
    assert contents(opt) == before


def test_masters_and_their_model_move_together_through_evaluations() -> None:
    model = linear().bfloat16()
    opt = polyamp.wrap_optimizer(REEVALUATING["lbfgs"](model.parameters()), loss_scale=LossScale())
    seen: list[torch.Tensor] = []

    def closure() -> torch.Tensor:
        opt.zero_grad()
        seen.append(model.weight.detach().clone())
        loss = (model(torch.ones(4, 3).bfloat16()).float() - 2).square().mean()
        opt.backward(loss)
        return loss

    opt.step(closure)
    assert not torch.equal(seen[0], seen[-1])
    assert torch.equal(model.weight, opt.masters.masters[0].bfloat16())


def test_a_closure_without_a_backward_is_refused() -> None:
    model = linear()
    opt = polyamp.wrap_optimizer(REEVALUATING["lbfgs"](model.parameters()), "mixed_float16")
    before = contents(opt)
    with pytest.raises(polyamp.errors.UsageError, match="without a backward"):
        opt.step(lambda: torch.tensor(1.0))
    assert contents(opt) == before
