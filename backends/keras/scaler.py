"""The parts of a wrapped Keras optimizer: the loss scale in variables, and the float32 masters that it trains.

In 16 bits, an update that is small compared to its weight is lost in rounding; in float32 it accumulates (Micikevicius
et al., "Mixed Precision Training", ICLR 2018, section 3.1).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
from keras import ops

from polyamp.arrays import ArrayScaler
from polyamp.backends.keras import native
from polyamp.backends.keras.native import value_of
from polyamp.backends.keras.unstable import is_mapped, layout_of
from polyamp.errors import InvalidValueError
from polyamp.policies import Policy
from polyamp.settings import LossScale, LossScaleState

SKIPPED = LossScaleState._fields.index("skipped") - LossScaleState._fields.index("hysteresis")
"""The place of the number of skipped steps in `polyamp.arrays.Stored.counters`."""


class LossScaler(ArrayScaler):
    """A loss scale in variables of an optimizer, on each of Keras' backends."""

    xp = ops

    def __init__(self, settings: LossScale, add_variable: Callable[..., Any], policy: Policy | None = None) -> None:
        def add(name: str, value: Any) -> Any:
            # Keras' "int" has 32 bits on JAX and 64 elsewhere: TensorFlow keeps 32-bit integers in host memory, where
            # programs that XLA compiled for a GPU cannot reach them.
            dtype = "float32" if isinstance(value, float) else "int"
            initializer = keras.initializers.Constant(value)
            # Aggregation would merge the replicas' values; they compute the same ones and do not need it.
            return add_variable(np.shape(value), initializer, dtype, aggregation="none", name=name)

        native.leave_unconverted()
        super().__init__(settings, add, policy)

    def value(self, variable: Any) -> Any:
        """Return the tensor that a variable holds now."""
        return value_of(variable)

    def assign(self, variable: Any, value: Any) -> None:
        """Assign a value to a variable."""
        variable.assign(value)

    def platform(self, tensor: Any) -> str | None:
        """Return where a tensor is; None inside traced functions."""
        return native.platform_of(tensor)

    def place(self) -> Any:
        """Return the graph, trace or replica around the loss scale; None if none."""
        return native.place_of(value_of(self.stored.dynamic_scale))

    def is_scaled(self, grads: Sequence[Any]) -> bool | None:
        """Return whether gradients are those of a scaled loss; None if that is not known."""
        return native.is_scaled(grads, self.stored.dynamic_scale)

    def is_one_of_several(self) -> bool:
        """Return whether the state is one of several, as in replicas and in pure functions on JAX."""
        return is_mapped(self.stored.dynamic_scale) or native.in_strategy()


def skipped(before: Sequence[Any], after: Sequence[Any]) -> Any:
    """Return whether any of several counts of skipped steps has grown; scalar bool."""
    return ops.any(ops.stack([new > old for old, new in zip(before, after, strict=True)]))


def master_of(variable: Any, add_variable: Callable[..., Any]) -> Any:
    """Return a new float32 variable with the value, the layout and the constraint of one with 16 bits."""
    master = add_variable(
        shape=variable.shape,
        dtype="float32",
        initializer=lambda shape, dtype: ops.cast(value_of(variable), dtype),
        layout=layout_of(variable),
        name=f"{variable.name.replace(':', '_')}_master",
    )
    master.constraint = getattr(variable, "constraint", None)
    return master


def settings_of(given: LossScale | float | None, initial_scale: float | None, growth_steps: int | None) -> LossScale:
    """Return the settings; each can be given in polyamp's way or as in `keras.optimizers.LossScaleOptimizer`."""
    init, interval = (given.init, given.interval) if isinstance(given, LossScale) else (given, None)
    named = (("initial_scale", initial_scale, init), ("dynamic_growth_steps", growth_steps, interval))
    for name, found, other in named:
        if None not in (found, other) and found != other:
            raise InvalidValueError(
                "two loss scales",
                where=f"LossScaledOptimizer(loss_scale=, {name}=)",
                found=f"{name}={found!r} together with {given!r}",
                allowed="one of the two, or the same value in both",
                fix=f"remove {name}: LossScale(init=, interval=) sets it",
            )
    if isinstance(given, LossScale):
        return given
    default = LossScale()
    init = next(one for one in (given, initial_scale, default.init) if one is not None)
    is_scale = isinstance(init, int | float) and 0 < init < float("inf")
    nearest = init if is_scale else default.init  # LossScale refuses values that are not scales
    interval = default.interval if growth_steps is None else growth_steps
    return LossScale(init=init, interval=interval, min=min(default.min, nearest), max=max(default.max, nearest))
