"""The part of the interpreter that handlers of primitives use.

A primitive such as ``scan`` holds another program, and its handler runs that program with the same interpreter. The
interpreter imports the handlers; they know it only as a `Run`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from polyamp.backends.jax.graphs.cells import Cell
from polyamp.backends.jax.graphs.planning import PlanBuilder
from polyamp.backends.jax.graphs.repeats import Repeats
from polyamp.deciding import Decider
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
