"""Other libraries' loss scales: their rules, what they saved read here, and what is written here continued there."""

import inspect
import math
import random
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import jmp
import keras
import numpy as np
import optax
import pytest
import tensorflow as tf
import torch
from flax.training.dynamic_scale import DynamicScale
from hypothesis import given, settings
from hypothesis import strategies as st

import polyamp
from polyamp import LossScale, LossScaleState, PolyampWarning
from polyamp.backends.torch import GradScaler
from polyamp.errors import StateError
from polyamp.libraries import LIBRARIES
from support.harness import overflow_trace
from support.loss_scale_cases import TRACES, DeepSpeed, walk
from support.other_libraries import ALL, INSTALLED

Trace = list[bool]
INTERVAL = 3


def our_scales(name: str, trace: Trace, **settings: Any) -> list[float]:
    return [state.scale for state in walk(LossScale.like(name, **settings), trace)]


def their_scales(name: str, trace: Trace, **settings: Any) -> list[float]:
    library = INSTALLED[name](**settings)
    return [library.step(finite) for finite in trace]


def drawn(seed: int, steps: int = 60) -> Trace:
    return overflow_trace(seed, steps, random.Random(seed).choice([0.05, 0.2, 0.4]))


FACTORS: list[tuple[str, dict[str, float]]] = [
    ("torch", {"growth": 4.0, "backoff": 0.125}),
    ("torch", {"growth": 1.5, "backoff": 0.75}),
    ("torch", {"growth": 1.7, "backoff": 0.3}),
    ("flax", {"growth": 4.0, "backoff": 0.25}),
    ("flax", {"growth": 1.5, "backoff": 0.75}),
    ("jmp", {"min": 2.0**-10}),
]
DOWN, UP = [False] * 130 + [True] * 10, [True] * 130 + [False] * 10 + [True] * 20  # to the library's own limits
RUNS: list[tuple[str, Trace, dict[str, float]]] = [
    *((name, drawn(seed), {"interval": n}) for name in INSTALLED for n in (1, 2, 3, 7) for seed in range(2)),
    *(
        (name, overflow_trace(1, 40, share), factors | {"interval": 2})
        for name, factors in FACTORS
        for share in (0.3, 0.7)
    ),
    *((name, DOWN, {"interval": 1}) for name in INSTALLED),
    *((name, UP, {"interval": 1}) for name in ("torch", "tensorflow", "flax", "jmp")),
]


@pytest.mark.parametrize(("name", "trace", "settings"), RUNS)
def test_presets_follow_the_library(name: str, trace: Trace, settings: dict[str, float]) -> None:
    assert our_scales(name, trace, **settings) == their_scales(name, trace, **settings)


@pytest.mark.parametrize("name", ["tensorflow", "jmp"])
def test_presets_follow_libraries_that_have_one_factor_for_both_ways(name: str) -> None:
    trace = overflow_trace(1, 40, 0.5)
    ours = our_scales(name, trace, interval=2, growth=4.0, backoff=0.25)
    assert ours == their_scales(name, trace, interval=2, growth=4.0)


DEFAULTS: dict[str, tuple[Any, str, str]] = {
    "torch": (torch.amp.GradScaler, "init_scale", "growth_interval"),
    "keras": (keras.optimizers.LossScaleOptimizer, "initial_scale", "dynamic_growth_steps"),
    "tensorflow": (tf.compat.v1.mixed_precision.DynamicLossScale, "initial_loss_scale", "increment_period"),
    "flax": (DynamicScale, "scale", "growth_interval"),
    "jmp": (jmp.DynamicLossScale, "", "period"),  # its users choose where to begin
}


@pytest.mark.parametrize("name", DEFAULTS)
def test_presets_start_with_the_library_s_own_defaults(name: str) -> None:
    library, *names = DEFAULTS[name]
    defaults = inspect.signature(library).parameters
    ours = (LossScale.like(name).init, LossScale.like(name).interval)
    assert all(defaults[one].default == value for one, value in zip(names, ours, strict=True) if one)


@pytest.mark.parametrize(("name", "init"), [("torch", 2.0**16), ("keras", 2.0**15)])
def test_where_a_library_collapses_to_zero_we_stop(name: str, init: float) -> None:
    trace = [False] * 300
    theirs, ours = their_scales(name, trace, init=init), our_scales(name, trace, init=init)
    assert theirs[-1] == 0.0
    assert ours[-1] == 2.0**-126
    assert math.isfinite(1 / np.float32(ours[-1]))
    assert all(mine == max(scale, 2.0**-126) for mine, scale in zip(ours, theirs, strict=True))


# --- read -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("steps", [0, 1, 2, 5, 11])
@pytest.mark.parametrize("name", INSTALLED)
def test_a_library_s_scale_goes_on_as_the_library_would(name: str, steps: int) -> None:
    library = INSTALLED[name](interval=INTERVAL)
    trace = overflow_trace(steps, 30, 0.3)
    for finite in trace[:steps]:
        library.step(finite)
    config = LossScale.like(name, interval=INTERVAL)
    states = [config.from_state_dict(saved) for saved in library.saved()]
    theirs = [library.step(finite) for finite in trace[steps:]]
    for state in states:
        assert [after.scale for after in walk(config, trace[steps:], state)] == theirs


# --- written ----------------------------------------------------------------------------------------------------------

LOST = pytest.mark.filterwarnings("ignore:the form of:polyamp.PolyampWarning")


def here(name: str, **changes: Any) -> LossScale:
    """Return the settings of a library without its error at the smallest scale, which ends a trace."""
    return LossScale.like(name, interval=INTERVAL, on_min="ignore", **changes)


@LOST
@pytest.mark.parametrize("name", ALL)
@settings(max_examples=40, deadline=None)
@given(before=TRACES, after=TRACES)
def test_the_library_continues_as_polyamp_would(name: str, before: list[bool], after: list[bool]) -> None:
    config = here(name)
    state = walk(config, before)[-1]
    library = ALL[name](config.to_state_dict(state, like=name), interval=INTERVAL)
    assert [library.step(finite) for finite in after] == [one.scale for one in walk(config, after, state)]


@LOST
@pytest.mark.parametrize("name", LIBRARIES)
@settings(max_examples=50, deadline=None)
@given(before=TRACES, after=TRACES)
def test_what_is_written_is_read_again(name: str, before: list[bool], after: list[bool]) -> None:
    config = here(name)
    state = walk(config, before)[-1]
    read = config.from_state_dict(config.to_state_dict(state, like=name))
    assert read.scale == state.scale
    if name != "fairseq":  # which saves the scale alone
        assert read.good_steps == state.good_steps
        assert [one.scale for one in walk(config, after, read)] == [one.scale for one in walk(config, after, state)]


@LOST
@settings(max_examples=50, deadline=None)
@given(before=TRACES, after=TRACES, consecutive=st.booleans(), hysteresis=st.integers(1, 3))
def test_deepspeed_takes_every_hysteresis(
    before: list[bool], after: list[bool], consecutive: bool, hysteresis: int
) -> None:
    config = here("deepspeed", hysteresis=hysteresis, consecutive=consecutive)
    state = walk(config, before)[-1]
    library = DeepSpeed(config.to_state_dict(state, like="deepspeed"))
    assert [library.step(finite) for finite in after] == [one.scale for one in walk(config, after, state)]


# --- every holder -----------------------------------------------------------------------------------------------------


def torch_optimizer(config: LossScale | None = None, policy: str = "fp16") -> Any:
    optimizer = torch.optim.SGD([torch.ones(2, requires_grad=True)], 0.1)
    return polyamp.wrap_optimizer(optimizer, policy, loss_scale=config)


def jax_state(config: LossScale | None = None, policy: str = "fp16") -> Any:
    return polyamp.wrap_optimizer(optax.sgd(0.1), policy, loss_scale=config).init({"w": jnp.ones(2)})


def keras_optimizer(config: LossScale | None = None, policy: str = "fp16") -> Any:
    optimizer = polyamp.wrap_optimizer(keras.optimizers.SGD(0.1), policy, loss_scale=config)
    optimizer.build([keras.Variable([1.0, 1.0])])
    return optimizer


def tensorflow_optimizer(config: LossScale | None = None, policy: str = "fp16") -> Any:
    return polyamp.wrap_optimizer(tf.compat.v1.train.GradientDescentOptimizer(0.1), policy, loss_scale=config)


OPTIMIZERS: dict[str, Callable[..., Any]] = {
    "torch": torch_optimizer,
    "jax": jax_state,
    "keras": keras_optimizer,
    "tensorflow": tensorflow_optimizer,
}
HOLDERS = {**OPTIMIZERS, "GradScaler": lambda config: GradScaler("cpu", loss_scale=config)}


@LOST
@pytest.mark.parametrize("like", LIBRARIES)
@pytest.mark.parametrize("holder", HOLDERS)
def test_every_holder_writes_every_form(holder: str, like: str) -> None:
    config = LossScale.like(like)
    state = LossScaleState(1024.0, 5, 1, 0, 2, 9)
    made = polyamp.load_loss_scale(HOLDERS[holder](config), config.to_state_dict(state))
    assert polyamp.save_loss_scale(made, like=like) == config.to_state_dict(state, like=like)
    again = polyamp.load_loss_scale(HOLDERS[holder](config), polyamp.save_loss_scale(made, like=like))
    assert polyamp.save_loss_scale(again)["scale"] == 1024.0


def test_megatron_gets_the_scale_as_a_tensor() -> None:
    saved = polyamp.save_loss_scale(torch_optimizer(LossScale.like("megatron")), like="megatron")
    assert torch.equal(saved["scale"], torch.tensor([2.0**32]))


# --- several losses ---------------------------------------------------------------------------------------------------

THREE = {f"loss_scaler{n}": {"loss_scale": 2.0**n, "unskipped": n} for n in range(3)}


def test_all_losses_of_apex_become_losses_of_the_optimizer_and_are_written_again() -> None:
    optimizer = polyamp.load_loss_scale(torch_optimizer(LossScale.like("apex")), THREE)
    assert [float(optimizer.scale(torch.ones(()), loss_id=n)) for n in (None, 1, 2)] == [1.0, 2.0, 4.0]
    assert polyamp.save_loss_scale(optimizer, like="apex") == THREE


def test_a_loss_of_apex_that_does_not_fit_changes_none() -> None:
    optimizer = torch_optimizer(LossScale.like("apex"))
    bad = THREE | {"loss_scaler2": {"loss_scale": math.inf, "unskipped": 0}}
    with pytest.raises(StateError):
        polyamp.load_loss_scale(optimizer, bad)
    assert polyamp.save_loss_scale(optimizer)["scale"] == 2.0**16
    assert list(polyamp.save_loss_scale(optimizer, like="apex")) == ["loss_scaler0"]


def test_a_loss_that_never_had_an_id_keeps_its_place() -> None:
    optimizer = torch_optimizer(LossScale.like("apex", init=8.0))
    optimizer.scale(torch.ones(()), loss_id=2)
    assert list(polyamp.save_loss_scale(optimizer, like="apex")) == ["loss_scaler0", "loss_scaler1", "loss_scaler2"]


def test_losses_without_a_number_are_reported() -> None:
    optimizer = torch_optimizer(LossScale.like("apex"))
    optimizer.scale(torch.ones(()), loss_id="discriminator")
    with pytest.warns(PolyampWarning, match="Apex numbers its losses: .*'discriminator' are lost"):
        assert list(polyamp.save_loss_scale(optimizer, like="apex")) == ["loss_scaler0"]


def test_of_losses_without_an_id_and_one_with_id_0_the_first_are_reported() -> None:
    optimizer = torch_optimizer(LossScale.like("apex", init=8.0))
    optimizer.scale(torch.ones(()), loss_id=0)
    assert list(polyamp.save_loss_scale(optimizer, like="apex")) == ["loss_scaler0"]
    polyamp.load_loss_scale(optimizer, {"scale": 2.0, "good_steps": 3})
    with pytest.warns(PolyampWarning, match="Apex numbers its losses: .* losses without an id are lost"):
        assert polyamp.save_loss_scale(optimizer, like="apex")["loss_scaler0"]["loss_scale"] == 8.0


# --- another policy's, in every framework -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("there", "here", "steps", "reports", "loaded"),
    [
        ("mixed_bfloat16", "mixed_float16", {}, "starts at init = 65536", (65536.0, 0, 0)),
        ("mixed_float16", "mixed_bfloat16", {"steps": 7, "skipped": 2}, "does not scale", (1.0, 7, 2)),
    ],
)
@pytest.mark.parametrize("framework", OPTIMIZERS)
def test_a_state_of_another_format_starts_anew(
    framework: str, there: str, here: str, steps: dict[str, int], reports: str, loaded: tuple[float, int, int]
) -> None:
    saved = polyamp.save_loss_scale(OPTIMIZERS[framework](policy=there)) | steps
    with pytest.warns(PolyampWarning, match=reports):
        holder = polyamp.load_loss_scale(OPTIMIZERS[framework](policy=here), saved)
    found = polyamp.save_loss_scale(holder)
    assert (found["scale"], found["steps"], found["skipped"]) == loaded


CONFIGS = [
    LossScale.fixed(0.1),
    LossScale.fixed(1000.1),
    LossScale(init=1e-4, min=1e-4),
    LossScale(max=1e30, init=1e30),
]


@pytest.mark.parametrize("config", CONFIGS, ids=repr)
@pytest.mark.parametrize("framework", OPTIMIZERS)
def test_settings_that_are_no_float32_numbers_round_trip(framework: str, config: LossScale) -> None:
    saved = polyamp.save_loss_scale(OPTIMIZERS[framework](config))
    assert polyamp.save_loss_scale(polyamp.load_loss_scale(OPTIMIZERS[framework](config), saved)) == saved
