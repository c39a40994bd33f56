"""`GradScaler` in the place of torch's: in front of plain optimizers, and of wrapped ones, which have master weights.

A docstring of a test names where its fault of another scaler was reported.
"""

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import ExponentialLR

import polyamp
from polyamp import LossScale
from polyamp.backends.torch import GradScaler, LossScaledOptimizer
from polyamp.errors import InvalidTypeError, InvalidValueError, UsageError
from support.harness_torch import contents, linear, loss_of, skipping_on_device

Optimizer = torch.optim.Optimizer


class Loop:
    """One model trained in one of polyamp's two ways, by one interface."""

    def __init__(self, model: nn.Module, plain: Optimizer, way: str) -> None:
        self.model, self.plain, self.opt = model, plain, None
        self.scaler = GradScaler("cpu") if way == "drop-in" else None
        if self.scaler is None:
            self.opt = polyamp.wrap_optimizer(plain, "mixed_float16", fused_step=way == "operators")
            skipping_on_device(self.opt, way == "on-device")

    def step(self, bad: float | None = None) -> None:
        self.plain.zero_grad()
        (self.scaler or self.opt).scale(loss_of(self.model)).backward()
        if bad is not None:
            self.model.weight.grad[0, 1] = bad
        if self.scaler is None:
            self.opt.step()
        else:
            self.scaler.step(self.plain)
            self.scaler.update()


def sgd(params: Any) -> Optimizer:
    return torch.optim.SGD(params, lr=0.1)


def momentum_fused(params: Any) -> Optimizer:
    return torch.optim.SGD(params, lr=0.1, momentum=0.9, fused=True)


def adamw_fused(params: Any) -> Optimizer:
    return torch.optim.AdamW(params, lr=0.1, fused=True)


def loops(make: Callable[[Any], Optimizer], way: str = "drop-in") -> Loop:
    model = linear()
    return Loop(model, make(model.parameters()), way)


@pytest.mark.parametrize("way", ["drop-in", "wrapped", "operators"])
@pytest.mark.parametrize("scheduler_first", [True, False])
def test_a_first_step_that_is_skipped_brings_no_scheduler_warning(way: str, scheduler_first: bool) -> None:
    """transformers #11144: "lr_scheduler.step() before optimizer.step()", which nobody had done."""
    model = linear()
    plain = sgd(model.parameters())
    schedule = ExponentialLR(plain, 0.5) if scheduler_first else None
    loop = Loop(model, plain, way)
    schedule = schedule or ExponentialLR(loop.opt or plain, 0.5)
    for bad in (math.inf, None):
        loop.step(bad)
        schedule.step()
    assert plain.param_groups[0]["lr"] == 0.025


@pytest.mark.parametrize("way", ["drop-in", "wrapped", "on-device"])
def test_momentum_is_not_made_of_memory_that_a_skipped_first_step_left(way: str) -> None:
    """torch's fused SGD allocates momentum, skips, and takes what lies there for momentum ever after."""
    plain_model, loop = linear(), loops(momentum_fused, way)
    plain = momentum_fused(plain_model.parameters())
    for _ in range(30):
        torch.full((1, 3), 1e6)  # so that what is allocated next holds something
    loop.step(math.inf)
    loop.step()
    loss_of(plain_model).backward()
    plain.step()
    assert contents(loop.plain) == contents(plain)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # Dynamo's own, about every loss
@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # and about the calls of torch.optim
@pytest.mark.parametrize("way", ["drop-in", "wrapped"])
def test_a_compiled_training_step_is_the_eager_one(way: str) -> None:
    """pytorch #138412."""
    eager, compiled = loops(adamw_fused, way), loops(adamw_fused, way)
    step = torch.compile(compiled.step, backend="eager")
    for bad in (None, None, math.inf, None):
        eager.step(bad)
        step(bad)
    assert contents(compiled.plain) == contents(eager.plain)


# --- in front of plain optimizers -------------------------------------------------------------------------------------


@pytest.mark.parametrize("change", ["update", "load"])
@pytest.mark.parametrize("bad", [0.0, -1.0, math.inf, math.nan])
def test_its_scale_can_be_set_to_what_the_next_step_can_use(change: str, bad: float) -> None:
    scaler = GradScaler("cpu")

    def set_to(scale: float) -> None:
        if change == "update":
            scaler.update(scale)
        else:
            scaler.load_state_dict({**scaler.state_dict(), "scale": scale})

    set_to(16.0)
    with pytest.raises(polyamp.PolyampError):
        set_to(bad)
    assert scaler.get_scale() == float(scaler.scale(torch.ones(()))) == 16.0
    assert GradScaler("cpu", enabled=False).get_scale() == 1.0


def test_it_has_no_masters_and_says_which_parameter_needs_one() -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1).half())
    plain, scaler = sgd(model.parameters()), GradScaler("cpu")
    scaler.scale(model[1](model[0](torch.ones(2, 3)).half()).sum()).backward()
    before = copy.deepcopy(model)
    with pytest.raises(ValueError, match=r"1\.weight") as raised:
        scaler.step(plain)
    assert isinstance(raised.value, InvalidValueError)
    assert "wrap_optimizer" in str(raised.value)
    assert all(map(torch.equal, model.parameters(), before.parameters()))


def test_unscaling_a_second_time_is_refused_and_divides_nothing() -> None:
    """accelerate #641, Swin-Transformer #311."""
    loop = loops(sgd)
    loop.scaler.scale(loss_of(loop.model)).backward()
    loop.scaler.unscale_(loop.plain)
    once = loop.model.weight.grad.clone()
    with pytest.raises(RuntimeError, match="unscale"):
        loop.scaler.unscale_(loop.plain)
    assert torch.equal(loop.model.weight.grad, once)


@pytest.mark.parametrize("broken", [0, 1, None])
@pytest.mark.parametrize("make", [sgd, adamw_fused])
def test_an_overflow_in_one_of_several_optimizers_lowers_the_scale(make: Any, broken: int | None) -> None:
    """nerfstudio #1919: and one whose part had no gradient makes a step that does nothing."""
    models, resting = [linear(), linear()], linear()
    opts, idle, scaler = [make(model.parameters()) for model in models], make(resting.parameters()), GradScaler("cpu")
    scaler.scale(sum(map(loss_of, models))).backward()
    if broken is not None:
        models[broken].weight.grad[0, 0] = math.inf
    for place, opt in enumerate(opts):
        scaler.step(opt)
        assert bool(scaler.last_step) == (place != broken)
    scaler.step(idle)
    scaler.update()
    assert scaler.get_scale() == (65536.0 if broken is None else 32768.0)
    assert all(map(torch.equal, resting.parameters(), linear().parameters()))


def test_its_scale_has_a_floor() -> None:
    """torch's reaches 0 after many overflows; the next healthy step then writes NaN into every parameter."""
    loop = loops(sgd)
    for _ in range(30):
        loop.step(math.nan)
    with pytest.warns(polyamp.PolyampWarning, match="minimum"):
        loop.step(math.nan)
    assert loop.scaler.get_scale() == LossScale().min
    loop.step()
    assert loop.scaler.last_step
    assert all(param.isfinite().all() for param in loop.model.parameters())


@pytest.mark.parametrize("by_name", [True, False])
def test_a_closure_is_refused_however_it_is_given(by_name: bool) -> None:
    """torch's scaler refuses one by name and takes one by position, whose gradients it then never unscales."""
    loop = loops(sgd)
    loop.scaler.scale(loss_of(loop.model)).backward()
    before = contents(loop.plain)
    arguments: tuple[tuple[Any, ...], dict[str, Any]] = ((), {"closure": float}) if by_name else ((float,), {})
    with pytest.raises(RuntimeError, match=r"[Cc]losure"):
        loop.scaler.step(loop.plain, *arguments[0], **arguments[1])
    assert contents(loop.plain) == before


@pytest.mark.parametrize("unscales", [True, False])
def test_clipping_of_scaled_gradients_is_reported_once_it_knows_the_optimizer(unscales: bool) -> None:
    loop, other = loops(sgd), linear()

    def train_step() -> None:
        loop.plain.zero_grad()
        loop.scaler.scale(loss_of(loop.model)).backward()
        loss_of(other).backward()
        if unscales:
            loop.scaler.unscale_(loop.plain)
        nn.utils.clip_grad_norm_(other.parameters(), 1.0)  # what it did not scale
        nn.utils.get_total_norm([param.grad for param in loop.model.parameters()])
        nn.utils.clip_grad_norm_(loop.model.parameters(), 1.0)
        loop.scaler.step(loop.plain)
        nn.utils.clip_grad_norm_(loop.model.parameters(), 1.0)  # after the step
        loop.scaler.update()
        nn.utils.clip_grad_norm_(loop.model.parameters(), 1.0)

    train_step()
    if unscales:
        train_step()
        return
    with pytest.warns(polyamp.PolyampWarning, match=r"call scaler.unscale_\(optimizer\) before clipping") as caught:
        train_step()
    assert caught[0].filename == __file__


# --- in front of wrapped optimizers: code that takes a scaler trains master weights -----------------------------------

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


def layer(low: bool = False) -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(8, 4).half() if low else nn.Linear(8, 4)


@pytest.mark.parametrize("low", [False, True])
def test_a_native_loop_trains_master_weights(low: bool) -> None:
    plain, model = layer(), layer(low)
    scaler = torch.amp.GradScaler("cpu", init_scale=SCALE.init)
    torch.manual_seed(1)
    expected = native_loop(plain, torch.optim.AdamW(plain.parameters(), lr=0.03), scaler)
    opt = LossScaledOptimizer(torch.optim.AdamW(model.parameters(), lr=0.03), SCALE)
    torch.manual_seed(1)
    losses = native_loop(model, opt, GradScaler(optimizers=opt))
    assert losses[0] - losses[-1] > 0.1
    assert losses == pytest.approx(expected, abs=4e-3)
    assert opt.param_groups[0]["params"][0].dtype == torch.float32


@pytest.mark.filterwarnings("ignore:.*not finite.*:polyamp.PolyampWarning")
def test_a_skip_is_seen_by_the_scale_as_trainers_look_for_it() -> None:
    model = layer(low=True)
    opt = LossScaledOptimizer(sgd(model.parameters()), SCALE)
    scaler = GradScaler(optimizers=opt)
    native_loop(model, opt, scaler, bad=7)
    assert scaler.get_scale() == SCALE.init / 2
    assert not scaler.last_step
    assert "loss" in scaler.last_step.reason


def test_its_state_is_that_of_the_optimizer_and_torchs_loads() -> None:
    opt = LossScaledOptimizer(sgd(layer().parameters()), SCALE)
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


@pytest.mark.parametrize("drives_wrapped", [True, False])
def test_the_verbs_take_it_as_they_take_an_optimizer(drives_wrapped: bool) -> None:
    opt = LossScaledOptimizer(sgd(layer().parameters()), SCALE) if drives_wrapped else None
    scaler = GradScaler("cpu", loss_scale=SCALE, optimizers=opt)
    assert polyamp.scale_loss(torch.ones(()), scaler).item() == SCALE.init
    assert polyamp.load_loss_scale(scaler, {"scale": 64.0}) is scaler
    assert polyamp.save_loss_scale(scaler)["scale"] == 64.0


def test_optimizers_that_share_a_scale_are_driven_together() -> None:
    models = [layer(low=True), layer()]
    both = polyamp.wrap_optimizer([sgd(model.parameters()) for model in models], "mixed_float16")
    scaler = GradScaler(optimizers=both)
    for _ in range(2):  # a second loss, after unscaling
        scaler.scale(sum(model.weight.float().square().mean() for model in models)).backward()
        scaler.unscale_(both[0])
    for opt in both:
        scaler.step(opt)
    scaler.update()
    assert all(opt.last_step for opt in both)


def test_what_it_cannot_drive_is_refused() -> None:
    opt, other = (LossScaledOptimizer(sgd(layer().parameters())) for _ in range(2))
    with pytest.raises(polyamp.PolyampError, match="different loss scales"):
        GradScaler(optimizers=[opt, other])
    with pytest.raises(InvalidTypeError, match="expected LossScaledOptimizer"):
        GradScaler(optimizers=opt.inner)  # type: ignore[arg-type]
    scaler = GradScaler(optimizers=opt)
    for wrong in (opt.inner, other):
        with pytest.raises(UsageError, match="not an optimizer of the scaler"):
            scaler.step(wrong)
