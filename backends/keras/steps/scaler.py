"""The loss scale of one optimizer, in Keras variables that `polyamp.advance` updates."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
from keras import ops
from keras.backend import standardize_dtype

from polyamp.backends.keras.backend import platform_of, value_of
from polyamp.backends.keras.casting import is_sixteen_bit
from polyamp.backends.keras.steps.gradients import unscaled
from polyamp.errors import NONFINITE_LOSS, no_loss
from polyamp.policies import report_missing_scale
from polyamp.scale import LossScale, LossScaleState, advance, on_host, report_limits, report_nonfinite_loss

_UNKNOWN = LossScaleState(*[None] * len(LossScaleState._fields))
_NAMES = (  # the first two are Keras' names, for the variables that its LossScaleOptimizer has too
    "dynamic_scale",
    "step_counter",
    *LossScaleState._fields[2:],
)


class LossScaler:
    """The state of a `LossScale` in variables, and its application to tensors."""

    def __init__(self, settings: LossScale, add_variable: Callable[..., Any]) -> None:
        self.settings = settings.in_float32()
        self.compute: str | None = None
        self.has_bad_loss = False

        def add(name: str, value: float) -> Any:
            # Keras' "int" has 32 bits on JAX and 64 elsewhere: TensorFlow keeps 32-bit integers in host memory, where
            # programs that XLA compiled for a GPU cannot reach them.
            dtype = "float32" if isinstance(value, float) else "int"
            initializer = keras.initializers.Constant(value)
            # Aggregation would merge the replicas' values; they compute the same ones and do not need it.
            return add_variable((), initializer, dtype, aggregation="none", name=name)

        self.variables = LossScaleState(*map(add, _NAMES, self.settings.initial_state()))

    @property
    def state(self) -> LossScaleState:
        """The scalars as tensors; inside traced functions, those of the trace."""
        return LossScaleState(*map(value_of, self.variables))

    @property
    def counters(self) -> tuple[Any, ...]:
        """The variables that do not affect the scale. Older files do not have them."""
        return tuple(getattr(self.variables, name) for name in LossScaleState._field_defaults)

    @property
    def host_state(self) -> LossScaleState:
        """The scalars as Python numbers. Waits for the device."""
        return on_host(self.state)

    def scale(self, loss: Any) -> Any:
        """Return a loss in float32 (float64 stays) times the loss scale."""
        # A loss that is inf or NaN is multiplied by inf, so that its gradients are not finite and the step is skipped.
        report_missing_scale(self.settings, self.compute, stacklevel=4)
        if not self.settings.check:
            return loss
        tensor = _floating(loss)
        finite = ops.all(ops.abs(tensor) < float("inf"))  # false for NaN; in a graph, `isfinite` marks the update
        self.has_bad_loss = False
        if platform_of(tensor) == "cpu" and not finite:
            self.has_bad_loss = True
            shown = ops.convert_to_numpy(ops.cast(tensor, "float32"))
            report_nonfinite_loss(self.settings, compute=self.compute, found=shown, stacklevel=4)
        wide = ops.cast(tensor, "float32") if is_sixteen_bit(tensor) else tensor
        scale = value_of(self.variables.scale)
        return wide * ops.cast(ops.where(finite, scale, ops.full_like(scale, float("inf"))), wide.dtype)

    def why(self) -> str:
        """Return the reason why a step was skipped, if it is known; else an empty string."""
        return NONFINITE_LOSS if self.has_bad_loss else ""

    def unscale(self, grads: Sequence[Any]) -> list[Any]:
        """Return gradients divided by the loss scale, in float32 or wider."""
        if not self.settings.check:
            return list(grads)
        return unscaled(grads, value_of(self.variables.scale), self.settings.max)

    def advance(self, finite: Any) -> None:
        """Advance the state after a step. On the CPU, outside traced functions, also report the limits."""
        if platform_of(finite) != "cpu":
            self._assign(advance(self.settings, self.state, finite, _where))
            return
        before = self.host_state  # Python's arithmetic takes a hundredth of the time of eager operations
        state = advance(self.settings, before, bool(finite))
        self._assign(state, before)
        report_limits(self.settings, state)

    def report(self) -> LossScaleState:
        """Report if the scale cannot help any more; return the state as Python numbers. Waits for the device."""
        state = self.host_state
        report_limits(self.settings, state)
        return state

    def load(self, saved: Mapping[str, Any]) -> None:
        """Continue from the result of `LossScale.to_state_dict`, which documents the errors."""
        self._assign(self.settings.from_state_dict(saved))

    def _assign(self, state: LossScaleState, known: LossScaleState = _UNKNOWN) -> None:
        """Assign the values that differ from the known ones."""
        for variable, value, old in zip(self.variables, state, known, strict=True):
            if value != old:
                variable.assign(value)


def skipped(before: Sequence[Any], after: Sequence[Any]) -> Any:
    """Return whether any of several counts of skipped steps has grown; scalar bool."""
    return ops.any(ops.stack([new > old for old, new in zip(before, after, strict=True)]))


def _where(condition: Any, if_true: Any, if_false: Any) -> Any:
    """Select values; a Python number gets the type of the other one, whatever ``keras.config.floatx()`` is."""
    typed = next((value for value in (if_true, if_false) if ops.is_tensor(value)), None)
    dtype = "int" if typed is None else typed.dtype
    return ops.where(condition, ops.cast(if_true, dtype), ops.cast(if_false, dtype))


def _floating(loss: Any) -> Any:
    tensor = loss if ops.is_tensor(loss) or isinstance(loss, float) else None
    if tensor is not None:
        tensor = ops.convert_to_tensor(tensor)
        if "float" in standardize_dtype(tensor.dtype):
            return tensor
    shown = type(loss).__name__ if tensor is None else f"a tensor of {standardize_dtype(tensor.dtype)}"
    raise no_loss(shown, allowed="a floating-point tensor of Keras' backend")
