"""The flow rule: the one function that decides what format an operation runs in, in every framework.

A pass over a graph gives every floating value a state, and `flow` says for each operation what comes of its inputs'
states. Adapters translate their graphs into calls of it and carry out what it says.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from polyamp.formats import format_of
from polyamp.operations import OPERATIONS
from polyamp.rules import TABLE, Decision

STATES: dict[str, str] = {
    "weak": "float32 only because it was declared so: a parameter, an input, a constant",
    "low": "in the compute format",
    "strong": "float32 because full work made it",
    "other": "of another type, which the user chose: float64, 16 bits of the user's own, complex",
}

AS_WRITTEN = "as written"
AFTER_LOOP = "after a loop"
"""The reason of what a loop carries in float32."""


class Value(NamedTuple):
    """What the flow rule knows of one floating value.

    Attributes:
        state: one of `STATES`.
        maker: the canonical operation, or the declared type, that the state comes from; empty for a ``weak`` value.
        unfit: why the compute format cannot hold it; empty where it can.
    """

    state: str = "weak"
    maker: str = ""
    unfit: str = ""


class Flow(NamedTuple):
    """What the flow rule says of one operation.

    Attributes:
        format: the format that its floating inputs are cast to and its outputs have; or `AS_WRITTEN`.
        output: what is known of its float32 outputs.
        reason: the rule, the neighbour or the guard that decided.
    """

    format: str
    output: Value
    reason: str


def flow(operation: str, decision: Decision, inputs: Sequence[Value], compute: str) -> Flow:
    """Decide one operation. Pure: the same arguments give the same answer in every framework.

    ``lower`` makes low values and ``full`` strong ones. ``follow`` is float32 after any strong input, else low beside
    any low one, else as declared; ``neutral`` carries its input's state in the same way. ``promote`` takes the widest
    input. An input that the compute format cannot hold forces float32, and so does what moves or multiplies it. An
    operation that the table calls ``full`` for its range alone is so in formats of a narrower range.

    >>> from polyamp.rules import decide
    >>> low, strong, weak = Value("low", "matmul"), Value("strong", "exp"), Value()
    >>> flow("add", decide((), "add"), [low, weak], "float16")
    Flow(format='float16', output=Value(state='low', maker='matmul', unfit=''), reason='beside matmul')
    >>> flow("add", decide((), "add"), [low, strong], "float16").reason
    'after exp'
    >>> flow("matmul", decide((), "matmul"), [strong, weak], "float16").format
    'float16'
    >>> flow("where", decide((), "where"), [low, constant([3e38], "float16")], "float16").reason
    'constant 3e+38 is beyond float16'

    Args:
        operation: the canonical name.
        decision: the operation's class and who gave it; see `polyamp.rules.decide`.
        inputs: its floating inputs; empty where it has none.
        compute: the format of ``lower`` operations.

    Source: the classes are those of `polyamp.operations`. Telling apart float32 by declaration and float32 by need is
    what TensorFlow's pass does by painting a whole graph (core/grappler/optimizers/auto_mixed_precision.cc); here one
    forward pass does it.
    """
    foreign = _first(inputs, "other")
    if decision.op_class == "keep" or foreign:
        after = _first(inputs, "strong", "other")
        output = Value("strong", after.maker) if after else Value()
        return Flow(AS_WRITTEN, output, f"an input is {foreign.maker}" if foreign else decision.reason)
    unfit = next((value.unfit for value in inputs if value.unfit), "")
    chosen = _CLASSES[decision.op_class](operation, decision, inputs)
    if decision.reason == TABLE and _overflows(operation, compute):
        chosen = _Choice("strong", operation, f"{operation} leaves the range of {compute}")
    if unfit and (chosen.state == "low" or decision.op_class == "follow"):
        chosen = _Choice("strong", "a constant", unfit)
    carried = unfit if decision.op_class in ("neutral", "promote") or operation == "mul" else ""
    format_name = compute if chosen.state == "low" else "float32"
    return Flow(format_name, Value(chosen.state, chosen.maker, carried), chosen.reason)


def constant(magnitudes: Iterable[float], compute: str) -> Value:
    """What is known of a constant.

    >>> constant([1e-8], "float16").unfit
    'constant 1e-08 is lost in float16'
    >>> constant([1e-8], "bfloat16")
    Value(state='weak', maker='', unfit='')

    Args:
        magnitudes: of its elements, those that have to be held: for a scalar its own; for an array the largest finite
            one, since tiny elements beside large ones may round to 0.
        compute: the format of ``lower`` operations.
    """
    target = format_of(compute)
    unfit = next((magnitude for magnitude in magnitudes if not target.holds(magnitude)), None)
    if unfit is None:
        return Value()
    return Value(unfit=f"constant {unfit:.4g} is {'beyond' if abs(unfit) > 1 else 'lost in'} {target.name}")


class _Choice(NamedTuple):
    state: str
    maker: str
    reason: str


def _overflows(operation: str, compute: str) -> bool:
    """Whether an operation is safe in 16 bits but for the range of a format narrower than float32's."""
    entry = OPERATIONS.get(operation)
    narrow = format_of(compute).exponent_bits < format_of("float32").exponent_bits
    return narrow and entry is not None and entry.op_class == "follow" and entry.sources.get("range") == "full"


def _first(inputs: Sequence[Value], *states: str) -> Value | None:
    return next((value for state in states for value in inputs if value.state == state), None)


def _lower(operation: str, decision: Decision, inputs: Sequence[Value]) -> _Choice:
    return _Choice("low", operation, decision.reason)


def _full(operation: str, decision: Decision, inputs: Sequence[Value]) -> _Choice:
    return _Choice("strong", operation, decision.reason)


def _follow(operation: str, decision: Decision, inputs: Sequence[Value]) -> _Choice:
    if strong := _first(inputs, "strong"):
        return _Choice("strong", strong.maker, f"after {strong.maker}")
    if low := _first(inputs, "low"):
        return _Choice("low", low.maker, f"beside {low.maker}")
    return _Choice("weak", "", "as declared")


def _promote(operation: str, decision: Decision, inputs: Sequence[Value]) -> _Choice:
    if _first(inputs, "low") and not _first(inputs, "strong") and _first(inputs, "weak"):
        return _Choice("weak", "", "its widest input is float32")
    return _follow(operation, decision, inputs)


_CLASSES: dict[str, Callable[[str, Decision, Sequence[Value]], _Choice]] = {
    "lower": _lower,
    "full": _full,
    "promote": _promote,
    "follow": _follow,
    "neutral": _follow,
}
