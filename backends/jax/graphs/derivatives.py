"""Handlers of functions with the user's own derivatives: ``custom_jvp``, ``custom_vjp``.

The user's rule stays a rule, and the operations inside it run by the flow rule. For example, a function with a
``custom_vjp`` becomes a new ``custom_vjp`` of cells. Its forward rule runs the user's forward rule again, operation by
operation. The outputs must have the same formats whether JAX runs the function itself or its rule, so `_Formats`
applies the formats of the first run to the others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from polyamp.backends.jax import unstable
from polyamp.backends.jax.graphs.cells import Cell
from polyamp.backends.jax.graphs.interpreter import Interpreter


def custom_jvp(run: Interpreter, equation: Any, cells: list[Cell], path: str) -> list[Cell]:
    """Run a function and its derivative rule by the flow rule; a tangent has its primal's dtype."""
    _, rule = unstable.custom_functions(equation)
    formats = _Formats()

    call = jax.custom_jvp(_function(run, equation.params["call_jaxpr"], path, formats))

    def jvp(primals: tuple[Cell, ...], tangents: tuple[Cell, ...]) -> tuple[list[Cell], list[Cell]]:
        both = [*(cell.within() for cell in primals), *map(_tangent, tangents)]
        outputs = _call_with_fixed(run, rule, both, path)
        count = len(outputs) // 2
        results = formats.same(outputs[:count])
        ends = zip(results, outputs[count:], strict=True)
        return results, [primal.around(_tangent_of(primal, tangent)) for primal, tangent in ends]

    call.defjvp(jvp, symbolic_zeros=equation.params["symbolic_zeros"])
    return list(call(*cells))


def custom_vjp(run: Interpreter, equation: Any, cells: list[Cell], path: str) -> list[Cell]:
    """Run a function and both its derivative rules by the flow rule; residuals keep that rule's formats."""
    sees_zeros = equation.params["symbolic_zeros"]
    _, forward_rule, backward_rule = unstable.custom_functions(equation)
    formats = _Formats()

    call = jax.custom_vjp(_function(run, equation.params["call_jaxpr"], path, formats))

    def forward(*own: Cell) -> tuple[list[Cell], list[Cell]]:
        primals = [cell.around(cell.array.value).within() for cell in own]
        perturbed = [cell.array.perturbed for cell in own]

        def rule(*arrays: Any) -> list[Any]:
            inputs = [part for pair in zip(arrays, perturbed, strict=True) for part in pair]
            return list(forward_rule(*inputs))

        results = _call_with_fixed(run, rule, primals, path)
        outputs, residuals = unstable.forward_results(equation, results, primals)
        return formats.same(outputs), residuals

    def backward(residuals: list[Cell], gradients: list[Cell]) -> tuple[Cell | None, ...]:
        own = gradients if sees_zeros else map(_filled, gradients)
        inputs = [*(cell.within() for cell in residuals), *map(_tangent, own)]
        absent: list[bool] = []

        def rule(*arrays: Any) -> list[Any]:
            found = unstable.cotangents(backward_rule(*arrays))
            absent[:] = [leaf is None for leaf in found]
            return [leaf for leaf in found if leaf is not None]

        results = iter(_call_with_fixed(run, rule, inputs, path))
        ends = zip(cells, absent, strict=True)
        return tuple(None if zero else cell.around(next(results).cast(cell.dtype)) for cell, zero in ends)

    call.defvjp(forward, backward, symbolic_zeros=True)
    return list(call(*cells))


class _Formats:
    """The formats of a call's outputs, the same in the function and in its rule."""

    def __init__(self) -> None:
        self.first: list[Cell] | None = None

    def same(self, cells: list[Cell]) -> list[Cell]:
        if self.first is None:
            self.first = cells
        return [model.around(cell.cast(model.dtype)) for model, cell in zip(self.first, cells, strict=True)]


def _function(run: Interpreter, program: Any, path: str, formats: _Formats) -> Callable[..., list[Cell]]:
    """Return the function to differentiate, run by the flow rule, with outputs in ``formats``."""
    return lambda *own: formats.same(run.run(program, [cell.within() for cell in own], path))


def _tangent(cell: Cell) -> Cell:
    """Return a tangent as the rule expects it: with the declared dtype of its primal, and not a constant."""
    if not cell.inexact:
        return Cell.of(cell.array, jax.dtypes.float0)
    if _is_zero(cell.array):
        return Cell.of(_zero_like(cell.array, cell.declared), cell.declared)
    return Cell(cell.array, cell.dtype, cell.declared, cell.value._replace(unfit=""), shared=True)


def _tangent_of(primal: Cell, tangent: Cell) -> Any:
    """Cast a rule's tangent, or symbolic zero, to the dtype of its primal."""
    dtype = primal.dtype if primal.inexact else jax.dtypes.float0
    return _zero_like(tangent.array, dtype) if _is_zero(tangent.array) else tangent.cast(dtype)


def _is_zero(array: Any) -> bool:
    return isinstance(array, jax.custom_derivatives.SymbolicZero)


def _zero_like(zero: Any, dtype: Any) -> Any:
    return jax.custom_derivatives.SymbolicZero(zero.aval.update(dtype=dtype))


def _filled(cell: Cell) -> Cell:
    """Return the gradient of an output, with zeros in place of a symbolic zero."""
    if not _is_zero(cell.array):
        return cell
    zeros = np.zeros if cell.array.dtype == jax.dtypes.float0 else jnp.zeros
    return cell.around(zeros(cell.array.shape, cell.array.dtype))


def _call_with_fixed(run: Interpreter, function: Callable[..., Any], cells: Sequence[Cell], path: str) -> list[Cell]:
    """Run a function by the flow rule, but keep outside what no jaxpr holds: float0, symbolic zeros, flags."""
    fixed = {
        index: cell.array
        for index, cell in enumerate(cells)
        if cell.declared == jax.dtypes.float0 or _is_static(cell.array)
    }
    free = [cell for index, cell in enumerate(cells) if index not in fixed]
    known: dict[int, Cell] = {}

    def with_fixed(*arrays: Any) -> Any:
        rest = iter(arrays)
        results = list(function(*(fixed[index] if index in fixed else next(rest) for index in range(len(cells)))))
        for index, one in enumerate(results):
            if _is_static(one):
                known[index] = Cell.of(one, one.dtype if _is_zero(one) else jax.typeof(one).dtype)
        return [one for one in results if not _is_static(one)]

    others = run.call(with_fixed, free, path)
    rest = iter(others)
    return [known[index] if index in known else next(rest) for index in range(len(known) + len(others))]


def _is_static(result: Any) -> bool:
    """Return whether a rule's value is not an array: a symbolic zero, a flag or a number."""
    return _is_zero(result) or isinstance(result, int | float)
