"""Handlers of loops: ``scan`` and ``while``.

A loop carries float32 values in float32: errors of 16 bits would add up over its iterations. This holds for cell
states, for the sums of gradients in the transposed loop, and for the iterates of solvers. A value that every iteration
computes again in 16 bits, such as the hidden state of ``tanh(h @ w + x)``, does not add up and is carried in 16 bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import jax
from jax import lax

from polyamp.backends.jax import unstable
from polyamp.backends.jax.graphs.cells import FLOAT32, Cell, around, held_as_declared
from polyamp.backends.jax.graphs.run import Run
from polyamp.flow import CARRIED


def scan(run: Run, equation: Any, cells: list[Cell], path: str) -> list[Cell]:
    """Run a ``scan`` with its body under the flow rule."""
    params = equation.params
    constants, carried, stacked = _split(cells, *unstable.loop_parts(params))
    constants = held_as_declared(constants)  # cast in each iteration, so that their gradients add up in float32
    length, reverse, unroll = params["length"], params["reverse"], params["unroll"]

    def loop(run: Run, models: Sequence[Cell], found: list[Cell]) -> tuple[list[Any], list[Cell]]:
        planned = _planning(run, length)

        def body(carry: list[Any], slices: list[Cell]) -> tuple[list[Any], list[Cell]]:
            inputs = [cell.within() for cell in constants] + around(models, carry) + [_shared(cell) for cell in slices]
            with run.looped(), planned():
                outputs = run.run(params["jaxpr"], inputs, path)
            found[:] = outputs[: len(carry)]
            return _ending_in(models, outputs), outputs[len(carry) :]

        initial = _ending_in(models, carried)
        last, outputs = lax.scan(body, initial, stacked, length=length, reverse=reverse, unroll=unroll)
        return last, outputs

    models = _models(run, equation, cells, carried, path, loop)
    last, outputs = loop(run, models, [])
    return around(models, last) + outputs


def while_loop(run: Run, equation: Any, cells: list[Cell], path: str) -> list[Cell]:
    """Run a ``while`` with its condition and body under the flow rule."""
    params = equation.params
    for_condition, for_body, carried = _split(cells, params["cond_nconsts"], params["body_nconsts"])

    def loop(run: Run, models: Sequence[Cell], found: list[Cell]) -> Sequence[Any]:
        planned = _planning(run)

        def condition(carry: Sequence[Any]) -> Any:
            with run.looped(), planned():
                inputs = [cell.within() for cell in for_condition] + around(models, carry)
                return run.run(params["cond_jaxpr"], inputs, path)[0].array

        def body(carry: Sequence[Any]) -> Sequence[Any]:
            inputs = [cell.within() for cell in for_body] + around(models, carry)
            with run.looped():
                found[:] = run.run(params["body_jaxpr"], inputs, path)
            return _ending_in(models, found)

        last: Sequence[Any] = lax.while_loop(condition, body, _ending_in(models, carried))
        return last

    models = _models(run, equation, cells, carried, path, loop)
    return around(models, loop(run, models, []))


def _models(
    run: Run,
    equation: Any,
    cells: Sequence[Cell],
    carried: Sequence[Cell],
    path: str,
    loop: Callable[[Run, Sequence[Cell], list[Cell]], Any],
) -> list[Cell]:
    """Return a model of each value that a loop carries."""
    # The body is traced with all of them in float32. Values that the body nevertheless returns low do not add up over
    # the iterations: they are carried in 16 bits.
    strong = [_carry(cell) for cell in carried]
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


def _carry(cell: Cell) -> Cell:
    """Return the model of a value that a loop carries in its declared dtype."""
    value = CARRIED if cell.declared == FLOAT32 else cell.value
    return Cell(cell.array, cell.declared, cell.declared, value, shared=True)


def _planning(run: Run, times: int = 1) -> Callable[[], Any]:
    """Return a context for a body that JAX may trace several times: the plan shows the last trace."""
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
    """Return the arrays of the first cells in the dtypes of the models. The casts are not shared with other uses."""
    return [cell.within().cast(model.dtype) for model, cell in zip(models, cells, strict=False)]
