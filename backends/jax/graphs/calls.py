"""Functions under ``jax.jit`` that a program calls several times: rewritten once for each way they are called.

JAX compiles such a function once however often it is called, since every call holds the same jaxpr. Run again
equation by equation, a block of 24 calls would be 24 blocks to trace and compile. So a jaxpr that is called more than
once is rewritten for the formats that its arguments come in, and all calls with these hold the one that came of it.

Where the output of a block goes straight into the next one, the first is given float32 data, say, and the others 16
bits: two functions. The output is then handed on in float32, which loses nothing, and one function does for all.
"""

from __future__ import annotations

import operator
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakKeyDictionary

from polyamp.backends.jax import unstable
from polyamp.backends.jax.graphs.cells import FLOAT32, Cell
from polyamp.deciding import Decider
from polyamp.flow import Value

if TYPE_CHECKING:
    from polyamp.backends.jax.graphs.interpreter import Interpreter


class _Rewritten(NamedTuple):
    """A jaxpr with its formats.

    Attributes:
        closed: the jaxpr.
        outputs: what stands for its results.
        decider: what decided it, with its record.
    """

    closed: Any
    outputs: list[Cell]
    decider: Decider


_KNOWN: WeakKeyDictionary[Any, dict[Any, _Rewritten]] = WeakKeyDictionary()


class Calls:
    """The functions that one program calls more than once, and what is known of its loops.

    Attributes:
        loops: for the parameters of a loop and the formats of its arguments, these parameters, which keep their id, and
            what its body makes of what it carries.
    """

    def __init__(self) -> None:
        self.loops: dict[Any, tuple[Any, list[Value]]] = {}
        self._times: Counter[int] = Counter()
        self._chained: defaultdict[int, set[tuple[int, int]]] = defaultdict(set)  # outputs that are inputs of the next

    def count(self, closed: Any) -> None:
        """Look through a program, which has to live as long as this."""
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

    def repeat(self, closed: Any) -> bool:
        """Whether a jaxpr is called more than once, and holds more than what a call of it takes."""
        return self._times[id(closed)] > 1 and len(unstable.opened(closed)[0].eqns) > 1

    def results(self, run: Interpreter, equation: Any, cells: Sequence[Cell], path: str) -> list[Cell]:
        """The outputs of one such call."""
        rewritten = self._rewritten(run, equation.params["jaxpr"], cells, path)
        run.decider.take_over(rewritten.decider)
        arrays = [cell.array for cell in cells]
        results = unstable.bound(equation, arrays, {**equation.params, "jaxpr": rewritten.closed})
        return [cell.around(array) for cell, array in zip(rewritten.outputs, results, strict=True)]

    def _rewritten(self, run: Interpreter, closed: Any, cells: Sequence[Cell], path: str) -> _Rewritten:
        known = _KNOWN.setdefault(closed, {})
        key = (run.policy, run.is_looped, run.place(path), tuple(cell.format for cell in cells), _equal(cells))
        if key not in known:
            known[key] = _like_one_of(known, _made(run, closed, cells, path, frozenset()))
        held = frozenset(
            (output, cells[own].value)
            for output, own in self._chained[id(closed)]
            if known[key].outputs[output].value.state == "low" and _is_given(cells[own])
        )
        if held and (key, held) not in known:
            known[key, held] = _like_one_of(known, _made(run, closed, cells, path, held))
        return known[key, held] if held else known[key]


def _made(
    run: Interpreter, closed: Any, cells: Sequence[Cell], path: str, held: frozenset[tuple[int, Value]]
) -> _Rewritten:
    """A jaxpr rewritten for arguments in these formats, with some of its outputs held as arguments are."""
    outputs: list[Cell] = []
    own = run.apart()

    def body(*arrays: Any) -> list[Any]:
        inner = [cell.around(array) for cell, array in zip(cells, arrays, strict=True)]
        found = own.run(closed, inner, path)
        given = dict(sorted(held))
        outputs[:] = [cell.as_given(given[place]) if place in given else cell for place, cell in enumerate(found)]
        return [cell.array for cell in outputs]

    jaxpr = unstable.traced(body, *(cell.array for cell in cells))
    specs = unstable.specs_of_results(jaxpr)
    return _Rewritten(jaxpr, [cell.around(spec) for cell, spec in zip(outputs, specs, strict=True)], own.decider)


def _like_one_of(known: dict[Any, _Rewritten], new: _Rewritten) -> _Rewritten:
    """What was made before for other formats, if it is the same program and gives the same formats."""
    text = unstable.text_of(new.closed)
    return next((old for old in known.values() if text and _is_same(old, new, text)), new)


def _is_same(old: _Rewritten, new: _Rewritten, text: str) -> bool:
    outputs = ([(cell.format, cell.shared) for cell in one.outputs] for one in (old, new))
    return operator.eq(*outputs) and unstable.text_of(old.closed) == text


def _equal(cells: Sequence[Cell]) -> tuple[int, ...]:
    """Which arguments hold the same: for each the first that does."""
    first: dict[Any, int] = {}
    return tuple(first.setdefault(cell.same, place) for place, cell in enumerate(cells))


def _is_given(cell: Cell) -> bool:
    """Whether a value is float32 only because it is declared so."""
    return cell.dtype == cell.declared == FLOAT32 and cell.value.state in ("weak", "input")


def _is_call(equation: Any) -> bool:
    return equation.primitive.name == "jit" and unstable.is_plain_jit(equation.params)


def _links(equation: Any, called: int, made: dict[Any, tuple[int, int]]) -> set[tuple[int, int]]:
    """Which outputs of calls of the same function its inputs are, as (output, input); ``made`` learns its outputs."""
    inputs = [made.get(atom) if unstable.is_variable(atom) else None for atom in equation.invars]
    made.update({variable: (called, place) for place, variable in enumerate(equation.outvars)})
    return {(source[1], place) for place, source in enumerate(inputs) if source is not None and source[0] == called}
