"""Other libraries' loss scales, each driven as its users drive it: new, or continued from what `LossScale` wrote."""

import math
from typing import Any

import flax.serialization
import flax.training.dynamic_scale
import jax
import jax.numpy as jnp
import jmp
import keras
import numpy as np
import tensorflow as tf
import torch

from support.loss_scale_cases import DeepSpeed

Saved = dict[str, Any]


class Torch:
    def __init__(
        self,
        saved: Saved | None = None,
        init: float = 2.0**16,
        interval: int = 2000,
        growth: float = 2.0,
        backoff: float = 0.5,
    ) -> None:
        self.scaler = torch.amp.GradScaler(
            "cpu", init_scale=init, growth_interval=interval, growth_factor=growth, backoff_factor=backoff
        )
        if saved is not None:
            self.scaler.load_state_dict(saved)
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
    def __init__(self, saved: Saved | None = None, init: float = 2.0**15, interval: int = 2000) -> None:
        inner = keras.optimizers.SGD(0.0)
        self.optimizer = keras.optimizers.LossScaleOptimizer(inner, initial_scale=init, dynamic_growth_steps=interval)
        self.optimizer.build([keras.Variable(np.zeros(2, np.float32))])
        for name, value in (saved or {}).items():
            getattr(self.optimizer, name).assign(value)

    def step(self, finite: bool) -> float:
        self.optimizer.apply([keras.ops.array([1.0, 1.0 if finite else math.nan])])
        return float(keras.ops.convert_to_tensor(self.optimizer.dynamic_scale))

    def saved(self) -> list[Any]:
        return [self.optimizer]


class TensorFlow:
    def __init__(
        self, saved: Saved | None = None, init: float = 2.0**15, interval: int = 2000, growth: float = 2.0
    ) -> None:
        self.scale = tf.compat.v1.mixed_precision.DynamicLossScale(init, interval, growth)
        variables = {name: variable for (name, _), variable in self.scale._weights.items()}
        assert saved is None or saved.keys() == variables.keys()
        for name, value in (saved or {}).items():
            variables[name].assign(value)

    def step(self, finite: bool) -> float:
        self.scale.update([tf.constant([1.0, 1.0 if finite else -math.inf])])
        return float(self.scale())

    def saved(self) -> list[Any]:
        return [{name: variable.numpy() for (name, _), variable in self.scale._weights.items()}]


class Flax:
    def __init__(self, saved: Saved | None = None, **settings: Any) -> None:
        names = {"init": "scale", "interval": "growth_interval", "growth": "growth_factor", "backoff": "backoff_factor"}
        start = flax.training.dynamic_scale.DynamicScale(**{names[name]: value for name, value in settings.items()})
        state = start if saved is None else flax.serialization.from_state_dict(start, saved)
        self.state = state.replace(scale=jnp.float32(state.scale), fin_steps=jnp.int32(state.fin_steps))
        self._step = jax.jit(lambda state, slope: state.value_and_grad(lambda x: x * slope)(jnp.float32(0.0))[0])

    def step(self, finite: bool) -> float:
        self.state = self._step(self.state, 1.0 if finite else jnp.nan)
        return float(self.state.scale)

    def saved(self) -> list[Any]:
        return [self.state, {"scale": self.state.scale, "fin_steps": self.state.fin_steps}]


class Jmp:
    def __init__(
        self,
        saved: Saved | None = None,
        init: float = 2.0**15,
        interval: int = 2000,
        growth: float = 2.0,
        min: float = 1.0,
    ) -> None:
        new = {"loss_scale": init, "counter": 0, "period": interval, "factor": growth, "min_loss_scale": min}
        values = new if saved is None else saved
        scales = {name: jnp.float32(values[name]) for name in ("loss_scale", "min_loss_scale")}
        self.scale = jmp.DynamicLossScale(**{**values, **scales, "counter": jnp.int32(values["counter"])})

    def step(self, finite: bool) -> float:
        self.scale = self.scale.adjust(jnp.bool_(finite))
        return float(self.scale.loss_scale)

    def saved(self) -> list[Any]:
        return [self.scale, {"loss_scale": self.scale.loss_scale, "counter": self.scale.counter}]


class Megatron:
    """DynamicGradScaler of megatron/core/optimizer/grad_scaler.py, 0.16, on the CPU."""

    def __init__(self, saved: Saved, interval: int) -> None:
        self.interval = interval
        assert saved.keys() == {"scale", "growth_tracker", "hysteresis_tracker"}
        self.scale, self.growth, self.left = saved["scale"], saved["growth_tracker"], saved["hysteresis_tracker"]

    def step(self, finite: bool) -> float:
        if not finite:
            self.growth = 0
            self.left -= 1
            if self.left <= 0:
                self.scale = max(self.scale * 0.5, 1.0)
        else:
            self.growth += 1
            if self.growth == self.interval:
                self.growth, self.left, self.scale = 0, 2, self.scale * 2
        return float(self.scale)


class Apex:
    """LossScaler.update_scale of apex/amp/scaler.py at b82c6bd."""

    def __init__(self, saved: Saved, interval: int) -> None:
        self.interval = interval
        assert saved.keys() == {"loss_scaler0"}
        assert saved["loss_scaler0"].keys() == {"loss_scale", "unskipped"}
        self.scale, self.unskipped = saved["loss_scaler0"].values()

    def step(self, finite: bool) -> float:
        if finite:
            self.unskipped += 1
        else:
            self.scale, self.unskipped = self.scale / 2, 0
        if self.unskipped == self.interval:
            self.scale, self.unskipped = min(2.0**24, self.scale * 2), 0
        return float(self.scale)


INSTALLED: dict[str, Any] = {"torch": Torch, "keras": Keras, "tensorflow": TensorFlow, "flax": Flax, "jmp": Jmp}
"""The libraries themselves."""

ALL = {**INSTALLED, "deepspeed": DeepSpeed, "megatron": Megatron, "apex": Apex}
"""Also the rules of those that are not installed, copied from their sources."""
