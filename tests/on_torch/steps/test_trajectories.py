"""Whole trainings beside PyTorch's own scaler, with overflows at known steps: the same bits, and no host sync.

Scales are powers of two here, so that dividing by one (torch's fused kernels) and multiplying by its inverse (polyamp,
and torch elsewhere) round alike; `test_scales_that_are_no_powers_of_two` leaves the fused kernels out.
"""

from __future__ import annotations

import copy
import functools
import itertools
import math
import random
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import polyamp
from polyamp import LossScale
from polyamp.backends.torch import GradScaler, LossScaledOptimizer
from support.harness_torch import skipping_on_device
from support.torch_steps import NoSync
from support.torch_waits import waits_are_errors

STEPS = 50
INIT, INTERVAL = 2.0**10, 5
OVERFLOWS = {step: (math.inf, -math.inf, math.nan)[step % 3] for step in random.Random(0).sample(range(1, STEPS), 12)}


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

    def __init__(self, scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer, max_norm: float | None) -> None:
        self.scaler, self.optimizer, self.max_norm = scaler, optimizer, max_norm

    def backward(self, loss: Tensor) -> None:
        self.scaler.scale(loss).backward()

    def step(self) -> None:
        if self.max_norm is not None:
            self.scaler.unscale_(self.optimizer)
            params = [param for group in self.optimizer.param_groups for param in group["params"]]
            nn.utils.clip_grad_norm_(params, self.max_norm)
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def zero_grad(self) -> None:
        self.optimizer.zero_grad()

    @property
    def loss_scale(self) -> float:
        return self.scaler.get_scale()


Loop = ByGradScaler | LossScaledOptimizer
Start = Callable[[torch.optim.Optimizer, float | None], Loop]


def start_native(optimizer: torch.optim.Optimizer, max_norm: float | None, **scale: Any) -> Loop:
    scale = {"init_scale": INIT, "growth_interval": INTERVAL} | scale
    return ByGradScaler(torch.amp.GradScaler("cpu", **scale), optimizer, max_norm)


def start_drop_in(optimizer: torch.optim.Optimizer, max_norm: float | None, **scale: Any) -> Loop:
    scale = {"init_scale": INIT, "growth_interval": INTERVAL} | scale
    return ByGradScaler(GradScaler("cpu", **scale), optimizer, max_norm)


def start_wrapped(optimizer: torch.optim.Optimizer, max_norm: float | None, **options: Any) -> Loop:
    scale = LossScale(init=INIT, interval=INTERVAL)
    return polyamp.wrap_optimizer(optimizer, "mixed_float16", loss_scale=scale, max_grad_norm=max_norm, **options)


def start_wrapped_on_device(optimizer: torch.optim.Optimizer, max_norm: float | None) -> Loop:
    return skipping_on_device(start_wrapped(optimizer, max_norm))


STARTS: dict[str, Start] = {
    "wrapped": start_wrapped,
    "wrapped-on-device": start_wrapped_on_device,
    "drop-in": start_drop_in,
}


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2))


BATCHES = [(torch.randn(3, 4, generator=g), torch.randn(3, 2, generator=g)) for g in [torch.Generator()] for _ in "abc"]


def loss_on(model: nn.Module, batch: int) -> Tensor:
    x, y = BATCHES[batch % len(BATCHES)]
    return nn.functional.mse_loss(model(x), y)


def break_a_gradient(model: nn.Module, bad: float) -> None:
    list(model.parameters())[-1].grad.view(-1)[0] = bad  # type: ignore[union-attr]


def state_of(optimizer: Any) -> Any:
    return copy.deepcopy(optimizer.state_dict()["state"])


def train(
    model: nn.Module,
    loop: Loop,
    *,
    steps: Iterable[int] = range(STEPS),
    micro_batches: int = 1,
    overflows: dict[int, float] = OVERFLOWS,
    loss_of: Callable[[nn.Module, int], Tensor] = loss_on,
) -> list[Any]:
    """The scale and the parameters after every step."""
    history = []
    for step in steps:
        loop.zero_grad()
        for micro in range(micro_batches):
            loop.backward(loss_of(model, step + micro) / micro_batches)
        if step in overflows:
            break_a_gradient(model, overflows[step])
        loop.step()
        history.append([loop.loss_scale, *(param.detach().clone() for param in model.parameters())])
    return history


def same(one: Any, other: Any) -> None:
    torch.testing.assert_close(one, other, rtol=0, atol=0)


CASES = [(name, start) for name in KINDS for start in STARTS if KINDS[name].skips or start != "wrapped-on-device"]


@pytest.mark.parametrize(("micro_batches", "max_norm"), [(1, None), (2, 0.3)])
@pytest.mark.parametrize(("name", "start"), CASES)
def test_fifty_steps_are_those_of_the_native_scaler(
    name: str, start: str, micro_batches: int, max_norm: float | None
) -> None:
    models = [network(), network()]
    plain = [KINDS[name].make(model.parameters()) for model in models]
    loops = [start_native(plain[0], max_norm), STARTS[start](plain[1], max_norm)]
    native, ours = (train(model, loop, micro_batches=micro_batches) for model, loop in zip(models, loops, strict=True))
    same(ours, native)
    same(state_of(plain[1]), state_of(plain[0]))
    assert len({scale for scale, *_ in native}) > 3


@pytest.mark.parametrize("start", ["wrapped", "drop-in"])
@pytest.mark.parametrize("name", ["momentum", "adamw-foreach", "rmsprop"])
def test_scales_that_are_no_powers_of_two(name: str, start: str) -> None:
    """The settings are float32 numbers: ``advance`` rounds them to that, and the native scaler does not."""
    in_torch = {"init_scale": 1000.5, "growth_factor": 1.25, "backoff_factor": 0.75, "growth_interval": 3}
    scale = LossScale(init=1000.5, growth=1.25, backoff=0.75, interval=3)
    models = [network(), network()]
    plain = [KINDS[name].make(model.parameters()) for model in models]
    if start == "wrapped":
        ours: Loop = polyamp.wrap_optimizer(plain[1], loss_scale=scale)
    else:
        ours = start_drop_in(plain[1], None, **in_torch)
    same(train(models[1], ours), train(models[0], start_native(plain[0], None, **in_torch)))
    assert math.log2(ours.loss_scale) % 1 != 0


@pytest.mark.parametrize("start", STARTS)
def test_the_whole_loop_with_autocast_is_the_native_one(start: str) -> None:
    def loss_in(region: Callable[[], Any]) -> Callable[[nn.Module, int], Tensor]:
        def loss_of(model: nn.Module, batch: int) -> Tensor:
            with region():
                return loss_on(model, batch)

        return loss_of

    regions = [lambda: torch.autocast("cpu", torch.bfloat16), lambda: polyamp.autocast("mixed_bfloat16")]
    models = [network(), network()]
    plain = [KINDS["adamw-fused"].make(model.parameters()) for model in models]
    loops = [start_native(plain[0], 1.0), STARTS[start](plain[1], 1.0)]
    same(*(train(m, loop, loss_of=loss_in(region)) for m, loop, region in zip(models, loops, regions, strict=True)))


@pytest.mark.parametrize("max_norm", [None, 1.0])
@pytest.mark.parametrize("name", [name for name, kind in KINDS.items() if kind.skips])
def test_a_step_on_the_device_waits_for_nothing(name: str, max_norm: float | None) -> None:
    model = network()
    opt = start_wrapped_on_device(KINDS[name].make(model.parameters()), max_norm)
    train(model, opt, steps=range(2), overflows={})  # the first step decides on the host
    for step in range(6):
        opt.zero_grad()
        scaled = loss_on(model, step)
        opt.backward(scaled)
        if step % 2:
            break_a_gradient(model, math.nan)
        with NoSync():
            opt.step()
            _ = opt.last_step
    assert opt.last_step.skipped_in_a_row == 1


def test_the_watch_for_waits_can_fail() -> None:
    with pytest.raises(AssertionError, match="waits for the device"), NoSync():
        bool(torch.ones(()))


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["momentum-fused", "adamw-fused"])
def test_fifty_steps_on_a_gpu_wait_for_nothing_and_are_the_native_ones(name: str) -> None:
    models = [network().cuda(), network().cuda()]
    plain = [KINDS[name].make(model.parameters()) for model in models]
    scaler = torch.amp.GradScaler("cuda", init_scale=INIT, growth_interval=INTERVAL)
    loops: list[Loop] = [ByGradScaler(scaler, plain[0], None), start_wrapped(plain[1], None, fused_step=False)]
    x, y = (value.cuda() for value in BATCHES[0])
    bad = {value: torch.tensor(value, device="cuda") for value in OVERFLOWS.values()}

    def steps(model: nn.Module, loop: Loop, first: int, last: int) -> None:
        for step in range(first, last):
            loop.zero_grad()
            loop.backward(nn.functional.mse_loss(model(x), y))
            if step in OVERFLOWS:
                break_a_gradient(model, bad[OVERFLOWS[step]])  # type: ignore[arg-type]
            loop.step()

    first_skip = min(OVERFLOWS)
    steps(models[0], loops[0], 0, STEPS)
    steps(models[1], loops[1], 0, first_skip)
    with waits_are_errors():
        steps(models[1], loops[1], first_skip, STEPS)
    assert loops[1].loss_scale == loops[0].loss_scale
    same(*(list(model.parameters()) for model in models))
