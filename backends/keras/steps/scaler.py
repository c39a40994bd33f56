"""The loss scale of one optimizer, in Keras variables that `polyamp.advance` updates, and which gradients it divided.

The method's results may be clipped or summed before they are applied: then they are other tensors. So three things are
recorded of a call: its input tensors, its results, and its place: eager code, or a certain trace.

For example, ``apply`` gets ``ops.minimum(g, 0.5)`` in the trace in which ``get_unscaled_gradients`` returned ``g``. It
is not one of the recorded tensors, but the place is the same, so it counts as unscaled.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import keras
from keras import ops
from keras.backend import standardize_dtype

from polyamp.backends.keras.backend import platform_of, traces_around, value_of
from polyamp.backends.keras.casting import is_sixteen_bit
from polyamp.backends.keras.steps.gradients import unscaled
from polyamp.errors import NONFINITE_LOSS, UsageError, no_loss
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


_KEPT = 16  # most calls to keep whose gradients were never applied


@dataclass(frozen=True, eq=False)  # tuples would compare tensors
class _Call:
    """One call: its trace, weak references to its inputs and results, and its finite flag."""

    trace: int
    inputs: list[weakref.ref[Any]]
    results: list[weakref.ref[Any]]
    finite: Any


class UnscaledGradients:
    """The calls whose gradients are not applied yet."""

    def __init__(self) -> None:
        self._calls: list[_Call] = []

    def remember(self, inputs: Sequence[Any], results: Sequence[Any], finite: Any) -> None:
        """Record a call with its arguments, its results, and whether the arguments were finite; scalar bool."""
        self._calls.append(_Call(traces_around(results)[0], _weak(inputs), _weak(results), finite))
        del self._calls[:-_KEPT]

    def claim(self, grads: Sequence[Any]) -> Any:
        """Return whether the originals of unscaled gradients were finite; None if ``grads`` are scaled gradients."""
        for call in reversed(self._calls):
            is_scaled, is_plain = _shares(call.inputs, grads), _shares(call.results, grads)
            if is_scaled and is_plain:
                raise _mixed()
            if is_scaled or is_plain:
                self._calls.remove(call)
                return call.finite if is_plain else None
        return self._claim_by_place(grads)

    def _claim_by_place(self, grads: Sequence[Any]) -> Any:
        """Claim tensors that belong to no call: assume an unclaimed call in the same place, if there is one."""
        if not self._calls:
            return None
        around = traces_around(grads)
        here = [call for call in self._calls if call.trace in around]
        if not here:
            self._calls.clear()
            raise _elsewhere()
        self._calls.remove(here[-1])  # perhaps another replica's: all decide together if all are finite
        return here[-1].finite


def _weak(grads: Sequence[Any]) -> list[weakref.ref[Any]]:
    return [weakref.ref(grad) for grad in grads if grad is not None]


def _shares(references: Sequence[weakref.ref[Any]], grads: Sequence[Any]) -> bool:
    known = {id(alive) for reference in references if (alive := reference()) is not None}
    return any(id(grad) in known for grad in grads)


def _mixed() -> UsageError:
    return UsageError(
        "some of the gradients are scaled, and some are not",
        where="apply(grads)",
        found="both arguments and results of get_unscaled_gradients",
        allowed="gradients of one kind",
        fix="pass all of its results, or only its arguments",
    )


def _elsewhere() -> UsageError:
    return UsageError(
        "get_unscaled_gradients was called elsewhere, and its gradients were not applied there",
        where="apply(grads)",
        found="gradients of another function, or of eager code and a compiled function",
        allowed="unscaling and applying in one function, and neither inside a loop",
        fix="make both calls in that function, or neither: apply unscales by itself. To look at gradients, use "
        "optimizer.scaler.unscale(grads). That call is forgotten now",
    )
