"""Collects what an interpreter decides, as the operations of a plan."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from polyamp.backends.jax import unstable
from polyamp.backends.jax.graphs.cells import FLOAT32, Cell
from polyamp.backends.jax.graphs.decisions import Decided
from polyamp.plan import PlannedOperation

RegionAt = Callable[[str], tuple[int, Sequence[PlannedOperation]] | None]
"""Returns the number and the operations of the autocast region that a path is in; None outside of all regions."""


class PlanBuilder:
    """The operations of one run, in their order."""

    # JAX may trace the body of a loop or a rule more than once. The operations of an earlier trace are then dropped.

    def __init__(self, region_at: RegionAt | None = None) -> None:
        self.operations: list[PlannedOperation] = []
        self._times = 1
        self._region_at = region_at
        self._begins: dict[int, int] = {}  # for a region, the index of its first operation

    @contextmanager
    def repeated(self, mark: int, times: int = 1) -> Iterator[None]:
        """Add the operations of a body that runs ``times`` times; ``mark`` is the number of operations before it."""
        del self.operations[mark:]
        self._begins = {region: begin for region, begin in self._begins.items() if begin < mark}
        before, self._times = self._times, self._times * times
        try:
            yield
        finally:
            self._times = before

    def add(self, equation: Any, path: str, decided: Decided, cells: Sequence[Cell]) -> None:
        """Add one operation. Call it before the inputs are cast."""
        region = self._region_at(path) if self._region_at else None
        if region is not None:
            self._insert(*region)
            return
        as_written, held = decided.is_as_written, decided.held
        wanted = [cell.declared if as_written or not cell.inexact else decided.computes_in for cell in cells]
        cast = [(cell.array, cell.dtype, to) for cell, to in zip(cells, wanted, strict=True) if cell.dtype != to]
        outputs = [variable.aval for variable in equation.outvars]
        read = sum(bytes_of(cell.array, to) for cell, to in zip(cells, wanted, strict=True))
        written = sum(bytes_of(aval, held if _is_float32(aval) and not as_written else None) for aval in outputs)
        bytes_cast = sum(bytes_of(array, before) for array, before, _ in cast)
        self.operations.append(
            PlannedOperation(
                decided.name,
                equation.primitive.name,
                f"{unstable.without_island(path)} {unstable.source_line(equation)}".strip(),
                decided.decision.op_class,
                decided.outcome.format,
                decided.outcome.reason,
                times=self._times,
                casts=len(cast),
                bytes_cast=bytes_cast,
                bytes_moved=read + written + bytes_cast + sum(bytes_of(array, to) for array, _, to in cast),
                bytes_moved_float32=sum(bytes_of(cell.array, cell.declared) for cell in cells)
                + sum(map(bytes_of, outputs)),
            )
        )

    def _insert(self, region: int, operations: Sequence[PlannedOperation]) -> None:
        if region not in self._begins:
            self._begins[region] = len(self.operations)
            self.operations += [op._replace(times=op.times * self._times) for op in operations]


def _is_float32(aval: Any) -> bool:
    return getattr(aval, "dtype", None) == FLOAT32


def bytes_of(array: Any, dtype: Any = None) -> int:
    """Return the size of an array in a dtype, by default its own; 0 if it has no dtype, or no known shape."""
    dtype = getattr(array, "dtype", None) if dtype is None else dtype
    shape = getattr(array, "shape", None)
    if dtype is None or shape is None or not all(isinstance(length, int) for length in shape):
        return 0
    size: int = math.prod(shape) * dtype.itemsize
    return size
