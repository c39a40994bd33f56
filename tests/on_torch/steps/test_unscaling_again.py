"""Losses that are scaled after `unscale_` in the same window: their gradients are unscaled as they arrive."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch

from polyamp import LossScale
from polyamp.backends.torch import GradScaler, LossScaledOptimizer
from support.harness_torch import contents, skipping_on_device

DTYPES = [torch.float32, torch.float16]  # without masters, and with them


def one_weight(dtype: torch.dtype = torch.float32) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.tensor([1.0, -2.0, 0.5], dtype=dtype))


def wrap(*params: torch.Tensor, lr: float = 1.0, init: float = 8.0, **options: Any) -> LossScaledOptimizer:
    return LossScaledOptimizer(torch.optim.SGD(params, lr=lr, fused=True), LossScale(init=init), **options)


@pytest.mark.parametrize(("fused_step", "on_device"), [(False, False), (False, True), (True, False)])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("bad", "ids"), [*itertools.product([0, 1, 2], [(None, None, None), (None, "b", "c")])])
def test_an_overflow_in_any_part_skips_and_only_its_loss_scale_backs_off(
    bad: int, ids: tuple[Any, ...], dtype: torch.dtype, on_device: bool, fused_step: bool
) -> None:
    weight = one_weight(dtype)
    opt = skipping_on_device(wrap(weight, fused_step=fused_step), on_device)
    opt.backward(weight.sum())
    opt.step()  # so that kernels may skip
    opt.zero_grad()
    before, values = contents(opt), weight.detach().clone()
    for place, loss_id in enumerate(ids):
        opt.backward(weight.sum(), loss_id)
        if place == bad:
            weight.grad[1] = math.inf
        opt.unscale_()
    opt.step()
    assert not opt.last_step.applied
    assert contents(opt) == before
    assert torch.equal(weight, values)
    assert {loss_id: float(opt.scalers[loss_id].state.scale) for loss_id in ids} == {
        loss_id: 4.0 if loss_id == ids[bad] else 8.0 for loss_id in ids
    }


def test_gradients_declared_unscaled_do_not_make_later_losses_unscaled() -> None:
    weight = one_weight()
    opt = wrap(weight)
    weight.grad = torch.ones(3)
    opt.unscale_(scaled=False)
    opt.backward(2 * weight.sum())
    opt.unscale_()
    assert weight.grad.tolist() == [3.0] * 3


@pytest.mark.parametrize("sparse_first", [True, False])
def test_sparse_and_dense_gradients_add_up(sparse_first: bool) -> None:
    table = torch.nn.Embedding(4, 2, sparse=True)
    opt = LossScaledOptimizer(torch.optim.SGD(table.parameters(), lr=1.0), LossScale(init=8.0))
    losses = [lambda: table(torch.tensor([1])).sum(), lambda: table.weight.sum()]
    for loss in losses if sparse_first else losses[::-1]:
        opt.backward(loss())
        opt.unscale_()
    assert table.weight.grad.to_dense().tolist() == [[1.0, 1.0], [2.0, 2.0], [1.0, 1.0], [1.0, 1.0]]


def test_a_scaler_in_front_takes_losses_after_unscaling() -> None:
    weight = one_weight()
    opt = wrap(weight)
    scaler = GradScaler(optimizers=opt)
    for _ in range(3):
        scaler.scale(weight.sum()).backward()
        scaler.unscale_(opt)
    assert weight.grad.tolist() == [3.0] * 3


def test_zero_gradients_that_were_not_cleared_stay() -> None:
    weight = one_weight(torch.float16)
    opt = wrap(weight)
    opt.backward(0 * weight.sum())
    opt.unscale_()
    opt.param_groups[0]["params"][0].grad.fill_(5.0)
    opt.backward(2 * weight.sum())
    opt.unscale_()
    assert opt.param_groups[0]["params"][0].grad.tolist() == [7.0] * 3
