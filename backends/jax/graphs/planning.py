"""Takes down what an interpreter decides, as the operations of a plan."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from polyamp.backends.jax import unstable
from polyamp.backends.jax.graphs.cells import FLOAT32, Cell
from polyamp.flow import AS_WRITTEN, Flow
from polyamp.plan import PlannedOperation
from polyamp.rules import Decision

if TYPE_CHECKING:
    from polyamp.backends.jax.autocast.regions import Regions


class Recorder:
    """The operations of one run, in their order.

    JAX may trace the body of a loop or a rule more than once; what an earlier trace took down is then dropped.

    Args:
        regions: the parts of the program that run under an autocast of their own, whose operations stand in the place
            of their equations.
    """

    def __init__(self, regions: Regions | None = None) -> None:
        self.operations: list[PlannedOperation] = []
        self._times = 1
        self._regions = regions
        self._placed: dict[int, int] = {}  # regions, and where their operations begin

    @contextmanager
    def repeated(self, mark: int, times: int = 1) -> Iterator[None]:
        """A body that runs so many times; ``mark`` is the number of operations before it."""
        del self.operations[mark:]
        self._placed = {index: begin for index, begin in self._placed.items() if begin < mark}
        before, self._times = self._times, self._times * times
        try:
            yield
        finally:
            self._times = before

    def add(
        self,
        equation: Any,
        name: str,
        path: str,
        decision: Decision,
        outcome: Flow,
        cells: Sequence[Cell],
        dtype: Any,
        held: Any,
    ) -> None:
        """Take down one operation, before its inputs are cast; its results are held in another dtype perhaps."""
        region = self._regions.of(path) if self._regions else None
        if self._regions is not None and region is not None:
            self._place(region, self._regions.found[region].operations)
            return
        as_written = outcome.format == AS_WRITTEN
        wanted = [cell.declared if as_written or not cell.inexact else dtype for cell in cells]
        cast = [(cell.array, cell.dtype, to) for cell, to in zip(cells, wanted, strict=True) if cell.dtype != to]
        outputs = [variable.aval for variable in equation.outvars]
        read = sum(_bytes(cell.array, to) for cell, to in zip(cells, wanted, strict=True))
        written = sum(_bytes(aval, held if _is_float32(aval) and not as_written else None) for aval in outputs)
        bytes_cast = sum(_bytes(array, before) for array, before, _ in cast)
        self.operations.append(
            PlannedOperation(
                name,
                equation.primitive.name,
                f"{unstable.without_island(path)} {unstable.source_line(equation)}".strip(),
                decision.op_class,
                outcome.format,
                outcome.reason,
                times=self._times,
                casts=len(cast),
                bytes_cast=bytes_cast,
                bytes_moved=read + written + bytes_cast + sum(_bytes(array, to) for array, _, to in cast),
                bytes_moved_float32=sum(_bytes(cell.array, cell.declared) for cell in cells)
                + sum(map(_bytes, outputs)),
            )
        )

    def _place(self, region: int, operations: Sequence[PlannedOperation]) -> None:
        if region not in self._placed:
            self._placed[region] = len(self.operations)
            self.operations += [op._replace(times=op.times * self._times) for op in operations]


def _is_float32(aval: Any) -> bool:
    return getattr(aval, "dtype", None) == FLOAT32


def _bytes(array: Any, dtype: Any = None) -> int:
    """Size of an array in a dtype; 0 where it has none, or a shape that is not known."""
    dtype = getattr(array, "dtype", None) if dtype is None else dtype
    shape = getattr(array, "shape", None)
    if dtype is None or shape is None or not all(isinstance(length, int) for length in shape):
        return 0
    size: int = math.prod(shape) * dtype.itemsize
    return size
