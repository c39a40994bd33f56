"""Handlers of calls: ``jit``, ``checkpoint``, ``shard_map``. They also rewrite functions that are called several times.

JAX compiles a jitted function once, however often it is called, because every call holds the same jaxpr. If we ran a
block of 24 calls again equation by equation, JAX would trace and compile 24 blocks. So a jaxpr that is called more than
once is rewritten for the formats of its arguments, and all calls with these formats hold the one rewritten jaxpr.

For example, the output of a block goes straight into the next block. The first block gets float32 data, and the others
get 16 bits, which would take two rewritten functions. The output is then passed on in float32, which loses nothing, and
one function is enough.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import jax

from polyamp.backends.jax import unstable
from polyamp.backends.jax.graphs import recipes
from polyamp.backends.jax.graphs.cells import FLOAT32, Cell, around, held_as_declared
from polyamp.backends.jax.graphs.run import Run
from polyamp.backends.jax.graphs.traced import Traced
from polyamp.deciding import Decider
from polyamp.flow import Value


def jit(run: Run, equation: Any, cells: list[Cell], path: str) -> list[Cell]:
    """Run the equations in place of the call, or call a rewritten function if it is called several times."""
    # A call that places or donates its arguments stays, and so do the types of its arguments and results.
    if unstable.is_plain_jit(equation.params):
        called = equation.params["jaxpr"]
        if not run.repeats.is_repeated(called):
            return run.run(called, cells, path)
        results = _call_rewritten(run, equation, cells, path)
        recipes.note_call(results, lambda: run.run(called, cells, path))
        return results
    inner = held_as_declared(cells)
    outputs: list[Cell] = []

    def body(*arrays: Any) -> list[Any]:
        outputs[:] = held_as_declared(run.run(equation.params["jaxpr"], around(inner, arrays), path))
        return [cell.array for cell in outputs]

    jaxpr = unstable.traced(body, *(cell.array for cell in inner))
    results = unstable.bound(equation, [cell.array for cell in inner], {**equation.params, "jaxpr": jaxpr})
    return around(outputs, results)


def closed_call(run: Run, equation: Any, cells: list[Cell], path: str) -> list[Cell]:
    """Run the equations in place of the call."""
    return run.run(equation.params["call_jaxpr"], cells, path)


def forward_rule(run: Run, equation: Any, cells: list[Cell], path: str) -> list[Cell]:
    """Run the forward rule of a custom derivative with ``optimize_remat`` in its place."""
    return run.run(equation.params["fwd_jaxpr"], cells, path)


def remat(run: Run, equation: Any, cells: list[Cell], path: str) -> list[Cell]:
    """Trace the function again and bind it with all its settings: nothing else can set ``differentiated``."""
    trace = Traced(run, equation.params["jaxpr"], cells, path)
    jaxpr, constants = unstable.without_constants(trace.closed)
    results = unstable.bound(equation, [*constants, *trace.arrays], {**equation.params, "jaxpr": jaxpr})
    return around(trace.outputs, results)


def shard_map(run: Run, equation: Any, cells: list[Cell], path: str) -> list[Cell]:
    """Map the function over the same axes again."""
    params = equation.params

    def body(*own: Cell) -> tuple[Cell, ...]:
        return tuple(run.run(params["jaxpr"], [cell.within() for cell in own], path))

    mapped = jax.shard_map(
        body,
        mesh=params["mesh"],
        in_specs=tuple(params["in_specs"]),
        out_specs=tuple(params["out_specs"]),
        axis_names=unstable.manual_axes(params),
        check_vma=params["check_vma"],
    )
    return list(mapped(*cells))


class _Rewritten(NamedTuple):
    """A rewritten jaxpr with its formats."""

    closed: Any  # the jaxpr
    outputs: list[Cell]  # models of its results
    decider: Decider  # the decisions in it, and the findings to report


_KNOWN: WeakKeyDictionary[Any, dict[Any, _Rewritten]] = WeakKeyDictionary()


def _call_rewritten(run: Run, equation: Any, cells: Sequence[Cell], path: str) -> list[Cell]:
    rewritten = _rewritten(run, equation.params["jaxpr"], cells, path)
    run.decider.take_over(rewritten.decider)
    arrays = [cell.array for cell in cells]
    results = unstable.bound(equation, arrays, {**equation.params, "jaxpr": rewritten.closed})
    return around(rewritten.outputs, results)


def _rewritten(run: Run, closed: Any, cells: Sequence[Cell], path: str) -> _Rewritten:
    """Return the jaxpr rewritten for arguments in these formats."""
    known = _KNOWN.setdefault(closed, {})
    key = (run.policy, run.is_looped, run.place(path), tuple(cell.format for cell in cells), _equal(cells))
    if key not in known:
        known[key] = _like_one_of(known, _rewrite(run, closed, cells, path, frozenset()))
    held = frozenset(
        (output, cells[own].value)
        for output, own in run.repeats.links(closed)
        if known[key].outputs[output].value.state == "low" and _is_float32_as_declared(cells[own])
    )
    if held and (key, held) not in known:
        known[key, held] = _like_one_of(known, _rewrite(run, closed, cells, path, held))
    return known[key, held] if held else known[key]


def _rewrite(run: Run, closed: Any, cells: Sequence[Cell], path: str, held: frozenset[tuple[int, Value]]) -> _Rewritten:
    """Rewrite a jaxpr for arguments in these formats. The outputs in ``held`` return in their declared dtypes."""
    outputs: list[Cell] = []
    own, values = run.apart(), dict(sorted(held))

    def body(*arrays: Any) -> list[Any]:
        found = own.run(closed, around(cells, arrays), path)
        outputs[:] = [cell.declared_as(values[at]) if at in values else cell for at, cell in enumerate(found)]
        return [cell.array for cell in outputs]

    jaxpr = unstable.traced(body, *(cell.array for cell in cells))
    return _Rewritten(jaxpr, around(outputs, unstable.specs_of_results(jaxpr)), own.decider)


def _like_one_of(known: dict[Any, _Rewritten], new: _Rewritten) -> _Rewritten:
    """Return an earlier jaxpr if it is the same program with the same formats, else the new one."""
    text = unstable.text_of(new.closed)
    return next((old for old in known.values() if text and _is_same(old, new, text)), new)


def _is_same(old: _Rewritten, new: _Rewritten, text: str) -> bool:
    outputs = ([(cell.format, cell.shared) for cell in one.outputs] for one in (old, new))
    return operator.eq(*outputs) and unstable.text_of(old.closed) == text


def _equal(cells: Sequence[Cell]) -> tuple[int, ...]:
    """Return for each argument the index of the first one with the same numbers."""
    first: dict[Any, int] = {}
    return tuple(first.setdefault(cell.same, place) for place, cell in enumerate(cells))


def _is_float32_as_declared(cell: Cell) -> bool:
    """Return whether a value is float32 only by its declaration."""
    return cell.dtype == cell.declared == FLOAT32 and cell.value.state in ("weak", "input")
