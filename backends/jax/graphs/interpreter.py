"""Runs a traced program again, each operation in the format that the flow rule decides.

For example, the program of ``exp(x @ w)`` has the equations ``dot_general`` and ``exp``. Under ``mixed_float16`` the
interpreter casts ``x`` and ``w`` to float16 and binds the first; it casts the result to float32 and binds the second.

Nothing is stored in between. The primitives are bound while JAX traces or runs the caller, so every transformation
around it sees an ordinary program.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from polyamp.backends.jax import unstable
from polyamp.backends.jax.casting import dtype_of
from polyamp.backends.jax.graphs import binding
from polyamp.backends.jax.graphs.binding import bind_low, bind_wide
from polyamp.backends.jax.graphs.cells import FLOAT32, Cell, around, declared_value
from polyamp.backends.jax.graphs.decisions import Decided, PlanBuilder, decide_equation
from polyamp.backends.jax.graphs.repeats import Repeats
from polyamp.backends.jax.graphs.values import Values
from polyamp.backends.jax.operations import canonical
from polyamp.errors import UnsupportedError
from polyamp.flow import AS_WRITTEN, INPUT, WEAK, Value, decide
from polyamp.plan import Decider
from polyamp.policies import Policy


class Interpreter:
    """One run of a program under a policy."""

    def __init__(
        self, policy: Policy, plan: PlanBuilder | None = None, parameters: frozenset[int] = frozenset()
    ) -> None:
        self.policy = policy
        self.compute = dtype_of(policy.compute)
        self.decider = Decider(policy)
        self.repeats = Repeats()
        self.values = Values(self.repeats)
        self.is_looped = False
        self._made: dict[tuple[int, int], Cell] = {}  # by its number the first of equal results
        self.plan = plan
        self.parameters = parameters
        self._needs_paths = plan is not None or bool(policy.rules)

    def apart(self) -> Interpreter:
        """Return an interpreter for the same policy that keeps its own record."""
        other = Interpreter(self.policy, parameters=self.parameters)
        other.repeats, other.values, other.is_looped = self.repeats, self.values, self.is_looped
        return other

    def knowing(self, values: Values) -> Interpreter:
        """Return this interpreter for a program whose values are known apart, as those of a function called twice."""
        other = copy(self)
        other.values = values
        return other

    @contextmanager
    def looped(self) -> Iterator[None]:
        """Mark the code inside as the body of a loop."""
        before, self.is_looped = self.is_looped, True
        try:
            yield
        finally:
            self.is_looped = before

    def place(self, path: str) -> str:
        """Return the part of a path that decisions depend on: without rules for paths, at most `unstable.ISLAND`."""
        return path if self._needs_paths else unstable.ISLAND if unstable.ISLAND in path else ""

    def run(self, closed: Any, cells: Sequence[Cell], path: str) -> list[Cell]:
        """Return the outputs of a jaxpr that runs in the scopes ``path``."""
        before, self._made = self._made, {}
        try:
            return self.inline(closed, cells, path)
        finally:
            self._made = before

    def inline(self, closed: Any, cells: Sequence[Cell], path: str) -> list[Cell]:
        """Return the outputs of a jaxpr that runs where it is called: it shares casts with what ran before it."""
        jaxpr, constants = unstable.opened(closed)
        known = dict(zip(jaxpr.constvars, map(self._constant, jaxpr.constvars, constants), strict=True))
        known.update(zip(jaxpr.invars, cells, strict=True))

        def read(atom: Any) -> Cell:
            return known[atom] if unstable.is_variable(atom) else self._constant(atom, np.asarray(atom.val))

        for equation in jaxpr.eqns:
            cells = [read(atom) for atom in equation.invars]
            with unstable.place_of(equation), unstable.settings_of(equation):
                results = self._equation(equation, cells, path)
            known.update(zip(equation.outvars, results, strict=True))
        return list(map(read, jaxpr.outvars))

    def call(self, function: Callable[..., Any], cells: Sequence[Cell], path: str) -> list[Cell]:
        """Trace a function that returns a list of arrays, at the declared types, and run it."""
        specs = [jax.ShapeDtypeStruct(np.shape(cell.array), cell.declared) for cell in cells]  # type: ignore[no-untyped-call]
        closed = jax.make_jaxpr(function)(*specs)
        self.values.add(closed)
        return self.run(closed, cells, path)

    def _equation(self, equation: Any, cells: list[Cell], path: str) -> list[Cell]:
        own = unstable.scopes(equation) if self._needs_paths else ""
        path = "/".join(filter(None, (path, unstable.island(equation), own)))
        handler = HANDLERS.get(equation.primitive.name)
        results = handler(self, equation, cells, path) if handler else None
        return self._operation(equation, cells, path) if results is None else results

    def _operation(self, equation: Any, cells: list[Cell], path: str) -> list[Cell]:
        if self._needs_paths:  # JAX has softmax, gelu and the like only as functions
            path = "/".join(filter(None, (path, unstable.library_function(equation))))
        decided = decide_equation(self.decider, self.compute, equation, cells, self.values, path)
        if self.plan is not None:
            self.plan.add(equation, path, decided, cells)
        if decided.outcome.format == AS_WRITTEN:
            bound = unstable.bound(equation, [cell.restored() for cell in cells])
            results = _results(equation, bound, decided.outcome.output, FLOAT32)
        else:
            results = _results(equation, self._bind(equation, decided, cells), decided.outcome.output, decided.dtype)
            binding.note_equation(equation, cells, results, decided.outcome.anew)
        if len(results) == 1:
            self._share_casts(equation, results[0])
        return results

    def _share_casts(self, equation: Any, result: Cell) -> None:
        """Make each cast of equal values once, so that their gradients add up before they are rounded."""
        number, *inputs = map(self.values.number, (*equation.outvars, *equation.invars))
        first = self._made.setdefault((id(self.values), number), result)
        if first.dtype == result.dtype and number not in inputs:
            result.casts = first.casts

    def _bind(self, equation: Any, decided: Decided, cells: Sequence[Cell]) -> list[Any]:
        """Return the results of an equation in the formats that were decided."""
        with _naming_rule(equation, decided):
            if not decided.is_wide:
                return bind_low(equation, cells, decided.dtype, is_looped=self.is_looped)
            results = bind_wide(equation, cells, decided.outcome.anew)
        pairs = zip(results, map(unstable.dtype_in, equation.outvars), strict=True)
        to = decided.dtype
        return [unstable.converted(one, to) if declared == FLOAT32 != to else one for one, declared in pairs]

    def _constant(self, variable: Any, array: Any) -> Cell:
        declared = unstable.dtype_in(variable)
        if isinstance(array, jax.core.Tracer):
            return Cell.of(array, declared, WEAK if id(array) in self.parameters else INPUT)
        if declared != FLOAT32:
            return Cell.of(array, declared)
        return Cell.of(array, declared, self.decider.table(array))


@contextmanager
def _naming_rule(equation: Any, decided: Decided) -> Iterator[None]:
    """Replace the error of a primitive that refuses a dtype by one that names the rule which asked for it."""
    try:
        yield
    except (TypeError, ValueError, NotImplementedError) as error:
        decision = decided.decision
        if decision == decide((), canonical(equation.primitive.name, equation.params)):
            raise
        raise UnsupportedError(
            f"JAX's primitive {equation.primitive.name} does not run in {decided.outcome.format}",
            where=unstable.source_line(equation),
            found=f"{decision.reason} of class {decision.op_class}; JAX reports: {str(error).partition(chr(10))[0]}",
            allowed="rules that the primitive can follow",
            fix='remove that rule, or give it the class "full" or "keep"',
        ) from error


def _results(equation: Any, arrays: Sequence[Any], value: Value, held: Any) -> list[Cell]:
    """Return the results of an equation; ``value`` and ``held`` describe those that are declared float32."""
    declared = map(unstable.dtype_in, equation.outvars)
    return [
        Cell(array, held, own, value, shared=True)
        if own == FLOAT32
        else Cell(array, own, own, declared_value(own), shared=True)
        for array, own in zip(arrays, declared, strict=True)
    ]


def _barrier(run: Interpreter, equation: Any, cells: list[Cell], path: str) -> list[Cell]:
    """Pass each operand on in its own format."""
    return around(cells, unstable.bound(equation, [cell.array for cell in cells]))


def _convert(run: Interpreter, equation: Any, cells: list[Cell], path: str) -> list[Cell] | None:
    """Carry out a cast that the user wrote. A cast from float32 to float32 (of a weak type) does nothing."""
    # The result of a cast from integers is an input, such as labels or positions; that of a cast from booleans is 0 or
    # 1.
    (cell,) = cells
    target = np.dtype(equation.params["new_dtype"])
    if target == FLOAT32 and jnp.issubdtype(cell.declared, np.integer):
        (array,) = unstable.bound(equation, [cell.array])
        return [Cell.of(array, FLOAT32, WEAK if run.values.is_constant(equation.invars[0]) else INPUT)]
    if cell.declared != FLOAT32:
        return None
    if target == FLOAT32:
        return [cell]
    if target == cell.dtype:
        return [Cell.of(cell.array, target)]
    return None


Handler = Callable[[Interpreter, Any, list[Cell], str], list[Cell] | None]
"""Returns the outputs of an equation, or None if the interpreter must bind it as an operation."""

# Handlers of primitives that hold programs need an interpreter, so `program` adds them.
HANDLERS: dict[str, Handler] = {"optimization_barrier": _barrier, "convert_element_type": _convert}
