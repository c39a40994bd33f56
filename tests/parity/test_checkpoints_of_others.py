"""A loss scale that another library saved, or another policy, loaded into a wrapped optimizer of every framework."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import jmp
import keras
import optax
import pytest
import tensorflow as tf
import torch

import polyamp
from polyamp import LossScale, PolyampWarning


def torch_holder(policy: str, scale: LossScale | None = None) -> Any:
    optimizer = torch.optim.SGD([torch.ones(2, requires_grad=True)], lr=0.1)
    return polyamp.wrap_optimizer(optimizer, policy, loss_scale=scale)


def jax_holder(policy: str, scale: LossScale | None = None) -> Any:
    return polyamp.wrap_optimizer(optax.sgd(0.1), policy, loss_scale=scale).init({"w": jnp.ones(2)})


def keras_holder(policy: str, scale: LossScale | None = None) -> Any:
    optimizer = polyamp.wrap_optimizer(keras.optimizers.SGD(0.1), policy, loss_scale=scale)
    optimizer.build([keras.Variable([1.0, 1.0])])
    return optimizer


def tensorflow_holder(policy: str, scale: LossScale | None = None) -> Any:
    return polyamp.wrap_optimizer(tf.compat.v1.train.GradientDescentOptimizer(0.1), policy, loss_scale=scale)


HOLDERS: dict[str, Callable[..., Any]] = {
    "torch": torch_holder,
    "jax": jax_holder,
    "keras": keras_holder,
    "tensorflow": tensorflow_holder,
}
GRAD_SCALER = torch.amp.GradScaler("cpu", init_scale=1024.0)
GRAD_SCALER.scale(torch.ones(()))
SAVED: dict[str, Any] = {
    "GradScaler": GRAD_SCALER.state_dict(),
    "Apex": {"loss_scaler0": {"loss_scale": 1024.0, "unskipped": 0}},
    "DeepSpeed": {"cur_scale": 1024.0, "cur_iter": 5, "last_overflow_iter": 4, "scale_window": 1000},
    "jmp": jmp.DynamicLossScale(jnp.float32(1024.0)),
    "by hand": {"scale": 1024.0},
}


@pytest.mark.parametrize("library", SAVED)
@pytest.mark.parametrize("framework", HOLDERS)
def test_another_library_s_scale_is_taken(framework: str, library: str) -> None:
    holder = polyamp.load_loss_scale(HOLDERS[framework]("mixed_float16"), SAVED[library])
    saved = polyamp.save_loss_scale(holder)
    assert (saved["scale"], saved["skipped"], saved["steps"]) == (1024.0, 0, 0)


@pytest.mark.parametrize("framework", HOLDERS)
def test_a_state_of_bfloat16_starts_float16_at_init(framework: str) -> None:
    saved = polyamp.save_loss_scale(HOLDERS[framework]("mixed_bfloat16"))
    holder = HOLDERS[framework]("mixed_float16")
    with pytest.warns(PolyampWarning, match="starts at init = 65536"):
        holder = polyamp.load_loss_scale(holder, saved)
    assert polyamp.save_loss_scale(holder)["scale"] == 65536.0


@pytest.mark.parametrize("framework", HOLDERS)
def test_a_state_of_float16_is_taken_by_bfloat16_without_its_scale(framework: str) -> None:
    saved = polyamp.save_loss_scale(HOLDERS[framework]("mixed_float16")) | {"steps": 7, "skipped": 2}
    holder = HOLDERS[framework]("mixed_bfloat16")
    with pytest.warns(PolyampWarning, match="does not scale"):
        holder = polyamp.load_loss_scale(holder, saved)
    loaded = polyamp.save_loss_scale(holder)
    assert (loaded["scale"], loaded["steps"], loaded["skipped"]) == (1.0, 7, 2)


CONFIGS = [
    LossScale.fixed(0.1),
    LossScale.fixed(1000.1),
    LossScale(init=1e-4, min=1e-4),
    LossScale(max=1e30, init=1e30),
]


@pytest.mark.parametrize("config", CONFIGS, ids=repr)
@pytest.mark.parametrize("framework", HOLDERS)
def test_settings_that_are_no_float32_numbers_round_trip(framework: str, config: LossScale) -> None:
    saved = polyamp.save_loss_scale(HOLDERS[framework]("mixed_float16", config))
    assert polyamp.save_loss_scale(polyamp.load_loss_scale(HOLDERS[framework]("mixed_float16", config), saved)) == saved
