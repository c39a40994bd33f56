"""Decides the format of each operation, and collects the decisions as a plan.

The policy's rules decide its class, and the flow rule its format. Then the parameters that the user gave to a product
decide: ``precision=HIGHEST`` keeps it in float32, and ``preferred_element_type=bfloat16`` leaves it as it was written.
Values that hold the same numbers, and constants, are known: ``x * x`` is a square, and ``1 / x`` is a reciprocal.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from polyamp.backends.jax import unstable
from polyamp.backends.jax.casting import dtype_of, is_traced
from polyamp.backends.jax.graphs.cells import FLOAT32, Cell
from polyamp.backends.jax.graphs.values import Values
from polyamp.flow import AS_WRITTEN, INPUT, NO_FLOATS, WEAK, Decision, Value
from polyamp.operations import OPERATIONS as CANONICAL
from polyamp.plan import Decider

IN_FLOAT32 = "autocast to float32"
"""The reason if the user's own autocast to float32 contains an operation."""
_IN_16_BITS = ("sigmoid", "tanh", "erf")  # of class inner; XLA computes them in float32 inside
_LOWERED = frozenset(name for name, entry in CANONICAL.items() if entry.op_class == "lower")


def decide_equation(decider: Decider, equation: Any, cells: Sequence[Cell], values: Values, path: str) -> Decision:
    """Return the decision about one operation; record in ``decider`` what is to be reported."""
    name = values.operation(equation)
    decision = decider.decide(name, path)
    entry = CANONICAL.get(name)
    if unstable.ISLAND in path and entry is not None and entry.op_class != "keep":
        decision = Decision(name, "full", IN_FLOAT32)
    inputs = [cell.value for cell in cells if cell.inexact]
    if inputs and equation.primitive.name == "dot_general":  # it also takes integers as they are
        pairs = zip(cells, equation.invars, strict=True)
        inputs += [value_of_integers(decider, *pair, values) for pair in pairs if not pair[0].inexact]
    if decision.op_class == "lower":  # what full work made of constants alone is a constant
        inputs = [value._replace(state="weak") if value.role == "weights" else value for value in inputs]
    asked = values.asked_of(equation.outvars[0]) if equation.outvars else ""
    is_constant = bool(equation.outvars and inputs) and values.is_constant(equation.outvars[0])
    is_backward = bool(asked or is_constant) and "transpose" in unstable.transformations(equation)
    asked, gradient = "" if is_backward else asked, decision.op_class == "lower" and values.is_backward(equation)
    decision = _with_format(decider, equation, decision, inputs, asked, gradient=gradient)
    if equation.primitive.name == "iota" and unstable.dtype_in(equation.outvars[0]) == FLOAT32:
        decision = decision._replace(output=decider.integers(WEAK, values.largest(equation.outvars[0])))
    if is_constant and not is_backward:
        decision = _of_constants(decision, cells)
    _note(decider, equation, decision, cells)
    return decision


def value_of_integers(decider: Decider, cell: Cell, atom: Any, values: Values) -> Value:
    """Return the facts about integers that become float32."""
    return decider.integers(INPUT if is_traced(cell.array) else WEAK, values.largest(atom))


def dtypes_of(decision: Decision, decider: Decider) -> tuple[Any, Any]:
    """Return the dtype that an operation computes in, and the one that its float32 results get."""
    low, lowers = dtype_of(decider.compute), decision.format == decider.compute
    is_wide = not lowers or (decision.op_class == "inner" and decision.operation not in _IN_16_BITS)
    return FLOAT32 if is_wide else low, low if lowers or decision.rounds else FLOAT32


def _with_format(
    decider: Decider, equation: Any, decision: Decision, inputs: list[Value], asked: str, *, gradient: bool
) -> Decision:
    """Return the decision with a format: by the operation's own parameters if they fix one, else by the flow rule."""
    if not inputs:
        return decision._replace(reason=NO_FLOATS)
    decision = decider.flow(decision, inputs, asked=asked, gradient=gradient)
    if equation.primitive.name == "reduce_window_sum" and decision.output.state == "low":
        output = decision.output._replace(role="normalized")  # the average of a window, once it is divided
        return decision._replace(format="float32", output=output)
    if decision.format != decider.compute:
        return decision
    in_float32 = decision._replace(format="float32", anew=())
    if asked := _asked(equation.params):
        return in_float32._replace(output=Value("strong", decision.operation), reason=asked)
    if "update_jaxpr" in equation.params:
        return in_float32._replace(output=WEAK, reason="its computation was traced in float32")
    return decision


def _of_constants(decision: Decision, cells: Sequence[Cell]) -> Decision:
    """Return a decision about constants: the result has the role ``weights``, unless known numbers only move."""
    roles = [cell.value.role for cell in cells]
    if decision.op_class == "lower":
        if set(roles) != {"weights"}:
            return decision
        return decision._replace(format="float32", output=Value(role="weights"), reason="as declared", anew=())
    array = cells[0].array
    is_zero = isinstance(array, np.ndarray) and not array.any()  # as of a tangent that JAX fills in
    is_moved = decision.op_class == "neutral" and (array.ndim > 0 or is_zero)
    role = decision.output.role or (roles[0] if is_moved else "weights")
    return decision._replace(output=decision.output._replace(role=role))


def _asked(params: dict[str, Any]) -> str:
    """Return which of a product's own parameters forbids to lower it; empty if none does."""
    precision = params.get("precision")
    precisions = precision if isinstance(precision, tuple) else (precision,)
    if any(one not in (None, unstable.DEFAULT) for one in precisions):
        return f"precision={'/'.join(dict.fromkeys(map(str, precisions)))} was asked for"
    preferred = params.get("preferred_element_type")
    if preferred is not None and preferred != FLOAT32:
        return f"preferred_element_type={jnp.dtype(preferred).name} was asked for"
    return ""


def _note(decider: Decider, equation: Any, decision: Decision, cells: Sequence[Cell]) -> None:
    """Record whether an operation was lowered, or why not although the table lowers it."""
    decider.lowered |= decision.format == decider.compute
    dtypes = {cell.dtype for cell in cells if cell.inexact}
    if decision.operation not in _LOWERED or not dtypes:
        return
    if decision.format == AS_WRITTEN and any(dtype.itemsize <= 2 for dtype in dtypes):  # the user wrote it so
        decider.lowered = True
    elif decision.format != decider.compute:
        where = f"{decision.operation} at {unstable.source_line(equation)}"
        decider.not_lowered.setdefault(decision.reason, where)
