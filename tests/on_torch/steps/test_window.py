"""Several losses on one optimizer, several optimizers on one loss, and both: each gradient by its loss's scale."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import polyamp
from polyamp import LossScale
from polyamp.backends.torch import LossScaledOptimizer
from polyamp.errors import InvalidTypeError, InvalidValueError
from support.harness_torch import contents, skipping_on_device

Weights = dict[str, torch.Tensor]


def weights() -> Weights:
    return {name: torch.full((3,), value, requires_grad=True) for name, value in (("a", 0.5), ("b", -0.25))}


def first_loss(params: Weights) -> torch.Tensor:
    return (params["a"] * params["b"]).square().sum()


def second_loss(params: Weights) -> torch.Tensor:
    return (params["a"] - 3 * params["b"]).square().mean()


def spoil(param: torch.Tensor) -> None:
    assert param.grad is not None
    param.grad[1] = math.inf


def sgd(params: list[torch.Tensor], **options: Any) -> Any:
    return polyamp.wrap_optimizer(torch.optim.SGD(params, lr=0.125, momentum=0.5), "mixed_float16", **options)


def scales(opt: LossScaledOptimizer) -> dict[Any, float]:
    return {loss_id: float(scaler.state.scale) for loss_id, scaler in {None: opt.scaler, **opt.scalers.others}.items()}


@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize("overflow", [None, "first", "second"])
def test_losses_with_scales_of_their_own_add_up_and_only_the_one_that_overflowed_backs_off(
    overflow: str | None, on_device: bool
) -> None:
    plain, params = weights(), weights()
    plain_opt = torch.optim.SGD(plain.values(), lr=0.125, momentum=0.5)
    opt = skipping_on_device(
        polyamp.wrap_optimizer(
            torch.optim.SGD(params.values(), lr=0.125, momentum=0.5, fused=True),
            "mixed_float16",
        ),
        on_device,
    )
    opt.scalers["second"].resume(opt.scaler.state._replace(scale=8.0))
    for bad in (None, overflow, None):
        opt.zero_grad()
        opt.backward(first_loss(params))
        if bad == "first":
            spoil(params["a"])
        opt.backward(second_loss(params), loss_id="second")
        if bad == "second":
            spoil(params["b"])
        opt.step()
        if bad is None:
            plain_opt.zero_grad()
            (first_loss(plain) + second_loss(plain)).backward()
            plain_opt.step()
    for name, param in params.items():
        torch.testing.assert_close(param, plain[name], rtol=1e-6, atol=1e-7)
    assert scales(opt) == {
        None: 65536.0 / (2 if overflow == "first" else 1),
        "second": 8.0 / (2 if overflow == "second" else 1),
    }


@settings(max_examples=30, deadline=None)
@given(
    trace=st.lists(st.tuples(st.sampled_from(["first", "second", "third"]), st.booleans()), min_size=1, max_size=12),
    step_every=st.integers(1, 3),
)
def test_every_loss_id_goes_through_the_scales_of_an_optimizer_of_its_own(
    trace: list[tuple[str, bool]], step_every: int
) -> None:
    config = LossScale(init=16.0, interval=2)
    opt = LossScaledOptimizer(torch.optim.SGD([torch.zeros(2, requires_grad=True)], lr=0.0), config)
    (weight,) = opt.param_groups[0]["params"]
    states = {name: config.initial_state() for name in ("first", "second", "third")}
    for start in range(0, len(trace), step_every):
        opt.zero_grad()
        seen: dict[str, bool] = {}
        for name, finite in trace[start : start + step_every]:
            opt.backward(weight.sum(), loss_id=name)
            if not finite:
                weight.grad.fill_(math.nan)
            is_first = all(seen.values())  # what is not finite already hides a later overflow
            seen[name] = seen.get(name, True) and (finite or not is_first)
        opt.step()
        assert opt.last_step.applied == all(seen.values())
        states.update((name, polyamp.advance(config, states[name], finite)) for name, finite in seen.items())
    for name in {name for name, _ in trace}:
        assert opt.scalers[name].state == states[name]


def test_optimizers_wrapped_together_share_the_scale_of_their_loss() -> None:
    params = weights()
    first, second = polyamp.wrap_optimizer([torch.optim.SGD([params[name]], lr=0.1) for name in "ab"], "mixed_float16")
    second.backward(first_loss(params))
    spoil(params["b"])
    before = contents(second)
    first.step()
    assert (bool(first.last_step), first.loss_scale) == (True, 65536.0)
    second.step()
    assert (bool(second.last_step), second.loss_scale, first.loss_scale) == (False, 32768.0, 32768.0)
    assert contents(second) == before
    assert first.scaler.state.skipped == 1


@pytest.mark.parametrize("on_device", [False, True])
def test_an_overflow_that_two_optimizers_see_is_one_overflow(on_device: bool) -> None:
    params = weights()
    made = [torch.optim.SGD([params[name]], lr=0.1, fused=True) for name in "ab"]
    opts = skipping_on_device(polyamp.wrap_optimizer(made, "mixed_float16"), on_device)
    for overflow in (False, True, False):
        for opt in opts:
            opt.zero_grad()
        opts[0].backward(first_loss(params))
        if overflow:
            spoil(params["a"])
            spoil(params["b"])
        for opt in opts:
            opt.step()
    assert opts[0].loss_scale == opts[1].loss_scale == 32768.0
    assert int(opts[0].scaler.state.skipped) == 1


def test_an_overflow_of_the_optimizer_that_scaled_nothing_lowers_the_scale_of_the_loss() -> None:
    params = weights()
    opts = [polyamp.wrap_optimizer(torch.optim.SGD([params[name]], lr=0.1), "mixed_float16") for name in "ab"]
    opts[0].backward(first_loss(params))
    spoil(params["b"])
    for opt in opts:
        opt.step()
    assert opts[0].loss_scale == 32768.0
    assert [bool(opt.last_step) for opt in opts] == [True, False]


@pytest.mark.parametrize("unscales", [False, True])
def test_a_backward_onto_the_gradients_of_the_last_step_is_refused(unscales: bool) -> None:
    params = weights()
    opt = sgd([params["a"]])
    for _ in range(1 + unscales):
        opt.backward(first_loss(params))
        if unscales:
            opt.unscale_()
    opt.step()
    with pytest.raises(polyamp.errors.UsageError, match="zero_grad"):
        opt.backward(first_loss(params))
    opt.zero_grad()
    opt.backward(first_loss(params))
    opt.step()
    assert opt.last_step


def test_the_scales_of_all_losses_are_saved_and_copied() -> None:
    params = weights()
    opt = sgd(list(params.values()))
    opt.backward(first_loss(params), loss_id="first")
    spoil(params["a"])
    opt.step()
    copied = copy.deepcopy(opt)
    loaded = sgd(list(weights().values()))
    loaded.load_state_dict(opt.state_dict())
    assert scales(copied) == scales(loaded) == scales(opt) == {None: 65536.0, "first": 32768.0}


@pytest.mark.parametrize("max_norm", [math.nan, "1"])
def test_norms_that_are_none_are_refused(max_norm: Any) -> None:
    params = weights()
    opt = sgd(list(params.values()))
    opt.backward(first_loss(params))
    before = params["a"].grad.clone()
    with pytest.raises((InvalidValueError, InvalidTypeError), match="gradient-norm limit"):
        opt.clip_grad_norm_(max_norm)
    assert torch.equal(params["a"].grad, before)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"named_parameters": [torch.ones(1)]}, "named parameters"),
        ({"named_parameters": [("a", 1, 2)]}, "named parameters"),
        ({"process_group": "world"}, "process group"),
        ({"fused_step": "yes"}, "fused_step"),
        ({"norm_group": lambda param: None}, "clip by a norm of your own"),
    ],
)
def test_arguments_of_the_wrong_type_are_refused(options: dict[str, Any], said: str) -> None:
    plain = torch.optim.SGD([torch.ones(1, requires_grad=True)], lr=0.1)
    with pytest.raises(InvalidTypeError, match=said):
        polyamp.wrap_optimizer(plain, "mixed_float16", **options)
    assert polyamp.wrap_optimizer(plain, "mixed_float16").inner is plain


@pytest.mark.parametrize(
    ("option", "said"),
    [("skip_on_device", "did you mean fused_step"), ("share", r"wrap_optimizer\(\[first, second\], policy\)")],
)
def test_an_option_under_another_name_is_told_what_to_write(option: str, said: str) -> None:
    plain = torch.optim.SGD([torch.ones(1, requires_grad=True)], lr=0.1)
    with pytest.raises(polyamp.errors.UnsupportedError, match=said):
        polyamp.wrap_optimizer(plain, "mixed_float16", **{option: True})
