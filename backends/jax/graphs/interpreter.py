"""Runs a traced program again, each primitive in the format that the flow rule gives it.

Nothing is stored in between: primitives are bound while JAX traces or runs the caller, so that every transformation
around it sees an ordinary program.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from polyamp.backends.jax import unstable
from polyamp.backends.jax.dtypes import dtype_of
from polyamp.backends.jax.graphs import recipes
from polyamp.backends.jax.graphs.binding import bound_low, bound_wide
from polyamp.backends.jax.graphs.calls import Calls
from polyamp.backends.jax.graphs.cells import FLOAT32, Cell, declared_value
from polyamp.backends.jax.graphs.higher_order import HANDLERS
from polyamp.backends.jax.graphs.planning import Recorder
from polyamp.backends.jax.operations import OPERATIONS, canonical
from polyamp.deciding import Decider
from polyamp.errors import UnsupportedError
from polyamp.flow import AS_WRITTEN, INPUT, NO_FLOATS, WEAK, Flow, Value, specific
from polyamp.operations import OPERATIONS as CANONICAL
from polyamp.policy import Policy
from polyamp.rules import Decision, decide
from polyamp.values import magnitude

IN_FLOAT32 = "autocast to float32"
_HELD = Decision("full", IN_FLOAT32)
_MOVES = ("reshape", "squeeze", "copy", "name", "stop_gradient")  # the same numbers in the same order
_LAYOUTS = ("broadcast_in_dim", "transpose", "slice")
_IN_16_BITS = ("sigmoid", "tanh", "erf")  # of class inner; what XLA makes of them is float32 inside
_LOWERED = frozenset(name for name, entry in CANONICAL.items() if entry.op_class == "lower")


class Interpreter:
    """One run of a program under a policy.

    Attributes:
        compute: the dtype of ``lower`` operations.
        decider: decides the operations, and records what there is to report of them.
        calls: the functions that the program calls more than once; they are rewritten once, unless there is a recorder.
        is_looped: whether it is in the body of a loop.
        recorder: takes down what was decided, for a plan; None for a run that only computes.
        parameters: the ids of traced arrays that the program takes from around it, and that are no inputs.
    """

    def __init__(
        self, policy: Policy, recorder: Recorder | None = None, parameters: frozenset[int] = frozenset()
    ) -> None:
        self.policy = policy
        self.parameters = parameters
        self.compute = dtype_of(policy.compute)
        self.recorder = recorder
        self.decider = Decider(policy)
        self.calls = Calls()
        self.is_looped = False
        self._needs_paths = recorder is not None or bool(policy.rules)

    def apart(self) -> Interpreter:
        """Return an interpreter for the same policy that keeps its own record."""
        other = Interpreter(self.policy, parameters=self.parameters)
        other.decider, other.calls, other.is_looped = self.decider.sibling(), self.calls, self.is_looped
        return other

    @contextmanager
    def looped(self) -> Iterator[None]:
        """What runs in here is the body of a loop."""
        before, self.is_looped = self.is_looped, True
        try:
            yield
        finally:
            self.is_looped = before

    def place(self, path: str) -> str:
        """As much of a path as decisions depend on."""
        return path if self._needs_paths else unstable.ISLAND if unstable.ISLAND in path else ""

    def run(self, closed: Any, cells: Sequence[Cell], path: str) -> list[Cell]:
        """The outputs of a jaxpr, of which ``path`` are the scopes that it stands in."""
        jaxpr, constants = unstable.opened(closed)
        known = dict(zip(jaxpr.constvars, map(self._constant, jaxpr.constvars, constants), strict=True))
        known.update(zip(jaxpr.invars, cells, strict=True))

        def read(atom: Any) -> Cell:
            return self._literal(atom) if isinstance(atom, unstable.Literal) else known[atom]

        for equation in jaxpr.eqns:
            cells = [read(atom) for atom in equation.invars]
            with unstable.place_of(equation), unstable.settings_of(equation):
                results = self._equation(equation, cells, path)
            known.update(zip(equation.outvars, results, strict=True))
        return list(map(read, jaxpr.outvars))

    def call(self, function: Callable[..., Any], cells: Sequence[Cell], path: str) -> list[Cell]:
        """Trace a function that returns a list of arrays, at the declared types, and run that."""
        specs = [jax.ShapeDtypeStruct(np.shape(cell.array), cell.declared) for cell in cells]  # type: ignore[no-untyped-call]
        return self.run(unstable.traced(function, *specs), cells, path)

    def _equation(self, equation: Any, cells: list[Cell], path: str) -> list[Cell]:
        own = unstable.scopes(equation) if self._needs_paths else ""
        path = "/".join(filter(None, (path, unstable.island(equation), own)))
        handler = HANDLERS.get(equation.primitive.name)
        results = handler(self, equation, cells, path) if handler else None
        return self._operation(equation, cells, path) if results is None else results

    def _operation(self, equation: Any, cells: list[Cell], path: str) -> list[Cell]:
        name = specific(
            canonical(equation.primitive.name, equation.params),
            of_itself=len(cells) == 2 and cells[0].same == cells[1].same and _shape(cells[0]) == _shape(cells[1]),
            over=len(cells) == 2 and cells[0].constant and not cells[1].constant,
        )
        if self._needs_paths:  # JAX has softmax, gelu and the like only as functions
            path = "/".join(filter(None, (path, unstable.library_function(equation))))
        decision = self._decide(name, path)
        outcome = self._outcome(equation, name, decision, [cell.value for cell in cells if cell.inexact])
        if OPERATIONS.get(equation.primitive.name) in _LOWERED:
            self._note(equation, name, outcome, cells)
        bound, dtype, value = self._bound(equation, name, path, decision, outcome, cells)
        results = [
            _result(variable, result, value, dtype) for variable, result in zip(equation.outvars, bound, strict=True)
        ]
        _remember(equation, cells, results)
        if outcome.format != AS_WRITTEN:
            recipes.noted(equation, cells, results, outcome.anew)
        return results

    def _bound(
        self, equation: Any, name: str, path: str, decision: Decision, outcome: Flow, cells: list[Cell]
    ) -> tuple[list[Any], Any, Value]:
        """The results of an operation, the dtype that float32 ones are held in, and what is known of them."""
        lowers = outcome.format == self.policy.compute
        rounds = outcome.output.state == "low" and outcome.output.role != "normalized"  # whatever it computes in
        is_wide = not lowers or (decision.op_class == "inner" and name not in _IN_16_BITS)
        dtype, value = self.compute if lowers or rounds else FLOAT32, outcome.output
        if lowers and equation.params.get("preferred_element_type") == FLOAT32 and unstable.chose_output(equation):
            held, value = FLOAT32, Value("strong", name)
        else:
            held = dtype
        if self.recorder is not None:
            place = FLOAT32 if is_wide else dtype
            self.recorder.add(equation, name, path, decision, outcome, cells, place, held)
        if outcome.format == AS_WRITTEN:
            return unstable.bound(equation, [cell.restored() for cell in cells]), FLOAT32, value
        self.decider.lowered |= lowers
        with _refusals(equation, decision, self.compute if lowers else FLOAT32):
            if not is_wide:
                return bound_low(equation, cells, dtype, held, is_looped=self.is_looped), held, value
            results = bound_wide(equation, cells, outcome.anew)
        declared = map(unstable.dtype_in, equation.outvars)
        ends = zip(results, declared, strict=True)
        results = [unstable.converted(one, dtype) if own == FLOAT32 != dtype else one for one, own in ends]
        return results, held, value

    def _decide(self, name: str, path: str) -> Decision:
        decision = self.decider.decide(name, path)
        return _HELD if _is_held(name, path) else decision

    def _note(self, equation: Any, name: str, outcome: Flow, cells: Sequence[Cell]) -> None:
        """Take down what became of an operation that the table lowers."""
        dtypes = {cell.dtype for cell in cells if cell.inexact}
        if outcome.format == AS_WRITTEN and any(dtype.itemsize <= 2 for dtype in dtypes):  # so the user wrote it
            self.decider.lowered = True
        elif outcome.format != self.policy.compute and dtypes:
            self.decider.not_lowered.setdefault(outcome.reason, f"{name} at {unstable.source_line(equation)}")

    def _outcome(self, equation: Any, name: str, decision: Decision, inputs: list[Value]) -> Flow:
        if not inputs:
            return Flow(AS_WRITTEN, WEAK, NO_FLOATS)
        outcome = self.decider.flow(name, decision, inputs)
        if equation.primitive.name == "reduce_window_sum" and outcome.output.state == "low":
            output = outcome.output._replace(role="normalized")  # the average of a window, once it is divided
            return outcome._replace(format="float32", output=output)
        if outcome.format != self.policy.compute:
            return outcome
        asked = _asked(equation.params)
        if asked:
            return Flow("float32", Value("strong", name), asked)
        if "update_jaxpr" in equation.params:
            return Flow("float32", WEAK, "its computation was traced in float32")
        return outcome

    def _literal(self, literal: Any) -> Cell:
        return self._constant(literal, np.asarray(literal.val))

    def _constant(self, variable: Any, array: Any) -> Cell:
        declared = unstable.dtype_in(variable)
        if isinstance(array, jax.core.Tracer):
            return Cell.given(array, declared, WEAK if id(array) in self.parameters else INPUT)
        if declared != FLOAT32:
            return Cell.given(array, declared, constant=True)
        return Cell.given(array, declared, self.decider.constant(magnitude(array)), constant=True)


def _is_held(name: str, path: str) -> bool:
    """Whether an operation stands in a part that the user keeps in float32 by an autocast of its own."""
    entry = CANONICAL.get(name)
    return unstable.ISLAND in path and entry is not None and entry.op_class != "keep"


@contextmanager
def _refusals(equation: Any, decision: Decision, dtype: Any) -> Iterator[None]:
    """A primitive that refuses the dtype that one of the user's rules gives it, in words that name the rule."""
    try:
        yield
    except (TypeError, ValueError, NotImplementedError) as error:
        if decision == decide((), canonical(equation.primitive.name, equation.params)):
            raise
        raise UnsupportedError(
            f"JAX's primitive {equation.primitive.name} does not run in {dtype.name}",
            where=unstable.source_line(equation),
            found=f"{decision.reason} of class {decision.op_class}; JAX says: {str(error).partition(chr(10))[0]}",
            allowed="rules that the primitive can keep",
            fix='remove that rule, or give it the class "full" or "keep"',
        ) from error


def _result(variable: Any, array: Any, value: Value, dtype: Any) -> Cell:
    declared = unstable.dtype_in(variable)
    if declared != FLOAT32:
        return Cell(array, declared, declared, declared_value(declared), shared=True)
    return Cell(array, dtype, declared, value, shared=True)


def _remember(equation: Any, cells: Sequence[Cell], results: Sequence[Cell]) -> None:
    """Take down whether results are constants, and which other values they are the same as."""
    is_constant = bool(cells) and all(cell.constant for cell in cells)
    for cell in results:
        cell.constant = is_constant
    name = equation.primitive.name
    moves = name in _MOVES and (name != "reshape" or equation.params["dimensions"] is None)
    if moves or (name == "broadcast_in_dim" and _size(cells[0]) == _size(results[0])):  # or a dimension of length 1
        results[0].same = cells[0].same
    elif name in _LAYOUTS and len(cells) == 1:
        results[0].same = (cells[0].same, _shape(cells[0]), name, repr(equation.params))


def _shape(cell: Cell) -> Any:
    return getattr(cell.array, "shape", ())


def _size(cell: Cell) -> Any:
    return getattr(cell.array, "size", 1)


def _asked(params: dict[str, Any]) -> str:
    """Why a product has to stay in float32 although its operands need not; empty where it need not."""
    precision = params.get("precision")
    told = precision if isinstance(precision, tuple) else (precision,)
    if any(part not in (None, unstable.DEFAULT) for part in told):
        return f"precision={'/'.join(dict.fromkeys(map(str, told)))} was asked for"
    preferred = params.get("preferred_element_type")
    if preferred is not None and preferred != FLOAT32:
        return f"preferred_element_type={jnp.dtype(preferred).name} was asked for"
    return ""
