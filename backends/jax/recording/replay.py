"""Evaluate a traced step once more and count every tensor that it computes.

For example, ``jax.value_and_grad`` of a loss ``(x @ w).sum()`` has the equations ``dot_general``, ``reduce_sum``, and
those of the backward pass, which JAX marks as transposed. The replay runs them one by one. It records the results of
the first two as activations, those of the backward pass as gradients, and what the optimizer gets as gradients of
parameters.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from typing import Any

import jax.numpy as jnp
import numpy as np

from polyamp.backends.jax import unstable
from polyamp.backends.jax.operations import canonical
from polyamp.backends.jax.recording.counting import Sample, sample
from polyamp.backends.jax.recording.handlers import HANDLERS
from polyamp.backends.jax.recording.values import Evaluated, Origin, Place, Record
from polyamp.backends.jax.recording.widening import bound_widened, is_low, widened
from polyamp.backends.jax.steps import marks
from polyamp.diagnosis.recording import ACTIVATION, GRADIENT, PARAMETER, Kind
from polyamp.formats import FORMATS
from polyamp.operations import OPERATIONS
from polyamp.policies import Policy
from polyamp.rules import decide

_NOT_NEEDED = Evaluated(None)


class Replay:
    """One evaluation, inside ``jax.jit``."""

    def __init__(self, policy: Policy, *, widened: bool) -> None:
        self.policy, self.widened = policy, widened
        self.records: list[Record] = []
        self._numbers = count()
        self._seen: dict[Any, Any] = {}  # by id; keeps the array alive, so that no other one gets the same id
        self._turned_back = False

    def run(
        self,
        closed: Any,
        values: Sequence[Evaluated],
        place: Place,
        wanted: Sequence[bool] | None = None,
        constants: Sequence[Any] | None = None,
    ) -> list[Evaluated]:
        """Return the outputs of a jaxpr; those that are not wanted may be missing."""
        jaxpr, own_constants = unstable.opened(closed)
        constants = own_constants if constants is None else constants
        known = {var: self.given(array, var) for var, array in zip(jaxpr.constvars, constants, strict=True)}
        known.update(zip(jaxpr.invars, values, strict=True))

        def read(atom: Any) -> Evaluated:
            if isinstance(atom, unstable.Literal):
                return self.given(np.asarray(atom.val, unstable.dtype_in(atom)), atom)
            return known.get(atom, _NOT_NEEDED)

        for equation, uses in unstable.live(closed, [True] * len(jaxpr.outvars) if wanted is None else wanted):
            with unstable.settings_of(equation):
                results = self._equation(equation, list(map(read, equation.invars)), place.of(equation), uses)
            known.update(zip(equation.outvars, results, strict=True))
        return list(map(read, jaxpr.outvars))

    def given(self, array: Any, variable: Any, *, scaled: bool = False) -> Evaluated:
        """Return a constant or an input, in the dtype that it has in this evaluation."""
        return Evaluated(widened(array, unstable.dtype_in(variable)) if self.widened else array, scaled=scaled)

    @contextmanager
    def collecting(self) -> Iterator[list[Record]]:
        """Return a context that collects the records of a part of the program separately."""
        outer, self.records = self.records, []
        try:
            yield self.records
        finally:
            self.records = outer

    def adopt(self, records: Sequence[Record], samples: Sequence[Sample]) -> None:
        """Add the records of a part, with the samples that it returned."""
        self.records += [record._replace(sample=own) for record, own in zip(records, samples, strict=True)]

    def named(self, value: Evaluated, name: str, place: Place) -> None:
        """Record a value to which the program gave a name, if `marks` gave it to a parameter's gradient."""
        parameter = marks.marked(name)
        if parameter is not None:
            self._parameter(value, parameter, place, named=True)

    def leave(self, values: Sequence[Evaluated], place: Place) -> list[Evaluated]:
        """Record as gradients the values of the backward pass that leave the step or go to the optimizer."""
        for value in values:
            if value.backward and id(value.array) not in self._seen:
                self._seen[id(value.array)] = value.array
                self._parameter(value, "", place, named=False)
        return [value._replace(backward=False) for value in values]

    def _equation(self, equation: Any, values: list[Evaluated], place: Place, uses: Sequence[bool]) -> list[Evaluated]:
        self._turned_back = self._turned_back or place.backward
        if self._is_after(place):
            values = self.leave(values, place)
        handler = HANDLERS.get(equation.primitive.name)
        results = handler(self, equation, values, place, uses) if handler else None
        return self._operation(equation, values, place, uses) if results is None else results

    def _is_after(self, place: Place) -> bool:
        """Return whether the gradients are finished: later equations outside a derivative belong to the optimizer."""
        return self._turned_back and not place.differentiated

    def _operation(self, equation: Any, values: list[Evaluated], place: Place, uses: Sequence[bool]) -> list[Evaluated]:
        arrays = [value.array for value in values]
        results = bound_widened(equation, arrays) if self.widened else unstable.bound(equation, arrays)
        name, native = canonical(equation.primitive.name, equation.params), equation.primitive.name
        about = Evaluated(None, place.backward, any(value.scaled for value in values))
        if not _computes(name):
            source = next((value for value in values if value.origin), _NOT_NEEDED)
            moved = [about._replace(array=array, origin=source.origin) for array in results]
            return [self._rounded(source, moved[0], equation, place)] if name == "cast" else moved
        path = "/".join(filter(None, (place.path, unstable.library_function(equation))))
        op_class = decide(self.policy.rules, name, path).op_class
        origins = [Origin(name, native, path, op_class, _format(variable)) for variable in equation.outvars]
        values = [about._replace(array=array, origin=own) for array, own in zip(results, origins, strict=True)]
        return [self._observed(value, place) if used else value for value, used in zip(values, uses, strict=True)]

    def _rounded(self, source: Evaluated, result: Evaluated, equation: Any, place: Place) -> Evaluated:
        """Record a float32 value that is cast to 16 bits as its own tensor: there it can overflow or be lost."""
        variable, origin = equation.outvars[0], source.origin
        if not is_low(unstable.dtype_in(variable)) or origin is None or source.backward != place.backward:
            return result
        narrow = origin._replace(format=_format(variable), number=None)
        key = (id(source.array), narrow.format)
        if narrow.format == origin.format or key in self._seen:
            return result._replace(origin=narrow)
        self._seen[key] = source.array
        return self._observed(result._replace(origin=narrow), place)

    def _observed(self, value: Evaluated, place: Place) -> Evaluated:
        """Record a tensor that the step computed, unless it does not belong in the recording."""
        origin, is_scaled_loss = value.origin, value.scaled and not place.backward
        if (
            is_scaled_loss
            or place.again
            or self._is_after(place)
            or not (origin and origin.format and value.array.size)
        ):
            return value
        origin = origin._replace(number=next(self._numbers))
        self._add(value, place, origin, GRADIENT if place.backward else ACTIVATION)
        return value._replace(origin=origin)

    def _parameter(self, value: Evaluated, name: str, place: Place, *, named: bool) -> None:
        origin = value.origin or Origin("", "", "", "keep", value.array.dtype.name)
        own = origin._replace(name=name, where="", number=next(self._numbers))
        self._add(value, place, own, PARAMETER, replaces=origin.number, named=named)

    def _add(self, value: Evaluated, place: Place, origin: Origin, kind: Kind, **about: Any) -> None:
        array = jnp.asarray(value.array)
        self.records.append(
            Record(kind, origin, tuple(array.shape), sample(array, place.turns), scaled=value.scaled, **about)
        )


def _computes(name: str) -> bool:
    """Return whether an operation computes new numbers, instead of moving old ones or changing their format."""
    return name not in OPERATIONS or OPERATIONS[name].op_class not in ("neutral", "keep") or name == "custom_call"


def _format(variable: Any) -> str:
    """Return the format of a floating-point variable; empty for any other."""
    dtype = unstable.dtype_in(variable)
    return dtype.name if dtype is not None and dtype.name in FORMATS else ""
