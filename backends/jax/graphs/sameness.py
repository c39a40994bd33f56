"""Which values hold the same numbers, and which are constants.

By these facts, ``x * x`` is a square, and ``1 / x`` is a reciprocal.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from polyamp.backends.jax.graphs.cells import Cell

_MOVES = ("reshape", "squeeze", "copy", "name", "stop_gradient")  # the same numbers in the same order
_ALIKE = ("broadcast_in_dim", "transpose", "slice", "abs", "neg")  # of the same numbers they return the same numbers


def is_of_itself(cells: Sequence[Cell]) -> bool:
    """Return whether an operation has two operands, which hold the same numbers in the same order."""
    return len(cells) == 2 and cells[0].same == cells[1].same and _shape(cells[0]) == _shape(cells[1])


def is_over(cells: Sequence[Cell]) -> bool:
    """Return whether an operation has two operands, and only the first one is a constant."""
    return len(cells) == 2 and cells[0].constant and not cells[1].constant


def note_same(equation: Any, cells: Sequence[Cell], results: Sequence[Cell]) -> None:
    """Record whether the results of an equation are constants, and which other values they are the same as."""
    is_constant = bool(cells) and all(cell.constant for cell in cells)
    for cell in results:
        cell.constant = is_constant
    name = equation.primitive.name
    moves = name in _MOVES and (name != "reshape" or equation.params["dimensions"] is None)
    if moves or (name == "broadcast_in_dim" and _size(cells[0]) == _size(results[0])):  # or a dimension of length 1
        results[0].same = cells[0].same
    elif name in _ALIKE and len(cells) == 1:
        results[0].same = (cells[0].same, _shape(cells[0]), name, repr(equation.params))


def _shape(cell: Cell) -> Any:
    return getattr(cell.array, "shape", ())


def _size(cell: Cell) -> Any:
    return getattr(cell.array, "size", 1)
