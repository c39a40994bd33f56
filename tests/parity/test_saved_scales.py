"""Loss scales that real libraries saved: read in mid-run, and continued step by step next to the library itself."""

from __future__ import annotations

import math
from typing import Any

import flax.training.dynamic_scale
import jax.numpy as jnp
import jmp
import keras
import numpy as np
import pytest
import torch

from polyamp import LossScale
from polyamp.testing import overflow_trace
from support.loss_scale_cases import walk

INTERVAL = 3


class Torch:
    def __init__(self) -> None:
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16, growth_interval=INTERVAL)
        self.param = torch.zeros(2, requires_grad=True)
        self.optimizer = torch.optim.SGD([self.param], lr=0.1)

    def step(self, finite: bool) -> float:
        self.scaler.scale(torch.ones(()))
        self.param.grad = torch.tensor([1.0, 1.0 if finite else math.inf])
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return float(self.scaler.get_scale())

    def saved(self) -> list[Any]:
        state = self.scaler.state_dict()
        return [state, {"MixedPrecision": state, "epoch": 3}, {"scaler": state}]


class Keras:
    def __init__(self) -> None:
        inner = keras.optimizers.SGD(0.0)
        self.optimizer = keras.optimizers.LossScaleOptimizer(inner, dynamic_growth_steps=INTERVAL)
        self.optimizer.build([keras.Variable(np.zeros(2, np.float32))])

    def step(self, finite: bool) -> float:
        self.optimizer.apply([keras.ops.array([1.0, 1.0 if finite else math.nan])])
        return float(keras.ops.convert_to_tensor(self.optimizer.dynamic_scale))

    def saved(self) -> list[Any]:
        return [self.optimizer]


class Flax:
    def __init__(self) -> None:
        start = flax.training.dynamic_scale.DynamicScale(growth_interval=INTERVAL)
        self.state = start.replace(scale=jnp.float32(start.scale), fin_steps=jnp.int32(0))

    def step(self, finite: bool) -> float:
        slope = 1.0 if finite else jnp.nan
        self.state = self.state.value_and_grad(lambda x: x * slope)(jnp.float32(0.0))[0]
        return float(self.state.scale)

    def saved(self) -> list[Any]:
        return [self.state, {"scale": self.state.scale, "fin_steps": self.state.fin_steps}]


class Jmp:
    def __init__(self) -> None:
        self.scale = jmp.DynamicLossScale(jnp.float32(2.0**15), period=INTERVAL)

    def step(self, finite: bool) -> float:
        self.scale = self.scale.adjust(jnp.bool_(finite))
        return float(self.scale.loss_scale)

    def saved(self) -> list[Any]:
        return [self.scale, {"loss_scale": self.scale.loss_scale, "counter": self.scale.counter}]


LIBRARIES = {"torch": Torch, "keras": Keras, "flax": Flax, "jmp": Jmp}


@pytest.mark.parametrize("steps", [0, 1, 2, 5, 11])
@pytest.mark.parametrize("name", LIBRARIES)
def test_a_library_s_scale_goes_on_as_the_library_would(name: str, steps: int) -> None:
    library: Any = LIBRARIES[name]()
    trace = overflow_trace(steps, 30, 0.3)
    for finite in trace[:steps]:
        library.step(finite)
    config = LossScale.like(name, interval=INTERVAL)
    states = [config.from_state_dict(saved) for saved in library.saved()]
    theirs = [library.step(finite) for finite in trace[steps:]]
    for state in states:
        assert [after.scale for after in walk(config, trace[steps:], state)] == theirs
