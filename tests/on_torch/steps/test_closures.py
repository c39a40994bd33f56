"""Steps with a closure, also where the optimizer evaluates it several times and moves in between."""

import math
from typing import Any

import pytest
import torch

import polyamp
from polyamp import LossScale
from polyamp.backends.torch import LossScaledOptimizer
from support.harness_torch import ThirdParty, X, Y, contents, linear, loss_of
from support.torch_closures import REEVALUATING

MAKERS = {
    **REEVALUATING,
    "adam": lambda params: torch.optim.Adam(params, lr=0.1),
    "third_party": ThirdParty,
}


class Loop:
    """A loop of steps with a closure, which spoils a gradient in one of its evaluations."""

    def __init__(self, name: str, *, wrapped: bool = True, low: bool = False, clears: bool = True) -> None:
        self.model = linear().bfloat16() if low else linear()
        self.evaluates_before, self.clears = name == "climbs", clears
        self.opt: Any = MAKERS[name](self.model.parameters())
        self.left = math.inf  # evaluations before the spoiled one
        self.seen: list[torch.Tensor] = []
        if wrapped:
            self.opt = polyamp.wrap_optimizer(self.opt, loss_scale=LossScale(init=256.0))

    def closure(self) -> torch.Tensor:
        self.left -= 1
        self.seen.append(self.model.weight.detach().clone())
        if self.clears:
            self.opt.zero_grad()
        loss = (self.model(X.to(self.model.weight.dtype)).float().squeeze(1) - Y).square().mean()
        self.opt.backward(loss) if isinstance(self.opt, LossScaledOptimizer) else loss.backward()
        if self.left == 0:
            self.model.weight.grad[0, 0] = math.nan
        return loss

    def step(self, spoiled: float = math.inf) -> Any:
        self.left = spoiled
        if self.evaluates_before:
            self.closure()
        loss = self.opt.step(self.closure)
        if not self.clears:
            self.opt.zero_grad()
        return loss


@pytest.mark.parametrize(("name", "clears"), [*((name, True) for name in MAKERS), ("climbs", False)])
def test_a_step_with_a_closure_is_the_plain_one_bit_for_bit(name: str, clears: bool) -> None:
    plain, loop = Loop(name, wrapped=False, clears=clears), Loop(name, clears=clears)
    for _ in range(3):
        expected = plain.step()
        assert torch.equal(loop.step(), expected)
    assert contents(loop.opt) == contents(plain.opt)
    assert loop.opt.last_step
    assert loop.opt.loss_scale == 256.0


EVALUATIONS = {  # at least, in each step
    "lbfgs": 3,
    "lbfgs_line_search": 2,
    "sharpness": 2,
    "climbs": 2,
    "adam": 1,
    "third_party": 1,
}


@pytest.mark.parametrize(
    ("name", "overflow_at"), [(name, at) for name, count in EVALUATIONS.items() for at in range(1, count + 1)]
)
@pytest.mark.parametrize("low", [False, True])
def test_an_overflow_at_any_evaluation_takes_the_whole_step_back(low: bool, name: str, overflow_at: int) -> None:
    loop = Loop(name, low=low)
    if overflow_at > 1:
        loop.step()
    before, weight = contents(loop.opt), loop.model.weight.clone()
    loss = loop.step(overflow_at)
    assert contents(loop.opt) == before
    assert torch.equal(loop.model.weight, weight)
    assert not loop.opt.last_step
    assert loop.opt.loss_scale == 128.0
    assert loss is None or low or torch.equal(loss, loss_of(loop.model))
    loop.step()
    assert loop.opt.last_step


def test_an_error_in_a_later_evaluation_takes_the_step_back_too() -> None:
    model = linear()
    opt = polyamp.wrap_optimizer(MAKERS["sharpness"](model.parameters()), loss_scale=LossScale(nonfinite_loss="raise"))
    before = contents(opt)
    losses = iter([1.0, math.inf])

    def closure() -> torch.Tensor:
        opt.zero_grad()
        opt.backward(loss_of(model) * next(losses))
        return torch.tensor(0.0)

    with pytest.raises(polyamp.errors.NonFiniteLossError):
        opt.step(closure)
    assert contents(opt) == before


@pytest.mark.parametrize(("name", "clears"), [("lbfgs", True), ("climbs", True), ("climbs", False)])
def test_masters_and_their_model_move_together_through_evaluations(name: str, clears: bool) -> None:
    plain, loop = Loop(name, wrapped=False, clears=clears), Loop(name, low=True, clears=clears)
    for _ in range(4):
        assert loop.step().item() == pytest.approx(plain.step().item(), abs=0.02)
        assert torch.equal(loop.model.weight, loop.opt.param_groups[0]["params"][0].bfloat16())
    assert not torch.equal(*loop.seen[:2])


@pytest.mark.parametrize("wrapped", [False, True])
def test_a_step_in_two_calls_is_right_too(wrapped: bool) -> None:
    loop, whole = Loop("climbs", wrapped=wrapped, clears=False), Loop("climbs", wrapped=False, clears=False)
    for _ in range(4):
        whole.step()
        for half in (loop.opt.first_step, loop.opt.second_step):
            loop.closure()
            if wrapped:
                loop.opt.unscale_()
            half()
            if wrapped:
                loop.opt.zero_grad()
        loop.opt.zero_grad()
    torch.testing.assert_close(loop.model.weight, whole.model.weight)


def test_a_closure_without_a_backward_is_refused() -> None:
    model = linear()
    opt = polyamp.wrap_optimizer(MAKERS["lbfgs"](model.parameters()), "mixed_float16")
    before = contents(opt)
    with pytest.raises(polyamp.errors.UsageError, match="without a backward"):
        opt.step(lambda: torch.tensor(1.0))
    assert contents(opt) == before


@pytest.mark.parametrize("name", MAKERS)
def test_a_closure_whose_loss_reaches_other_parameters_changes_nothing(name: str) -> None:
    model, other = linear(), linear()
    opt = polyamp.wrap_optimizer(MAKERS[name](model.parameters()), loss_scale=LossScale(init=256.0))
    others = polyamp.wrap_optimizer(torch.optim.SGD(other.parameters(), lr=0.1))

    def closure() -> torch.Tensor:
        loss = loss_of(other)
        others.backward(loss)
        return loss

    before = [param.clone() for param in model.parameters()]
    assert opt.step(closure).isfinite()
    assert opt.last_step.applied
    assert all(map(torch.equal, before, model.parameters()))
    assert opt.loss_scale == 256.0
