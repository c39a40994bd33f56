"""Groups, gradients and optimizers that polyamp's operators do not cover step as they do without."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from support.torch_steps import COVERED, DEVICES, Way, close, loss_of, network, operators, same, train, ways, wrapped

optim = torch.optim

FALLBACKS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "amsgrad": lambda params: optim.AdamW(params, lr=0.02, amsgrad=True),
    "dampening": lambda params: optim.SGD(params, lr=0.05, momentum=0.9, dampening=0.1),
    "adagrad": lambda params: optim.Adagrad(params, lr=0.05),
    "rmsprop": lambda params: optim.RMSprop(params, lr=0.01, momentum=0.9, centered=True),
    "nadam": lambda params: optim.NAdam(params, lr=0.02),
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("max_norm", [None, 0.3])
@pytest.mark.parametrize("name", FALLBACKS)
def test_what_the_kernels_do_not_cover_steps_as_ever(name: str, max_norm: float | None, device: str) -> None:
    fused, _, plain = ways(FALLBACKS[name], lambda: network(device), max_grad_norm=max_norm)
    close(*(train(way, range(10)) for way in (fused, plain)))
    fused.opt.zero_grad()
    fused.opt.backward(loss_of(fused.model))
    assert not {"adam_step_", "sgd_step_"} & set(operators(fused.opt.step))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("max_norm", [None, 0.3])
def test_groups_that_fall_back_beside_one_that_does_not(max_norm: float | None, device: str) -> None:
    def make(params: Any) -> torch.optim.Optimizer:
        own = list(params)
        return optim.AdamW([{"params": own[:2]}, {"params": own[2:], "amsgrad": True}], lr=0.02)

    fused, _, plain = ways(make, lambda: network(device), max_grad_norm=max_norm)
    close(*(train(way, range(10)) for way in (fused, plain)))


class Kinds(nn.Module):
    """float64, complex and sparse gradients beside float32 ones."""

    def __init__(self, sparse: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(7, 4, sparse=sparse)
        self.phase = nn.Parameter(torch.randn(4, dtype=torch.complex64))
        self.wide = nn.Parameter(torch.randn(4, dtype=torch.float64))
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.embedding((x * 10).long() % 7).mean(1) * self.phase.abs()
        return self.head((hidden.double() * self.wide).float())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("name", "sparse"), [("adamw", False), ("momentum", False), ("sgd", True)])
def test_gradients_that_the_kernels_do_not_take(name: str, sparse: bool, device: str) -> None:
    fused, _, plain = ways(COVERED[name], lambda: Kinds(sparse).to(device))
    close(*(train(way, range(8)) for way in (fused, plain)), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("device", DEVICES)
def test_a_bad_gradient_of_a_kind_that_falls_back_skips_all_of_the_step(device: str) -> None:
    model = Kinds(sparse=False).to(device)
    way = Way(model, wrapped(COVERED["adamw"](model.parameters()), True))
    train(way, range(2), overflows={})
    before = [param.detach().clone() for param in model.parameters()]
    for bad in (model.phase, model.wide, model.head.bias):
        way.opt.zero_grad()
        way.opt.backward(loss_of(model))
        bad.grad[0] = math.nan
        way.opt.step()
        same([param.detach() for param in model.parameters()], before)
        assert not way.opt.last_step
