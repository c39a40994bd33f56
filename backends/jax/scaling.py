"""Read from a traced program, without running it, whether the loss is scaled and whether scaled gradients are clipped.

Every value is a power of the loss scale times something independent of it. This power is its degree: 1 for the scale
itself, for a scaled loss and for its gradients. A product adds degrees; a square root halves them. A wrapped optimizer
must get gradients of degree 1.

For example, the gradients of a loss that nobody scaled have degree 0. And ``jnp.where(norm > 1, g / norm, g)`` chooses
for a scaled ``g`` between degree 0 and degree 1: it clips gradients before they are unscaled.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from polyamp.backends.jax import gradients, unstable
from polyamp.backends.jax.graphs.cells import is_inexact


class _Value(NamedTuple):
    """The facts about one value."""

    degree: float | None = 0.0  # the power of the loss scale in it; None for zeros, which have any degree
    clipped: str = ""  # the place where it was chosen from values of different degrees; empty if it was not
    of_backward: bool = False  # whether a backward pass computed it


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


class Scaling(NamedTuple):
    """Places, each once: updates with gradients that are not scaled, and places that clip scaled gradients."""

    unscaled: tuple[str, ...]
    clipped: tuple[str, ...]


def scaling_of(closed: Any, scales: Sequence[int]) -> Scaling:
    """Return the faults of the gradients that wrapped optimizers get in a program."""
    reader = _Reader()
    jaxpr, constants = unstable.opened(closed)
    inputs = [_Value(1.0 if index in scales else 0.0) for index in range(len(jaxpr.invars))]
    if scales:
        reader.run(jaxpr, constants, inputs, _Where("the gradients", backward=False))
    gradients = [(value, place) for value, place in reader.gradients if value.of_backward]
    unscaled = dict.fromkeys(place for value, place in gradients if value.degree == 0 and not value.clipped)
    return Scaling(tuple(unscaled), tuple(dict.fromkeys(value.clipped for value, _ in gradients if value.clipped)))


class _Reader:
    """One pass over a program. The body of a loop is read once, as its first iteration."""

    def __init__(self) -> None:
        self.gradients: list[tuple[_Value, str]] = []

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
        if name == "name" and gradients.mark_of(equation.params["name"]) is not None:
            self.gradients.append((values[0], where.place))
        if not parts:
            own = _result(equation, values, where)
            own = own._replace(of_backward=own.of_backward or where.backward)
            return [own if is_inexact(unstable.dtype_in(var)) else _flag(own) for var in equation.outvars]
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
    """Return the facts about a constant: zeros have any degree, and so does NaN, which can force a step to skip."""
    if not isinstance(array, np.ndarray | np.generic | float | int):
        return _Value()
    values = np.asarray(array)
    return _ANY if is_inexact(values.dtype) and not np.any(np.nan_to_num(values.astype(np.float32))) else _Value()


def _flag(value: _Value) -> _Value:
    """Return the facts about a bool or integer: it depends on a gradient only if it tests how large that is."""
    return _Value(0.0, value.clipped)


def _result(equation: Any, values: list[_Value], where: _Where) -> _Value:
    name, params = equation.primitive.name, equation.params
    if name in _DEGREES:
        own = _powered(values, _DEGREES[name](values, params), where)
        is_normalised = len(values) == 2 and own.degree == 0 and all(one.degree and one.of_backward for one in values)
        return own._replace(clipped=own.clipped or where.place) if is_normalised and not where.backward else own
    if name == "select_n":
        which, *cases = values
        chosen = _joined(cases, where)
        return chosen._replace(clipped=chosen.clipped or (which.clipped if chosen.degree else ""))
    if name in _ADDING:
        return _powered(values, _joined(values, where).degree, where)
    return _joined(values, where)


def _powered(values: Sequence[_Value], degree: float | None, where: _Where) -> _Value:
    clipped = "" if where.backward else next((value.clipped for value in values if value.clipped), "")
    return _Value(degree, clipped, any(value.of_backward for value in values))


def _joined(values: Sequence[_Value], where: _Where) -> _Value:
    """Return one of these values or their sum: it has their common degree."""
    # If it is one of gradients and values of another degree, it was chosen by size: that is clipping.
    degrees = {value.degree for value in values if value.degree is not None}
    own = _powered(values, max(degrees) if degrees else None, where)
    is_chosen = len(degrees) > 1 and own.of_backward and not where.backward
    return own._replace(clipped=own.clipped or where.place) if is_chosen else own


def _added(values: Sequence[_Value], params: Any) -> float | None:
    degrees = [value.degree for value in values]
    return None if None in degrees else float(sum(degree for degree in degrees if degree is not None))


def _times(factor: float) -> Callable[[Sequence[_Value], Any], float | None]:
    return lambda values, params: None if values[0].degree is None else values[0].degree * factor


def _quotient(values: Sequence[_Value], params: Any) -> float | None:
    top, bottom = values[0].degree, values[1].degree
    return None if top is None else top - (bottom or 0.0)


_ADDING = ("add", "sub", "add_any", "is_finite", "concatenate", "dynamic_update_slice", "scatter-add", "scatter", "pad")
_DEGREES: dict[str, Callable[[Sequence[_Value], Any], float | None]] = {
    "mul": _added,
    "dot_general": _added,
    "conv_general_dilated": _added,
    "div": _quotient,
    "sqrt": _times(0.5),
    "rsqrt": _times(-0.5),
    "cbrt": _times(1 / 3),
    "square": _times(2.0),
    "reciprocal": _times(-1.0),
    "is_finite": lambda values, params: 0.0,
    "sign": lambda values, params: 0.0,
    "integer_pow": lambda values, params: _times(float(params["y"]))(values, params),
}
