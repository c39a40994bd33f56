"""All equations of a traced function, those of inner programs too, with the equations that made their inputs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from polyamp.backends.jax import unstable

_PASSING = ("reshape", "squeeze", "broadcast_in_dim", "abs", "neg", "stop_gradient", "convert_element_type", "name")


class Equation:
    """An equation anywhere in a program."""

    def __init__(
        self, own: Any, path: str, sources: Sequence[Equation | None], is_backward: bool, times: int = 1
    ) -> None:
        self.own, self.path, self.sources, self.is_backward, self.times = own, path, sources, is_backward, times
        self.name: str = own.primitive.name

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        """The shapes of its inputs."""
        return [tuple(atom.aval.shape) for atom in self.own.invars]

    @property
    def source(self) -> Equation | None:
        """The equation that made its first input; equations that only pass a value on are left out."""
        made = self.sources[0] if self.sources else None
        return made.source if made is not None and made.name in _PASSING else made

    def holding(self, own: Any, sources: Sequence[Equation | None]) -> Equation:
        """Return an equation of a program that this equation holds."""
        path = "/".join(filter(None, (self.path, unstable.scopes(own))))
        is_backward = self.is_backward or "transpose" in unstable.transformations(own)
        length = self.own.params.get("length", 1) if self.name == "scan" else 1
        return Equation(own, path, sources, is_backward, self.times * length)


def walk(closed: Any) -> Iterator[Equation]:
    """Yield all equations; those of an inner program replace the equation that holds it."""
    return _walk(closed, None, {})


def _walk(closed: Any, holder: Equation | None, made: dict[Any, Equation | None]) -> Iterator[Equation]:
    jaxpr, _ = unstable.opened(closed)
    for own in jaxpr.eqns:
        sources = [made.get(atom) if unstable.is_variable(atom) else None for atom in own.invars]
        equation = _outermost(own, sources) if holder is None else holder.holding(own, sources)
        parts = unstable.inner_programs(own)
        if not parts:
            made.update(dict.fromkeys(own.outvars, equation))
            yield equation
        for part in parts:
            yield from _walk_inner(part, equation, made)


def _outermost(own: Any, sources: Sequence[Equation | None]) -> Equation:
    return Equation(own, unstable.scopes(own), sources, "transpose" in unstable.transformations(own))


def _walk_inner(part: Any, holder: Equation, made: dict[Any, Any]) -> Iterator[Equation]:
    """Walk through a part of an equation. Sources are known across its border if its arguments are the equation's."""
    jaxpr, _ = unstable.opened(part)
    outer = holder.sources
    taken = dict(zip(jaxpr.invars, outer, strict=True)) if len(jaxpr.invars) == len(outer) else {}
    yield from _walk(part, holder, taken)
    if len(jaxpr.outvars) == len(holder.own.outvars):
        results = zip(holder.own.outvars, jaxpr.outvars, strict=True)
        made.update({outer: taken.get(inner) for outer, inner in results if unstable.is_variable(inner)})
