"""Decides the format of each operation.

The policy's rules decide its class, and the flow rule its format. Then the parameters that the user gave to a product
decide: ``precision=HIGHEST`` keeps it in float32, and ``preferred_element_type=float32`` keeps its result in float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from polyamp.backends.jax import unstable
from polyamp.backends.jax.graphs.cells import FLOAT32, Cell
from polyamp.backends.jax.graphs.sameness import is_of_itself, is_over
from polyamp.backends.jax.operations import OPERATIONS, canonical
from polyamp.deciding import Decider
from polyamp.flow import AS_WRITTEN, NO_FLOATS, WEAK, Flow, Value, specific
from polyamp.operations import OPERATIONS as CANONICAL
from polyamp.rules import Decision

IN_FLOAT32 = "autocast to float32"
"""The reason if the user's own autocast to float32 contains an operation."""
_ISLAND = Decision("full", IN_FLOAT32)
_IN_16_BITS = ("sigmoid", "tanh", "erf")  # of class inner; XLA computes them in float32 inside
_LOWERED = frozenset(name for name, entry in CANONICAL.items() if entry.op_class == "lower")


class Decided(NamedTuple):
    """How one operation runs."""

    name: str  # its canonical name
    decision: Decision  # its class, and why
    outcome: Flow  # the decision of the flow rule
    is_wide: bool  # whether it computes in float32
    dtype: Any  # the dtype that its float32 results are cast to, and that it computes in unless it is wide
    held: Any  # the dtype in which its primitive returns the float32 results
    value: Value  # the flow rule's facts about them

    @property
    def computes_in(self) -> Any:
        """The dtype that it computes in."""
        return FLOAT32 if self.is_wide else self.dtype

    @property
    def is_as_written(self) -> bool:
        """Whether it runs as the program was written."""
        return self.outcome.format == AS_WRITTEN


def decide_equation(
    decider: Decider, compute: np.dtype[Any], equation: Any, cells: Sequence[Cell], path: str
) -> Decided:
    """Decide one operation, and record the findings to report."""
    native = canonical(equation.primitive.name, equation.params)
    name = specific(native, of_itself=is_of_itself(cells), over=is_over(cells))
    decision = decider.decide(name, path)
    decision = _ISLAND if _is_in_float32(name, path) else decision
    outcome = _outcome(decider, equation, name, decision, [cell.value for cell in cells if cell.inexact])
    lowers, value = outcome.format == decider.compute, outcome.output
    is_wide = not lowers or (decision.op_class == "inner" and name not in _IN_16_BITS)
    held = dtype = compute if lowers or outcome.rounds else FLOAT32
    if lowers and equation.params.get("preferred_element_type") == FLOAT32 and unstable.chose_output(equation):
        held, value = FLOAT32, Value("strong", name)
    _note(decider, equation, name, outcome, cells)
    return Decided(name, decision, outcome, is_wide, dtype, held, value)


def _is_in_float32(name: str, path: str) -> bool:
    """Return whether an operation is in a part that the user keeps in float32 by an autocast to float32."""
    entry = CANONICAL.get(name)
    return unstable.ISLAND in path and entry is not None and entry.op_class != "keep"


def _outcome(decider: Decider, equation: Any, name: str, decision: Decision, inputs: list[Value]) -> Flow:
    if not inputs:
        return Flow(AS_WRITTEN, WEAK, NO_FLOATS)
    outcome = decider.flow(name, decision, inputs)
    if equation.primitive.name == "reduce_window_sum" and outcome.output.state == "low":
        output = outcome.output._replace(role="normalized")  # the average of a window, once it is divided
        return outcome._replace(format="float32", output=output)
    if outcome.format != decider.compute:
        return outcome
    asked = _asked(equation.params)
    if asked:
        return Flow("float32", Value("strong", name), asked)
    if "update_jaxpr" in equation.params:
        return Flow("float32", WEAK, "its computation was traced in float32")
    return outcome


def _asked(params: dict[str, Any]) -> str:
    """Return why a product must stay in float32 although its operands need not; empty if it need not."""
    precision = params.get("precision")
    precisions = precision if isinstance(precision, tuple) else (precision,)
    if any(one not in (None, unstable.DEFAULT) for one in precisions):
        return f"precision={'/'.join(dict.fromkeys(map(str, precisions)))} was asked for"
    preferred = params.get("preferred_element_type")
    if preferred is not None and preferred != FLOAT32:
        return f"preferred_element_type={jnp.dtype(preferred).name} was asked for"
    return ""


def _note(decider: Decider, equation: Any, name: str, outcome: Flow, cells: Sequence[Cell]) -> None:
    """Record whether an operation was lowered; for one that the table lowers, also why it was not."""
    decider.lowered |= outcome.format == decider.compute
    dtypes = {cell.dtype for cell in cells if cell.inexact}
    if OPERATIONS.get(equation.primitive.name) not in _LOWERED or not dtypes:
        return
    if outcome.format == AS_WRITTEN and any(dtype.itemsize <= 2 for dtype in dtypes):  # the user wrote it so
        decider.lowered = True
    elif outcome.format != decider.compute:
        decider.not_lowered.setdefault(outcome.reason, f"{name} at {unstable.source_line(equation)}")
