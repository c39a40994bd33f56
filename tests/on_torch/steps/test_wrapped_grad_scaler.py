"""A scaler of torch's interface that drives wrapped optimizers: code that takes a scaler trains master weights."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

import polyamp
from polyamp import LossScale
from polyamp.backends.torch import GradScaler, LossScaledOptimizer

SCALE = LossScale(init=2.0**10)


def native_loop(model: nn.Module, opt: Any, scaler: torch.amp.GradScaler, *, bad: int = -1) -> list[float]:
    """A loop as trainers write it; it clips the model's parameters, and one step's loss overflows."""
    x, y = torch.randn(16, 8), torch.randn(16, 4)
    losses = []
    for step in range(8):
        with polyamp.autocast("mixed_float16"):
            loss = (model(x).float() - y).square().mean()
        losses.append(loss.item())
        scaler.scale(loss * (math.inf if step == bad else 1.0)).backward()
        scaler.unscale_(opt)
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        scaler.step(opt)
        scaler.update()
        opt.zero_grad()
    return losses


def linear(low: bool) -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(8, 4).half() if low else nn.Linear(8, 4)


def plain_losses() -> list[float]:
    model = linear(low=False)
    scaler = torch.amp.GradScaler("cpu", init_scale=SCALE.init)
    return native_loop(model, torch.optim.AdamW(model.parameters(), lr=0.03), scaler)


@pytest.mark.parametrize("low", [False, True])
def test_a_native_loop_trains_master_weights(low: bool) -> None:
    model = linear(low)
    opt = LossScaledOptimizer(torch.optim.AdamW(model.parameters(), lr=0.03), SCALE)
    losses = native_loop(model, opt, GradScaler(optimizers=opt))
    assert losses[0] - losses[-1] > 0.1
    assert losses == pytest.approx(plain_losses(), abs=4e-3)
    assert opt.param_groups[0]["params"][0].dtype == torch.float32


@pytest.mark.filterwarnings("ignore:.*not finite.*:polyamp.PolyampWarning")
def test_a_skip_is_seen_by_the_scale_as_trainers_look_for_it() -> None:
    model = linear(low=True)
    opt = LossScaledOptimizer(torch.optim.SGD(model.parameters(), lr=0.03), SCALE)
    scaler = GradScaler(optimizers=opt)
    native_loop(model, opt, scaler, bad=7)
    assert scaler.get_scale() == SCALE.init / 2
    assert not scaler.last_step
    assert "loss" in scaler.last_step.reason


def test_its_state_is_that_of_the_optimizer_and_torchs_loads() -> None:
    model = linear(low=False)
    opt = LossScaledOptimizer(torch.optim.SGD(model.parameters(), lr=0.03), SCALE)
    scaler = GradScaler(optimizers=opt)
    native = torch.amp.GradScaler("cpu", init_scale=64.0)
    scaler.load_state_dict(native.state_dict())
    assert opt.loss_scale == scaler.get_scale() == 64.0
    saved = scaler.state_dict()
    scaler.update(32.0)
    assert opt.loss_scale == 32.0
    scaler.load_state_dict(saved)
    assert opt.loss_scale == 64.0
    assert isinstance(scaler, torch.amp.GradScaler)
    assert scaler.is_enabled()
    assert (scaler.get_growth_factor(), scaler.get_backoff_factor(), scaler.get_growth_interval()) == (2.0, 0.5, 2000)


def test_optimizers_that_share_a_scale_are_driven_together() -> None:
    models = [linear(low=True), linear(low=False)]
    both = polyamp.wrap_optimizer([torch.optim.SGD(m.parameters(), lr=0.1) for m in models], "mixed_float16")
    scaler = GradScaler(optimizers=both)
    scaler.scale(sum(model.weight.float().square().mean() for model in models)).backward()
    for opt in both:
        scaler.step(opt)
    scaler.update()
    assert all(opt.last_step for opt in both)


def test_what_it_cannot_drive_is_refused() -> None:
    opt, other = (LossScaledOptimizer(torch.optim.SGD(linear(False).parameters(), lr=0.1)) for _ in range(2))
    with pytest.raises(polyamp.PolyampError, match="different loss scales"):
        GradScaler(optimizers=[opt, other])
    with pytest.raises(polyamp.errors.InvalidTypeError, match="expected LossScaledOptimizer"):
        GradScaler(optimizers=opt.inner)  # type: ignore[arg-type]
    scaler = GradScaler(optimizers=opt)
    for wrong in (opt.inner, other):
        with pytest.raises(polyamp.errors.UsageError, match="not an optimizer of the scaler"):
            scaler.step(wrong)
    for change in (scaler.set_growth_factor, scaler.set_backoff_factor, scaler.set_growth_interval):
        with pytest.raises(polyamp.errors.UsageError, match="settings of the loss scale are"):
            change(3)  # type: ignore[arg-type]
