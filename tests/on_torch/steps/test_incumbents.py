"""What goes wrong with torch's own scaler, with Apex and in trainers built on them, and does not go wrong here.

Each test names the behaviour; its docstring names where it was reported, if it was.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import ExponentialLR
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import polyamp
from polyamp import LossScale
from polyamp.backends.torch import AppliedSteps, GradScaler, LossScaledOptimizer
from support.harness_torch import contents, linear, loss_of, skipping_on_device

Optimizer = torch.optim.Optimizer


class Loop:
    """One model trained in one of polyamp's two ways, by one interface."""

    def __init__(self, model: nn.Module, plain: Optimizer, scaler: GradScaler | None, **options: Any) -> None:
        self.model, self.plain, self.scaler = model, plain, scaler
        self.opt = None if scaler else polyamp.wrap_optimizer(plain, "mixed_float16", **options)

    def step(self, bad: float | None = None) -> Any:
        self.plain.zero_grad()
        if self.scaler is None:
            self.opt.backward(loss_of(self.model))
        else:
            self.scaler.scale(loss_of(self.model)).backward()
        if bad is not None:
            self.model.weight.grad[0, 1] = bad
        if self.scaler is None:
            self.opt.step()
            return self.opt.last_step
        self.scaler.step(self.plain)
        self.scaler.update()
        return self.scaler.last_step


def sgd(params: Any) -> Optimizer:
    return torch.optim.SGD(params, lr=0.1)


def momentum_fused(params: Any) -> Optimizer:
    return torch.optim.SGD(params, lr=0.1, momentum=0.9, fused=True)


def adamw(params: Any) -> Optimizer:
    return torch.optim.AdamW(params, lr=0.1)


def adamw_fused(params: Any) -> Optimizer:
    return torch.optim.AdamW(params, lr=0.1, fused=True)


def loops(make: Callable[[Any], Optimizer], ways: str) -> Loop:
    model = linear()
    plain = make(model.parameters())
    if ways == "drop-in":
        return Loop(model, plain, GradScaler("cpu"))
    loop = Loop(model, plain, None)
    skipping_on_device(loop.opt, ways == "on-device")
    return loop


WAYS = ["wrapped", "drop-in"]
EVERY = [
    *((make, way) for make in (sgd, adamw) for way in WAYS),
    *((make, way) for make in (momentum_fused, adamw_fused) for way in (*WAYS, "on-device")),
]


@pytest.mark.parametrize(("make", "way"), EVERY)
def test_a_skip_is_seen_and_schedules_do_not_count_it(make: Any, way: str) -> None:
    """pytorch #67590, #152279; accelerate #4242: not seen where a fused optimizer skips; Lightning #5558."""
    loop = loops(make, way)
    schedule = AppliedSteps(ExponentialLR(loop.plain, 0.5))
    applied = []
    for bad in (None, math.inf, None, math.nan, None):
        result = loop.step(bad)
        schedule.step(result)
        applied.append(result.applied)
    assert applied == [True, False, True, False, True]
    assert schedule.get_last_lr() == [0.1 * 0.5**3]


@pytest.mark.parametrize("way", [*WAYS, "operators"])
@pytest.mark.parametrize("scheduler_first", [True, False])
def test_a_first_step_that_is_skipped_brings_no_scheduler_warning(way: str, scheduler_first: bool) -> None:
    """transformers #11144: "lr_scheduler.step() before optimizer.step()", which nobody had done."""
    model = linear()
    plain = sgd(model.parameters())
    if scheduler_first:
        schedule = ExponentialLR(plain, 0.5)
    scaler, options = (GradScaler("cpu"), {}) if way == "drop-in" else (None, {"fused_step": way == "operators"})
    loop = Loop(model, plain, scaler, **options)
    if not scheduler_first:
        schedule = ExponentialLR(loop.opt or plain, 0.5)
    loop.step(math.inf)
    schedule.step()
    loop.step()
    schedule.step()
    assert plain.param_groups[0]["lr"] == 0.025


def test_a_scaler_that_has_no_masters_says_which_parameter_needs_one() -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1).half())
    plain, scaler = sgd(model.parameters()), GradScaler("cpu")
    scaler.scale(model[1](model[0](torch.ones(2, 3)).half()).sum()).backward()
    before = copy.deepcopy(model)
    with pytest.raises(ValueError, match=r"1\.weight") as raised:
        scaler.step(plain)
    assert isinstance(raised.value, polyamp.errors.InvalidValueError)
    assert "wrap_optimizer" in str(raised.value)
    assert all(map(torch.equal, model.parameters(), before.parameters()))


def test_an_average_of_masters_moves_where_one_of_16_bit_weights_does_not() -> None:
    """sd_dreambooth_extension #1415."""
    weight = nn.Parameter(torch.ones(1, dtype=torch.bfloat16))
    opt = polyamp.wrap_optimizer(torch.optim.SGD([weight], lr=1e-3), "bfloat16")
    (master,) = opt.param_groups[0]["params"]
    averages = [
        AveragedModel(nn.ParameterList([param]), multi_avg_fn=get_ema_multi_avg_fn(0.999)) for param in (weight, master)
    ]
    for _ in range(20):
        opt.zero_grad()
        opt.backward(weight.float().sum())
        opt.step()
        for average, param in zip(averages, (weight, master), strict=True):
            average.update_parameters(nn.ParameterList([param]))
    low, full = (next(average.module.parameters()).item() for average in averages)
    assert low == 1.0
    assert 0.998 < full < 0.999


@pytest.mark.parametrize("make", [sgd, adamw, adamw_fused])
@pytest.mark.parametrize("unscaled_first", [True, False])
def test_clipping_is_of_true_gradients_in_any_order(make: Any, unscaled_first: bool) -> None:
    """Lightning #9694, transformers #24840: scaled gradients were clipped; Lightning #15501: fused ones not at all."""
    plain_model, model = linear(), linear()
    plain, opt = make(plain_model.parameters()), polyamp.wrap_optimizer(make(model.parameters()), "mixed_float16")
    loss_of(plain_model).backward()
    norm = nn.utils.clip_grad_norm_(plain_model.parameters(), 0.1)
    plain.step()
    opt.backward(loss_of(model))
    if unscaled_first:
        opt.unscale_()
    assert torch.equal(opt.clip_grad_norm_(0.1), norm)
    opt.step()
    assert contents(opt) == contents(plain)


@pytest.mark.parametrize("way", WAYS)
def test_unscaling_a_second_time_is_refused_and_divides_nothing(way: str) -> None:
    """accelerate #641, Swin-Transformer #311."""
    loop = loops(sgd, way)
    owner = loop.opt or loop.scaler
    owner.scale(loss_of(loop.model)).backward()
    arguments = () if loop.opt else (loop.plain,)
    owner.unscale_(*arguments)
    once = loop.model.weight.grad.clone()
    with pytest.raises(RuntimeError if loop.scaler else polyamp.errors.UsageError, match="unscale"):
        owner.unscale_(*arguments)
    assert torch.equal(loop.model.weight.grad, once)


@pytest.mark.parametrize("make", [sgd, adamw_fused])
def test_an_optimizer_whose_part_had_no_gradient_is_a_step_that_does_nothing(make: Any) -> None:
    """nerfstudio #1919: "No inf checks were recorded for this optimizer" for a frozen part."""
    model, resting = linear(), linear()
    plain, idle, scaler = make(model.parameters()), make(resting.parameters()), GradScaler("cpu")
    scaler.scale(loss_of(model)).backward()
    scaler.step(plain)
    scaler.step(idle)
    scaler.update()
    assert scaler.last_step
    assert scaler.get_scale() == 65536.0
    assert all(map(torch.equal, resting.parameters(), linear().parameters()))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shape", [(), (1,), (2, 2)])
def test_a_small_half_loss_is_scaled_in_float32(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """A float16 loss of shape (1,) times torch's first scale is inf."""
    scaled = GradScaler("cpu").scale([torch.full(shape, 2.0, dtype=dtype)])
    assert torch.equal(scaled[0], torch.full(shape, 131072.0))


@pytest.mark.parametrize("by_name", [True, False])
def test_a_closure_is_refused_however_it_is_given(by_name: bool) -> None:
    """torch's scaler refuses one by name and takes one by position, whose gradients it then never unscales."""
    loop = loops(sgd, "drop-in")
    loop.scaler.scale(loss_of(loop.model)).backward()
    before = contents(loop.plain)
    arguments: tuple[tuple[Any, ...], dict[str, Any]] = ((), {"closure": float}) if by_name else ((float,), {})
    with pytest.raises(RuntimeError, match=r"[Cc]losure"):
        loop.scaler.step(loop.plain, *arguments[0], **arguments[1])
    assert contents(loop.plain) == before


def test_moments_keep_their_dtype_and_the_scale_its_value_when_loaded() -> None:
    """accelerate #4289, ultralytics #22189: torch loads float32 moments in the parameters' bfloat16."""

    def fresh() -> tuple[nn.Parameter, LossScaledOptimizer]:
        weight = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
        return weight, polyamp.wrap_optimizer(torch.optim.AdamW([weight], lr=1e-3), loss_scale=LossScale(interval=1))

    (weight, opt), (_, other) = fresh(), fresh()
    opt.backward((weight.float() * torch.tensor([1.0, 1 / 3, 1e-4])).sum())
    opt.step()
    other.load_state_dict(opt.state_dict())
    for saved, loaded in zip(opt.state.values(), other.state.values(), strict=True):
        torch.testing.assert_close(loaded, saved, rtol=0, atol=0)
    assert other.loss_scale == opt.loss_scale == 2.0**17


class Tagged(nn.Parameter):
    """As libraries of quantised or sharded layers have."""


@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_overflows_in_several_kinds_of_gradients_count_as_one(bad: float) -> None:
    """torch adds the flags of devices up, and its fused kernels skip where the sum is exactly 1."""
    weights = [Tagged(torch.ones(2, dtype=dtype)) for dtype in (torch.float32, torch.float64)]
    opt = skipping_on_device(polyamp.wrap_optimizer(adamw_fused(weights), "mixed_float16"))
    for grad in (1.0, bad):
        for weight in weights:
            weight.grad = torch.full_like(weight, grad)
        before = contents(opt)
        opt.step(scaled=True)
    assert contents(opt) == before
    assert not opt.last_step


@pytest.mark.parametrize("way", ["drop-in", "wrapped", "on-device"])
def test_momentum_is_not_made_of_memory_that_a_skipped_first_step_left(way: str) -> None:
    """torch's fused SGD allocates momentum, skips, and takes what lies there for momentum ever after."""
    plain_model = linear()
    plain = momentum_fused(plain_model.parameters())
    loop = loops(momentum_fused, way)
    for _ in range(30):
        torch.full((1, 3), 1e6)  # so that what is allocated next holds something
    loop.step(math.inf)
    loop.step()
    loss_of(plain_model).backward()
    plain.step()
    assert contents(loop.plain) == contents(plain)


@pytest.mark.parametrize("way", WAYS)
def test_large_gradients_whose_sum_is_infinite_are_no_overflow(way: str) -> None:
    """Apex without its extension tested the sum of a gradient."""
    loop = loops(sgd, way)
    loop.plain.param_groups[0]["lr"] = 1e-38
    owner = loop.opt or loop.scaler
    owner.scale(torch.ones(()))
    for param in loop.model.parameters():
        param.grad = torch.full_like(param, torch.finfo(torch.float32).max)
    loop.opt.step() if loop.opt else loop.scaler.step(loop.plain)
    assert owner.last_step


@pytest.mark.parametrize("way", ["drop-in", "wrapped", "on-device"])
def test_a_skip_names_the_parameters_that_overflowed(way: str) -> None:
    """apex #834, and others whose only message was that the scale fell."""
    loop = loops(adamw_fused, way)
    loop.step()
    loop.step()
    result = loop.step(math.nan)
    assert "weight (1 NaN of 3)" in result.reason
    assert "bias" not in result.reason
    found = loop.opt.overflowed() if loop.opt else loop.scaler.overflowed(loop.plain)
    assert [(one.name, one.nan, one.inf) for one in found] == [("weight", 1, 0)]


@pytest.mark.parametrize("scale", [0.0, -1.0, math.inf, math.nan])
def test_a_scale_that_ruins_the_next_step_cannot_be_set_or_loaded(scale: float) -> None:
    scaler = GradScaler("cpu")
    scaler.scale(torch.ones(()))
    with pytest.raises(polyamp.PolyampError):
        scaler.update(scale)
    with pytest.raises(polyamp.PolyampError):
        scaler.load_state_dict({**scaler.state_dict(), "scale": scale})
    assert scaler.get_scale() == 65536.0


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # Dynamo's own, about every loss
@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # and about the calls of torch.optim
@pytest.mark.parametrize("way", WAYS)
def test_a_compiled_training_step_is_the_eager_one(way: str) -> None:
    """pytorch #138412."""
    eager, compiled = loops(adamw, way), loops(adamw, way)
    step = torch.compile(compiled.step, backend="eager")
    for bad in (None, None, math.inf, None):
        eager.step(bad)
        step(bad)
    assert contents(compiled.plain) == contents(eager.plain)


def test_gradients_are_divided_by_the_scale_that_multiplied_them() -> None:
    """DeepSpeed #8588: the scale moved between the backward pass and the division."""
    models = [linear(), linear()]
    plain = [torch.optim.SGD(model.parameters(), lr=1.0) for model in models]
    expected = linear()
    loss_of(expected).backward()
    opts = polyamp.wrap_optimizer(plain, "mixed_float16", loss_scale=LossScale(init=1024.0))
    opts[0].backward(sum(map(loss_of, models)))
    models[0].weight.grad[:] = math.inf
    opts[0].step()
    assert opts[1].loss_scale == 512.0
    opts[1].unscale_()
    torch.testing.assert_close(models[1].weight.grad, expected.weight.grad)
