"""The part of the interpreter that handlers of primitives use, and what it knows of code that runs more than once.

A primitive such as ``scan`` holds another program, and its handler runs that program with the same interpreter. The
interpreter imports the handlers; they know it only as a `Run`.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from polyamp.backends.jax import unstable
from polyamp.backends.jax.graphs.cells import Cell
from polyamp.backends.jax.graphs.decisions import PlanBuilder
from polyamp.deciding import Decider
from polyamp.flow import Value
from polyamp.policies import Policy


class Run(Protocol):
    """One run of a program under a policy; see `polyamp.backends.jax.graphs.interpreter.Interpreter`."""

    policy: Policy  # the policy
    compute: Any  # the dtype of its compute format
    decider: Decider  # decides the operations, and records what to report at the end
    repeats: Repeats  # what the program runs more than once
    is_looped: bool  # whether it is in the body of a loop
    plan: PlanBuilder | None  # collects the operations for a plan; None for a run that only computes

    def run(self, closed: Any, cells: Sequence[Cell], path: str) -> list[Cell]:
        """Return the outputs of a jaxpr that runs in the scopes ``path``."""

    def call(self, function: Callable[..., Any], cells: Sequence[Cell], path: str) -> list[Cell]:
        """Trace a function that returns a list of arrays, at the declared types, and run it."""

    def place(self, path: str) -> str:
        """Return the part of a path that decisions depend on: without rules for paths, at most `unstable.ISLAND`."""

    def looped(self) -> AbstractContextManager[None]:
        """Mark the code inside as the body of a loop."""

    def apart(self) -> Run:
        """Return a run under the same policy that keeps its own record."""


Handler = Callable[[Run, Any, list[Cell], str], list[Cell] | None]
"""Returns the outputs of an equation, or None if the interpreter must bind it as an operation."""


class Repeats:
    """The functions that one program calls more than once, and the facts about its loops."""

    def __init__(self) -> None:
        self.loops: dict[Any, tuple[Any, list[Value]]] = {}
        self._times: Counter[int] = Counter()
        self._chained: defaultdict[int, set[tuple[int, int]]] = defaultdict(set)

    def count(self, closed: Any) -> None:
        """Count the calls in a program, which must live as long as this object."""
        made: dict[Any, tuple[int, int]] = {}
        for equation in unstable.opened(closed)[0].eqns:
            for part in unstable.inner_programs(equation):
                if not _is_call(equation):
                    self.count(part)
                    continue
                self._times[id(part)] += 1
                if self._times[id(part)] == 1:
                    self.count(part)
                self._chained[id(part)] |= _links(equation, id(part), made)

    def is_repeated(self, closed: Any) -> bool:
        """Return whether a jaxpr is called more than once and has more than one equation."""
        return self._times[id(closed)] > 1 and len(unstable.opened(closed)[0].eqns) > 1

    def links(self, closed: Any) -> set[tuple[int, int]]:
        """Return the outputs of a jaxpr that are inputs of a later call of it, as pairs (output, input)."""
        return self._chained[id(closed)]


def _is_call(equation: Any) -> bool:
    return equation.primitive.name == "jit" and unstable.is_plain_jit(equation.params)


def _links(equation: Any, called: int, made: dict[Any, tuple[int, int]]) -> set[tuple[int, int]]:
    """Return the links from earlier calls of the same function to a call, and add the call's outputs to ``made``."""
    inputs = [made.get(atom) if unstable.is_variable(atom) else None for atom in equation.invars]
    made.update({variable: (called, place) for place, variable in enumerate(equation.outvars)})
    return {(source[1], place) for place, source in enumerate(inputs) if source is not None and source[0] == called}
