"""The parts of a function that run under autocast by themselves, for plans that show them as they run.

A training step calls `value_and_grad`, so its program has 16-bit operations already, and nothing in it says why. While
`polyamp.explain` traces a function, every autocast in it therefore takes down its own operations, and runs in a named
scope by which the equations that came of it are known afterwards.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, NamedTuple

import jax

from polyamp.backends.jax import unstable
from polyamp.backends.jax.graphs.cells import is_inexact
from polyamp.backends.jax.graphs.equations import Equation, walk
from polyamp.backends.jax.graphs.interpreter import Interpreter
from polyamp.backends.jax.graphs.planning import Recorder
from polyamp.backends.jax.operations import canonical
from polyamp.deciding import Decider, unused_in
from polyamp.flow import AS_WRITTEN
from polyamp.formats import FORMATS
from polyamp.plan import Plan, PlannedOperation
from polyamp.policy import Policy
from polyamp.rules import decide

if TYPE_CHECKING:
    from polyamp.backends.jax.graphs.program import Program

_MARK = re.compile(r"(?:^|/)polyamp_region_(\d+)")
OUTSIDE, DERIVED = "outside of autocast", "as its forward pass"


class Region(NamedTuple):
    """One call of autocast.

    Attributes:
        policy: what it ran under.
        operations: what it ran.
        decider: what decided it, with its record.
        saved: bytes kept for the backward pass, and the same where nothing is cast; None where it has none.
    """

    policy: Policy
    operations: list[PlannedOperation]
    decider: Decider
    saved: tuple[int | None, int | None]


class Regions:
    """The calls of autocast while one function is traced."""

    def __init__(self) -> None:
        self.found: list[Region] = []

    def run(self, policy: Policy, program: Program) -> list[Any]:
        """Run a program as one of them."""
        recorder = Recorder(self)
        interpreter = Interpreter(policy, recorder)
        saved = program.bytes_saved(lambda arrays: program.run(Interpreter(policy), arrays))
        full = program.bytes_saved(program.as_traced)
        self.found.append(Region(policy, recorder.operations, interpreter.decider, (saved, full)))
        with jax.named_scope(f"polyamp_region_{len(self.found) - 1}"):
            return program.run(interpreter, program.arrays)

    def of(self, path: str) -> int | None:
        """Which of them a path is in, the outermost; None for none."""
        found = _MARK.search(path)
        return None if found is None else int(found[1])

    def unused_rules(self, policy: Policy, others: Iterable[Decider] = ()) -> list[str]:
        """Return the patterns of a policy's own rules that matched nothing in its regions, nor in other parts."""
        own = [region.decider for region in self.found if region.policy == policy]
        return [rule.pattern for rule in unused_in([*own, *others])]


_SEEN: ContextVar[Regions | None] = ContextVar("polyamp_jax_regions", default=None)


def current() -> Regions | None:
    """What takes down regions now; None where nothing does."""
    return _SEEN.get()


@contextmanager
def seen() -> Iterator[Regions]:
    """Take down every region that is traced in here, in functions too that were traced before."""
    regions = Regions()
    token = _SEEN.set(regions)
    try:
        with unstable.traced_anew():
            yield regions
    finally:
        _SEEN.reset(token)


_LEFT_OUT: ContextVar[bool] = ContextVar("polyamp_jax_regions_left_out", default=False)


def are_left_out() -> bool:
    """Whether no autocast is to change anything now."""
    return _LEFT_OUT.get()


@contextmanager
def left_out() -> Iterator[None]:
    """Trace functions as if there were no autocast in them."""
    token = _LEFT_OUT.set(True)
    try:
        with unstable.traced_anew():
            yield
    finally:
        _LEFT_OUT.reset(token)


def plan_of_step(closed: Any, regions: Regions) -> Plan:
    """The plan of a step that differentiates by itself: its regions as they run, the rest as it was written."""
    operations: list[PlannedOperation] = []
    shown: dict[int, Region] = {}
    for equation in walk(closed):
        index = regions.of(equation.path)
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


def _as_it_is(equation: Equation, of_region: bool) -> PlannedOperation:
    """An operation of the backward pass of a region, or one outside of all regions."""
    name = canonical(equation.name, equation.own.params)
    path = _MARK.sub("", equation.path).strip("/")
    decision = decide((), name, path)
    written = [var.aval for var in equation.own.outvars]
    avals = [*(atom.aval for atom in equation.own.invars), *written]
    computes = of_region and decision.op_class != "keep"
    return PlannedOperation(
        name,
        equation.name,
        f"{path} {unstable.source_line(equation.own)}".strip(),
        decision.op_class,
        _format(written) if computes else AS_WRITTEN,
        DERIVED if computes else decision.reason if of_region else OUTSIDE,
        times=equation.times,
        bytes_moved=sum(_bytes(aval, widened=False) for aval in avals),
        bytes_moved_float32=sum(_bytes(aval, widened=of_region) for aval in avals),
    )


def _format(avals: Sequence[Any]) -> str:
    names = [aval.dtype.name for aval in avals if is_inexact(getattr(aval, "dtype", None))]
    return next((name for name in names if name in FORMATS), AS_WRITTEN)


def _bytes(aval: Any, *, widened: bool) -> int:
    dtype, shape = getattr(aval, "dtype", None), getattr(aval, "shape", None)
    if dtype is None or shape is None or not all(isinstance(length, int) for length in shape):
        return 0
    is_low = widened and is_inexact(dtype) and dtype.itemsize <= 2
    size: int = math.prod(shape) * (4 if is_low else dtype.itemsize)
    return size


def _total(sizes: Sequence[int | None]) -> int | None:
    known = [size for size in sizes if size is not None]
    return sum(known) if known and len(known) == len(sizes) else None
