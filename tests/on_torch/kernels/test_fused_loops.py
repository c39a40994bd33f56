"""Fused steps in training loops as people write them: state, schedulers, hooks, and several losses."""

from __future__ import annotations

import copy
import io
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import polyamp
from polyamp import LossScale
from support.torch_steps import (
    COVERED,
    DEVICES,
    Plain,
    Way,
    close,
    loss_of,
    network,
    same,
    spoil,
    train,
    ways,
    wrapped,
)

STORAGES = [None, True]
optim = torch.optim


def fresh(name: str, fused: bool, device: str, storage: Any = None, dtype: torch.dtype = torch.float32) -> Way:
    model = network(device, dtype)
    return Way(model, wrapped(COVERED[name](model.parameters()), fused, master_weights=storage, max_grad_norm=0.5))


def saved_and_loaded(way: Way, into: Way) -> Way:
    file = io.BytesIO()
    torch.save([way.model.state_dict(), way.opt.state_dict()], file)
    file.seek(0)
    for part, saved in zip(into, torch.load(file), strict=True):
        part.load_state_dict(saved)
    return into


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("before", "after"), [(True, True), (True, False), (False, True)])
@pytest.mark.parametrize("name", COVERED)
def test_saved_training_goes_on_with_or_without(name: str, before: bool, after: bool, device: str) -> None:
    way = fresh(name, before, device)
    train(way, range(6))
    resumed = saved_and_loaded(way, fresh(name, after, device))
    compare = same if before == after else close
    compare(train(resumed, range(6, 12)), train(way, range(6, 12)))
    assert resumed.opt.loss_scale == way.opt.loss_scale


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("before", "after"), [(True, True), (True, False), (False, True)])
def test_saved_16_bit_training_goes_on_with_or_without(before: bool, after: bool, device: str) -> None:
    way = fresh("adamw", before, device, True, torch.bfloat16)
    train(way, range(6))
    resumed = saved_and_loaded(way, fresh("adamw", after, device, True, torch.bfloat16))
    same(list(resumed.model.parameters()), list(way.model.parameters()))
    same(resumed.opt.state_dict()["master_weights"], way.opt.state_dict()["master_weights"])
    histories = train(resumed, range(6, 9)), train(way, range(6, 9))
    (same if before == after else _close_in_bfloat16)(*histories)


def _close_in_bfloat16(one: Any, other: Any) -> None:
    close(one, other, rtol=2.0**-6, atol=2.0**-6)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("storage", STORAGES)
def test_copies_train_on_alike_and_apart(storage: Any, device: str) -> None:
    way = fresh("adamw", True, device, storage, torch.float32 if storage is None else torch.bfloat16)
    train(way, range(3))
    twin = Way(*copy.deepcopy([way.model, way.opt]))
    same(train(twin, range(3, 7)), train(way, range(3, 7)))
    before = [param.detach().clone() for param in way.model.parameters()]
    train(twin, range(2))
    same([param.detach() for param in way.model.parameters()], before)


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


def test_a_hook_that_changes_the_learning_rate_changes_this_step() -> None:
    fused, _, plain = ways(COVERED["sgd"])
    for inner in (fused.opt.inner, plain.opt.inner):
        inner.register_step_pre_hook(lambda opt, *_: opt.param_groups[0].update(lr=opt.param_groups[0]["lr"] * 0.5))
    close(*(train(way, range(3), overflows={}) for way in (fused, plain)))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["adamw", "momentum"])
def test_gradients_that_were_unscaled_and_changed_are_those_of_the_step(name: str, device: str) -> None:
    fused, _, plain = ways(COVERED[name], lambda: network(device))
    for step in range(6):
        for way in (fused, plain):
            way.opt.zero_grad()
            way.opt.backward(loss_of(way.model, step))
            if way is fused:
                way.opt.unscale_()
            with torch.no_grad():
                for param in way.model.parameters():
                    param.grad.clamp_(-0.01, 0.01)
            way.opt.step()
        close(list(fused.model.parameters()), list(plain.model.parameters()))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["adamw", "momentum"])
def test_losses_with_scales_of_their_own(name: str, device: str) -> None:
    fused, unfused, _ = ways(COVERED[name], lambda: network(device), max_grad_norm=1.0)
    for step in range(10):
        for way in (fused, unfused):
            way.opt.zero_grad()
            way.opt.backward(loss_of(way.model, step))
            way.opt.backward(way.model[0].weight.square().sum(), loss_id="penalty")
            if step in (2, 5):
                spoil(way.model, math.inf)
            if step == 6:
                way.model[0].weight.grad[0, 0] = math.nan
            way.opt.step()
        close(list(fused.model.parameters()), list(unfused.model.parameters()))
    for loss_id in (None, "penalty"):
        assert fused.opt.scalers[loss_id].state == unfused.opt.scalers[loss_id].state


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("bad", [None, 0, 2])
def test_optimizers_that_share_a_loss_share_its_scale(bad: int | None, device: str) -> None:
    histories = []
    for fused in (True, False):
        model = network(device)
        inner = [COVERED["adamw"](model[0].parameters()), COVERED["momentum"](model[2].parameters())]
        opts = polyamp.wrap_optimizer(inner, "mixed_float16", fused_step=fused)
        rows = []
        for step in range(4):
            for opt in opts:
                opt.zero_grad()
            opts[0].backward(loss_of(model, step))
            if bad is not None and step == 1:
                model[bad].bias.grad[0] = math.inf
            for opt in opts:
                opt.step()
            rows.append([param.detach().clone() for param in model.parameters()])
        histories.append(rows)
        assert [opt.loss_scale for opt in opts] == [2.0 ** (16 if bad is None else 15)] * 2
    close(*histories)


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


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("make", [
    lambda params: optim.LBFGS(params, lr=0.5, max_iter=4),
    COVERED["adamw"],
], ids=["lbfgs", "adamw"])  # fmt: skip
def test_steps_with_a_closure(make: Callable[[Any], torch.optim.Optimizer], device: str) -> None:
    fused, unfused, _ = ways(make, lambda: network(device))
    for step in range(4):
        for way in (fused, unfused):
            way.opt.step(lambda way=way, step=step: _closure(way, step))
        close(list(fused.model.parameters()), list(unfused.model.parameters()))


def _closure(way: Way, step: int) -> Tensor:
    way.opt.zero_grad()
    loss = loss_of(way.model, step)
    way.opt.backward(loss)
    return loss


@pytest.mark.parametrize("device", DEVICES)
def test_too_many_skips_in_a_row_are_an_error(device: str) -> None:
    model = network(device)
    way = Way(model, wrapped(COVERED["adamw"](model.parameters()), True, loss_scale=LossScale(max_skips=3)))

    def skip_on() -> None:
        for step in range(8):
            train(way, [step], overflows={step: math.inf})
            if device == "cuda":
                torch.cuda.synchronize()

    with pytest.raises(polyamp.errors.LossScaleError, match=r"2\.bias"):
        skip_on()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("storage", STORAGES)
def test_overflowed_names_the_parameters(storage: Any, device: str) -> None:
    way = fresh("adamw", True, device, storage, torch.float32 if storage is None else torch.bfloat16)
    train(way, range(2), overflows={1: math.nan})
    assert [(found.name, found.nan) for found in way.opt.overflowed()] == [("2.bias", 1)]


@pytest.mark.parametrize("device", DEVICES)
def test_a_second_step_on_the_same_gradients_is_refused(device: str) -> None:
    way = fresh("adamw", True, device)
    train(way, range(1), overflows={})
    with pytest.raises(polyamp.errors.UsageError, match="last step"):
        way.opt.step()
    with pytest.raises(polyamp.errors.UsageError, match="last step"):
        way.opt.backward(loss_of(way.model))


@pytest.mark.parametrize("device", DEVICES)
def test_without_a_loss_scale_the_step_is_the_plain_one(device: str) -> None:
    fused, _, plain = ways(COVERED["adamw"], lambda: network(device), loss_scale=LossScale.none())
    same(*(train(way, range(4), overflows={}) for way in (fused, plain)))


def test_plain_and_wrapped_part_where_one_is_spoiled() -> None:
    model = network()
    plain = Way(model, Plain(COVERED["sgd"](model.parameters())))
    before = [param.detach().clone() for param in model.parameters()]
    train(plain, range(1), overflows={0: math.inf})
    same([param.detach() for param in model.parameters()], before)
    train(plain, range(1), overflows={})
    with pytest.raises(AssertionError):
        close([param.detach() for param in model.parameters()], before)
