"""The parts of a wrapped Keras optimizer: the loss scale in variables, gradients, and the float32 masters they train.

In 16 bits, an update that is small compared to its weight is lost in rounding; in float32 it accumulates (Micikevicius
et al., "Mixed Precision Training", ICLR 2018, section 3.1).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
from keras import ops

from polyamp.agreement import report_disagreement
from polyamp.arrays import divided, followed, select, values_of, widened, with_masters
from polyamp.backends.keras.native import (
    in_strategy,
    is_scaled,
    leave_unconverted,
    place_of,
    platform_of,
    value_of,
)
from polyamp.backends.keras.unstable import is_mapped, layout_of
from polyamp.errors import InvalidValueError, no_loss
from polyamp.policies import Policy
from polyamp.scale import advance, can_divide, report_limits, report_nonfinite_loss
from polyamp.settings import LossScale, LossScaleState
from polyamp.unscaled import ScaledLosses


class Stored(NamedTuple):
    """A loss-scale state in variables, or their values. Few, because TensorFlow keeps 35 KiB of each for good."""

    dynamic_scale: Any  # Keras' class has variables with the names of these two
    step_counter: Any
    counters: Any  # all other counters, in the order of `LossScaleState`
    overflow_scale: Any

    @classmethod
    def of(cls, state: LossScaleState) -> Stored:
        """Return the values to store."""
        scale, good_steps, *counters, overflow_scale = state
        return cls(scale, good_steps, counters, overflow_scale)


SKIPPED = LossScaleState._fields.index("skipped") - LossScaleState._fields.index("hysteresis")
"""The place of the number of skipped steps in `Stored.counters`."""


class LossScaler:
    """The state of a `LossScale` in variables, and its application to tensors."""

    def __init__(self, settings: LossScale, add_variable: Callable[..., Any], policy: Policy | None = None) -> None:
        leave_unconverted()
        self.settings = settings.in_float32()
        self.policy = policy  # that the optimizer was wrapped for; None if nobody chose one
        self.losses = ScaledLosses()

        def add(name: str, value: Any) -> Any:
            # Keras' "int" has 32 bits on JAX and 64 elsewhere: TensorFlow keeps 32-bit integers in host memory, where
            # programs that XLA compiled for a GPU cannot reach them.
            dtype = "float32" if isinstance(value, float) else "int"
            initializer = keras.initializers.Constant(value)
            # Aggregation would merge the replicas' values; they compute the same ones and do not need it.
            return add_variable(np.shape(value), initializer, dtype, aggregation="none", name=name)

        self.variables = Stored(*map(add, Stored._fields, Stored.of(self.settings.initial_state())))

    @property
    def state(self) -> LossScaleState:
        """The scalars as tensors; inside traced functions, those of the trace."""
        scale, good_steps, counters, overflow_scale = map(value_of, self.variables)
        return LossScaleState(*[scale, good_steps, *ops.unstack(counters), overflow_scale])

    @property
    def compute(self) -> str | None:
        """The format that forward passes compute in, as far as the policy tells."""
        return None if self.policy is None else self.policy.compute

    @property
    def host_state(self) -> LossScaleState:
        """The scalars as Python numbers. Waits for the device."""
        scale, good_steps, counters, overflow_scale = map(value_of, self.variables)
        scale = float(scale)  # inside traced functions this is the framework's error
        counters = ops.convert_to_numpy(counters).tolist()
        return LossScaleState(*[scale, int(good_steps), *counters, float(overflow_scale)])

    def scale(self, loss: Any) -> Any:
        """Return a loss in float32 (float64 stays) times the loss scale."""
        # A loss that is inf or NaN is multiplied by inf, so that its gradients are not finite and the step is skipped.
        report_disagreement(self.policy, None, self.settings)
        if not self.settings.check:
            return loss
        tensor = _floating(loss)
        finite = ops.all(ops.abs(tensor) < float("inf"))  # false for NaN; in a graph, `isfinite` marks the update
        if platform_of(tensor) == "cpu" and not finite:
            shown = ops.convert_to_numpy(ops.cast(tensor, "float32"))
            report_nonfinite_loss(self.settings, compute=self.compute, found=shown)
        wide = widened(ops, tensor)
        scale = value_of(self.variables.dynamic_scale)
        is_one_of_several = (
            is_mapped(self.variables.dynamic_scale) or in_strategy()
        )  # states, as in pure functions on JAX
        is_traced = platform_of(tensor) is None
        known = None if is_one_of_several else ops.copy(scale)
        self.losses.note(place_of(scale), known, finite, is_traced=is_traced)
        return wide * ops.cast(ops.where(finite, scale, ops.full_like(scale, float("inf"))), wide.dtype)

    def note_by_hand(self) -> None:
        """Record that the scale was read, perhaps to multiply a loss by it."""
        self.losses.note_by_hand(place_of(value_of(self.variables.dynamic_scale)))

    def unscale(self, grads: Sequence[Any], variables: Sequence[Any] = ()) -> list[Any]:
        """Return gradients of variables divided by the loss scale, in float32 or wider."""
        if not self.settings.check:
            return list(grads)
        scale = value_of(self.variables.dynamic_scale)
        if self.settings.scales:
            known = is_scaled(grads, self.variables.dynamic_scale)
            scale = self.losses.claim(place_of(scale), scale, known, variables)
        return divided(ops, grads, scale)

    @property
    def can_divide(self) -> Any:
        """Whether gradients can be unscaled; scalar bool."""
        return can_divide(value_of(self.variables.dynamic_scale))

    def advance(self, finite: Any) -> None:
        """Advance the state after a step. On the CPU, outside traced functions, also report the limits."""
        if platform_of(finite) != "cpu":
            after = Stored.of(advance(self.settings, self.state, finite, functools.partial(select, ops, "int")))
            counters = ops.stack([ops.cast(one, self.variables.counters.dtype) for one in after.counters])
            self._assign(after._replace(counters=counters))
            return
        before = self.host_state  # Python's arithmetic takes a hundredth of the time of eager operations
        state = advance(self.settings, before, bool(finite))
        self._assign(Stored.of(state), Stored.of(before))
        report_limits(self.settings, state)

    def load(self, saved: Mapping[str, Any]) -> None:
        """Continue from the result of `LossScale.to_state_dict`, which documents the errors."""
        self._assign(Stored.of(self.settings.from_state_dict(saved)))

    def _assign(self, state: Stored, before: Stored | None = None) -> None:
        """Assign the values that differ from those before, if these are known."""
        for place, (variable, value) in enumerate(zip(self.variables, state, strict=True)):
            if before is None or value != before[place]:
                variable.assign(value)


def skipped(before: Sequence[Any], after: Sequence[Any]) -> Any:
    """Return whether any of several counts of skipped steps has grown; scalar bool."""
    return ops.any(ops.stack([new > old for old, new in zip(before, after, strict=True)]))


def _floating(loss: Any) -> Any:
    if isinstance(loss, float) or (ops.is_tensor(loss) and "float" in str(loss.dtype)):
        return ops.convert_to_tensor(loss)
    raise no_loss(loss, allowed="a floating-point tensor of Keras' backend")


def all_finite(grads: Sequence[Any]) -> Any:
    """Return whether all gradients are finite; scalar bool."""
    return ops.all(ops.stack([ops.all(ops.isfinite(values)) for values in values_of(grads)]))


def excess(grads: Sequence[Any], limit: float) -> Any:
    """Return by how much the gradients' global L2 norm exceeds ``limit``, as a factor of at least 1; float32."""
    squares = [ops.sum(ops.square(ops.cast(values, "float32"))) for values in values_of(grads)]
    norm = ops.sqrt(ops.sum(ops.stack(squares)))
    return ops.maximum(norm, limit) / limit


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


def follow_model(variables: Sequence[Any], trained: Sequence[Any]) -> None:
    """Copy a value assigned to a model's variable since the last rounding into its master weight."""
    for variable, master in with_masters(variables, trained):
        master.assign(followed(ops, value_of(variable), value_of(master)))


def round_into_model(variables: Sequence[Any], trained: Sequence[Any]) -> None:
    """Round the master weights into the model's variables."""
    for variable, master in with_masters(variables, trained):
        variable.assign(ops.cast(value_of(master), variable.dtype))


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
