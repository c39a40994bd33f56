"""Builds plans: the operations of one run, and the autocast regions of a function, shown as they run.

A training step calls `value_and_grad`, so its program has 16-bit operations already, and nothing in it tells why. So
while `polyamp.explain` traces a function, every autocast in it records its own operations. It also runs in a named
scope, so that its equations can be found: those of the first region are in the scope ``polyamp_region_0``.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import jax

from polyamp.backends.jax import unstable
from polyamp.backends.jax.graphs.capture import Equation, walk
from polyamp.backends.jax.graphs.cells import FLOAT32, Cell, is_inexact
from polyamp.backends.jax.operations import canonical
from polyamp.flow import AS_WRITTEN, Decision, decide
from polyamp.formats import FORMATS
from polyamp.plan import BY_HAND, Decider, Plan, PlannedOperation, planned, unused_in
from polyamp.policies import Policy

_MARK = re.compile(r"(?:^|/)polyamp_region_(\d+)")
OUTSIDE, DERIVED = "outside of autocast", "as its forward pass"


class PlanBuilder:
    """The operations of one run, in their order."""

    # JAX may trace the body of a loop or a rule more than once. The operations of an earlier trace are then dropped.

    def __init__(self, regions: Regions | None = None) -> None:
        self.operations: list[PlannedOperation] = []
        self._times = 1
        self._regions = regions
        self._begins: dict[int, int] = {}  # for a region, the index of its first operation

    @contextmanager
    def repeated(self, mark: int, times: int = 1) -> Iterator[None]:
        """Remove what an earlier trace added from ``mark`` on; what is added inside counts ``times`` times."""
        del self.operations[mark:]
        self._begins = {region: begin for region, begin in self._begins.items() if begin < mark}
        before, self._times = self._times, self._times * times
        try:
            yield
        finally:
            self._times = before

    def add(
        self, equation: Any, path: str, decision: Decision, cells: Sequence[Cell], computes_in: Any, held: Any
    ) -> None:
        """Add one operation to the plan; to be called before its inputs are cast."""
        region = self._regions.index_at(path) if self._regions else None
        if self._regions and region is not None:
            if region not in self._begins:
                self._begins[region] = len(self.operations)
                inside = self._regions.found[region].operations
                self.operations += [op._replace(times=op.times * self._times) for op in inside]
            return
        as_written = decision.format == AS_WRITTEN
        wanted = [cell.declared if as_written or not cell.inexact else computes_in for cell in cells]
        cast = [(cell.array, cell.dtype, to) for cell, to in zip(cells, wanted, strict=True) if cell.dtype != to]
        outputs = [variable.aval for variable in equation.outvars]
        read = sum(_bytes(cell.array, to) for cell, to in zip(cells, wanted, strict=True))
        written = sum(
            _bytes(aval, held if not as_written and getattr(aval, "dtype", None) == FLOAT32 else None)
            for aval in outputs
        )
        self.operations.append(
            planned(
                _by_hand(equation, decision),
                equation.primitive.name,
                f"{unstable.without_island(path)} {unstable.source_line(equation)}",
                casts=[(_bytes(array, before), _bytes(array, to)) for array, before, to in cast],
                moved=read + written,
                moved_float32=sum(_bytes(cell.array, cell.declared) for cell in cells) + sum(map(_bytes, outputs)),
                times=self._times,
                sizes=_sizes(equation, decision.operation),
            )
        )


def _by_hand(equation: Any, decision: Decision) -> Decision:
    """Return a decision; for a cast to 16 bits in the forward pass, with the user's code as the reason."""
    target = _format([var.aval for var in equation.outvars])
    is_low = target in ("float16", "bfloat16") and "transpose" not in unstable.transformations(equation)
    return decision._replace(reason=f"{BY_HAND}{target}") if decision.operation == "cast" and is_low else decision


def _bytes(array: Any, dtype: Any = None) -> int:
    """Return the size of an array in a dtype, by default its own; 0 if it has no dtype, or no known shape."""
    dtype = getattr(array, "dtype", None) if dtype is None else dtype
    shape = getattr(array, "shape", None)
    if dtype is None or shape is None or not all(isinstance(length, int) for length in shape):
        return 0
    size: int = math.prod(shape) * dtype.itemsize
    return size


class Region(NamedTuple):
    """One call of autocast."""

    policy: Policy  # the policy that it runs under
    operations: list[PlannedOperation]  # its operations
    decider: Decider  # its decisions, and the findings to report
    # the bytes kept for its backward pass, and the same without casts; None if it has no backward pass
    saved: tuple[int | None, int | None]


class Regions:
    """The calls of autocast while one function is traced."""

    def __init__(self, *, left_out: bool) -> None:
        self.left_out = left_out  # whether autocast must not change anything
        self.found: list[Region] = []

    def add(self, region: Region) -> AbstractContextManager[None]:
        """Add a region; return the context that its operations are bound in."""
        self.found.append(region)
        return jax.named_scope(f"polyamp_region_{len(self.found) - 1}")

    def index_at(self, path: str) -> int | None:
        """Return the number of the outermost region in a path; None outside of all regions."""
        found = _MARK.search(path)
        return None if found is None else int(found[1])

    def unused_rules(self, policy: Policy, others: Iterable[Decider] = ()) -> list[str]:
        """Return the patterns of a policy's own rules that matched nothing in that policy's regions or ``others``."""
        own = [region.decider for region in self.found if region.policy == policy]
        return [rule.pattern for rule in unused_in([*own, *others])]


RECORDED: ContextVar[Regions | None] = ContextVar("polyamp_jax_regions", default=None)


@contextmanager
def recorded(*, left_out: bool = False) -> Iterator[Regions]:
    """Record each autocast that is traced inside, also in functions traced before; ``left_out`` turns autocast off."""
    regions = Regions(left_out=left_out)
    token, number = RECORDED.set(regions), _NUMBERS.pop() if _NUMBERS else next(_NEW)
    try:
        with unstable.traced_apart(number):
            yield regions
    finally:
        RECORDED.reset(token)
        if not (regions.found or left_out):
            _NUMBERS.append(number)


_NEW = itertools.count()
_NUMBERS: list[int] = []  # of traces without a region: ``jax.jit`` keeps traces, and may use these again


def plan_of_step(closed: Any, regions: Regions) -> Plan:
    """Return the plan of a step with its own backward pass: its regions as they run, the rest as it was written."""
    operations: list[PlannedOperation] = []
    shown: dict[int, Region] = {}
    for equation in walk(closed):
        index = regions.index_at(equation.path)
        if index is None or equation.is_backward:
            operations.append(_as_it_is(equation, index is not None))
        elif index not in shown:
            shown[index] = regions.found[index]
            operations += [op._replace(times=op.times * equation.times) for op in shown[index].operations]
    policies = list(dict.fromkeys(region.policy for region in shown.values()))
    return Plan(
        ", ".join(map(str, policies)),
        tuple(operations),
        _total([region.saved[0] for region in shown.values()]),
        _total([region.saved[1] for region in shown.values()]),
        tuple(pattern for policy in policies for pattern in regions.unused_rules(policy)),
    )


def _as_it_is(equation: Equation, in_region: bool) -> PlannedOperation:
    """Return a plan's entry for an equation as written: in a region's backward pass, or outside of all regions."""
    path = _MARK.sub("", equation.path).strip("/")
    decision = decide((), canonical(equation.name, equation.own.params), path)
    written = [var.aval for var in equation.own.outvars]
    avals = [*(atom.aval for atom in equation.own.invars), *written]
    if not in_region:
        decision = decision._replace(reason=OUTSIDE)
    elif decision.op_class != "keep":
        decision = decision._replace(format=_format(written), reason=DERIVED)
    return planned(
        decision,
        equation.name,
        f"{path} {unstable.source_line(equation.own)}",
        moved=sum(map(_bytes, avals)),
        moved_float32=sum(_bytes_widened(aval) if in_region else _bytes(aval) for aval in avals),
        times=equation.times,
        sizes=() if equation.is_backward else _sizes(equation.own, decision.operation),
    )


def _sizes(equation: Any, name: str) -> tuple[int, ...]:
    """Return the sizes of a product, or the classes and rows of a loss; see `polyamp.plan.PlannedOperation`."""
    if name not in ("conv", "matmul", "sum") or "transpose" in unstable.transformations(equation):
        return ()
    params, (left, *others) = equation.params, [atom.aval.shape for atom in equation.invars]
    if name == "conv":
        out_channels, in_channels, *_ = params["dimension_numbers"].rhs_spec
        return others[0][in_channels], others[0][out_channels]
    if name == "matmul":
        (contracting, _), (batched, _) = params["dimension_numbers"]
        terms, batch = (math.prod(left[axis] for axis in axes) for axes in (contracting, batched))
        each = max(terms * batch, 1)
        return math.prod(left) // each, terms, math.prod(others[0]) // each
    classes = math.prod(left[axis] for axis in params["axes"])
    is_loss = unstable.library_function(equation) in ("log_softmax", "logsumexp")
    return (classes, math.prod(left) // max(classes, 1)) if is_loss else ()


def _format(avals: Sequence[Any]) -> str:
    names = [aval.dtype.name for aval in avals if is_inexact(getattr(aval, "dtype", None))]
    return next((name for name in names if name in FORMATS), AS_WRITTEN)


def _bytes_widened(aval: Any) -> int:
    """Return the bytes of an array; of a 16-bit one, the bytes that it would have in float32."""
    dtype = getattr(aval, "dtype", None)
    return _bytes(aval, FLOAT32 if dtype is not None and is_inexact(dtype) and dtype.itemsize <= 2 else None)


def _total(sizes: Sequence[int | None]) -> int | None:
    known = [size for size in sizes if size is not None]
    return sum(known) if known and len(known) == len(sizes) else None
