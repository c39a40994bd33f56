"""Fused steps in training loops as people write them: state, schedulers, hooks, and several losses."""

from __future__ import annotations

import io
import math

import pytest
import torch
from torch import Tensor, nn

from support.torch_steps import (
    COVERED,
    DEVICES,
    Way,
    close,
    loss_of,
    network,
    same,
    train,
    ways,
    wrapped,
)

optim = torch.optim


def fresh(name: str, fused: bool, device: str, dtype: torch.dtype = torch.float32) -> Way:
    model = network(device, dtype)
    return Way(model, wrapped(COVERED[name](model.parameters()), fused, max_grad_norm=0.5))


def saved_and_loaded(way: Way, into: Way) -> Way:
    file = io.BytesIO()
    torch.save([way.model.state_dict(), way.opt.state_dict()], file)
    file.seek(0)
    for part, saved in zip(into, torch.load(file), strict=True):
        part.load_state_dict(saved)
    return into


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("before", "after"), [(True, True), (True, False), (False, True)])
@pytest.mark.parametrize("name", ["adamw", "nesterov"])
def test_saved_training_goes_on_with_or_without(name: str, before: bool, after: bool, device: str) -> None:
    way = fresh(name, before, device)
    train(way, range(6))
    resumed = saved_and_loaded(way, fresh(name, after, device))
    compare = same if before == after else close
    compare(train(resumed, range(6, 12)), train(way, range(6, 12)))
    assert resumed.opt.loss_scale == way.opt.loss_scale


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("on", ["wrapped", "inner"])
def test_hooks_run_once_a_step(on: str, device: str) -> None:
    way = fresh("adamw", True, device)
    seen: list[str] = []
    target = way.opt if on == "wrapped" else way.opt.inner
    target.register_step_pre_hook(lambda *_: seen.append("pre"))
    target.register_step_post_hook(lambda *_: seen.append("post"))
    train(way, range(2), overflows={})
    assert seen == ["pre", "post"] * 2


class Odd(nn.Module):
    """Frozen, unused and empty parameters, tied layers, and a channels-last convolution."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.convolution = nn.Conv2d(1, 3, 2).to(memory_format=torch.channels_last)
        self.first, self.second = nn.Linear(9, 9, bias=False), nn.Linear(9, 9, bias=False)
        self.second.weight = self.first.weight
        self.frozen = nn.Parameter(torch.randn(9), requires_grad=False)
        self.unused, self.empty = nn.Parameter(torch.randn(3)), nn.Parameter(torch.randn(0, 9))
        self.transposed = nn.Parameter(torch.randn(5, 9).t())
        self.head = nn.Linear(9, 3)

    def forward(self, x: Tensor) -> Tensor:
        image = x.view(-1, 1, 2, 2).repeat(1, 1, 2, 2).contiguous(memory_format=torch.channels_last)
        hidden = self.second(self.first(self.convolution(image).flatten(1)[:, :9])) + self.frozen + self.empty.sum(0)
        return self.head(torch.tanh(hidden) @ self.transposed @ self.transposed.t())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", COVERED)
def test_parameters_of_every_sort(name: str, device: str) -> None:
    fused, _, plain = ways(COVERED[name], lambda: Odd().to(device), max_grad_norm=5.0)
    close(*(train(way, range(8)) for way in (fused, plain)), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("device", DEVICES)
def test_16_bit_parameters_of_every_sort(device: str) -> None:
    fused, unfused, _ = ways(COVERED["adamw"], lambda: Odd().to(device, torch.bfloat16), max_grad_norm=5.0)
    histories = [train(way, range(3)) for way in (fused, unfused)]
    close(*histories, rtol=2.0**-5, atol=2.0**-4)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["adamw", "momentum"])
def test_a_parameter_joins_and_another_pauses(name: str, device: str) -> None:
    """Adam counts each parameter's own steps."""

    def pausing(model: nn.Module, step: int) -> Tensor:
        return loss_of(model, step) if step % 3 else model[0].weight.square().sum()

    fused, _, plain = ways(lambda params: COVERED[name](list(params)[:3]), lambda: network(device))
    histories = []
    for way in (fused, plain):
        rows = train(way, range(4), overflows={2: math.inf}, loss=pausing)
        (way.opt if way is fused else way.opt.inner).add_param_group({"params": [way.model[2].bias], "lr": 0.3})
        histories.append(rows + train(way, range(4, 10), overflows={6: math.inf}, loss=pausing))
    close(*histories)
