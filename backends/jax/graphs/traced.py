"""A program traced before it runs, so that its own formats are known."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax

from polyamp.backends.jax import unstable
from polyamp.backends.jax.graphs.cells import Cell, around
from polyamp.backends.jax.graphs.run import Run


class Traced:
    """A program traced with the formats that its arguments have now."""

    def __init__(self, run: Run, closed: Any, cells: Sequence[Cell], path: str) -> None:
        self.arrays = [cell.array for cell in cells]
        self.outputs: list[Cell] = []

        def body(*arrays: Any) -> list[Any]:
            self.outputs = run.run(closed, around(cells, arrays), path)
            return [cell.array for cell in self.outputs]

        self.closed = unstable.traced(body, *self.arrays)

    def ending_in(self, targets: Sequence[Cell]) -> Callable[..., list[Any]]:
        """Return a function that runs the program and casts its outputs to the targets' dtypes."""

        def run(*arrays: Any) -> list[Any]:
            jaxpr, constants = unstable.opened(self.closed)
            results = around(self.outputs, jax.core.eval_jaxpr(jaxpr, constants, *arrays))
            return [cell.cast(target.dtype) for cell, target in zip(results, targets, strict=True)]

        return run
