"""Fused steps in training loops as people write them: state, schedulers, hooks, and several losses."""

from __future__ import annotations

import io
import math

import pytest
import torch
from torch import Tensor, nn

from support.torch_kinds import Net
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


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", COVERED)
def test_parameters_of_every_sort(name: str, dtype: torch.dtype, device: str) -> None:
    made = ways(COVERED[name], lambda: Net(dtype, usual=True).to(device), max_grad_norm=5.0)
    histories = [train(way, range(8), loss=lambda model, _: model.loss()) for way in made]
    rounding = {"rtol": 1e-4, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 2.0**-5, "atol": 2.0**-4}
    for history in histories[1 : 3 if dtype == torch.float32 else 2]:  # the plain one has no masters
        close(histories[0], history, **rounding)


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
