"""Sharpness-aware optimizers as people write them: float32's losses, with and without what is skipped inside."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import polyamp
from polyamp import LossScale
from polyamp.backends.torch import LossScaledOptimizer
from support.harness_torch import contents

Closure = Callable[[], Any]


class Climbs(torch.optim.Optimizer):
    """github.com/davda54/sam: climbs by the gradients that are there, clears them, evaluates, comes back, descends."""

    def __init__(self, params: Any, rho: float = 0.05, **options: Any) -> None:
        super().__init__(params, {"rho": rho, **options})
        self.base = torch.optim.SGD(self.param_groups, lr=0.1, momentum=0.9)
        self.param_groups = self.base.param_groups

    @property
    def params(self) -> list[Tensor]:
        return [param for group in self.param_groups for param in group["params"] if param.grad is not None]

    def norm(self) -> Tensor:
        return torch.stack([param.grad.norm() for param in self.params]).norm()

    @torch.no_grad()
    def first_step(self) -> None:
        scale = self.param_groups[0]["rho"] / (self.norm() + 1e-12)
        for param in self.params:
            self.state[param]["old_p"] = param.data.clone()
            self.climb(param, param.grad * scale.to(param))
        self.zero_grad()

    def climb(self, param: Tensor, by: Tensor) -> None:
        param.add_(by)

    @torch.no_grad()
    def second_step(self) -> None:
        for param in self.params:
            param.data = self.state[param]["old_p"]
        self.base.step()

    @torch.no_grad()
    def step(self, closure: Closure | None = None) -> Any:
        assert closure is not None
        closure = torch.enable_grad()(closure)
        self.first_step()
        loss = closure()
        self.second_step()
        return loss


class ClimbsByData(Climbs):
    """Older code writes to ``data``, which no version counts."""

    def climb(self, param: Tensor, by: Tensor) -> None:
        param.data.add_(by)


X, Y = (
    torch.randn(16, 8, generator=torch.Generator().manual_seed(1)),
    torch.randn(16, 4, generator=torch.Generator().manual_seed(2)),
)
KINDS = [Climbs, ClimbsByData]


def network(dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4)).to(dtype)


class Loop:
    """A training loop that evaluates before its step, and clears after it."""

    def __init__(self, kind: type[Climbs], wrapped: bool, dtype: torch.dtype, clears: bool) -> None:
        self.model, self.clears = network(dtype), clears
        self.opt: Any = kind(self.model.parameters())
        self.evaluations, self.break_at = 0, 0
        if wrapped:
            self.opt = polyamp.wrap_optimizer(self.opt, loss_scale=LossScale(init=256.0))

    def closure(self) -> Tensor:
        self.evaluations += 1
        if self.clears:
            self.opt.zero_grad()
        dtype = next(self.model.parameters()).dtype
        loss = (self.model(X.to(dtype)).float() - Y).square().mean()
        self.opt.backward(loss) if isinstance(self.opt, LossScaledOptimizer) else loss.backward()
        if self.evaluations == self.break_at:
            next(self.model.parameters()).grad[0, 0] = math.inf
        return loss.detach()

    def step(self) -> float:
        self.closure()
        loss = self.opt.step(self.closure)
        self.opt.zero_grad()
        return math.nan if loss is None else float(loss)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("clears", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_losses_are_those_without_scaling(kind: type[Climbs], clears: bool, dtype: torch.dtype) -> None:
    plain, scaled = Loop(kind, False, torch.float32, clears), Loop(kind, True, dtype, clears)
    for _ in range(8):
        expected = plain.step()
        assert scaled.step() == pytest.approx(expected, abs=1e-5 if dtype == torch.float32 else 0.02)
        assert scaled.opt.last_step
    assert expected < 1.2
    assert scaled.opt.loss_scale == 256.0


@pytest.mark.parametrize("kind", KINDS)
def test_an_overflow_at_any_evaluation_takes_the_step_back(kind: type[Climbs]) -> None:
    for place, steps_before in ((1, 0), (2, 2)):
        loop = Loop(kind, True, torch.float32, clears=True)
        for _ in range(steps_before):
            loop.step()
        before = contents(loop.opt)
        loop.break_at = loop.evaluations + place
        loop.step()
        assert contents(loop.opt) == before
        assert not loop.opt.last_step
        assert loop.opt.loss_scale == 128.0
        loop.step()
        assert loop.opt.last_step


def test_a_step_in_two_calls_is_right_too() -> None:
    losses = []
    for wrapped in (False, True):
        loop = Loop(Climbs, wrapped, torch.float32, clears=False)
        for _ in range(4):
            for half in (loop.opt.first_step, loop.opt.second_step):
                loss = loop.closure()
                if wrapped:
                    loop.opt.unscale_()
                half()
                if wrapped:
                    loop.opt.zero_grad()
            loop.opt.zero_grad()
        losses.append(float(loss))
    assert losses[1] == pytest.approx(losses[0], abs=1e-6)
