"""Runs a traced program again, each operation in the format that the flow rule decides.

For example, the program of ``exp(x @ w)`` has the equations ``dot_general`` and ``exp``. Under ``mixed_float16`` the
interpreter casts ``x`` and ``w`` to float16 and binds the first; it casts the result to float32 and binds the second.

Nothing is stored in between. The primitives are bound while JAX traces or runs the caller, so every transformation
around it sees an ordinary program.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from polyamp.backends.jax import unstable
from polyamp.backends.jax.casting import dtype_of, is_traced
from polyamp.backends.jax.graphs import writing
from polyamp.backends.jax.graphs.capture import Program
from polyamp.backends.jax.graphs.cells import FLOAT32, Cell, around, declared_value
from polyamp.backends.jax.graphs.decisions import decide_equation, dtypes_of, value_of_integers
from polyamp.backends.jax.graphs.planning import PlanBuilder
from polyamp.backends.jax.graphs.values import Values
from polyamp.backends.jax.graphs.writing import bind_low, bind_wide
from polyamp.errors import UnsupportedError
from polyamp.flow import AS_WRITTEN, INPUT, WEAK, Decision, Value
from polyamp.plan import Decider
from polyamp.policies import Policy
from polyamp.readers import DIVIDES


class Repeats:
    """The functions that one program calls more than once, and the facts about its loops."""

    def __init__(self) -> None:
        self.loops: dict[Any, tuple[Any, list[Value]]] = {}
        self._times: Counter[int] = Counter()
        self._chained: defaultdict[int, set[tuple[int, int]]] = defaultdict(set)

    def count(self, closed: Any) -> None:
        """Count how often a program calls each function; the program must live as long as this object."""
        made: dict[Any, tuple[int, int]] = {}
        for equation in unstable.opened(closed)[0].eqns:
            for part in unstable.inner_programs(equation):
                if equation.primitive.name != "jit" or not unstable.is_plain_jit(equation.params):
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
        """Return each pair (output, input) where that output of one call of a jaxpr is that input of a later one."""
        return self._chained[id(closed)]


def _links(equation: Any, called: int, made: dict[Any, tuple[int, int]]) -> set[tuple[int, int]]:
    """Return the pairs of `Repeats.links` that end in this call, and add the call's outputs to ``made``."""
    inputs = [made.get(atom) if unstable.is_variable(atom) else None for atom in equation.invars]
    made.update({variable: (called, place) for place, variable in enumerate(equation.outvars)})
    return {(source[1], place) for place, source in enumerate(inputs) if source is not None and source[0] == called}


class Interpreter:
    """One run of a program under a policy."""

    def __init__(self, policy: Policy, handlers: Mapping[str, Handler], plan: PlanBuilder | None = None) -> None:
        self.policy, self.handlers = policy, handlers
        self.compute = dtype_of(policy.compute)
        self.decider = Decider(policy)
        self.repeats = Repeats()
        self.values: Values  # those of the program that runs
        self._made: dict[int, Cell] = {}  # by its number the first of equal results
        self.is_looped = False
        self.plan = plan
        self._parameters: frozenset[int] = frozenset()  # the ids of traced arrays that it takes from modules
        self._needs_paths = plan is not None or bool(policy.rules)

    def apart(self) -> Interpreter:
        """Return an interpreter for the same policy, with a record of decisions of its own and no plan."""
        other = copy(self)
        other.decider, other.plan = Decider(self.policy), None
        return other

    def looped(self) -> Interpreter:
        """Return an interpreter for the body of a loop; it records into the same plan and decisions."""
        other = copy(self)
        other.is_looped = True
        return other

    def place(self, path: str) -> str:
        """Return the part of a path that matters: all of it for a plan or rules, else at most `unstable.ISLAND`."""
        return path if self._needs_paths else unstable.ISLAND if unstable.ISLAND in path else ""

    def run_program(self, program: Program, arrays: Sequence[Any]) -> list[Any]:
        """Run a program; return its results as arrays in their declared dtypes."""
        jaxpr, _ = unstable.opened(program.closed)
        if self.plan is None:
            self.repeats.count(program.closed)
        self.values = Values(program.closed, self.repeats.is_repeated, program.are_parameters)
        self._parameters = program.parameters
        given = zip(arrays, jaxpr.invars, program.are_parameters, strict=True)
        cells = [
            Cell.of(array, unstable.dtype_in(var), self._parameter(array) if own else INPUT)
            for array, var, own in given
        ]
        outputs = self.run(program.closed, cells, "")
        return [_as_traced(cell, variable) for cell, variable in zip(outputs, jaxpr.outvars, strict=True)]

    def run(self, closed: Any, cells: Sequence[Cell], path: str) -> list[Cell]:
        """Run a jaxpr in the scopes ``path``; return its outputs."""
        jaxpr, constants = unstable.opened(closed)
        before, self._made = self._made, {}
        known = dict(zip(jaxpr.constvars, map(self._constant, jaxpr.constvars, constants), strict=True))
        known.update(zip(jaxpr.invars, cells, strict=True))

        def read(atom: Any) -> Cell:
            return known[atom] if unstable.is_variable(atom) else self._constant(atom, np.asarray(atom.val))

        for equation in jaxpr.eqns:
            cells = [read(atom) for atom in equation.invars]
            with unstable.place_of(equation), unstable.settings_of(equation):
                results = self._equation(equation, cells, path)
            known.update(zip(equation.outvars, results, strict=True))
        self._made = before
        return list(map(read, jaxpr.outvars))

    def call(self, function: Callable[..., Any], cells: Sequence[Cell], path: str) -> list[Cell]:
        """Trace a function of arrays for the declared dtypes of ``cells``, then run the trace on the cells."""
        # An array inside `jax.shard_map` varies along some axes of the mesh, and its type has these axes.
        specs = [jax.typeof(cell.array).update(dtype=cell.declared, weak_type=False) for cell in cells]
        closed, own = jax.make_jaxpr(function)(*specs), copy(self)
        own.values = Values(closed, self.repeats.is_repeated)
        return own.run(closed, cells, path)

    def _equation(self, equation: Any, cells: list[Cell], path: str) -> list[Cell]:
        own = unstable.scopes(equation) if self._needs_paths else ""
        path = "/".join(filter(None, (path, unstable.island(equation), own)))
        handler = self.handlers.get(equation.primitive.name)
        results = handler(self, equation, cells, path) if handler else None
        return self._operation(equation, cells, path) if results is None else results

    def _operation(self, equation: Any, cells: list[Cell], path: str) -> list[Cell]:
        if self._needs_paths:  # JAX has softmax, gelu and the like only as functions
            path = "/".join(filter(None, (path, unstable.library_function(equation))))
        decision = decide_equation(self.decider, equation, cells, self.values, path)
        computes_in, held = dtypes_of(decision, self.decider)
        if self.plan is not None:
            self.plan.add(equation, path, decision, cells, computes_in, held)
        if decision.format == AS_WRITTEN:
            bound = unstable.bound(equation, [cell.restored() for cell in cells])
            results = _results(equation, bound, decision.output, FLOAT32)
        else:
            with _naming_rule(equation, decision):
                bound = self._bind(equation, cells, decision.anew, computes_in, held)
            results = _results(equation, bound, decision.output, held)
            writing.note_equation(equation, cells, results, decision.anew)
        if len(results) == 1:
            self._share_casts(equation, results[0])
        return results

    def _share_casts(self, equation: Any, result: Cell) -> None:
        """Let equal values share their casts, so that the gradients of all uses add up before they are rounded."""
        number, *inputs = map(self.values.number, (*equation.outvars, *equation.invars))
        first = self._made.setdefault(number, result)
        if first.dtype == result.dtype and number not in inputs:
            result.casts = first.casts

    def _bind(
        self, equation: Any, cells: Sequence[Cell], anew: tuple[str, ...], computes_in: Any, held: Any
    ) -> list[Any]:
        """Bind an equation in the dtypes that were decided; return its results."""
        if computes_in != FLOAT32:
            return bind_low(equation, cells, computes_in, is_looped=self.is_looped)
        pairs = zip(bind_wide(equation, cells, anew), map(unstable.dtype_in, equation.outvars), strict=True)
        return [unstable.converted(one, held) if declared == FLOAT32 != held else one for one, declared in pairs]

    def _parameter(self, array: Any) -> Value:
        """Return the facts about a parameter; inside ``jit`` its numbers are unknown."""
        unknown = self.decider.parameter(None)
        if unknown == WEAK or is_traced(array) or array.dtype != FLOAT32:
            return unknown
        return self.decider.parameter(float(jnp.abs(array).max(initial=0)))

    def _constant(self, variable: Any, array: Any) -> Cell:
        declared = unstable.dtype_in(variable)
        if isinstance(array, jax.core.Tracer):
            return Cell.of(array, declared, self._parameter(array) if id(array) in self._parameters else INPUT)
        if declared != FLOAT32:
            return Cell.of(array, declared)
        return Cell.of(array, declared, self.decider.table(array, divides=self.values.asked_of(variable) == DIVIDES))


@contextmanager
def _naming_rule(equation: Any, decision: Decision) -> Iterator[None]:
    """If a primitive refuses a dtype, raise an error that names the rule which asked for the dtype."""
    try:
        yield
    except (TypeError, ValueError, NotImplementedError) as error:
        if not decision.rule:
            raise
        raise UnsupportedError(
            f"JAX's primitive {equation.primitive.name} does not run in {decision.format}",
            where=unstable.source_line(equation),
            found=f"{decision.rule} of class {decision.op_class}; JAX reports: {str(error).partition(chr(10))[0]}",
            allowed="rules that the primitive can follow",
            fix='remove that rule, or give it the class "full" or "keep"',
        ) from error


def _results(equation: Any, arrays: Sequence[Any], value: Value, held: Any) -> list[Cell]:
    """Return cells of an equation's results; those declared float32 get the facts ``value`` and the dtype ``held``."""
    declared = map(unstable.dtype_in, equation.outvars)
    return [
        Cell(array, *((held, own, value) if own == FLOAT32 else (own, own, declared_value(own))), shared=True)
        for array, own in zip(arrays, declared, strict=True)
    ]


def _as_traced(cell: Cell, variable: Any) -> Any:
    """Return an output with its traced dtype, which can be a weak type."""
    is_rounded = cell.value.role == "saturated" and cell.declared == FLOAT32  # its user may take a logarithm
    array = writing.compute_again(cell) if is_rounded else cell.restored()
    weak = getattr(variable.aval, "weak_type", False)
    if unstable.dtype_in(variable) is None:
        return array
    array = jnp.asarray(array)
    return unstable.converted(array, cell.declared, weak_type=weak) if array.aval.weak_type != weak else array


def barrier(run: Interpreter, equation: Any, cells: list[Cell], path: str) -> list[Cell]:
    """Pass each operand on in its own format."""
    return around(cells, unstable.bound(equation, [cell.array for cell in cells]))


def convert(run: Interpreter, equation: Any, cells: list[Cell], path: str) -> list[Cell] | None:
    """Carry out a cast that the user wrote. A cast from float32 to float32 (of a weak type) does nothing."""
    # The result of a cast from integers is an input, such as labels or positions; that of a cast from booleans is 0 or
    # 1.
    (cell,) = cells
    target = np.dtype(equation.params["new_dtype"])
    if target == FLOAT32 and jnp.issubdtype(cell.declared, np.integer):
        (array,) = unstable.bound(equation, [cell.array])
        return [Cell.of(array, FLOAT32, value_of_integers(run.decider, cell, equation.invars[0], run.values))]
    if cell.declared != FLOAT32:
        return None
    if target == FLOAT32:
        return [cell]
    if target == cell.dtype:
        return [Cell.of(cell.array, target)]
    return None


Handler = Callable[[Interpreter, Any, list[Cell], str], list[Cell] | None]
"""Returns the outputs of an equation, or None if the interpreter must bind it as an operation."""
