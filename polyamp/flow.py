"""The flow rule: the one function that decides what format an operation runs in, in every framework.

A pass over a graph assigns a state to every floating value. For each operation, `flow` derives the format and the
state of the outputs from the states of the inputs. Adapters translate their graphs into calls of `flow` and apply its
results.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from polyamp.formats import format_of
from polyamp.operations import OPERATIONS
from polyamp.rules import Rule, is_untouched

TABLE = "table"  # the reason if none of the policy's own rules decided
AS_WRITTEN = "as written"
"""The format of an operation that keeps what the user wrote."""
NO_FLOATS = "no floating-point input"
"""The reason for an operation that needs no decision."""
READ_IN_FULL = "read by full work alone"
"""What `polyamp.readers.look` finds about a product that is computed inside the full work that reads it."""
IN_DISTANCE = "subtracted from squares of its operands"
"""What it finds about the product in a squared distance that is written out."""
SOLVED = "read by solvers"
"""What it finds about a product of matrices or a difference that solvers and factorizations read."""
IN_QUOTIENT = "a quotient of products"
"""What it finds about a product of matrices that divides, what it divides, and the products that these multiply."""
READ_IN_NORMS = "read by full work and norms alone"
"""What it finds about a sum with a constant: if the constant is large, a difference cancels it."""
SMALL_STEPS = "a small step of a value"
"""What it finds about the sum of a value and a small multiple of another."""
ACCUMULATES = "a state that is written"
"""What it finds about an accumulator, and what is between its old value and its new one."""

# --- values: what is known of each ------------------------------------------------------------------------------------

# A value's state:
#
# - ``weak``: float32 only because it was declared so: a parameter, a constant
# - ``input``: float32 data of the user's: a mask, labels, targets, positions
# - ``low``: in the compute format
# - ``strong``: float32 because full work made it
# - ``other``: of another type, which the user chose: float64, 16 bits of the user's own, complex
#
# Its role, if it has one:
#
# - ``sum``: a strong value: a sum over axes
# - ``statistic``: a strong value: a mean, or what was computed of statistics alone
# - ``root``: a strong value: the root of a statistic, such as a norm or a standard deviation
# - ``reciprocal root``: a strong value: one over such a root
# - ``normalized``: a low value that is still held in float32, between a norm's mean and the end of its affine part, or
#   since it was scaled by an unseen parameter
# - ``saturated``: a low value: a function that comes close to 0 or 1 and stays there, such as a sigmoid, or 1 minus it
# - ``pointwise``: a low value: a cheap function of one low value, such as abs
# - ``unseen``: a parameter whose numbers are not known, where the format's range is narrower than that of float32
# - ``table``: a constant array without negative elements, such as the window of a filter
# - ``weights``: what was computed of constants alone
# - ``average``: a low value: a pool, a product with one of these two, or what was computed of such values alone


class Value(NamedTuple):
    """The facts that the flow rule records about one floating value."""

    state: str = "weak"
    # the canonical operation, or the declared type, that the state comes from; for a ``weak`` value only the operation
    # that joined parameters or constants to a low value
    maker: str = ""
    unfit: str = ""  # why the compute format cannot hold the value; empty if it can
    role: str = ""


WEAK = Value()
INPUT = Value("input")
CARRIED = Value("strong", "a loop")
"""A float32 value that a loop carries over its iterations. It may be a sum, which in 16 bits loses small terms."""


def constant(magnitudes: Iterable[float], compute: str) -> Value:
    """Return the facts about a constant."""
    target = format_of(compute)
    unfit = next((magnitude for magnitude in magnitudes if not target.holds(magnitude)), None)
    if unfit is None:
        return Value()
    if target.is_one(abs(unfit)):
        return Value(unfit=f"constant {unfit:.8g} is 1 in {target.name}")
    return Value(unfit=f"constant {unfit:.4g} is {'beyond' if abs(unfit) > 1 else 'lost in'} {target.name}")


def integers(value: Value, largest: float, compute: str) -> Value:
    """Return the facts about integers, none beyond ``largest``, that become floating values, as exact data."""
    target = format_of(compute)
    limit = 2 ** (target.mantissa_bits + 1)
    if not target.is_low or largest <= limit:
        return value
    return value._replace(unfit=f"integers beyond {limit} are not exact in {target.name}")


def largest_integer(operation: str, inputs: Sequence[float], limit: float) -> float:
    """Return how large the integers are that an operation makes of others; ``limit``: their type's largest.

    The numbers of sizes and scalars count as 0: one factor for all elements can be rounded like any constant.
    """
    bounds: dict[str, Callable[[Sequence[float]], float]] = {"add": sum, "sub": sum, "mul": math.prod}
    entry = OPERATIONS.get(operation)
    moves = operation == "cast" or (entry is not None and entry.op_class in ("neutral", "promote"))
    bound = bounds.get(operation, max if moves or not any(inputs) else None)
    return min(limit, bound(inputs)) if bound and inputs else limit


def parameter(largest: float | None, compute: str) -> Value:
    """Return the facts about a parameter; ``largest`` is None if unknown.

    They change in training, so only whether they are beyond the format counts.
    """
    if largest is None:
        return Value(role="unseen") if _is_narrow(compute) else WEAK
    return constant([largest], compute) if largest > format_of(compute).max else WEAK


def table(values: Any, compute: str, *, divides: bool = False) -> Value:
    """Return the facts about a constant array; with ``divides``, small elements count too, as a divisor's do."""
    import numpy

    array = numpy.asarray(values)
    if array.size == 1:
        return constant([float(array.reshape(()))], compute)
    sizes = numpy.abs(array[numpy.isfinite(array) & (array != 0)].astype(float))
    ends = [sizes.max(), sizes.min()][: 1 + divides] if sizes.size else []
    found = constant(map(float, ends), compute)
    if array.dtype.kind in "iu" and not found.unfit:
        found = integers(found, max(ends, default=0), compute)
    return found if found.unfit or not (array >= 0).all() else found._replace(role="table")


# --- the rule ---------------------------------------------------------------------------------------------------------

_SATURATING = frozenset({"sigmoid", "tanh", "erf"})
_PRODUCTS = frozenset({"matmul", "conv"})
SOLVERS = frozenset(
    {"cholesky", "det", "eigh", "inverse", "lstsq", "lu", "matrix_sqrt", "qr", "solve", "svd", "triangular_solve"}
)
_WEIGHTS = frozenset({"table", "weights"})
_POINTWISE = frozenset(
    {"add", "sub", "mul", "div", "neg", "abs", "relu", "sqrt", "where", "clip", "maximum", "minimum"}
    | {"reshape", "broadcast", "transpose", "slice", "gather", "identity"}
)


class Decision(NamedTuple):
    """What is decided of one operation: its class by `decide`, and then its format by `flow`."""

    operation: str  # its canonical name
    op_class: str
    reason: str  # the table, the rule, the neighbour or the guard that decided
    rule: str = ""  # the policy's rule that gave the class, as in ``rule 'head/*'``; empty if none did
    format: str = AS_WRITTEN  # the format that its floating inputs are cast to and that it computes in
    # the state of the outputs that were float32. If the state is ``low`` and the operation ran in float32, the output
    # is cast to the compute format at once, except in the role ``normalized``: then it stays in float32 until an
    # operation that runs in the compute format uses it
    output: Value = WEAK
    # roles of low inputs whose rounded values the operation must not use. These inputs are computed again in float32
    # for this operation
    anew: tuple[str, ...] = ()

    @property
    def rounds(self) -> bool:
        """Whether float32 results are cast to the compute format at once, being low and not inside a norm."""
        return self.output.state == "low" and self.output.role != "normalized"

    @property
    def is_wide(self) -> bool:
        """Whether class ``inner`` means casts here, since no kernel is known to use float32 inside."""
        entry = OPERATIONS.get(self.operation)
        return self.op_class == "inner" and (entry is None or "inside" not in entry.sources)


def decide(rules: Iterable[Rule], operation: str, path: str = "") -> Decision:
    """Decide the class of a canonical operation at a path, by the first matching rule or else by the table."""
    # Rules do not apply to operations of class ``keep``, such as integer operations and casts.
    entry = OPERATIONS.get(operation)
    matched = None if is_untouched(operation) else next((rule for rule in rules if rule.matches(operation, path)), None)
    if matched is not None:
        rule = f"rule {matched.pattern!r}"
        return Decision(operation, matched.op_class, rule, rule)
    if entry is None:
        return Decision(operation, "keep", "unknown operation: runs as written")
    return Decision(operation, entry.op_class, TABLE)


def flow(
    decision: Decision,
    inputs: Sequence[Value],
    compute: str,
    *,
    gradient: bool = False,
    asked: str = "",
) -> Decision:
    """Decide the format of one operation. Pure: the same arguments give the same answer in every framework.

    Args:
        decision: its class, and why; see `decide`.
        inputs: the facts about its floating inputs, in order.
        compute: the compute format.
        gradient: whether it is part of a backward pass.
        asked: what `polyamp.readers.look` found about its result.
    """
    # The classes of operations:
    #
    # - ``lower`` returns low values, and ``full`` returns strong ones.
    # - ``inner`` returns a low value if its first input is low or strong, else a value as declared. An average pool is
    #   the exception: it returns what ``follow`` does if its data are strong or the user's.
    # - ``follow`` and ``neutral`` run in float32 if any input is strong, or if a low value meets one of the user's
    #   inputs; else in the compute format if any input is low; else as declared.
    # - ``promote`` runs in the format of its widest input.
    #
    # Exceptions: an input that the compute format cannot hold forces float32, and so does the result of moving or
    # multiplying such an input. An operation that is ``full`` only because of its range is ``full`` only in formats
    # with a range narrower than that of float32. A norm that is written out returns low values, but is computed in
    # float32 (see the end of this file). A product with constant weights is an average: it follows strong data. One
    # of computed weights alone stays as declared, and one of strong values alone, such as probabilities, is strong. In
    # a backward pass, where most gradients are strong, only one with what a solver returned is.
    #
    # Source: the classes are those of `polyamp.operations`. TensorFlow's pass also distinguishes values that are
    # float32 by declaration from values that need float32: it paints a whole graph
    # (core/grappler/optimizers/auto_mixed_precision.cc); here one forward pass is enough. A user's float32 data stay
    # float32, as in PyTorch's promotion under autocast.
    foreign = _first(inputs, "other")
    if decision.op_class == "keep" or foreign:
        return _as_written(decision, inputs, foreign)
    operation, unfit = decision.operation, next((value.unfit for value in inputs if value.unfit), "")
    format_name, output, reason = _by_class(decision, inputs, compute, gradient, asked)
    if unfit and (output.state == "low" or decision.op_class == "follow"):
        format_name, output, reason = _strong("a constant", unfit)
    is_low = output.state == "low" and format_name == compute
    role = output.role or (_role(decision, inputs) if is_low else "")
    role = statistic(operation, inputs) if output.state == "strong" else role
    if output.state == "weak" and not (role or unfit) and decision.op_class in ("follow", "neutral", "promote"):
        role = "unseen" if any(value.role == "unseen" for value in inputs) else ""
    moves = decision.op_class in ("neutral", "promote") or operation == "mul"
    output = output._replace(unfit=unfit if moves and not role else "", role=role)
    anew = () if is_low else _anew(decision, inputs, reason, unfit)
    return decision._replace(format=format_name, output=output, reason=reason, anew=anew)


_NEXT_TO_INPUT = "next to an input"
_Choice = tuple[str, Value, str]  # a format, the state of the outputs, and the reason


def _by_class(decision: Decision, inputs: Sequence[Value], compute: str, gradient: bool, asked: str) -> _Choice:
    """Decide by the class and what is known of the result. A low result can be computed in float32."""
    operation, op_class, by_table = decision.operation, decision.op_class, decision.reason == TABLE
    if by_table and _is_asked(operation, op_class, inputs, gradient, asked):
        return _strong(operation, asked)
    if by_table and _overflows(operation, compute):
        return _strong(operation, f"{operation} leaves the range of {compute}")
    cancels = by_table and _cancels(operation, op_class, inputs, asked)
    if cancels or (op_class in ("follow", "neutral") and normalizes(operation, inputs, gradient)):
        maker = next(value.maker for value in inputs if value.state == "low")
        return "float32", Value("low", maker, role="normalized"), asked if cancels else "inside a norm"
    if op_class == "follow" and _scales_by_unseen(operation, inputs):
        maker = next(value.maker for value in inputs if value.state == "low")
        return "float32", Value("low", maker, role="normalized"), "the numbers of a parameter are not known"
    if op_class == "lower":
        wide = _wide_product(operation, inputs, gradient) if by_table else None
        return wide or (compute, Value("low", operation), decision.reason)
    if op_class == "full":
        return _strong(operation, decision.reason)
    if op_class == "inner":
        # An average can be as large as its data, so an average of strong values or of the user's inputs keeps their
        # state.
        if operation == "avg_pool" and by_table and inputs and inputs[0].state in ("strong", "input"):
            return _follow(inputs[:1], compute)
        return _inner(operation, inputs, compute)
    if op_class == "promote" and {value.state for value in inputs} == {"low", "weak"}:
        return "float32", Value(maker=operation), "its widest input is float32"
    return _follow(inputs, compute)


def _is_asked(operation: str, op_class: str, inputs: Sequence[Value], gradient: bool, asked: str) -> bool:
    """Return whether an operation is in float32 because of what becomes of its result."""
    if asked == ACCUMULATES:
        return op_class in ("follow", "neutral", "promote")
    of_lows = all(value.state == "low" for value in inputs[:2])
    if asked in (IN_DISTANCE, SOLVED):
        return op_class == "lower" or operation == "mul" or (operation == "sub" and of_lows)
    if asked and gradient and op_class == "lower":  # as its forward product
        return True
    if asked == IN_QUOTIENT:
        return op_class == "lower" and all(value.state != "weak" or value.maker for value in inputs)
    return of_lows and (asked == SMALL_STEPS or (asked == READ_IN_FULL and operation in ("mul", "matmul")))


def _cancels(operation: str, op_class: str, inputs: Sequence[Value], asked: str) -> bool:
    """Return whether an operation adds a constant or parameter which differences of its results cancel."""
    low = [value for value in inputs if value.state == "low"]
    if not low or op_class not in ("follow", "neutral") or any(value.state not in ("low", "weak") for value in inputs):
        return False
    adds = operation in ("add", "sub") and len(low) == 1
    return asked == READ_IN_NORMS and (adds or all(value.role == "normalized" for value in low))


def _scales_by_unseen(operation: str, inputs: Sequence[Value]) -> bool:
    """Return whether a low value is multiplied or divided by a parameter of unknown size."""
    # What is scaled may be as large as the parameter, as in ``(y * deviation + mean) * 1e-6``, so it is not rounded
    # before the end of such a chain.
    states = sorted(value.state for value in inputs)
    return operation in ("mul", "div") and states == ["low", "weak"] and any(one.role == "unseen" for one in inputs)


def _averages(operation: str, inputs: Sequence[Value]) -> bool:
    """Return whether an operation is an average with constant weights."""
    return operation == "avg_pool" or (operation in _PRODUCTS and any(value.role in _WEIGHTS for value in inputs))


def _wide_product(operation: str, inputs: Sequence[Value], gradient: bool) -> _Choice | None:
    """Decide a product of strong values or of computed weights, or an average of strong values; None for others."""
    if inputs and all(value.role == "weights" for value in inputs):
        return "float32", WEAK, "as declared"
    solved = any(value.maker in SOLVERS for value in inputs)
    if operation in _PRODUCTS and (solved or not gradient) and {value.state for value in inputs} == {"strong"}:
        return _strong(inputs[0].maker, f"after {inputs[0].maker}")
    strong = _first([value for value in inputs if value.role not in _WEIGHTS], "strong")
    if strong is None or not _averages(operation, inputs):
        return None
    return _strong(strong.maker, f"an average, after {strong.maker}")


def _strong(maker: str, reason: str) -> _Choice:
    return "float32", Value("strong", maker), reason


def _inner(operation: str, inputs: Sequence[Value], compute: str) -> _Choice:
    """Decide by the first input, which is the data. The other inputs, such as a norm's parameters, do not count."""
    data = inputs[0] if inputs else WEAK
    if data.state == "low":
        return compute, Value("low", operation), f"next to {data.maker}"
    if data.state == "strong":  # only a function that saturates tolerates inf as its argument
        computed_in = compute if operation in _SATURATING else "float32"
        return computed_in, Value("low", operation), f"bounded, after {data.maker}"
    return "float32", WEAK, "as declared"


def _follow(inputs: Sequence[Value], compute: str) -> _Choice:
    if strong := _first(inputs, "strong"):
        return _strong(strong.maker, f"after {strong.maker}")
    low, data = _first(inputs, "low"), _first(inputs, "input")
    if low and data:
        return _strong("an input", _NEXT_TO_INPUT)
    if low:
        return compute, Value("low", low.maker), f"next to {low.maker}"
    joined = next((value.maker for value in inputs if value.state == "weak" and value.maker), "")
    return "float32", INPUT if data else Value(maker=joined), "as declared"


def _as_written(decision: Decision, inputs: Sequence[Value], foreign: Value | None) -> Decision:
    after = _first(inputs, "strong", "other")
    output = Value("strong", after.maker) if after else Value("input" if _first(inputs, "input") else "weak")
    return decision._replace(output=output, reason=f"an input is {foreign.maker}" if foreign else decision.reason)


def _overflows(operation: str, compute: str) -> bool:
    """Return whether an operation needs float32 only for its range, and the format has a narrower range."""
    entry = OPERATIONS.get(operation)
    return (
        _is_narrow(compute)
        and entry is not None
        and entry.op_class == "follow"
        and entry.sources.get("range") == "full"
    )


def _is_narrow(compute: str) -> bool:
    return format_of(compute).exponent_bits < format_of("float32").exponent_bits


def _role(decision: Decision, inputs: Sequence[Value]) -> str:
    """Return the role of the result of an operation that runs in the compute format."""
    operation = decision.operation
    if operation in _SATURATING:
        return "saturated"
    if _averages(operation, inputs):
        return "average"
    low = [value for value in inputs if value.state == "low"]
    if decision.op_class not in ("follow", "neutral") or operation not in _POINTWISE or not low:
        return ""
    if low[0].role in ("saturated", "average") and all(value.role == low[0].role for value in low):
        return low[0].role
    return "pointwise" if len(low) == 1 else ""


def _anew(decision: Decision, inputs: Sequence[Value], reason: str, unfit: str) -> tuple[str, ...]:
    """Return the roles of inputs that are computed again in float32."""
    # For example, take ``log(sigmoid(x) + 1e-12)`` where the sigmoid was rounded to 0. The gradient 1e12 would become
    # inf in float16 and be multiplied by the sigmoid's derivative, which is 0: the result would be NaN.
    # A difference of averages, as in a variance, may be much smaller than what they were rounded by.
    roles: tuple[str, ...] = ("average",) if decision.operation == "sub" else ()
    if unfit or reason == _NEXT_TO_INPUT:
        roles = ("saturated", "pointwise", "average")
    elif decision.op_class == "full" or reason in (READ_IN_FULL, IN_DISTANCE, SOLVED):
        roles = ("saturated", "average")
    present = {value.role for value in inputs if value.state == "low"}
    return tuple(role for role in roles if role in present)


def _first(inputs: Sequence[Value], *states: str) -> Value | None:
    return next((value for state in states for value in inputs if value.state == state), None)


# --- norms that a program writes out ----------------------------------------------------------------------------------
#
# Recognise norms that a program writes out as sums, roots and products, for the flow rule.
#
# A layer norm by hand is ``(x - mean(x)) * rsqrt(variance(x) + eps) * scale + bias``. Its mean and variance are full
# work. Everything after full work would be float32, and since norms are everywhere, this would be the whole network.
# But the results of a norm are near one, so 16 bits can hold them. Each value therefore has a role that is found
# step by step:
#
# ==================================  ======================================
# ``m = mean(x)``                     ``statistic``
# ``v = mean(square(x)) - m * m``     ``statistic``
# ``r = rsqrt(v + eps)``              ``reciprocal root``
# ``y = x - m``                       ``normalized``: computed in float32
# ``z = y * r * scale + bias``        ``normalized``: still in float32
# ``relu(z)``                         takes ``z`` rounded, once
# ==================================  ======================================
#
# Two kinds of results stay strong, because they may be much larger than one: a low value times a statistic that is
# not a reciprocal root, which reverses a norm; and a value minus a sum, or minus the logarithm of a sum, as in a cross
# entropy that a program writes out.

_REDUCTIONS = {"sum": "sum", "mean": "statistic", "variance": "statistic", "norm": "root"}
_STATISTICS = frozenset({"sum", "statistic", "root", "reciprocal root"})
_ROOTS = {"sqrt": "root", "rsqrt": "reciprocal root"}
_INVERSES = {"root": "reciprocal root", "reciprocal root": "root"}
_MOVES = frozenset({"reshape", "broadcast", "identity"})  # those that cost nothing, in float32 too
_KEEPING = _MOVES | {"add", "sub", "maximum", "minimum", "clip", "where", "transpose", "slice", "gather", "tile", "neg"}
_AFFINE = frozenset({"add", "sub", "mul", "div"})


def statistic(operation: str, inputs: Sequence[Value]) -> str:
    """Return the role of a float32 result if it is a statistic; else an empty string."""
    if operation in _REDUCTIONS:
        return _REDUCTIONS[operation]
    roles = [value.role for value in inputs if value.role in _STATISTICS]
    if any(value.role not in _STATISTICS and value.state != "weak" for value in inputs):
        return ""
    if operation == "rsqrt":  # also of a parameter: the variance that a norm stores for inference is a parameter
        return "reciprocal root"
    if not roles:
        return ""
    if operation in _ROOTS:
        return _ROOTS[operation]
    if operation == "reciprocal" or (operation == "div" and inputs[0].role not in _STATISTICS):
        return _INVERSES.get(roles[0], "statistic")
    if operation in _KEEPING and len(set(roles)) == 1:
        return roles[0]
    if operation in ("mul", "div") and len(roles) == 1:  # by a number, which turns a sum into a mean
        return roles[0] if roles[0] in _INVERSES else "statistic"
    return "statistic" if operation in _KEEPING | _AFFINE | {"square", "squared_difference", "abs"} else ""


def normalizes(operation: str, inputs: Sequence[Value], gradient: bool = False) -> bool:
    """Return whether an operation is part of a written-out norm, so that the result is low but kept in float32."""
    low = [value for value in inputs if value.state == "low"]
    statistics = [value for value in inputs if value.role in _STATISTICS]
    others = [value for value in inputs if value.state != "low" and value.role not in _STATISTICS]
    if not low or any(value.state != "weak" for value in others) or (operation == "div" and inputs[0].state != "low"):
        return False
    begun = all(value.role == "normalized" for value in low)
    if not statistics:
        alone = len(low) == 1 or (gradient and operation in ("add", "sub"))
        return begun and alone and operation in _AFFINE | _MOVES
    many = gradient and operation in ("add", "sub")  # sums the gradients of the data and of its statistics
    if (len(low) > 1 and not many) or operation not in _AFFINE:
        return False
    role = statistics[0].role
    allowed = {"mul": role == "reciprocal root", "div": True, "sub": role != "sum", "add": begun and role != "sum"}
    return gradient or allowed[operation]
