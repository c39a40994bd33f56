"""Whole trainings beside PyTorch's own scaler, with overflows at known steps: the same bits, and no host sync.

Scales are powers of two here, so that dividing by one (torch's fused kernels) and multiplying by its inverse (polyamp,
and torch elsewhere) round alike; `test_scales_that_are_no_powers_of_two` leaves the fused kernels out.
"""

import functools
import itertools
import math
import random
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import polyamp
from polyamp import LossScale
from polyamp.backends.torch import GradScaler
from support.harness_torch import skipping_on_device
from support.torch_steps import NoSync, Way, loss_of, network, same, spoil, state_of, train
from support.torch_waits import waits_are_errors

STEPS = 25
INIT, INTERVAL = 2.0**10, 5
OVERFLOWS = {step: (math.inf, -math.inf, math.nan)[step % 3] for step in random.Random(0).sample(range(1, STEPS), 6)}


class Kind(NamedTuple):
    """An optimizer to train with, and whether it can skip a step on the device."""

    make: Callable[[Any], torch.optim.Optimizer]
    skips: bool


HAVE_FUSED = ("momentum", "nesterov", "amsgrad", "adamw", "adagrad")


def kinds() -> dict[str, Kind]:
    optim = torch.optim
    bases: dict[str, tuple[Any, dict[str, Any]]] = {
        "momentum": (optim.SGD, {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.01}),
        "nesterov": (optim.SGD, {"lr": 0.05, "momentum": 0.9, "nesterov": True}),
        "amsgrad": (optim.Adam, {"lr": 0.05, "amsgrad": True}),
        "adamw": (optim.AdamW, {"lr": 0.05}),
        "adagrad": (optim.Adagrad, {"lr": 0.05}),
        "rmsprop": (optim.RMSprop, {"lr": 0.01, "momentum": 0.9, "centered": True}),
        **{name.lower(): (getattr(optim, name), {"lr": 0.01}) for name in ("Adadelta", "Adafactor", "NAdam", "Rprop")},
    }
    ways = {"": {"foreach": False}, "-foreach": {"foreach": True}, "-fused": {"fused": True}}
    made = {}
    for name, way in itertools.product(bases, ways):
        optimizer, options = bases[name]
        if way != "-fused" or name in HAVE_FUSED:
            make = functools.partial(optimizer, **options, **ways[way])
            made[name + way] = Kind(make, hasattr(make([torch.ones(1)]), "_step_supports_amp_scaling"))
    return made


KINDS = kinds()


class ByGradScaler:
    """A loop as PyTorch's documentation writes it."""

    def __init__(self, scaler: torch.amp.GradScaler, inner: torch.optim.Optimizer, max_norm: float | None) -> None:
        self.scaler, self.inner, self.max_norm = scaler, inner, max_norm

    def backward(self, loss: Tensor) -> None:
        self.scaler.scale(loss).backward()

    def step(self) -> None:
        if self.max_norm is not None:
            self.scaler.unscale_(self.inner)
            nn.utils.clip_grad_norm_([p for group in self.inner.param_groups for p in group["params"]], self.max_norm)
        self.scaler.step(self.inner)
        self.scaler.update()

    def zero_grad(self) -> None:
        self.inner.zero_grad()

    @property
    def loss_scale(self) -> float:
        return self.scaler.get_scale()


STARTS = ["wrapped", "wrapped-on-device", "drop-in"]


def start(
    way: str, name: str, max_norm: float | None = None, device: str = "cpu", scale: LossScale | None = None
) -> Way:
    scale = scale or LossScale(init=INIT, interval=INTERVAL)
    model = network(device)
    inner = KINDS[name].make(model.parameters())
    if way.startswith("wrapped"):
        opt = polyamp.wrap_optimizer(inner, loss_scale=scale, max_grad_norm=max_norm, fused_step=False)
        return Way(model, skipping_on_device(opt, way == "wrapped-on-device" or None))
    make = GradScaler if way == "drop-in" else torch.amp.GradScaler
    scaler = make(device, scale.init, scale.growth, scale.backoff, scale.interval)
    return Way(model, ByGradScaler(scaler, inner, max_norm))


def history(way: Way, micro_batches: int = 1, loss: Callable[[nn.Module, int], Tensor] = loss_of) -> list[Any]:
    """The parameters and the scale after every step."""
    return [[*train(way, [step], OVERFLOWS, loss, micro_batches), way.opt.loss_scale] for step in range(STEPS)]


@functools.cache  # several ways are compared with it
def native_run(name: str, micro_batches: int, max_norm: float | None) -> tuple[list[Any], dict[int, dict[str, Any]]]:
    native = start("native", name, max_norm)
    return history(native, micro_batches), state_of(native.opt)


@pytest.mark.parametrize(("micro_batches", "max_norm"), [(1, None), (2, 0.3)])
@pytest.mark.parametrize(
    ("name", "way"),
    [(name, way) for name in KINDS for way in STARTS if KINDS[name].skips or way != "wrapped-on-device"],
)
def test_steps_are_those_of_the_native_scaler(name: str, way: str, micro_batches: int, max_norm: float | None) -> None:
    ours, (expected, state) = start(way, name, max_norm), native_run(name, micro_batches, max_norm)
    same(history(ours, micro_batches), expected)
    same(state_of(ours.opt), state)
    assert len({scale for _, scale in expected}) > 3


@pytest.mark.parametrize("way", ["wrapped", "drop-in"])
@pytest.mark.parametrize("name", ["momentum", "adamw-foreach", "rmsprop"])
def test_scales_that_are_no_powers_of_two(name: str, way: str) -> None:
    """The settings are float32 numbers: ``advance`` rounds them to that, and the native scaler does not."""
    scale = LossScale(init=1000.5, growth=1.25, backoff=0.75, interval=3)
    ours = start(way, name, scale=scale)
    same(history(ours), history(start("native", name, scale=scale)))
    assert math.log2(ours.opt.loss_scale) % 1 != 0


@pytest.mark.parametrize("way", STARTS)
def test_the_whole_loop_with_autocast_is_the_native_one(way: str) -> None:
    def loss_in(region: Callable[[], Any]) -> Callable[[nn.Module, int], Tensor]:
        def loss(model: nn.Module, batch: int) -> Tensor:
            with region():
                return loss_of(model, batch)

        return loss

    ours, native = (start(one, "adamw-fused", 1.0) for one in (way, "native"))
    same(
        history(ours, loss=loss_in(lambda: polyamp.autocast("mixed_bfloat16"))),
        history(native, loss=loss_in(lambda: torch.autocast("cpu", torch.bfloat16))),
    )


@pytest.mark.parametrize("max_norm", [None, 1.0])
@pytest.mark.parametrize("name", [name for name, kind in KINDS.items() if kind.skips])
def test_a_step_on_the_device_waits_for_nothing(name: str, max_norm: float | None) -> None:
    way = start("wrapped-on-device", name, max_norm)
    train(way, range(2), overflows={})  # the first step decides on the host
    for step in range(6):
        way.opt.zero_grad()
        way.opt.backward(loss_of(way.model, step))
        if step % 2:
            spoil(way.model, math.nan)
        with NoSync():
            way.opt.step()
            _ = way.opt.last_step
    assert way.opt.last_step.skipped_in_a_row == 1


def test_the_watch_for_waits_can_fail() -> None:
    with pytest.raises(AssertionError, match="waits for the device"), NoSync():
        bool(torch.ones(()))


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["momentum-fused", "adamw-fused"])
def test_steps_on_a_gpu_wait_for_nothing_and_are_the_native_ones(name: str) -> None:
    ours = start("wrapped-on-device", name, device="cuda")
    # unscaled before the step: PyTorch's fused SGD rounds some parameters otherwise on a GPU where it unscales itself
    native = start("native", name, max_norm=math.inf, device="cuda")
    x, y = torch.randn(5, 4, device="cuda"), torch.randn(5, 3, device="cuda")

    def steps(way: Way, first: int, last: int) -> None:
        train(way, range(first, last), OVERFLOWS, lambda model, _: nn.functional.mse_loss(model(x), y))

    first_skip = min(OVERFLOWS)
    steps(native, 0, STEPS)
    steps(ours, 0, first_skip)
    with waits_are_errors():
        steps(ours, first_skip, STEPS)
    assert ours.opt.loss_scale == native.opt.loss_scale
    same(*(list(way.model.parameters()) for way in (ours, native)))
