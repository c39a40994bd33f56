"""What is known of a program's values before it runs: which of them are equal, and which are constants.

For example, in ``(x @ w) * (x @ w)`` the two products have equal numbers, so the flow rule sees a square.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import jax
import numpy as np

from polyamp.backends.jax import unstable
from polyamp.backends.jax.graphs.repeats import Repeats, is_call
from polyamp.backends.jax.operations import OPERATIONS, canonical
from polyamp.numbering import Numbering

_CALLS = frozenset({"jit", "closed_call", "remat2", "remat_opt", "custom_jvp_call", "custom_vjp_call"})
_IDENTITIES = frozenset({"copy", "name"})

Pattern = tuple[tuple[int, bool], ...]
"""For each argument of a function the index of the first one that equals it, and whether it is a constant."""


class Values:
    """The numbers of the values of a program, and of all programs in it that are called once."""

    def __init__(self, repeats: Repeats) -> None:
        self.numbering = Numbering()
        self._repeats = repeats
        self._programs: list[Any] = []
        self._numbers: dict[Any, int] = {}
        self._literals: dict[Hashable, int] = {}

    def add(self, closed: Any) -> None:
        """Give numbers to the values of a program."""
        self._programs.append(closed)  # the counts are by identity
        self._repeats.count(closed)
        self._add(closed)

    def of_call(self, equation: Any) -> Values:
        """Return the values of a function that is called more than once, for such arguments as a call has."""
        called, pattern = equation.params["jaxpr"], self.pattern(equation.invars)
        known: dict[Any, Values] = self._repeats.values
        if (id(called), pattern) not in known:
            own = known[id(called), pattern] = Values(self._repeats)
            own._add(called, pattern)
        return known[id(called), pattern]

    def _add(self, closed: Any, pattern: Pattern | None = None) -> None:
        """Give numbers to the values of a program, whose arguments are all different if no pattern is given."""
        jaxpr, _ = unstable.opened(closed)
        arguments = pattern or [(place, False) for place in range(len(jaxpr.invars))]
        numbers: dict[int, int] = {}
        for variable, (first, is_constant) in zip(jaxpr.invars, arguments, strict=True):
            if first not in numbers:
                numbers[first] = self.numbering.new(_shape(variable), is_constant=is_constant)
            self._numbers[variable] = numbers[first]
        self._walk(closed)

    def operation(self, equation: Any) -> str:
        """Return the canonical name of an operation: a ``mul`` of equal values is a ``square``."""
        name = canonical(equation.primitive.name, equation.params)
        if len(equation.invars) != 2:
            return name
        return self.numbering.specific(name, *map(self.number, equation.invars))

    def number(self, atom: Any) -> int:
        """Return the number of a value."""
        if unstable.is_variable(atom):
            return self._numbers[atom]
        key = (str(atom.aval), np.asarray(atom.val).tobytes())
        if key not in self._literals:
            self._literals[key] = self.numbering.new(_shape(atom), is_constant=True)
        return self._literals[key]

    def is_constant(self, atom: Any) -> bool:
        """Return whether a value is a constant, or made of constants alone."""
        return self.numbering.is_constant(self.number(atom))

    def pattern(self, atoms: Sequence[Any]) -> Pattern:
        """Return which of some values are equal, and which are constants."""
        first: dict[int, int] = {}
        numbers = map(self.number, atoms)
        return tuple(
            (first.setdefault(number, place), self.numbering.is_constant(number))
            for place, number in enumerate(numbers)
        )

    def _walk(self, closed: Any) -> None:
        jaxpr, constants = unstable.opened(closed)
        for variable, array in zip(jaxpr.constvars, constants, strict=False):
            is_constant = not isinstance(array, jax.core.Tracer)
            self._numbers[variable] = self.numbering.new(_shape(variable), is_constant=is_constant)
        for equation in jaxpr.eqns:
            parts = unstable.inner_programs(equation)
            self._numbers.update(zip(equation.outvars, self._results(equation, parts), strict=True))

    def _results(self, equation: Any, parts: Sequence[Any]) -> list[int]:
        """Return the numbers of the results of an equation, and number the values of its programs."""
        inputs = list(map(self.number, equation.invars))
        if not parts:
            return self._made(equation, inputs)
        inner, _ = unstable.opened(parts[0])
        called = equation.primitive.name in _CALLS and len(inner.invars) == len(inputs)
        if called and self._repeats.times(parts[0]) == 1:
            self._numbers.update(zip(inner.invars, inputs, strict=True))
            self._walk(parts[0])
            numbers = list(map(self.number, inner.outvars))
            if equation.primitive.name.startswith("custom_"):
                return [self.numbering.of("custom derivative", [number], id(equation)) for number in numbers]
            if len(numbers) == len(equation.outvars):
                return numbers
        elif not is_call(equation):
            for part in parts:
                self._add(part)
        if is_call(equation) and not equation.effects:
            keys = ((id(parts[0]), place) for place in range(len(equation.outvars)))
            return [self.numbering.of("jit", inputs, key) for key in keys]
        return [self.numbering.new(_shape(variable)) for variable in equation.outvars]

    def _made(self, equation: Any, inputs: Sequence[int]) -> list[int]:
        """Return the numbers of the results of an equation that runs no program."""
        name, shapes = equation.primitive.name, list(map(_shape, equation.outvars))
        if equation.effects or OPERATIONS.get(name) == "random":
            return [self.numbering.new(shape) for shape in shapes]
        if name in _IDENTITIES:
            return list(inputs)
        if name == "convert_element_type" and equation.invars[0].aval.dtype == equation.params["new_dtype"]:
            return list(inputs)
        if _is_reshape(equation):
            return [self.numbering.of("reshape", inputs, shape=shapes[0])]
        attributes = tuple(sorted(equation.params.items()))
        try:
            return [self.numbering.of(name, inputs, (place, attributes), shape) for place, shape in enumerate(shapes)]
        except TypeError:  # an attribute that cannot be compared
            return [self.numbering.new(shape) for shape in shapes]


def _shape(atom: Any) -> Any:
    return getattr(atom.aval, "shape", None)


def _is_reshape(equation: Any) -> bool:
    """Return whether an equation returns the same elements in the same order."""
    name = equation.primitive.name
    if name == "broadcast_in_dim":  # to the same size: dimensions of length 1 are added
        return len(equation.invars) == 1 and equation.invars[0].aval.size == equation.outvars[0].aval.size
    return name == "squeeze" or (name == "reshape" and equation.params["dimensions"] is None)
