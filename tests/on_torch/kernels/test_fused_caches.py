"""What a fused step keeps for the next one is made anew where anything under it was exchanged in between."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from support.torch_steps import COVERED, DEVICES, Way, close, wrapped

STORAGES: list[tuple[torch.dtype, Any]] = [
    (torch.float32, None),
    (torch.bfloat16, True),
]


def build(device: str, dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(2, 3, 3), nn.Linear(4, 5)).to(device, dtype)


def linear_loss(model: nn.Module, step: int) -> Tensor:
    """Its gradients are the same whatever the parameters are, so that roundings do not add up."""
    generator = torch.Generator().manual_seed(step)
    weights = [torch.randn(param.shape, generator=generator) for param in model.parameters()]
    pairs = zip(model.parameters(), weights, strict=True)
    return torch.stack([(param.float() * weight.to(param.device)).sum() for param, weight in pairs]).sum()


def exchange_memory(way: Way) -> None:
    for param in way.model.parameters():
        param.data = param.data.clone()


def change_the_layout(way: Way) -> None:
    way.model.to(memory_format=torch.channels_last)


def clear_the_state(way: Way) -> None:
    way.opt.state.clear()


def exchange_the_state(way: Way) -> None:
    way.opt.inner.load_state_dict(copy.deepcopy(way.opt.inner.state_dict()))


def exchange_moments(way: Way) -> None:
    for state in way.opt.state.values():
        state.update({name: 0.5 * value for name, value in state.items() if name != "step" and value is not None})


def change_options(way: Way) -> None:
    for group in way.opt.param_groups:
        group.update(lr=0.5 * group["lr"], weight_decay=0.3, maximize=True)


def begin_with_momentum(way: Way) -> None:
    for group in way.opt.param_groups:
        group.update({"momentum": 0.9} if "momentum" in group else {"betas": (0.5, 0.9)})


def regroup(way: Way) -> None:
    first, second = way.opt.param_groups
    first["params"].append(second["params"].pop(0))


def write_to_the_model(way: Way) -> None:
    with torch.no_grad():
        for param in way.model.parameters():
            param.mul_(0.5)


EXCHANGES: list[Callable[[Way], None]] = [
    exchange_memory,
    change_the_layout,
    clear_the_state,
    exchange_the_state,
    exchange_moments,
    change_options,
    begin_with_momentum,
    regroup,
    write_to_the_model,
]


def trained(
    fused: bool,
    name: str,
    device: str,
    storage: tuple[torch.dtype, Any],
    unscales: bool,
    exchange: Callable[[Way], None],
) -> Way:
    model = build(device, storage[0])
    params = list(model.parameters())
    inner = COVERED[name]([{"params": params[:2]}, {"params": params[2:], "lr": 0.003}])
    way = Way(model, wrapped(inner, fused, master_weights=storage[1]))
    for step in range(6):
        way.opt.zero_grad()
        way.opt.backward(linear_loss(model, step))
        if unscales:
            way.opt.unscale_()
        way.opt.step()
        if step in (1, 3):
            exchange(way)
    return way


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("exchange", EXCHANGES, ids=lambda exchange: exchange.__name__)
@pytest.mark.parametrize("unscales", [False, True], ids=["direct", "unscaled"])
@pytest.mark.parametrize(("name", "storage"), [("adamw", STORAGES[0]), ("momentum", STORAGES[1])])
def test_training_goes_on_where_something_was_exchanged(
    name: str, storage: tuple[torch.dtype, Any], unscales: bool, exchange: Callable[[Way], None], device: str
) -> None:
    fused, unfused = (trained(choice, name, device, storage, unscales, exchange) for choice in (True, False))
    if storage[1] is not None:
        close(*(way.opt.state_dict()["master_weights"] for way in (fused, unfused)), rtol=1e-4, atol=1e-5)
    unit = {torch.float32: 1e-5, torch.bfloat16: 2.0**-7}[storage[0]]
    params = ([param.detach() for param in way.model.parameters()] for way in (fused, unfused))
    close(*params, rtol=unit, atol=unit)


@pytest.mark.parametrize("unscales", [False, True], ids=["direct", "unscaled"])
def test_a_parameter_in_the_place_of_another_trains(unscales: bool) -> None:
    def exchange(way: Way) -> None:
        way.model[1].weight = nn.Parameter(way.model[1].weight.detach().clone())
        way.opt.param_groups[1]["params"][0] = way.model[1].weight

    fused, unfused = (
        trained(choice, "sgd", "cpu", (torch.float32, None), unscales, exchange) for choice in (True, False)
    )
    close(*([param.detach() for param in way.model.parameters()] for way in (fused, unfused)))
