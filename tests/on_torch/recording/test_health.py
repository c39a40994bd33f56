"""The counters of the loss scale where torch has its own ways: scalers that stand in for torch's, optimizers that share
one, steps by polyamp's operators."""

import copy
import pickle
from typing import Any

import pytest
import torch

import polyamp
from polyamp import LossScale, health
from polyamp.backends.torch import GradScaler
from polyamp.diagnosis.health import Health
from support.loss_scale_cases import read, walk

CONFIG = LossScale(interval=3, on_min="ignore")
TRACE = "!!....!.."


def weight_and_optimizer() -> tuple[torch.Tensor, torch.optim.Optimizer]:
    weight = torch.ones(4, requires_grad=True)
    return weight, torch.optim.SGD([weight], lr=0.1)


def drive_scaler(scaler: GradScaler, trace: str) -> None:
    weight, optimizer = weight_and_optimizer()
    for finite in read(trace):
        scaler.scale(weight.sum() * (1.0 if finite else 1e36)).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()


def expected(trace: str) -> Health:
    return Health(CONFIG, walk(CONFIG, read(trace))[-1])


@pytest.mark.parametrize("again", [copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))], ids=["copy", "pickle"])
def test_a_copied_scaler_goes_on_counting(again: Any) -> None:
    scaler = GradScaler("cpu", loss_scale=CONFIG)
    drive_scaler(scaler, TRACE)
    other = again(scaler)
    drive_scaler(other, "!.")
    assert (health(other), health(scaler)) == (expected(TRACE + "!."), expected(TRACE))


def test_a_saved_scaler_goes_on_counting_where_torch_keeps_no_more_than_it_does() -> None:
    limited = GradScaler("cpu", loss_scale=(config := LossScale(interval=3, max_skips=9, on_min="ignore")))
    drive_scaler(limited, TRACE)
    other = GradScaler("cpu", loss_scale=config)
    other.load_state_dict(limited.state_dict())
    assert health(other) == health(limited)
    plain, native = GradScaler("cpu", loss_scale=CONFIG), torch.amp.GradScaler("cpu")
    assert plain.state_dict().keys() == native.state_dict().keys()


def test_a_scaler_that_is_switched_off_has_no_scale() -> None:
    assert health(GradScaler("cpu", enabled=False)).settings == LossScale.none()


def test_torchs_own_scaler_keeps_no_counters() -> None:
    with pytest.raises(polyamp.errors.InvalidTypeError, match="holds no loss scale"):
        health(torch.amp.GradScaler("cpu"))


@pytest.mark.parametrize("fused_step", [None, True], ids=["torch", "operators"])
def test_a_step_of_optimizers_that_share_a_scale_counts_once(fused_step: bool | None) -> None:
    weights, optimizers = zip(*(weight_and_optimizer() for _ in range(2)), strict=True)
    opts = polyamp.wrap_optimizer(list(optimizers), "mixed_float16", loss_scale=CONFIG, fused_step=fused_step)
    for finite in read(TRACE):
        loss = weights[0].sum() + weights[1].sum() * (1.0 if finite else 1e36)
        opts[0].backward(loss)
        for opt in opts:
            opt.step()
            opt.zero_grad()
    assert health(opts[0]) == health(opts[1]) == expected(TRACE)


@pytest.mark.parametrize("fused_step", [None, True], ids=["torch", "operators"])
def test_losses_with_scales_of_their_own_count_apart(fused_step: bool | None) -> None:
    weight, optimizer = weight_and_optimizer()
    opt = polyamp.wrap_optimizer(optimizer, "mixed_float16", loss_scale=CONFIG, fused_step=fused_step)
    for _ in range(2):
        opt.scale(weight.sum()).backward()
        opt.scale(weight.sum() * 1e36, loss_id="second").backward()
        opt.step()
        opt.zero_grad()
    assert (health(opt).steps, health(opt).skipped) == (2, 0)
    assert opt.scaler.of("second").state[:5] == walk(CONFIG, [False] * 2)[-1][:5]
