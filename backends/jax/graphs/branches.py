"""The handler of branches: ``cond``, with two branches or more."""

from __future__ import annotations

from typing import Any

from jax import lax

from polyamp.backends.jax.graphs.cells import Cell, around
from polyamp.backends.jax.graphs.run import Run
from polyamp.backends.jax.graphs.traced import Traced


def cond(run: Run, equation: Any, cells: list[Cell], path: str) -> list[Cell]:
    """Trace every branch first. An output is low if it is low in all of them."""
    index, *operands = cells
    traces = [Traced(run, branch, operands, path) for branch in equation.params["branches"]]
    joined = [_join(outputs) for outputs in zip(*(trace.outputs for trace in traces), strict=True)]
    branches = [trace.ending_in(joined) for trace in traces]
    if len(branches) == 2:
        results = lax.cond(index.array, branches[1], branches[0], *traces[0].arrays)
    else:
        results = lax.switch(index.array, branches, *traces[0].arrays)
    return around(joined, results)


def _join(outputs: tuple[Cell, ...]) -> Cell:
    """Return the model of one output of all branches: in their common format, else in its declared dtype."""
    ranks = ["strong", "other", "input", "weak", "low"]
    first = min(outputs, key=lambda cell: ranks.index(cell.value.state))
    dtype = first.dtype if all(cell.dtype == first.dtype for cell in outputs) else first.declared
    return Cell(first.array, dtype, first.declared, first.value, shared=True)
