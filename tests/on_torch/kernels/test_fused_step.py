"""`wrap_optimizer(fused_step=True)` takes the steps that it takes without, and that the plain optimizer takes.

On the CPU these are the operators' references, or the compiled ones where they are built; on a GPU the kernels.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from support.torch_steps import (
    COVERED,
    DEVICES,
    STEP_OPERATORS,
    NoSync,
    Way,
    close,
    loss_of,
    network,
    operators,
    same,
    spoil,
    state_of,
    train,
    ways,
    wrapped,
)

STEPS = 12


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("micro_batches", "max_norm"), [(1, 100.0), (2, 0.3)])
@pytest.mark.parametrize("name", COVERED)
def test_steps_are_those_of_the_plain_optimizer(
    name: str, micro_batches: int, max_norm: float | None, device: str
) -> None:
    fused, unfused, plain = ways(COVERED[name], lambda: network(device), max_grad_norm=max_norm)
    histories = [train(way, range(STEPS), micro_batches=micro_batches) for way in (fused, unfused, plain)]
    close(histories[0], histories[1])
    close(histories[0], histories[2])
    close(state_of(fused.opt), state_of(plain.opt))
    assert fused.opt.loss_scale == unfused.opt.loss_scale
    assert fused.opt.scaler.state == unfused.opt.scaler.state


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", COVERED)
def test_a_step_is_one_look_at_the_gradients_and_one_update(name: str, device: str) -> None:
    fused, *_ = ways(COVERED[name], lambda: network(device), max_grad_norm=1.0)
    train(fused, range(2), overflows={})
    fused.opt.zero_grad()
    fused.opt.backward(loss_of(fused.model))
    assert operators(fused.opt.step) == ["grad_stats", STEP_OPERATORS[name]]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", COVERED)
def test_a_step_writes_no_gradient(name: str, device: str) -> None:
    fused, *_ = ways(COVERED[name], lambda: network(device), max_grad_norm=0.1)
    fused.opt.backward(loss_of(fused.model))
    grads = [param.grad.clone() for param in fused.model.parameters()]
    fused.opt.step()
    same([param.grad for param in fused.model.parameters()], grads)


@pytest.mark.parametrize("max_norm", [None, 1.0])
@pytest.mark.parametrize(
    ("dtype", "storage"),
    [(torch.float32, None), (torch.float16, True)],
)
@pytest.mark.parametrize("name", ["adamw", "momentum", "sgd"])
def test_a_step_waits_for_nothing(name: str, dtype: torch.dtype, storage: Any, max_norm: float | None) -> None:
    model = network(dtype=dtype)
    way = Way(model, wrapped(COVERED[name](model.parameters()), True, master_weights=storage, max_grad_norm=max_norm))
    train(way, range(2), overflows={})
    for step in range(4):
        way.opt.zero_grad()
        way.opt.backward(loss_of(model, step))
        if step % 2:
            spoil(model, math.nan)
        with NoSync():
            way.opt.step()
            _ = way.opt.last_step
    assert way.opt.last_step.skipped_in_a_row == 1


def test_without_fused_step_no_operator_of_ours_runs_on_a_cpu() -> None:
    for choice in (None, False):
        model = network()
        way = Way(model, wrapped(COVERED["adamw"](model.parameters()), choice))
        assert operators(lambda way=way: train(way, range(2), overflows={})) == []


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["adamw", "momentum", "nesterov"])
def test_groups_have_their_own_settings(name: str, device: str) -> None:
    options = [{"weight_decay": 0.0}, {"lr": 1e-3}, {"maximize": True, "lr": 1e-4}]

    def make(params: Any) -> torch.optim.Optimizer:
        own = list(params)
        parts = [own[:1], own[1:3], own[3:]]
        return COVERED[name]([{"params": part, **more} for part, more in zip(parts, options, strict=True)])

    fused, _, plain = ways(make, lambda: network(device), max_grad_norm=1.0)
    close(*(train(way, range(STEPS)) for way in (fused, plain)))
    fused.opt.zero_grad()
    fused.opt.backward(loss_of(fused.model))
    assert operators(fused.opt.step) == ["grad_stats", STEP_OPERATORS[name]]
