"""Evaluate a traced step once more and count every tensor that it computes, those of inner programs too.

For example, ``jax.value_and_grad`` of a loss ``(x @ w).sum()`` has the equations ``dot_general``, ``reduce_sum``, and
those of the backward pass, which JAX marks as transposed. The replay runs them one by one. It records the results of
the first two as activations, those of the backward pass as gradients, and what the optimizer gets as gradients of
parameters. A loop returns the samples of all its iterations, and a ``cond`` those of all branches; the samples of
branches that did not run are empty.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

from polyamp.backends.jax import gradients, unstable
from polyamp.backends.jax.operations import canonical
from polyamp.backends.jax.recording.counting import Sample
from polyamp.backends.jax.recording.values import (
    Evaluated,
    Origin,
    Place,
    Record,
    bound_widened,
    is_low,
    sampled,
    samples_of,
    widened,
    with_samples,
)
from polyamp.diagnosis.recording import ACTIVATION, GRADIENT, PARAMETER, Kind
from polyamp.flow import decide
from polyamp.formats import FORMATS
from polyamp.operations import OPERATIONS
from polyamp.policies import Policy

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
        """Evaluate a jaxpr; return its outputs, with a placeholder for some that are not wanted."""
        jaxpr, own_constants = unstable.opened(closed)
        constants = own_constants if constants is None else constants
        known = {var: self.given(array, var) for var, array in zip(jaxpr.constvars, constants, strict=True)}
        known.update(zip(jaxpr.invars, values, strict=True))

        def read(atom: Any) -> Evaluated:
            if unstable.is_variable(atom):
                return known.get(atom, _NOT_NEEDED)
            return self.given(np.asarray(atom.val, unstable.dtype_in(atom)), atom)

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

    def leave(self, values: Sequence[Evaluated], place: Place) -> list[Evaluated]:
        """Record, as parameters' gradients, values that leave the backward pass; return all, marked as outside."""
        for value in values:
            if value.backward and id(value.array) not in self._seen:
                self._seen[id(value.array)] = value.array
                self.parameter(value, "", place, named=False)
        return [value._replace(backward=False) for value in values]

    def _equation(self, equation: Any, values: list[Evaluated], place: Place, uses: Sequence[bool]) -> list[Evaluated]:
        self._turned_back = self._turned_back or place.backward
        if self._is_after(place):
            values = self.leave(values, place)
        name = equation.primitive.name
        if name in _INLINED:
            return self.run(equation.params[_INLINED[name]], values, place, uses)
        results = HANDLERS[name](self, equation, values, place) if name in HANDLERS else None
        return self._operation(equation, values, place, uses) if results is None else results

    def _is_after(self, place: Place) -> bool:
        """Return whether a place is in the optimizer: after the backward pass, and not inside a derivative."""
        return self._turned_back and not place.differentiated

    def _operation(self, equation: Any, values: list[Evaluated], place: Place, uses: Sequence[bool]) -> list[Evaluated]:
        arrays = [value.array for value in values]
        results = bound_widened(equation, arrays) if self.widened else unstable.bound(equation, arrays)
        name = canonical(equation.primitive.name, equation.params)
        about = Evaluated(None, place.backward, any(value.scaled for value in values))
        if not _computes(name):
            source = next((value for value in values if value.origin), _NOT_NEEDED)
            moved = [about._replace(array=array, origin=source.origin) for array in results]
            return [self._rounded(source, moved[0], equation, place)] if name == "cast" else moved
        path = "/".join(filter(None, (place.path, unstable.library_function(equation))))
        op_class = decide(self.policy.rules, name, path).op_class
        origins = [Origin(name, path, op_class, _format(variable)) for variable in equation.outvars]
        values = [about._replace(array=array, origin=own) for array, own in zip(results, origins, strict=True)]
        return [self._observed(value, place) if used else value for value, used in zip(values, uses, strict=True)]

    def _rounded(self, source: Evaluated, result: Evaluated, equation: Any, place: Place) -> Evaluated:
        """Record the result of a cast to 16 bits, in which values can overflow or be lost, as a tensor of its own."""
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
        """Record a tensor that the step computed, unless recordings leave it out; return it."""
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

    def parameter(self, value: Evaluated, name: str, place: Place, *, named: bool) -> None:
        """Record a parameter's gradient."""
        origin = value.origin or Origin("", "", "keep", value.array.dtype.name)
        own = origin._replace(name=name, where="", number=next(self._numbers))
        self._add(value, place, own, PARAMETER, replaces=origin.number, named=named)

    def _add(self, value: Evaluated, place: Place, origin: Origin, kind: Kind, **about: Any) -> None:
        array = jnp.asarray(value.array)
        self.records.append(Record(kind, origin, array.shape, array, place.turns, scaled=value.scaled, **about))


def _computes(name: str) -> bool:
    """Return whether an operation computes new numbers, instead of moving old ones or changing their format."""
    return name not in OPERATIONS or OPERATIONS[name].op_class not in ("neutral", "keep") or name == "custom_call"


def _format(variable: Any) -> str:
    """Return the format of a floating-point variable; empty for any other."""
    dtype = unstable.dtype_in(variable)
    return dtype.name if dtype is not None and dtype.name in FORMATS else ""


_INLINED = {
    "jit": "jaxpr",
    "closed_call": "call_jaxpr",
    "remat2": "jaxpr",
    "remat_opt": "fwd_jaxpr",
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
    "custom_vmap_call": "call",
}
"""For calls, the parameter whose equations are evaluated in place of the call."""

Handler = Callable[[Replay, Any, list[Evaluated], Place], list[Evaluated] | None]
"""Returns the outputs of an equation, or None if the caller must evaluate it as an operation."""


class _Part:
    """A body or branch that runs inside a traced function, and its records from the last trace."""

    def __init__(self, replay: Replay, closed: Any, place: Place) -> None:
        self.replay, self.closed, self.place = replay, closed, place
        self.records: list[Record] = []
        self.outputs: list[Evaluated] = []

    def run(self, values: Sequence[Evaluated]) -> tuple[list[Any], list[Sample]]:
        """Return the part's output arrays and the samples of all tensors."""
        with self.replay.collecting() as found:
            self.outputs = self.replay.run(self.closed, values, self.place)
        self.records = sampled(found)
        return _arrays(self.outputs), samples_of(self.records)

    def nothing(self, values: Sequence[Evaluated]) -> list[Sample]:
        """Return the samples of a part that did not run."""
        _, shapes = jax.eval_shape(lambda arrays: self.run(_around(values, arrays)), _arrays(values))
        return [Sample(*(jnp.zeros(field.shape, field.dtype) for field in like)) for like in shapes]

    def results(self, arrays: Sequence[Any], samples: Sequence[Sample]) -> list[Evaluated]:
        """Store the part's records, and return its outputs as values outside the function, with these arrays."""
        self.replay.records += with_samples(self.records, samples)
        outputs = [value.elsewhere() for value in self.outputs]
        return _around(outputs, arrays)


def _scan(replay: Replay, equation: Any, values: list[Evaluated], place: Place) -> list[Evaluated]:
    params = equation.params
    fixed, carried = unstable.loop_parts(params)
    constants, moving = values[:fixed], _scaled_alike(values[fixed:])
    initial, stacked = moving[:carried], moving[carried:]
    part = _Part(replay, params["jaxpr"], place._replace(turns=place.turns * params["length"]))

    def body(carry: list[Any], slices: list[Any]) -> tuple[list[Any], Any]:
        arrays, samples = part.run([*constants, *_around(initial, carry), *_around(stacked, slices)])
        return arrays[:carried], (arrays[carried:], samples)

    length, reverse, unroll = params["length"], params["reverse"], params["unroll"]
    last, (outputs, samples) = lax.scan(
        body, _arrays(initial), _arrays(stacked), length=length, reverse=reverse, unroll=unroll
    )
    return part.results([*last, *outputs], samples)


def _while(replay: Replay, equation: Any, values: list[Evaluated], place: Place) -> list[Evaluated]:
    """Record a while loop: all iterations count in the totals, and the last one is sampled."""
    params = equation.params
    first, second = params["cond_nconsts"], params["cond_nconsts"] + params["body_nconsts"]
    for_condition, for_body, initial = values[:first], values[first:second], values[second:]
    part = _Part(replay, params["body_jaxpr"], place)
    empty = part.nothing([*for_body, *initial])

    def condition(carry: Any) -> Any:
        with replay.collecting():
            given = [*for_condition, *_around(initial, carry[0])]
            return replay.run(params["cond_jaxpr"], given, place)[0].array

    def body(carry: Any) -> Any:
        arrays, samples = part.run([*for_body, *_around(initial, carry[0])])
        return arrays, [new.after(old) for old, new in zip(carry[1], samples, strict=True)]

    last, samples = lax.while_loop(condition, body, (_arrays(initial), empty))
    return part.results(last, samples)


def _cond(replay: Replay, equation: Any, values: list[Evaluated], place: Place) -> list[Evaluated]:
    index, operands = values[0].array, values[1:]
    parts = [_Part(replay, branch, place) for branch in equation.params["branches"]]
    empty = [part.nothing(operands) for part in parts]

    def branch(own: int) -> Callable[..., Any]:
        def run(arrays: list[Any]) -> Any:
            results, samples = parts[own].run(_around(operands, arrays))
            return results, [*empty[:own], samples, *empty[own + 1 :]]

        return run

    arrays, samples = lax.switch(jnp.int32(index), [branch(own) for own in range(len(parts))], _arrays(operands))
    results = [part.results(arrays, own) for part, own in zip(parts, samples, strict=True)]
    return [_either(outputs) for outputs in zip(*results, strict=True)]


def _either(outputs: Sequence[Evaluated]) -> Evaluated:
    """Return one value for an output of a ``cond`` from its values in all branches."""
    first = next((value for value in outputs if value.origin), outputs[0])
    return first._replace(
        backward=any(value.backward for value in outputs), scaled=any(value.scaled for value in outputs)
    )


def _shard_map(replay: Replay, equation: Any, values: list[Evaluated], place: Place) -> list[Evaluated]:
    """Record a ``shard_map``: every device returns its own samples, like the iterations of a loop."""
    params = equation.params
    part = _Part(replay, params["jaxpr"], place)

    def body(*arrays: Any) -> Any:
        results, samples = part.run(_around(values, arrays))
        return tuple(results), jax.tree.map(lambda field: field[None], samples)

    of_samples = PartitionSpec(tuple(unstable.manual_axes(params)))  # type: ignore[no-untyped-call]
    mapped = unstable.mapped_again(params, body, (tuple(params["out_specs"]), of_samples))
    return part.results(*mapped(*_arrays(values)))


def _name(replay: Replay, equation: Any, values: list[Evaluated], place: Place) -> None:
    parameter = gradients.mark_of(equation.params["name"])
    if parameter is not None:
        replay.parameter(values[0], parameter, place, named=True)


HANDLERS: dict[str, Handler] = {
    "scan": _scan,
    "while": _while,
    "cond": _cond,
    "shard_map": _shard_map,
    "name": _name,
}


def _arrays(values: Sequence[Evaluated]) -> list[Any]:
    return [value.array for value in values]


def _around(values: Sequence[Evaluated], arrays: Sequence[Any]) -> list[Evaluated]:
    return [value._replace(array=array) for value, array in zip(values, arrays, strict=True)]


def _scaled_alike(values: Sequence[Evaluated]) -> list[Evaluated]:
    """Return the inputs of a loop, all marked as scaled if any of them is: one can depend on another."""
    scaled = any(value.scaled for value in values)
    return [value._replace(scaled=scaled) for value in values]
