"""Read from a traced program, without running it, whether gradients have the factor that the optimizer divides by.

Every value is a product of powers of loss scales times something independent of them. These powers are its degree: 1 of
one scale for that scale itself, for a loss that it scaled and for its gradients. A product adds degrees; a square root
halves them. A wrapped optimizer must get gradients of degree 1 of the scale in its state, and returns another scale.

For example, the gradients of a loss that nobody scaled have no degree. And ``jnp.where(norm > 1, g / norm, g)`` chooses
for a scaled ``g`` between no degree and degree 1: it clips gradients before they are unscaled.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from polyamp.backends.jax import gradients, unstable
from polyamp.backends.jax.graphs.cells import is_inexact

Degree = frozenset[tuple[int, float]]
"""The loss scales in a value, by number, each with its power."""

NONE: Degree = frozenset()


class _Value(NamedTuple):
    """The facts about one value."""

    degree: Degree | None = NONE  # None for zeros, which have any degree
    clipped: str = ""  # the place where it was chosen from values of different degrees; empty if it was not
    of_backward: bool = False  # whether a backward pass computed it
    divided: str = ""  # the place where a gradient lost its loss scale; empty if none did


_ANY = _Value(None)


class _Where(NamedTuple):
    """The place of an equation: the user's line, and whether it belongs to a backward pass."""

    place: str
    backward: bool

    def of(self, equation: Any) -> _Where:
        """Return the place of an equation inside a program that is at this place."""
        backward = self.backward or "transpose" in unstable.transformations(equation)
        return _Where(unstable.users_line(equation) or self.place, backward)


_NOWHERE = _Where("", backward=True)


def scaling_of(closed: Any, scales: Sequence[int]) -> dict[str, tuple[str, ...]]:
    """Return the places of faults in how a program scales gradients, each once, by the fields of `polyamp`'s facts."""
    reader = _Reader()
    jaxpr, constants = unstable.opened(closed)
    inputs = [_Value(_power_of(index) if index in scales else NONE) for index in range(len(jaxpr.invars))]
    if scales:
        reader.run(jaxpr, constants, inputs, _Where("the gradients", backward=False))
    found: dict[str, dict[str, None]] = {"unscaled": {}, "clipped": {}, "divided": {}, "mixed": {}}
    for value, own, place in reader.gradients:
        if not own or not value.of_backward or value.degree is None:
            continue
        if value.clipped:
            found["clipped"][value.clipped] = None
        elif not value.degree:
            found["divided" if value.divided else "unscaled"][value.divided or place] = None
        elif {scale for scale, _ in value.degree} != {scale for scale, _ in own}:
            found["mixed"][place] = None
    return {name: tuple(places) for name, places in found.items()}


def _power_of(scale: int) -> Degree:
    return frozenset([(scale, 1.0)])


class _Reader:
    """One pass over a program. The body of a loop is read once, as its first iteration."""

    def __init__(self) -> None:
        self.gradients: list[tuple[_Value, Degree | None, str]] = []  # with the degree of the scale that divides them
        self._scale: Degree | None = None  # the degree of the last update's loss scale
        self._numbers = itertools.count(-1, -1)  # of loss scales that the program computes

    def run(self, program: Any, constants: Sequence[Any], given: Sequence[_Value], where: _Where) -> list[_Value]:
        """Return the outputs of a jaxpr."""
        jaxpr, own_constants = unstable.opened(program)
        known = dict(zip(jaxpr.invars, given, strict=True))
        known.update(zip(jaxpr.constvars, map(_constant, constants or own_constants), strict=False))

        def read(atom: Any) -> _Value:
            return known.get(atom, _Value()) if unstable.is_variable(atom) else _constant(atom.val)

        for equation in jaxpr.eqns:
            results = self._equation(equation, list(map(read, equation.invars)), where.of(equation))
            known.update(zip(equation.outvars, results, strict=True))
        return list(map(read, jaxpr.outvars))

    def _equation(self, equation: Any, values: list[_Value], where: _Where) -> list[_Value]:
        name, parts = equation.primitive.name, unstable.inner_programs(equation)
        mark = equation.params["name"] if name == "name" else ""
        if mark == gradients.SCALE:
            self._scale = values[0].degree
        elif mark == gradients.NEXT_SCALE:
            return [_Value(_power_of(next(self._numbers)))]
        elif gradients.mark_of(mark) is not None:
            self.gradients.append((values[0], self._scale, where.place))
        if not parts:
            own = _result(equation, values, where)
            own = own._replace(of_backward=own.of_backward or where.backward)
            # a bool or integer depends on a gradient only if it tests how large that is
            flag = _Value(NONE, own.clipped)
            return [own if is_inexact(unstable.dtype_in(var)) else flag for var in equation.outvars]
        given = (
            values[equation.params["cond_nconsts"] :] if name == "while" else values[1:] if name == "cond" else values
        )
        taking = [part for part in parts if len(unstable.opened(part)[0].invars) == len(given)]
        runs = [self.run(part, unstable.opened(part)[1], given, where) for part in taking]
        each = [results for results in runs if len(results) == len(equation.outvars)]
        if not each:
            return [_joined(values, _NOWHERE)] * len(equation.outvars)
        return [_joined(results, where) for results in zip(*each, strict=True)]


def _constant(array: Any) -> _Value:
    """Return a constant's degree: none; but any for zeros, and for NaN, which programs write to force a skip."""
    if not isinstance(array, np.ndarray | np.generic | float | int):
        return _Value()
    values = np.asarray(array)
    return _ANY if is_inexact(values.dtype) and not np.any(np.nan_to_num(values.astype(np.float32))) else _Value()


def _result(equation: Any, values: list[_Value], where: _Where) -> _Value:
    name, params = equation.primitive.name, equation.params
    if name in _DEGREES:
        own = _powered(values, _DEGREES[name](values, params))
        scaled = [bool(one.degree) and one.of_backward for one in values]
        if own.degree != NONE or where.backward or not any(scaled):
            return own
        if len(values) == 2 and all(scaled):  # normalised
            return own._replace(clipped=own.clipped or where.place)
        return own._replace(divided=where.place)
    if name == "select_n":
        which, *cases = values
        chosen = _joined(cases, where, is_choice=True)
        return chosen._replace(clipped=chosen.clipped or (which.clipped if chosen.degree else ""))
    if name in _ADDING:
        return _powered(values, _joined(values, where).degree)
    return _joined(values, where, is_choice=name in ("clamp", "min", "max"))


def _powered(values: Sequence[_Value], degree: Degree | None) -> _Value:
    clipped = next((value.clipped for value in values if value.clipped), "")
    divided = next((value.divided for value in values if value.divided), "")
    return _Value(degree, clipped, any(value.of_backward for value in values), divided)


def _joined(values: Sequence[_Value], where: _Where, *, is_choice: bool = False) -> _Value:
    """Return one of these values or their sum: it has their common degree, or all scales of different ones."""
    # If it is one of gradients and values of another degree, it was chosen by size: that is clipping. The backward pass
    # itself adds up and selects by the data, so that there only what chooses between the values counts.
    degrees = {value.degree for value in values if value.degree is not None}
    powers = {sum(power for _, power in degree): degree for degree in degrees}
    largest = frozenset().union(*(one for one in degrees if sum(p for _, p in one) == max(powers))) if degrees else None
    own = _powered(values, largest)
    is_chosen = len(powers) > 1 and own.of_backward and (is_choice or not where.backward)
    return own._replace(clipped=own.clipped or where.place) if is_chosen else own


def _product(*factors: tuple[Degree | None, float]) -> Degree | None:
    """Return the degree of a product of values, each to a power."""
    powers: dict[int, float] = {}
    for degree, exponent in factors:
        if degree is None:
            return None
        for scale, power in degree:
            powers[scale] = powers.get(scale, 0.0) + power * exponent
    return frozenset(item for item in powers.items() if item[1])


def _added(values: Sequence[_Value], params: Any) -> Degree | None:
    return _product(*((value.degree, 1.0) for value in values))


def _times(factor: float) -> Callable[[Sequence[_Value], Any], Degree | None]:
    return lambda values, params: _product((values[0].degree, factor))


def _quotient(values: Sequence[_Value], params: Any) -> Degree | None:
    return _product((values[0].degree, 1.0), (values[1].degree or NONE, -1.0))


_ADDING = ("add", "sub", "add_any", "is_finite", "concatenate", "dynamic_update_slice", "scatter-add", "scatter", "pad")
_DEGREES: dict[str, Callable[[Sequence[_Value], Any], Degree | None]] = {
    "mul": _added,
    "dot_general": _added,
    "conv_general_dilated": _added,
    "div": _quotient,
    "sqrt": _times(0.5),
    "rsqrt": _times(-0.5),
    "cbrt": _times(1 / 3),
    "square": _times(2.0),
    "reciprocal": _times(-1.0),
    "is_finite": lambda values, params: NONE,
    "sign": lambda values, params: NONE,
    "integer_pow": lambda values, params: _times(float(params["y"]))(values, params),
}
