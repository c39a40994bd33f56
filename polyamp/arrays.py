"""What a step does to gradients, master weights and the loss scale, once for the frameworks that spell it alike.

The functions take the framework's namespace ``xp``, which has ``all``, ``cast``, ``equal``, ``isfinite``, ``stack``,
``where`` and other functions under NumPy's or Keras' names. They work eagerly and in graphs that are being built. A
sparse gradient is an object with ``values``, ``indices`` and ``dense_shape``; only its stored rows are computed with.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from polyamp.agreement import OfPolicy, report_disagreement
from polyamp.errors import no_loss
from polyamp.policies import Policy
from polyamp.provenance import ScaledLosses
from polyamp.scale import advance, can_divide
from polyamp.settings import LossScale, LossScaleState
from polyamp.skips import report_limits, report_nonfinite_loss


def map_values(function: Callable[[Any], Any], grad: Any) -> Any:
    """Apply a function to a gradient's values: all of a dense one, the stored rows of a sparse one; None stays None."""
    if hasattr(grad, "dense_shape"):
        return type(grad)(values=function(grad.values), indices=grad.indices, dense_shape=grad.dense_shape)
    return None if grad is None else function(grad)


def values_of(grads: Sequence[Any]) -> list[Any]:
    """Return the values of the gradients that are not None."""
    return [grad.values if hasattr(grad, "dense_shape") else grad for grad in grads if grad is not None]


def has_sixteen_bits(value: Any) -> bool:
    """Return whether a tensor or variable is stored in a 16-bit floating-point format."""
    return "float16" in str(value.dtype)  # bfloat16 too


def widened(xp: Any, value: Any) -> Any:
    """Return a tensor in float32 if it has 16 bits."""
    return xp.cast(value, "float32") if has_sixteen_bits(value) else value


def divided(xp: Any, grads: Sequence[Any], divisor: Any) -> list[Any]:
    """Return every gradient in float32 or wider, divided by a scalar."""

    def divide(values: Any) -> Any:
        wide = widened(xp, values)
        return wide / xp.cast(divisor, wide.dtype)

    return [map_values(divide, grad) for grad in grads]


def with_masters(variables: Sequence[Any], trained: Sequence[Any]) -> list[tuple[Any, Any]]:
    """Return the variables that have master weights, each with the master weight that is trained in its place."""
    return [(one, other) for one, other in zip(variables, trained, strict=True) if one is not other]


def followed(xp: Any, value: Any, master: Any) -> Any:
    """Return a master weight, with the elements that were assigned to its variable since the last rounding."""
    return xp.where(xp.equal(xp.cast(master, value.dtype), value), master, xp.cast(value, "float32"))


def select(xp: Any, counter: str, condition: Any, if_true: Any, if_false: Any) -> Any:
    """Return values chosen by a condition; a number gets the other's type if that is a tensor, else ``counter``."""
    dtype = next((value.dtype for value in (if_true, if_false) if xp.is_tensor(value)), counter)
    return xp.where(condition, xp.cast(if_true, dtype), xp.cast(if_false, dtype))


def all_finite(xp: Any, grads: Sequence[Any]) -> Any:
    """Return whether all gradients are finite; scalar bool."""
    return xp.all(xp.stack([xp.all(xp.isfinite(values)) for values in values_of(grads)] or [True]))


class Stored(NamedTuple):
    """A loss-scale state in few variables, since TensorFlow keeps 35 KiB of each for good; or their values."""

    dynamic_scale: Any  # Keras' class has variables with the names of these two
    step_counter: Any
    counters: Any  # all other counters, in the order of `LossScaleState`
    overflow_scale: Any

    @classmethod
    def of(cls, state: LossScaleState) -> Stored:
        """Return the values to store."""
        scale, good_steps, *counters, overflow_scale = state
        return cls(scale, good_steps, counters, overflow_scale)


class ArrayScaler(OfPolicy):
    """A loss scale in variables, and its application to tensors of the namespace ``xp``.

    A framework's subclass adds what differs: variables, and what is known of a tensor and of the code around it.
    """

    xp: Any
    counter = "int"  # the type of counters

    def __init__(self, settings: LossScale, add_variable: Callable[[str, Any], Any], policy: Policy | None) -> None:
        self.settings = settings.in_float32()
        self.policy = policy
        self.losses = ScaledLosses()
        self.stored = Stored(*map(add_variable, Stored._fields, Stored.of(self.settings.initial_state())))

    def value(self, variable: Any) -> Any:
        """Return the tensor that a variable holds now."""
        raise NotImplementedError

    def assign(self, variable: Any, value: Any) -> Any:
        """Assign a tensor or numbers to a variable; return the operation to run, if there is one."""
        raise NotImplementedError

    def platform(self, tensor: Any) -> str | None:
        """Return where a tensor is (``"cpu"``, ``"gpu"``, ...); None inside traced functions."""
        raise NotImplementedError

    def place(self) -> Any:
        """Return what is being traced around the loss scale; None in eager code."""
        raise NotImplementedError

    def is_scaled(self, grads: Sequence[Any]) -> bool | None:
        """Return whether gradients are those of a loss times the loss scale; None if that is not known."""
        raise NotImplementedError

    def is_one_of_several(self) -> bool:
        """Return whether this scaler's state is one of several, as in replicas."""
        raise NotImplementedError

    @property
    def state(self) -> LossScaleState:
        """The scalars as tensors; inside traced functions, those of the trace."""
        return self.tensors()

    def tensors(self) -> LossScaleState:
        """Return the scalars as tensors; unlike `state`, never record that they were read."""
        scale, good_steps, counters, overflow_scale = map(self.value, self.stored)
        return LossScaleState(*[scale, good_steps, *self.xp.unstack(counters), overflow_scale])

    @property
    def host_state(self) -> LossScaleState:
        """The scalars as Python numbers. Only outside traced functions; reading them waits for the device."""
        scale, good_steps, counters, overflow_scale = map(self.value, self.stored)
        scale = float(scale)  # inside traced functions this is the framework's error
        counters = self.xp.convert_to_numpy(counters).tolist()
        return LossScaleState(*[scale, int(good_steps), *counters, float(overflow_scale)])

    def scale(self, loss: Any) -> Any:
        """Return the loss in float32 (float64 stays) times the loss scale.

        A loss that is inf or NaN is scaled by inf, so that the step is skipped whatever the gradients are.

        Raises:
            InvalidTypeError: the loss is not a floating-point tensor.
            NonFiniteLossError: the loss is inf or NaN under ``nonfinite_loss="raise"``, as an eager tensor on the CPU.

        Warns:
            PolyampWarning: the loss is inf or NaN, as an eager tensor on the CPU; or the scaler was made for another
                format than that of the rewritten function or the region of this call.
        """
        report_disagreement(self.policy, None, self.settings)
        if not self.settings.check:
            return loss
        xp, tensor = self.xp, self._floating(loss)
        finite = xp.all(xp.abs(tensor) < float("inf"))  # false for NaN; in a graph, `isfinite` marks the update
        platform, scale = self.platform(tensor), self.value(self.stored.dynamic_scale)
        if platform == "cpu" and not finite:
            shown = xp.convert_to_numpy(xp.cast(tensor, "float32"))
            report_nonfinite_loss(self.settings, compute=self.compute, found=shown)
        known = None if self.is_one_of_several() else xp.copy(scale)
        self.losses.note(self.place(), known, finite, is_traced=platform is None)
        wide = widened(xp, tensor)
        return wide * xp.cast(xp.where(finite, scale, xp.cast(float("inf"), "float32")), wide.dtype)

    def note_by_hand(self) -> None:
        """Record that the scale was read, perhaps to multiply a loss by it."""
        self.losses.note_by_hand(self.place())

    def are_finite(self, grads: Sequence[Any]) -> Any:
        """Return whether gradients are finite and can be unscaled; scalar bool."""
        return self.xp.logical_and(all_finite(self.xp, grads), can_divide(self.value(self.stored.dynamic_scale)))

    def divide(self, grads: Sequence[Any], variables: Sequence[Any] = ()) -> list[Any]:
        """Return gradients, of ``variables`` if known, divided by their loss's scale, in float32 or wider."""
        if not self.settings.check:
            return list(grads)
        scale = self.value(self.stored.dynamic_scale)
        if self.settings.scales:
            scale = self.losses.claim(self.place(), scale, self.is_scaled(grads), variables)
        return divided(self.xp, grads, scale)

    def clip(self, grads: Sequence[Any], limit: float, total: Sequence[Any]) -> list[Any]:
        """Return gradients scaled down so that their sums over replicas, ``total``, have an L2 norm up to ``limit``."""
        squares = [self.xp.sum(self.xp.square(self.xp.cast(values, "float32"))) for values in values_of(total)]
        excess = self.xp.maximum(self.xp.sqrt(self.add(squares)), limit) / limit
        return divided(self.xp, grads, excess)

    def add(self, scalars: Sequence[Any]) -> Any:
        """Return the sum of scalars."""
        return self.xp.sum(self.xp.stack(scalars))

    def advance(self, finite: Any) -> list[Any]:
        """Advance the state after a step; on the CPU, outside traced functions, also report the limits.

        Return the operations that do this, where there are any.
        """
        if self.platform(finite) != "cpu":
            choose = functools.partial(select, self.xp, self.counter)
            after = Stored.of(advance(self.settings, self.tensors(), finite, choose))
            counters = self.xp.stack([self.xp.cast(one, self.stored.counters.dtype) for one in after.counters])
            return self._assign(after._replace(counters=counters))
        before = self.host_state  # Python's arithmetic takes a hundredth of the time of eager operations
        state = advance(self.settings, before, bool(finite))
        operations = self._assign(Stored.of(state), Stored.of(before))
        report_limits(self.settings, state)
        return operations

    def load_loss_scale(self, saved: Mapping[str, Any]) -> None:
        """Continue from a state that `polyamp.save_loss_scale` returned, in any framework. Outside traced functions.

        Raises:
            StateError: it is of another kind, lacks fields, or is outside the settings; nothing is changed.
        """
        self._assign(Stored.of(self.settings.from_state_dict(saved)))

    def follow(self, variables: Sequence[Any], trained: Sequence[Any]) -> list[Any]:
        """Copy to the master weights what was assigned to variables since they were last rounded."""
        return [
            self.assign(master, followed(self.xp, self.value(one), self.value(master)))
            for one, master in with_masters(variables, trained)
        ]

    def round_into(self, variables: Sequence[Any], trained: Sequence[Any]) -> list[Any]:
        """Assign the master weights, rounded, to their variables; return the results of the assignments."""
        pairs = with_masters(variables, trained)
        return [self.assign(one, self.xp.cast(self.value(master), one.dtype)) for one, master in pairs]

    def _assign(self, state: Stored, before: Stored | None = None) -> list[Any]:
        """Assign the values of a state to the variables; if ``before`` is given, only those that differ."""
        triples = zip(self.stored, state, before or [None] * len(state), strict=True)
        return [self.assign(variable, value) for variable, value, known in triples if known is None or value != known]

    def _floating(self, loss: Any) -> Any:
        if isinstance(loss, float) or (self.xp.is_tensor(loss) and "float" in str(loss.dtype)):
            return self.xp.convert_to_tensor(loss)
        raise no_loss(loss, allowed="a floating-point tensor")
