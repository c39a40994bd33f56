"""The functions that a program calls more than once, and the facts about its loops."""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import Any

from polyamp.backends.jax import unstable
from polyamp.flow import Value


class Repeats:
    """What is counted of all programs of one run, which must live as long as this object."""

    def __init__(self) -> None:
        self.loops: dict[Any, tuple[Any, list[Value]]] = {}
        self.values: dict[Any, Any] = {}  # of the functions that are called more than once
        self._times: Counter[int] = Counter()
        self._chained: defaultdict[int, set[tuple[int, int]]] = defaultdict(set)

    def count(self, closed: Any) -> None:
        """Count the programs in a program."""
        made: dict[Any, tuple[int, int]] = {}
        for equation in unstable.opened(closed)[0].eqns:
            for part in unstable.inner_programs(equation):
                self._times[id(part)] += 1
                if not is_call(equation):
                    self.count(part)
                    continue
                if self._times[id(part)] == 1:
                    self.count(part)
                self._chained[id(part)] |= _links(equation, id(part), made)

    def times(self, closed: Any) -> int:
        """Return how often a jaxpr occurs."""
        return self._times[id(closed)]

    def links(self, closed: Any) -> set[tuple[int, int]]:
        """Return the outputs of a jaxpr that are inputs of a later call of it, as pairs (output, input)."""
        return self._chained[id(closed)]


def is_call(equation: Any) -> bool:
    """Return whether an equation only calls a function, so that a rewritten function can replace it."""
    return equation.primitive.name == "jit" and unstable.is_plain_jit(equation.params)


def _links(equation: Any, called: int, made: dict[Any, tuple[int, int]]) -> set[tuple[int, int]]:
    """Return the links from earlier calls of the same function to a call, and add the call's outputs to ``made``."""
    inputs = [made.get(atom) if unstable.is_variable(atom) else None for atom in equation.invars]
    made.update({variable: (called, place) for place, variable in enumerate(equation.outvars)})
    return {(source[1], place) for place, source in enumerate(inputs) if source is not None and source[0] == called}
