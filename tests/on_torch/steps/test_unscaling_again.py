"""Losses that are scaled after `unscale_` in the same window: unscaled gradients are set aside, and all are added."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import polyamp
from polyamp import LossScale
from polyamp.backends.torch import GradScaler, LossScaledOptimizer
from support.harness_torch import contents, skipping_on_device

DTYPES = [torch.float32, torch.float16]  # without masters, and with them
TOLERANCE = {torch.float32: 1e-6, torch.float16: 2.0**-9}  # 16-bit gradients are added up, and clipped, in 16 bits
Act = tuple[str, Any]


def one_weight(dtype: torch.dtype = torch.float32) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.tensor([1.0, -2.0, 0.5], dtype=dtype))


def wrap(*params: torch.Tensor, lr: float = 1.0, init: float = 8.0, **options: Any) -> LossScaledOptimizer:
    return LossScaledOptimizer(torch.optim.SGD(params, lr=lr, fused=True), LossScale(init=init), **options)


ACTS = st.one_of(
    st.tuples(st.just("backward"), st.tuples(st.sampled_from([None, "b", "c"]), st.integers(-8, 8))),
    st.tuples(st.just("unscale"), st.none()),
    st.tuples(st.just("clip"), st.sampled_from([1.0, 1e9])),
    st.tuples(st.just("set scale"), st.sampled_from([2.0, 64.0])),
    st.tuples(st.just("step"), st.booleans()),
)


class Reference:
    """The same window in float64: unscaled gradients, summed."""

    def __init__(self) -> None:
        self.weight = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)
        self.grad = torch.zeros(3, dtype=torch.float64)

    def backward(self, factor: int) -> None:
        self.grad += factor * torch.tensor([1.0, 2.0, -1.0], dtype=torch.float64)

    def clip(self, limit: float) -> None:
        self.grad *= min(1.0, limit / (self.grad.norm().item() + 1e-6))

    def step(self) -> None:
        self.weight -= 0.25 * self.grad


@pytest.mark.parametrize("fused_step", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@given(acts=st.lists(ACTS, max_size=12))
def test_any_order_of_losses_and_unscaling_steps_by_the_sum(
    dtype: torch.dtype, fused_step: bool, acts: list[Act]
) -> None:
    weight, reference = one_weight(dtype), Reference()
    opt = wrap(weight, lr=0.25, fused_step=fused_step)
    direction = torch.tensor([1.0, 2.0, -1.0], dtype=dtype)
    unscaled = has_gradient = False
    for act, value in [*acts, ("step", True)]:
        if act == "backward":
            loss_id, factor = value
            opt.backward((weight * direction * factor).sum(), loss_id)
            reference.backward(factor)
            unscaled, has_gradient = False, True
        elif act == "set scale":
            opt.loss_scale = value
        elif not has_gradient or (act == "unscale" and unscaled):
            with pytest.raises(polyamp.errors.UsageError):
                opt.unscale_()
        elif act == "step":
            opt.step()
            assert opt.last_step.applied
            reference.step()
            opt.zero_grad()
            unscaled = has_gradient = False
            reference.grad.zero_()
        else:
            opt.unscale_() if act == "unscale" else opt.clip_grad_norm_(value)
            if act == "clip":
                reference.clip(value)
            unscaled = True
            found = opt.param_groups[0]["params"][0].grad  # after some roundings in float32
            torch.testing.assert_close(found.double(), reference.grad, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    tolerance = 1e-5 if dtype == torch.float32 else 0.02
    torch.testing.assert_close(weight.double(), reference.weight, rtol=tolerance, atol=tolerance)


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


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_models_own_zero_grad_after_unscaling_abandons_the_window(dtype: torch.dtype, set_to_none: bool) -> None:
    model = torch.nn.Linear(3, 1, bias=False, dtype=dtype)
    opt = wrap(*model.parameters())
    opt.backward(7 * model.weight.sum())
    opt.unscale_()
    model.zero_grad(set_to_none)
    opt.backward(2 * model.weight.sum())
    opt.unscale_()
    assert opt.param_groups[0]["params"][0].grad.tolist() == [[2.0] * 3]


def test_an_optimizer_that_shares_the_scales_keeps_its_unscaled_gradients() -> None:
    first, second = one_weight(), one_weight()
    one = wrap(first)
    two = wrap(second)
    two.share_scales(one)
    one.backward(first.sum() + second.sum())
    one.unscale_()
    two.unscale_()
    one.backward(2 * first.sum() + 4 * second.sum())
    one.unscale_()
    two.step()
    assert first.grad.tolist() == [3.0] * 3
    assert second.tolist() == [1.0 - 5, -2.0 - 5, 0.5 - 5]


def test_gradients_declared_unscaled_do_not_make_later_losses_unscaled() -> None:
    weight = one_weight()
    opt = wrap(weight)
    weight.grad = torch.ones(3)
    opt.unscale_(scaled=False)
    opt.backward(2 * weight.sum())
    opt.unscale_()
    assert weight.grad.tolist() == [3.0] * 3


def test_without_a_loss_scale_losses_with_ids_add_up() -> None:
    weight = one_weight()
    opt = LossScaledOptimizer(torch.optim.SGD([weight], lr=1.0), LossScale.none())
    for loss_id, unscales in ((None, False), ("b", True), (None, False), ("c", True)):
        opt.backward(weight.sum(), loss_id)
        if unscales:
            opt.unscale_()
    assert weight.grad.tolist() == [4.0] * 3
    opt.step()
    assert weight.tolist() == [-3.0, -6.0, -3.5]


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


def test_gradients_that_a_step_left_are_not_added_when_others_scale_losses() -> None:
    first, second = one_weight(), one_weight()
    one = wrap(first)
    two = wrap(second)
    two.share_scales(one)
    two.backward(second.sum())
    two.step()
    for loss_id in (None, "b"):  # with a second loss scale, gradients would be unscaled and set aside
        one.backward(first.sum(), loss_id)
    one.step()
    second.grad = None  # as by the model's own zero_grad
    two.backward(2 * second.sum(), "c")
    two.unscale_()
    assert second.grad.tolist() == [2.0] * 3
