"""The flow rule: the one function that decides what format an operation runs in, in every framework.

A pass over a graph gives every floating value a state, and `flow` decides for each operation what comes of its inputs'
states. Adapters translate their graphs into calls of it and carry out what it returns.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from polyamp.formats import format_of
from polyamp.norms import normalizes, statistic
from polyamp.operations import OPERATIONS
from polyamp.rules import TABLE, Decision
from polyamp.values import CARRIED, INPUT, ROLES, STATES, WEAK, Value, constant

__all__ = [
    "AS_WRITTEN",
    "CARRIED",
    "INPUT",
    "NO_FLOATS",
    "ROLES",
    "STATES",
    "WEAK",
    "Flow",
    "Value",
    "constant",
    "flow",
    "specific",
]

AS_WRITTEN = "as written"
NO_FLOATS = "no floating-point input"
"""The reason if an operation has nothing to decide about."""

_SATURATING = frozenset({"sigmoid", "tanh", "erf"})
_POINTWISE = frozenset(
    {"add", "sub", "mul", "div", "neg", "abs", "relu", "sqrt", "where", "clip", "maximum", "minimum"}
    | {"reshape", "broadcast", "transpose", "slice", "gather", "identity"}
)


class Flow(NamedTuple):
    """What the flow rule decides of one operation.

    Attributes:
        format: the format that its floating inputs are cast to and that it computes in; or `AS_WRITTEN`.
        output: what is known of its float32 outputs. One that is ``low`` after work in float32 is cast to the compute
            format there, unless its role is ``normalized``: such a value stays in float32 until an operation that
            runs in the compute format takes it.
        reason: the rule, the neighbour or the guard that decided.
        anew: roles of low inputs that the operation must not take as they were rounded: they are computed again in
            float32 for it.
    """

    format: str
    output: Value
    reason: str
    anew: tuple[str, ...] = ()

    @property
    def rounds(self) -> bool:
        """Whether float32 results are cast to the compute format at once: they are low, and not inside a norm.

        >>> Flow("float32", Value("low", "sub", role="normalized"), "inside a norm").rounds
        False
        """
        return self.output.state == "low" and self.output.role != "normalized"


def flow(operation: str, decision: Decision, inputs: Sequence[Value], compute: str, *, gradient: bool = False) -> Flow:
    """Decide one operation. Pure: the same arguments give the same answer in every framework.

    ``lower`` makes low values and ``full`` strong ones. ``inner`` is low if its first input is low, low after strong
    work too, else as declared. ``follow`` is float32 after any strong input and where low values meet the user's
    inputs, else low next to any low value, else as declared; ``neutral`` carries its input's state in the same way.
    ``promote`` takes the widest input. An input that the compute format cannot hold forces float32, and so does what
    moves or multiplies it. An operation that the table calls ``full`` for its range alone is so in formats of a
    narrower range. A norm that is written out is low, and float32 inside (`polyamp.norms`).

    >>> from polyamp.rules import decide
    >>> low, strong, weak = Value("low", "matmul"), Value("strong", "exp"), Value()
    >>> flow("add", decide((), "add"), [low, weak], "float16").reason
    'next to matmul'
    >>> flow("add", decide((), "add"), [low, strong], "float16").reason
    'after exp'
    >>> flow("add", decide((), "add"), [low, Value("input")], "float16").reason
    'next to an input'
    >>> flow("matmul", decide((), "matmul"), [strong, weak], "float16").format
    'float16'
    >>> flow("where", decide((), "where"), [low, constant([3e38], "float16")], "float16").reason
    'constant 3e+38 is beyond float16'

    Args:
        operation: the canonical name; see `specific`.
        decision: the operation's class and who gave it; see `polyamp.rules.decide`.
        inputs: its floating inputs in the order of its operands; empty where it has none.
        compute: the format of ``lower`` operations.
        gradient: whether it is of a backward pass that the program writes out.

    Source: the classes are those of `polyamp.operations`. Telling apart float32 by declaration and float32 by need is
    what TensorFlow's pass does by painting a whole graph (core/grappler/optimizers/auto_mixed_precision.cc); here one
    forward pass does it. That a user's float32 data stay float32 is PyTorch's promotion under autocast.
    """
    foreign = _first(inputs, "other")
    if decision.op_class == "keep" or foreign:
        return _as_written(decision, inputs, foreign)
    unfit = next((value.unfit for value in inputs if value.unfit), "")
    chosen = _choose(operation, decision, inputs, compute, gradient)
    if unfit and (chosen.state == "low" or decision.op_class == "follow"):
        chosen = _Choice("strong", "a constant", unfit)
    is_low = chosen.state == "low" and not chosen.is_wide
    role = chosen.role or (_role(operation, decision, inputs) if is_low else "")
    role = statistic(operation, inputs) if chosen.state == "strong" else role
    moves = decision.op_class in ("neutral", "promote") or operation == "mul"
    output = Value(chosen.state, chosen.maker, unfit if moves and not role else "", role)
    if is_low:
        return Flow(compute, output, chosen.reason)
    is_guarded = bool(unfit) or chosen.reason == _NEXT_TO_INPUT
    return Flow("float32", output, chosen.reason, _anew(decision, inputs, is_guarded))


def specific(operation: str, *, of_itself: bool = False, over: bool = False) -> str:
    """Return what an operation is, given what its operands are.

    >>> specific("mul", of_itself=True), specific("div", over=True), specific("add", of_itself=True)
    ('square', 'reciprocal', 'add')

    Args:
        operation: the canonical name.
        of_itself: whether its two operands are the same value, seen through moves, ``conj`` and ``real``.
        over: whether its first operand is a constant, and the second is none.
    """
    if operation == "mul" and of_itself:
        return "square"
    return "reciprocal" if operation == "div" and over else operation


class _Choice(NamedTuple):
    """What a class makes of its inputs; ``is_wide`` where a low result is computed in float32."""

    state: str
    maker: str
    reason: str
    is_wide: bool = False
    role: str = ""


_NEXT_TO_INPUT = "next to an input"


def _choose(operation: str, decision: Decision, inputs: Sequence[Value], compute: str, gradient: bool) -> _Choice:
    if decision.reason == TABLE and _overflows(operation, compute):
        return _Choice("strong", operation, f"{operation} leaves the range of {compute}")
    if decision.op_class in ("follow", "neutral") and normalizes(operation, inputs, gradient):
        maker = next(value.maker for value in inputs if value.state == "low")
        return _Choice("low", maker, "inside a norm", is_wide=True, role="normalized")
    return _CLASSES[decision.op_class](operation, decision, inputs)


def _as_written(decision: Decision, inputs: Sequence[Value], foreign: Value | None) -> Flow:
    after = _first(inputs, "strong", "other")
    output = Value("strong", after.maker) if after else Value("input" if _first(inputs, "input") else "weak")
    return Flow(AS_WRITTEN, output, f"an input is {foreign.maker}" if foreign else decision.reason)


def _overflows(operation: str, compute: str) -> bool:
    """Return whether an operation is safe in 16 bits but for the range of a format narrower than float32's."""
    entry = OPERATIONS.get(operation)
    narrow = format_of(compute).exponent_bits < format_of("float32").exponent_bits
    return narrow and entry is not None and entry.op_class == "follow" and entry.sources.get("range") == "full"


def _role(operation: str, decision: Decision, inputs: Sequence[Value]) -> str:
    """Return the role of what an operation computes in the compute format."""
    if operation in _SATURATING:
        return "saturated"
    low = [value for value in inputs if value.state == "low"]
    if decision.op_class not in ("follow", "neutral") or operation not in _POINTWISE or not low:
        return ""
    if all(value.role == "saturated" for value in low):
        return "saturated"
    return "pointwise" if len(low) == 1 else ""


def _anew(decision: Decision, inputs: Sequence[Value], is_guarded: bool) -> tuple[str, ...]:
    """Return the roles of inputs that are computed again in float32.

    Between a sigmoid that was rounded to 0 and the logarithm of its sum with 1e-12, a gradient of 1e12 would be cast to
    float16 and meet the sigmoid's derivative, which is 0: inf times 0.
    """
    roles = ("saturated", "pointwise") if is_guarded else ("saturated",) if decision.op_class == "full" else ()
    present = {value.role for value in inputs if value.state == "low"}
    return tuple(role for role in roles if role in present)


def _first(inputs: Sequence[Value], *states: str) -> Value | None:
    return next((value for state in states for value in inputs if value.state == state), None)


def _lower(operation: str, decision: Decision, inputs: Sequence[Value]) -> _Choice:
    return _Choice("low", operation, decision.reason)


def _full(operation: str, decision: Decision, inputs: Sequence[Value]) -> _Choice:
    return _Choice("strong", operation, decision.reason)


def _inner(operation: str, decision: Decision, inputs: Sequence[Value]) -> _Choice:
    """Choose by the first input, the data; a norm's others are its parameters and statistics.

    An average is as large as its data, as of squares: after full work, and of the user's data, it is what they are.
    """
    data = inputs[0] if inputs else Value()
    if operation == "avg_pool" and decision.reason == TABLE and data.state in ("strong", "input"):
        return _follow(operation, decision, inputs[:1])
    if data.state == "low":
        return _Choice("low", operation, f"next to {data.maker}")
    if data.state == "strong":  # inf is a fine argument of a function that saturates, and of nothing else
        return _Choice("low", operation, f"bounded, after {data.maker}", is_wide=operation not in _SATURATING)
    return _Choice("weak", "", "as declared")


def _follow(operation: str, decision: Decision, inputs: Sequence[Value]) -> _Choice:
    if strong := _first(inputs, "strong"):
        return _Choice("strong", strong.maker, f"after {strong.maker}")
    low, data = _first(inputs, "low"), _first(inputs, "input")
    if low and data:
        return _Choice("strong", "an input", _NEXT_TO_INPUT)
    if low:
        return _Choice("low", low.maker, f"next to {low.maker}")
    return _Choice("input" if data else "weak", "", "as declared")


def _promote(operation: str, decision: Decision, inputs: Sequence[Value]) -> _Choice:
    states = {value.state for value in inputs}
    if states == {"low", "weak"}:
        return _Choice("weak", "", "its widest input is float32")
    return _follow(operation, decision, inputs)


_CLASSES: dict[str, Callable[[str, Decision, Sequence[Value]], _Choice]] = {
    "lower": _lower,
    "inner": _inner,
    "full": _full,
    "promote": _promote,
    "follow": _follow,
    "neutral": _follow,
}
