"""Handlers of primitives with inner programs: calls, loops, branches. The tensors inside are recorded too.

A loop returns the samples of all its iterations. A ``cond`` returns those of all branches; the samples of
branches that did not run are empty.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from polyamp.backends.jax import unstable
from polyamp.backends.jax.recording.counting import Sample, merged, nothing
from polyamp.backends.jax.recording.values import Evaluated, Place, Record

_LAST_TURNS = 16  # recorded iterations of a loop whose number of iterations is not known


class Evaluation(Protocol):
    """The part of an evaluation that handlers use; see `polyamp.backends.jax.recording.replay.Replay`."""

    def run(
        self, closed: Any, values: Sequence[Evaluated], place: Place, wanted: Sequence[bool] | None = None
    ) -> list[Evaluated]:
        """Return the outputs of a jaxpr; those that are not wanted may be missing."""

    def collecting(self) -> AbstractContextManager[list[Record]]:
        """Return a context that collects the records of a part of the program separately."""

    def adopt(self, records: Sequence[Record], samples: Sequence[Sample]) -> None:
        """Add the records of a part, with the samples that it returned."""

    def named(self, value: Evaluated, name: str, place: Place) -> None:
        """Record a value to which the program gave a name, if it is a parameter's gradient."""


Handler = Callable[[Evaluation, Any, list[Evaluated], Place, Sequence[bool]], list[Evaluated] | None]
"""Returns the outputs of an equation, or None if the caller must evaluate it as an operation."""


def _inlined(key: str) -> Handler:
    """Return a handler that evaluates the equations of a call in place of the call."""

    def call(
        replay: Evaluation, equation: Any, values: list[Evaluated], place: Place, uses: Sequence[bool]
    ) -> list[Evaluated]:
        return replay.run(equation.params[key], values, place, uses)

    return call


class _Part:
    """A body or branch that runs inside a traced function, and its records from the last trace."""

    def __init__(self, replay: Evaluation, closed: Any, place: Place) -> None:
        self.replay, self.closed, self.place = replay, closed, place
        self.records: list[Record] = []
        self.outputs: list[Evaluated] = []

    def run(self, values: Sequence[Evaluated]) -> tuple[list[Any], list[Sample]]:
        """Return the part's output arrays and a sample of each tensor."""
        with self.replay.collecting() as self.records:
            self.outputs = self.replay.run(self.closed, values, self.place)
        return _arrays(self.outputs), [record.sample for record in self.records]

    def run_complete(self, values: Sequence[Evaluated]) -> tuple[list[Any], list[Sample]]:
        """Run a part that may run never or an unknown number of times; return the same as `run`."""
        arrays, samples = self.run(values)
        return arrays, [sample.complete() for sample in samples]

    def nothing(self, values: Sequence[Evaluated]) -> list[Sample]:
        """Return the samples of a part that did not run."""
        _, shapes = jax.eval_shape(lambda arrays: self.run_complete(_around(values, arrays)), _arrays(values))
        return list(map(nothing, shapes))

    def results(self, arrays: Sequence[Any], samples: Sequence[Sample]) -> list[Evaluated]:
        """Store the part's records, and return its outputs as values outside the function, with these arrays."""
        self.replay.adopt(self.records, samples)
        return [value.elsewhere()._replace(array=array) for value, array in zip(self.outputs, arrays, strict=True)]


def _scan(
    replay: Evaluation, equation: Any, values: list[Evaluated], place: Place, uses: Sequence[bool]
) -> list[Evaluated]:
    params = equation.params
    fixed, carried = unstable.loop_parts(params)
    constants, moving = values[:fixed], _scaled_alike(values[fixed:])
    initial, stacked = moving[:carried], moving[carried:]
    part = _Part(replay, params["jaxpr"], place.repeated(params["length"]))

    def body(carry: list[Any], slices: list[Any]) -> tuple[list[Any], Any]:
        arrays, samples = part.run([*constants, *_around(initial, carry), *_around(stacked, slices)])
        return arrays[:carried], (arrays[carried:], samples)

    length, reverse, unroll = params["length"], params["reverse"], params["unroll"]
    last, (outputs, samples) = lax.scan(
        body, _arrays(initial), _arrays(stacked), length=length, reverse=reverse, unroll=unroll
    )
    return part.results([*last, *outputs], samples)


def _while(
    replay: Evaluation, equation: Any, values: list[Evaluated], place: Place, uses: Sequence[bool]
) -> list[Evaluated]:
    """Record a while loop: all iterations count in the totals, and the last ones are sampled."""
    params = equation.params
    first, second = params["cond_nconsts"], params["cond_nconsts"] + params["body_nconsts"]
    for_condition, for_body, initial = values[:first], values[first:second], values[second:]
    part = _Part(replay, params["body_jaxpr"], place.repeated(_LAST_TURNS))
    empty = [_turns(sample) for sample in part.nothing([*for_body, *initial])]

    def condition(carry: Any) -> Any:
        with replay.collecting():
            given = [*for_condition, *_around(initial, carry[1])]
            return replay.run(params["cond_jaxpr"], given, place)[0].array

    def body(carry: Any) -> Any:
        turn, arrays, kept = carry
        arrays, samples = part.run_complete([*for_body, *_around(initial, arrays)])
        return turn + 1, arrays, [_kept(old, new, turn) for old, new in zip(kept, samples, strict=True)]

    _, last, samples = lax.while_loop(condition, body, (jnp.int32(0), _arrays(initial), empty))
    return part.results(last, samples)


def _turns(empty: Sample) -> Sample:
    values, present = (jnp.stack([field] * _LAST_TURNS) for field in empty[:2])
    return Sample(values, present, empty.totals)


def _kept(old: Sample, new: Sample, turn: Any) -> Sample:
    place = turn % _LAST_TURNS
    values, present = (
        lax.dynamic_update_index_in_dim(field, own, place, 0) for field, own in zip(old[:2], new[:2], strict=True)
    )
    return Sample(values, present, merged(old.totals, new.totals))


def _cond(
    replay: Evaluation, equation: Any, values: list[Evaluated], place: Place, uses: Sequence[bool]
) -> list[Evaluated]:
    index, operands = values[0].array, values[1:]
    parts = [_Part(replay, branch, place) for branch in equation.params["branches"]]
    empty = [part.nothing(operands) for part in parts]

    def branch(own: int) -> Callable[..., Any]:
        def run(arrays: list[Any]) -> Any:
            results, samples = parts[own].run_complete(_around(operands, arrays))
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


def _shard_map(
    replay: Evaluation, equation: Any, values: list[Evaluated], place: Place, uses: Sequence[bool]
) -> list[Evaluated]:
    """Record a ``shard_map``: every device returns its own samples, like the iterations of a loop."""
    params = equation.params
    axes = unstable.manual_axes(params)
    part = _Part(replay, params["jaxpr"], place)

    def body(*arrays: Any) -> Any:
        results, samples = part.run(_around(values, arrays))
        return tuple(results), jax.tree.map(lambda field: field[None], samples)

    mapped = jax.shard_map(
        body,
        mesh=params["mesh"],
        in_specs=tuple(params["in_specs"]),
        out_specs=(tuple(params["out_specs"]), PartitionSpec(tuple(axes))),  # type: ignore[no-untyped-call]
        axis_names=axes,
        check_vma=params["check_vma"],
    )
    return part.results(*mapped(*_arrays(values)))


def _name(replay: Evaluation, equation: Any, values: list[Evaluated], place: Place, uses: Sequence[bool]) -> None:
    replay.named(values[0], equation.params["name"], place)


HANDLERS: dict[str, Handler] = {
    "jit": _inlined("jaxpr"),
    "closed_call": _inlined("call_jaxpr"),
    "remat2": _inlined("jaxpr"),
    "remat_opt": _inlined("fwd_jaxpr"),
    "custom_jvp_call": _inlined("call_jaxpr"),
    "custom_vjp_call": _inlined("call_jaxpr"),
    "custom_vmap_call": _inlined("call"),
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
    """Return the inputs of a loop, all marked as scaled if any of them is: they may depend on each other."""
    scaled = any(value.scaled for value in values)
    return [value._replace(scaled=scaled) for value in values]
