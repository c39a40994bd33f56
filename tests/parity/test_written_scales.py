"""Loss scales that polyamp writes in the form of another library: the library loads them and continues alike."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import flax.serialization
import flax.training.dynamic_scale
import jax.numpy as jnp
import jmp
import keras
import numpy as np
import optax
import pytest
import tensorflow as tf
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensorflow.python.training.experimental import loss_scale as tf_loss_scale

import polyamp
from polyamp import LossScale, LossScaleState, PolyampWarning
from polyamp.backends.torch import GradScaler
from polyamp.libraries import LIBRARIES as ROWS
from support.loss_scale_cases import TRACES, walk

INTERVAL = 3


class Torch:
    def __init__(self, saved: dict[str, Any]) -> None:
        self.scaler = torch.amp.GradScaler("cpu")
        self.scaler.load_state_dict(saved)
        self.param = torch.zeros(1, requires_grad=True)
        self.optimizer = torch.optim.SGD([self.param], lr=0.1)

    def step(self, finite: bool) -> float:
        self.scaler.scale(torch.ones(()))
        self.param.grad = torch.tensor([1.0 if finite else math.inf])
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return float(self.scaler.get_scale())


class Keras:
    def __init__(self, saved: dict[str, Any]) -> None:
        inner = keras.optimizers.SGD(0.0)
        self.optimizer = keras.optimizers.LossScaleOptimizer(inner, dynamic_growth_steps=INTERVAL)
        self.optimizer.build([keras.Variable(np.zeros(1, np.float32))])
        for name, value in saved.items():
            getattr(self.optimizer, name).assign(value)

    def step(self, finite: bool) -> float:
        self.optimizer.apply([keras.ops.array([1.0 if finite else math.nan])])
        return float(keras.ops.convert_to_tensor(self.optimizer.dynamic_scale))


class TensorFlow:
    def __init__(self, saved: dict[str, Any]) -> None:
        self.scale = tf_loss_scale.DynamicLossScale(increment_period=INTERVAL)
        for (name, _), variable in self.scale._weights.items():
            variable.assign(saved.pop(name))
        assert not saved

    def step(self, finite: bool) -> float:
        self.scale.update([tf.constant(1.0 if finite else math.inf)])
        return float(self.scale())


class Flax:
    def __init__(self, saved: dict[str, Any]) -> None:
        start = flax.training.dynamic_scale.DynamicScale(growth_interval=INTERVAL)
        state = flax.serialization.from_state_dict(start, saved)
        self.state = state.replace(scale=jnp.float32(state.scale), fin_steps=jnp.int32(state.fin_steps))

    def step(self, finite: bool) -> float:
        slope = 1.0 if finite else jnp.nan
        self.state = self.state.value_and_grad(lambda x: x * slope)(jnp.float32(0.0))[0]
        return float(self.state.scale)


class Jmp:
    def __init__(self, saved: dict[str, Any]) -> None:
        scales = {name: jnp.float32(saved[name]) for name in ("loss_scale", "min_loss_scale")}
        self.scale = jmp.DynamicLossScale(**{**saved, **scales, "counter": jnp.int32(saved["counter"])})

    def step(self, finite: bool) -> float:
        self.scale = self.scale.adjust(jnp.bool_(finite))
        return float(self.scale.loss_scale)


class DeepSpeed:
    """DynamicLossScaler.update_scale of deepspeed/runtime/fp16/loss_scaler.py, 0.19, without its logging."""

    def __init__(self, saved: dict[str, Any]) -> None:
        self.__dict__.update(saved)

    def step(self, finite: bool) -> float:
        if finite:
            if self.consecutive_hysteresis:
                self.cur_hysteresis = self.delayed_shift
            stable = (self.cur_iter - self.last_overflow_iter) - 1
            if stable > 0 and stable % self.scale_window == 0:
                self.cur_hysteresis = self.delayed_shift
                self.cur_scale *= self.scale_factor
        else:
            if self.delayed_shift == 1 or self.cur_hysteresis == 1:
                self.cur_scale = max(self.cur_scale / self.scale_factor, self.min_scale)
            else:
                self.cur_hysteresis -= 1
            self.last_overflow_iter = self.cur_iter
        self.cur_iter += 1
        return self.cur_scale


class Megatron:
    """DynamicGradScaler of megatron/core/optimizer/grad_scaler.py, 0.16, on the CPU."""

    def __init__(self, saved: dict[str, Any]) -> None:
        self.scale, self.growth, self.left = (
            saved.pop("scale"),
            saved.pop("growth_tracker"),
            saved.pop("hysteresis_tracker"),
        )
        assert not saved

    def step(self, finite: bool) -> float:
        if not finite:
            self.growth = 0
            self.left -= 1
            if self.left <= 0:
                self.scale = max(self.scale * 0.5, 1.0)
        else:
            self.growth += 1
            if self.growth == INTERVAL:
                self.growth, self.left, self.scale = 0, 2, self.scale * 2
        return self.scale


class Apex:
    """LossScaler.update_scale of apex/amp/scaler.py at b82c6bd."""

    def __init__(self, saved: dict[str, Any]) -> None:
        ((name, loss),) = saved.items()
        assert name == "loss_scaler0"
        self.scale, self.unskipped = loss.pop("loss_scale"), loss.pop("unskipped")
        assert not loss

    def step(self, finite: bool) -> float:
        if finite:
            self.unskipped += 1
        else:
            self.scale, self.unskipped = self.scale / 2, 0
        if self.unskipped == INTERVAL:
            self.scale, self.unskipped = min(2.0**24, self.scale * 2), 0
        return self.scale


LIBRARIES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "torch": Torch,
    "keras": Keras,
    "tensorflow": TensorFlow,
    "flax": Flax,
    "jmp": Jmp,
    "deepspeed": DeepSpeed,
    "megatron": Megatron,
    "apex": Apex,
}
LOST = pytest.mark.filterwarnings("ignore:the form of:polyamp.PolyampWarning")


def here(name: str, **changes: Any) -> LossScale:
    """Return the settings of a library without its error at the smallest scale, which ends a trace."""
    return LossScale.like(name, interval=INTERVAL, on_min="ignore", **changes)


@LOST
@pytest.mark.parametrize("name", LIBRARIES)
@settings(max_examples=40, deadline=None)
@given(before=TRACES, after=TRACES)
def test_the_library_continues_as_polyamp_would(name: str, before: list[bool], after: list[bool]) -> None:
    config = here(name)
    state = walk(config, before)[-1]
    library = LIBRARIES[name](config.to_state_dict(state, like=name))
    assert [library.step(finite) for finite in after] == [one.scale for one in walk(config, after, state)]


@LOST
@pytest.mark.parametrize("name", ROWS)
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


def torch_optimizer(config: LossScale) -> Any:
    return polyamp.wrap_optimizer(torch.optim.SGD([torch.ones(2, requires_grad=True)], 0.1), "fp16", loss_scale=config)


def keras_optimizer(config: LossScale) -> Any:
    optimizer = polyamp.wrap_optimizer(keras.optimizers.SGD(0.1), "fp16", loss_scale=config)
    optimizer.build([keras.Variable([1.0, 1.0])])
    return optimizer


HOLDERS: dict[str, Callable[[LossScale], Any]] = {
    "torch": torch_optimizer,
    "GradScaler": lambda config: GradScaler("cpu", loss_scale=config),
    "jax": lambda config: polyamp.wrap_optimizer(optax.sgd(0.1), "fp16", loss_scale=config).init({"w": jnp.ones(2)}),
    "keras": keras_optimizer,
    "tensorflow": lambda config: polyamp.wrap_optimizer(
        tf.compat.v1.train.GradientDescentOptimizer(0.1), "fp16", loss_scale=config
    ),
}


@LOST
@pytest.mark.parametrize("like", ROWS)
@pytest.mark.parametrize("holder", HOLDERS)
def test_every_holder_writes_every_form(holder: str, like: str) -> None:
    config = LossScale.like(like)
    state = LossScaleState(1024.0, 5, 1, 0, 2, 9)
    made = polyamp.load_loss_scale(HOLDERS[holder](config), config.to_state_dict(state))
    assert polyamp.save_loss_scale(made, like=like) == config.to_state_dict(state, like=like)
    again = polyamp.load_loss_scale(HOLDERS[holder](config), polyamp.save_loss_scale(made, like=like))
    assert polyamp.save_loss_scale(again)["scale"] == 1024.0


@LOST
def test_the_real_scalers_of_torch_take_what_a_keras_model_was_trained_with() -> None:
    optimizer = keras_optimizer(LossScale(init=2.0**10))
    scaler = torch.amp.GradScaler("cpu")
    scaler.load_state_dict(polyamp.save_loss_scale(optimizer, like="torch"))
    assert scaler.get_scale() == 1024.0


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
    with pytest.raises(polyamp.errors.StateError):
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


def test_a_framework_that_has_one_loss_scale_takes_the_first() -> None:
    state = HOLDERS["jax"](LossScale.like("apex"))
    with pytest.warns(PolyampWarning, match="several loss scales"):
        assert float(polyamp.load_loss_scale(state, THREE).loss_scale) == 1.0
