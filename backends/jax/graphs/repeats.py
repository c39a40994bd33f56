"""Find the code that a program runs more than once: functions with several calls, and the bodies of loops."""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import Any

from polyamp.backends.jax import unstable
from polyamp.flow import Value


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
