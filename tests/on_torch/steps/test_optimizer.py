"""The wrapped optimizer: what a step does, what a skipped one leaves, and the order of things."""

import copy
import functools
import math
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import LinearLR

import polyamp
from polyamp import LossScale
from polyamp.backends.torch import LossScaledOptimizer
from polyamp.skips import NONFINITE_LOSS
from support.harness_torch import FUSED, OPTIMIZERS, ThirdParty, contents, linear, loss_of, skipping_on_device


def step(model: torch.nn.Module, opt: LossScaledOptimizer, *, overflow: bool = False) -> None:
    opt.zero_grad()
    opt.backward(loss_of(model))
    if overflow:
        next(iter(model.parameters())).grad.view(-1)[0] = math.inf
    opt.step()


@pytest.mark.parametrize(
    ("name", "on_device", "steps_before"),
    [*((name, None, 2 * (place % 2)) for place, name in enumerate(OPTIMIZERS)), *((name, True, 2) for name in FUSED)],
)
def test_a_skipped_step_changes_nothing(name: str, on_device: bool | None, steps_before: int) -> None:
    model = linear()
    opt = skipping_on_device(polyamp.wrap_optimizer(OPTIMIZERS[name](model.parameters()), "mixed_float16"), on_device)
    for _ in range(steps_before):
        step(model, opt)
    before = contents(opt)
    step(model, opt, overflow=True)
    assert contents(opt) == before
    assert not opt.last_step
    assert (opt.last_step.skipped_in_a_row, opt.loss_scale) == (1, 32768.0)
    assert opt.last_step.reason.startswith("gradients were not finite: weight (1 inf of 3)")


@pytest.mark.parametrize("on_device", [False, True])
def test_max_skips_and_on_min_are_reported(on_device: bool) -> None:
    model = linear()
    config = LossScale(init=4.0, min=2.0, on_min="warn", max_skips=3)
    opt = skipping_on_device(LossScaledOptimizer(OPTIMIZERS["sgd_fused"](model.parameters()), config), on_device)
    step(model, opt)
    overflow = functools.partial(step, model, opt, overflow=True)
    overflow()  # brings the scale to its minimum; only the next one finds it there
    if on_device:  # what is known on the device alone is said at the next step
        overflow()
    with pytest.warns(polyamp.PolyampWarning, match="minimum"):
        overflow()
    with pytest.raises(polyamp.errors.LossScaleError, match="3 steps in a row"):
        overflow()
    assert opt.last_step.skipped_in_a_row == 3


@pytest.mark.parametrize("nonfinite_loss", ["skip", "raise"])
def test_a_loss_on_the_device_that_was_not_finite_is_reported_at_the_next_step(nonfinite_loss: Any) -> None:
    model = linear()
    opt = skipping_on_device(
        polyamp.wrap_optimizer(
            OPTIMIZERS["adam_fused"](model.parameters()),
            "mixed_float16",
            loss_scale=LossScale(nonfinite_loss=nonfinite_loss),
        )
    )
    step(model, opt)
    step(model, opt)
    before = contents(opt)
    opt.zero_grad()
    opt.backward(loss_of(model))
    opt.scaler.loss_was_finite = torch.tensor(False)  # as on a device
    model.weight.grad.fill_(math.nan)
    opt.step()
    assert not opt.last_step
    assert opt.last_step.reason.startswith(NONFINITE_LOSS)
    assert contents(opt) == before
    said = {"skip": pytest.warns(polyamp.PolyampWarning, match="float16 may have overflowed")}
    with said.get(nonfinite_loss, pytest.raises(polyamp.errors.NonFiniteLossError, match="earlier step")):
        step(model, opt)
    assert (contents(opt) == before) == (nonfinite_loss == "raise")
    step(model, opt)
    assert opt.last_step


@pytest.mark.parametrize("policy", ["float32", "mixed_float16"])
def test_a_step_without_a_backward_is_refused(policy: str) -> None:
    model = linear()
    opt = polyamp.wrap_optimizer(OPTIMIZERS["adam"](model.parameters()), policy)
    before = contents(opt)
    with pytest.raises(polyamp.errors.UsageError, match="without a backward"):
        opt.step()
    with pytest.raises(polyamp.errors.UsageError, match="without a backward"):
        opt.unscale_()
    assert contents(opt) == before
    assert opt.last_step.scale == opt.scaler.settings.init


@pytest.mark.parametrize("fused", [None, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_what_the_last_step_used_is_not_used_again(dtype: torch.dtype, fused: bool | None) -> None:
    model = linear().to(dtype)
    opt = polyamp.wrap_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), "mixed_float16", fused_step=fused)
    loss = sum(param.sum().float() for param in model.parameters())
    opt.backward(loss, retain_graph=True)
    opt.step()
    before = contents(opt)
    for again in (opt.step, lambda: opt.backward(loss)):
        with pytest.raises(polyamp.errors.UsageError, match="gradients of the last step"):
            again()
    assert contents(opt) == before


@pytest.mark.parametrize(("shape", "dtype"), [((1,), torch.float16), ((), torch.bfloat16)])
def test_losses_are_scaled_in_float32(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """GradScaler's product overflows for a float16 loss of shape (1,)."""
    opt = polyamp.wrap_optimizer(torch.optim.SGD([torch.ones(2)], lr=0.1), "mixed_float16")
    scaled = opt.scale(torch.full(shape, 2.0, dtype=dtype))
    assert scaled.dtype == torch.float32
    assert torch.equal(scaled, torch.full(shape, 131072.0))


def test_losses_in_containers_are_scaled_alike() -> None:
    opt = LossScaledOptimizer(torch.optim.SGD([torch.ones(2)], lr=0.1), LossScale(init=2.0))
    scaled = opt.scale({"a": torch.tensor(1.0), "b": [torch.tensor(2.0), (torch.tensor(3.0, dtype=torch.float64),)]})
    assert scaled == {"a": torch.tensor(2.0), "b": [torch.tensor(4.0), (torch.tensor(6.0, dtype=torch.float64),)]}


@pytest.mark.parametrize("policy", ["float32", "mixed_float16"])
def test_a_loss_that_is_no_floating_tensor_is_refused(policy: str) -> None:
    opt = polyamp.wrap_optimizer(torch.optim.SGD([torch.ones(2)], lr=0.1), policy)
    for loss in (1.0, None, torch.tensor(3), torch.tensor(1j), [], {"loss": 2.0}):
        with pytest.raises(polyamp.errors.InvalidTypeError, match="a floating-point tensor"):
            opt.scale(loss)


def test_groups_state_hooks_and_other_attributes_are_the_inner_ones() -> None:
    model = linear()
    opt = polyamp.wrap_optimizer(ThirdParty([model.weight]), "mixed_float16")
    opt.inner.mode = "train"
    opt.add_param_group({"params": [model.bias], "lr": 0.01})
    calls: list[str] = []
    handle = opt.register_step_post_hook(lambda *_: calls.append("step"))
    step(model, opt)
    step(model, opt, overflow=True)
    handle.remove()
    step(model, opt)
    assert isinstance(opt, torch.optim.Optimizer)
    assert "ThirdParty" in repr(opt)
    assert "LossScale()" in repr(opt)
    assert opt.mode == "train"
    assert [group["lr"] for group in opt.param_groups] == [0.1, 0.01]
    assert opt.state is opt.inner.state
    assert opt.defaults is opt.inner.defaults
    assert calls == ["step"]
    with pytest.raises(AttributeError, match="nothing_like_this"):
        _ = opt.nothing_like_this


@pytest.mark.parametrize(
    ("name", "copied"), [("adamw", copy.deepcopy), ("adamw_fused", lambda pair: pickle.loads(pickle.dumps(pair)))]
)
def test_copies_train_on_alike(name: str, copied: Callable[[Any], Any]) -> None:
    model = linear()
    opt = polyamp.wrap_optimizer(OPTIMIZERS[name](model.parameters()), "mixed_float16", max_grad_norm=1.0)
    LinearLR(opt)
    step(model, opt, overflow=True)
    step(model, opt)
    other_model, other = copied((model, opt))
    step(model, opt)
    step(other_model, other)
    assert contents(other) == contents(opt)
    assert other.loss_scale == opt.loss_scale == 32768.0
