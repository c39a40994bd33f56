"""Primitives that hold programs of their own: calls, loops, branches. What they compute is recorded too.

A loop hands out the tallies of all its turns, a branch those of every branch, empty where it was not taken.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from polyamp.backends.jax import unstable
from polyamp.backends.jax.recording.counting import Tally, nothing
from polyamp.backends.jax.recording.values import Place, Record, Value

if TYPE_CHECKING:
    from polyamp.backends.jax.recording.replay import Replay

_MANY_TURNS = 16  # of a loop of which nobody knows how often it turns


def _inlined(key: str) -> Handler:
    """The equations of a call in its place."""

    def call(replay: Replay, equation: Any, values: list[Value], place: Place, uses: Sequence[bool]) -> list[Value]:
        return replay.run(equation.params[key], values, place, uses)

    return call


class _Part:
    """A body or branch that runs inside of a traced function, and what it recorded when it was traced last."""

    def __init__(self, replay: Replay, closed: Any, place: Place) -> None:
        self.replay, self.closed, self.place = replay, closed, place
        self.records: list[Record] = []
        self.outputs: list[Value] = []

    def run(self, values: Sequence[Value]) -> tuple[list[Any], list[Tally]]:
        """The arrays that it gives, and the tally of each tensor."""
        with self.replay.collecting() as self.records:
            self.outputs = self.replay.run(self.closed, values, self.place)
        return [value.array for value in self.outputs], [record.tally for record in self.records]

    def shapes(self, values: Sequence[Value]) -> list[Tally]:
        """The tallies' shapes and dtypes."""
        _, tallies = jax.eval_shape(lambda arrays: self.run(_around(values, arrays)), _arrays(values))
        return list(tallies)

    def results(self, arrays: Sequence[Any], tallies: Sequence[Tally]) -> list[Value]:
        """Its outputs and records outside of the function, where they are these."""
        self.replay.adopt(self.records, tallies)
        return [value.elsewhere()._replace(array=array) for value, array in zip(self.outputs, arrays, strict=True)]


def _scan(replay: Replay, equation: Any, values: list[Value], place: Place, uses: Sequence[bool]) -> list[Value]:
    params = equation.params
    fixed, carried = unstable.loop_parts(params)
    constants, initial, stacked = (
        values[:fixed],
        _scaled_alike(values[fixed:])[:carried],
        _scaled_alike(values[fixed:])[carried:],
    )
    part = _Part(replay, params["jaxpr"], place.repeated(params["length"]))

    def body(carry: list[Any], slices: list[Any]) -> tuple[list[Any], Any]:
        arrays, tallies = part.run([*constants, *_around(initial, carry), *_around(stacked, slices)])
        return arrays[:carried], (arrays[carried:], tallies)

    length, reverse, unroll = params["length"], params["reverse"], params["unroll"]
    last, (outputs, tallies) = lax.scan(
        body, _arrays(initial), _arrays(stacked), length=length, reverse=reverse, unroll=unroll
    )
    return part.results([*last, *outputs], [tally.over_turns() for tally in tallies])


def _while(replay: Replay, equation: Any, values: list[Value], place: Place, uses: Sequence[bool]) -> list[Value]:
    params = equation.params
    first, second = params["cond_nconsts"], params["cond_nconsts"] + params["body_nconsts"]
    for_condition, for_body, initial = values[:first], values[first:second], values[second:]
    part = _Part(replay, params["body_jaxpr"], place.repeated(_MANY_TURNS))
    empty = [nothing(tally) for tally in part.shapes([*for_body, *initial])]

    def condition(carry: Any) -> Any:
        with replay.collecting():
            given = [*for_condition, *_around(initial, carry[0])]
            return replay.run(params["cond_jaxpr"], given, place)[0].array

    def body(carry: Any) -> Any:
        arrays, kept = carry
        arrays, tallies = part.run([*for_body, *_around(initial, arrays)])
        return arrays, [old.joined(new) for old, new in zip(kept, tallies, strict=True)]

    last, tallies = lax.while_loop(condition, body, (_arrays(initial), empty))
    return part.results(last, tallies)


def _cond(replay: Replay, equation: Any, values: list[Value], place: Place, uses: Sequence[bool]) -> list[Value]:
    index, operands = values[0].array, values[1:]
    parts = [_Part(replay, branch, place) for branch in equation.params["branches"]]
    shapes = [part.shapes(operands) for part in parts]

    def branch(own: int) -> Callable[..., Any]:
        def run(arrays: list[Any]) -> Any:
            results, tallies = parts[own].run(_around(operands, arrays))
            empty = [[nothing(tally) for tally in shape] for shape in shapes]
            return results, [*empty[:own], tallies, *empty[own + 1 :]]

        return run

    arrays, tallies = lax.switch(jnp.int32(index), [branch(own) for own in range(len(parts))], _arrays(operands))
    results = [part.results(arrays, own) for part, own in zip(parts, tallies, strict=True)]
    return [_either(outputs) for outputs in zip(*results, strict=True)]


def _either(outputs: Sequence[Value]) -> Value:
    """One output of all branches."""
    first = next((value for value in outputs if value.origin), outputs[0])
    return first._replace(
        backward=any(value.backward for value in outputs), scaled=any(value.scaled for value in outputs)
    )


def _shard_map(replay: Replay, equation: Any, values: list[Value], place: Place, uses: Sequence[bool]) -> list[Value]:
    """Every device hands out tallies of its own, as every turn of a loop does."""
    params = equation.params
    axes = unstable.manual_axes(params)
    part = _Part(replay, params["jaxpr"], place)

    def body(*arrays: Any) -> Any:
        results, tallies = part.run(_around(values, arrays))
        return tuple(results), jax.tree.map(lambda field: field[None], tallies)

    mapped = jax.shard_map(
        body,
        mesh=params["mesh"],
        in_specs=tuple(params["in_specs"]),
        out_specs=(tuple(params["out_specs"]), PartitionSpec(tuple(axes))),  # type: ignore[no-untyped-call]
        axis_names=axes,
        check_vma=params["check_vma"],
    )
    arrays, tallies = mapped(*_arrays(values))
    return part.results(arrays, [tally.over_turns() for tally in tallies])


def _name(replay: Replay, equation: Any, values: list[Value], place: Place, uses: Sequence[bool]) -> None:
    replay.named(values[0], equation.params["name"], place)


Handler = Callable[["Replay", Any, list[Value], Place, Sequence[bool]], list[Value] | None]

HANDLERS: dict[str, Handler] = {
    "jit": _inlined("jaxpr"),
    "closed_call": _inlined("call_jaxpr"),
    "remat2": _inlined("jaxpr"),
    "custom_jvp_call": _inlined("call_jaxpr"),
    "custom_vjp_call": _inlined("call_jaxpr"),
    "scan": _scan,
    "while": _while,
    "cond": _cond,
    "shard_map": _shard_map,
    "name": _name,
}


def _arrays(values: Sequence[Value]) -> list[Any]:
    return [value.array for value in values]


def _around(values: Sequence[Value], arrays: Sequence[Any]) -> list[Value]:
    return [value._replace(array=array) for value, array in zip(values, arrays, strict=True)]


def _scaled_alike(values: Sequence[Value]) -> list[Value]:
    """What goes around in a loop has the loss scale as a factor as soon as anything has that goes in."""
    scaled = any(value.scaled for value in values)
    return [value._replace(scaled=scaled) for value in values]
