"""Handlers of primitives that hold a program: calls (``jit``, ``checkpoint``, ``shard_map``), ``cond``, and loops.

JAX compiles a jitted function once, however often it is called, because every call holds the same jaxpr. If we ran a
block of 24 calls again equation by equation, JAX would trace and compile 24 blocks. So a jaxpr that is called more than
once is rewritten for the formats of its arguments, and all calls with these formats hold the one rewritten jaxpr.

For example, the output of a block goes straight into the next block. The first block gets float32 data, and the others
get 16 bits, which would take two rewritten functions. The output is then passed on in float32, which loses nothing, and
one function is enough.

A loop carries float32 values in float32: errors of 16 bits would add up over its iterations. This holds for an LSTM's
cell state, for sums of gradients in the transposed loop, and for the iterates of solvers. A value that every iteration
computes again in 16 bits, such as the hidden state of ``tanh(h @ w + x)``, does not add up and is carried in 16 bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from polyamp.backends.jax import unstable
from polyamp.backends.jax.graphs.cells import FLOAT32, Cell, around, held_as_declared
from polyamp.backends.jax.graphs.interpreter import Handler, Interpreter
from polyamp.backends.jax.graphs.writing import note_call
from polyamp.flow import CARRIED, Value
from polyamp.plan import Decider


def trace(
    run: Interpreter,
    closed: Any,
    cells: Sequence[Cell],
    path: str,
    ending: Callable[[list[Cell]], list[Cell]] = lambda outputs: outputs,
) -> tuple[Any, list[Cell]]:
    """Trace a program for the formats of ``cells``; return the new jaxpr, and cells that describe its results."""
    outputs: list[Cell] = []

    def body(*arrays: Any) -> list[Any]:
        outputs[:] = ending(run.run(closed, around(cells, arrays), path))
        return [cell.array for cell in outputs]

    jaxpr = jax.make_jaxpr(body)(*(cell.array for cell in cells))
    return jaxpr, around(outputs, unstable.specs_of_results(jaxpr))


def jit(run: Interpreter, equation: Any, cells: list[Cell], path: str) -> list[Cell]:
    """Run a called function's equations in place; call its rewritten jaxpr if the function is called several times."""
    # A call that places or donates its arguments stays, and so do the types of its arguments and results.
    called = equation.params["jaxpr"]
    if not unstable.is_plain_jit(equation.params):
        cells = held_as_declared(cells)
        return _bound_to(equation, cells, *trace(run, called, cells, path, held_as_declared))
    if not run.repeats.is_repeated(called):
        return run.run(called, cells, path)
    rewritten = _rewritten(run, called, cells, path)
    run.decider.take_over(rewritten.decider)
    results = _bound_to(equation, cells, rewritten.closed, rewritten.outputs)
    note_call(results, lambda: run.run(called, cells, path))
    return results


def _bound_to(
    equation: Any, cells: Sequence[Cell], jaxpr: Any, outputs: Sequence[Cell], constants: Sequence[Any] = ()
) -> list[Cell]:
    """Bind a call with ``jaxpr`` as its program; return the results with the facts of ``outputs``."""
    arrays = [*constants, *(cell.array for cell in cells)]
    return around(outputs, unstable.bound(equation, arrays, {**equation.params, "jaxpr": jaxpr}))


def in_place(program: str) -> Handler:
    """Return a handler that runs, in place of a call, the program that the call has as this parameter."""
    return lambda run, equation, cells, path: run.run(equation.params[program], cells, path)


def remat(run: Interpreter, equation: Any, cells: list[Cell], path: str) -> list[Cell]:
    """Trace the function again, and bind the primitive itself, since no public function sets ``differentiated``."""
    closed, outputs = trace(run, equation.params["jaxpr"], cells, path)
    jaxpr, constants = unstable.without_constants(closed)
    return _bound_to(equation, cells, jaxpr, outputs, constants)


def shard_map(run: Interpreter, equation: Any, cells: list[Cell], path: str) -> list[Cell]:
    """Map the function over the same axes again."""
    params = equation.params

    def body(*own: Cell) -> tuple[Cell, ...]:
        return tuple(run.run(params["jaxpr"], [cell.within() for cell in own], path))

    return list(unstable.mapped_again(params, body, tuple(params["out_specs"]))(*cells))


class _Rewritten(NamedTuple):
    """A rewritten jaxpr with its formats."""

    closed: Any  # the jaxpr
    outputs: list[Cell]  # models of its results
    decider: Decider  # the decisions in it, and the findings to report


_KNOWN: WeakKeyDictionary[Any, dict[Any, _Rewritten]] = WeakKeyDictionary()


def _rewritten(run: Interpreter, closed: Any, cells: Sequence[Cell], path: str) -> _Rewritten:
    """Return the jaxpr rewritten for arguments in these formats."""
    known = _KNOWN.setdefault(closed, {})
    key = (run.policy, run.is_looped, run.place(path), tuple(cell.format for cell in cells))
    if key not in known:
        known[key] = _rewrite(run, closed, cells, path, frozenset())
    is_weak = [cell.dtype == cell.declared == FLOAT32 and cell.value.state in ("weak", "input") for cell in cells]
    held = frozenset(
        (output, cells[own].value)
        for output, own in run.repeats.links(closed)
        if known[key].outputs[output].value.state == "low" and is_weak[own]
    )
    if held and (key, held) not in known:
        known[key, held] = _rewrite(run, closed, cells, path, held)
    return known[key, held] if held else known[key]


def _rewrite(
    run: Interpreter, closed: Any, cells: Sequence[Cell], path: str, held: frozenset[tuple[int, Value]]
) -> _Rewritten:
    """Rewrite a jaxpr for arguments in these formats, to return the outputs ``held`` in their declared dtypes."""
    own, values = run.apart(), dict(sorted(held))

    def hold(outputs: list[Cell]) -> list[Cell]:
        return [cell.declared_as(values[at]) if at in values else cell for at, cell in enumerate(outputs)]

    return _Rewritten(*trace(own, closed, cells, path, hold), own.decider)


def cond(run: Interpreter, equation: Any, cells: list[Cell], path: str) -> list[Cell]:
    """Trace every branch, then bind the conditional; an output is low if every branch returns it low."""
    index, *operands = cells
    traces = [trace(run, branch, operands, path) for branch in equation.params["branches"]]
    joined = [_join(outputs) for outputs in zip(*(outputs for _, outputs in traces), strict=True)]

    def branch(closed: Any, outputs: Sequence[Cell]) -> Callable[..., list[Any]]:
        def run_branch(*arrays: Any) -> list[Any]:
            jaxpr, constants = unstable.opened(closed)
            results = around(outputs, jax.core.eval_jaxpr(jaxpr, constants, *arrays))
            return [cell.cast(model.dtype) for cell, model in zip(results, joined, strict=True)]

        return run_branch

    branches, arrays = [branch(*own) for own in traces], [cell.array for cell in operands]
    if len(branches) == 2:
        return around(joined, lax.cond(index.array, branches[1], branches[0], *arrays))
    return around(joined, lax.switch(index.array, branches, *arrays))


def _join(outputs: tuple[Cell, ...]) -> Cell:
    """Return one output as every branch returns it: in the dtype that all share, else the declared one."""
    ranks = ["strong", "other", "input", "weak", "low"]
    first = min(outputs, key=lambda cell: ranks.index(cell.value.state))
    dtype = first.dtype if all(cell.dtype == first.dtype for cell in outputs) else first.declared
    return Cell(first.array, dtype, first.declared, first.value, shared=True)


def scan(run: Interpreter, equation: Any, cells: list[Cell], path: str) -> list[Cell]:
    """Run a ``scan`` with its body under the flow rule."""
    params = equation.params
    constants, carried, stacked = _split(cells, *unstable.loop_parts(params))
    constants = held_as_declared(constants)  # cast in each iteration, so that their gradients add up in float32
    length, reverse, unroll = params["length"], params["reverse"], params["unroll"]

    def loop(run: Interpreter, models: Sequence[Cell], found: list[Cell]) -> tuple[list[Any], list[Cell]]:
        planned = _planning(run, length)

        def body(carry: list[Any], slices: list[Cell]) -> tuple[list[Any], list[Cell]]:
            inputs = [cell.within() for cell in constants] + around(models, carry) + [_shared(cell) for cell in slices]
            with planned():
                outputs = run.looped().run(params["jaxpr"], inputs, path)
            found[:] = outputs[: len(carry)]
            return _ending_in(models, outputs), outputs[len(carry) :]

        initial = _ending_in(models, carried)
        last, outputs = lax.scan(body, initial, stacked, length=length, reverse=reverse, unroll=unroll)
        return last, outputs

    models = _models(run, equation, cells, carried, path, loop)
    last, outputs = loop(run, models, [])
    return around(models, last) + outputs


def while_loop(run: Interpreter, equation: Any, cells: list[Cell], path: str) -> list[Cell]:
    """Run a ``while`` with its condition and body under the flow rule."""
    params = equation.params
    for_condition, for_body, carried = _split(cells, params["cond_nconsts"], params["body_nconsts"])
    is_per_example = bool(params["cond_jaxpr"].out_avals[0].shape)  # by `jax.vmap`

    def loop(run: Interpreter, models: Sequence[Cell], found: list[Cell]) -> Sequence[Any]:
        planned = _planning(run)

        def going_on(carry: Sequence[Any]) -> Any:
            with planned():
                inputs = [cell.within() for cell in for_condition] + around(models, carry)
                return run.looped().run(params["cond_jaxpr"], inputs, path)[0].array

        def condition(carry: Sequence[Any]) -> Any:
            return jnp.any(going_on(carry)) if is_per_example else going_on(carry)

        def body(carry: Sequence[Any]) -> Sequence[Any]:
            on = going_on(carry) if is_per_example else None
            inputs = [cell.within() for cell in for_body] + around(models, carry)
            found[:] = run.looped().run(params["body_jaxpr"], inputs, path)
            return [_select(on, *pair) for pair in zip(_ending_in(models, found), carry, strict=True)]

        last: Sequence[Any] = lax.while_loop(condition, body, _ending_in(models, carried))
        return last

    models = _models(run, equation, cells, carried, path, loop)
    return around(models, loop(run, models, []))


def _select(on: Any, new: Any, old: Any) -> Any:
    """Return the new state of the examples that go on, and the old state of those that are done."""
    return new if on is None else lax.select(lax.broadcast_in_dim(on, np.shape(new), range(np.ndim(on))), new, old)


def _models(
    run: Interpreter,
    equation: Any,
    cells: Sequence[Cell],
    carried: Sequence[Cell],
    path: str,
    loop: Callable[[Interpreter, Sequence[Cell], list[Cell]], Any],
) -> list[Cell]:
    """Return, for each value that a loop carries, a cell that shows its dtype and facts in every iteration."""
    # The body is traced with all of them in float32. Values that the body nevertheless returns low do not add up over
    # the iterations: they are carried in 16 bits.
    strong = [
        Cell(cell.array, cell.declared, cell.declared, CARRIED if cell.declared == FLOAT32 else cell.value, shared=True)
        for cell in carried
    ]
    if all(cell.declared != FLOAT32 or cell.value.unfit for cell in carried):
        return strong
    key = (id(equation.params), run.place(path), tuple(cell.format for cell in cells))
    if key not in run.repeats.loops:
        found: list[Cell] = []
        jax.eval_shape(lambda: jax.tree.leaves(loop(run.apart(), strong, found)))
        run.repeats.loops[key] = equation.params, [cell.value for cell in found]
    values = run.repeats.loops[key][1]
    return [
        model if value.state != "low" or cell.declared != FLOAT32 or cell.value.unfit else model.low(run.compute, value)
        for cell, model, value in zip(carried, strong, values, strict=True)
    ]


def _planning(run: Interpreter, times: int = 1) -> Callable[[], Any]:
    """Return a context for a body that JAX can trace several times; a plan shows only the last."""
    plan = run.plan
    if plan is None:
        return nullcontext
    mark = len(plan.operations)
    return lambda: plan.repeated(mark, times)


def _split(cells: list[Cell], first: int, second: int) -> tuple[list[Cell], list[Cell], list[Cell]]:
    return cells[:first], cells[first : first + second], cells[first + second :]


def _shared(cell: Cell) -> Cell:
    return Cell(cell.array, cell.dtype, cell.declared, cell.value, shared=True)


def _ending_in(models: Sequence[Cell], cells: Sequence[Cell]) -> list[Any]:
    """Return the arrays of the first cells, cast to the dtypes of ``models`` by casts that no other use shares."""
    return [cell.within().cast(model.dtype) for model, cell in zip(models, cells, strict=False)]
