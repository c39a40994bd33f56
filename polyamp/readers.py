"""A look at the readers of a graph's values, before the flow rule decides its operations.

The flow rule goes forward, so it does not know what becomes of a value. Eight patterns need that:

- A product of two low values that only full work reads, such as the sum in ``(a * b).sum()``, is computed inside that
  work, in float32. So are two products whose difference is taken, which can be much smaller than they are. A product of
  matrices, such as a covariance, is treated so too, unless an exponential is taken of it as of a score.
- A product of matrices that divides, as in linear attention, is in float32, and so is what it divides: their quotient
  is much smaller than both.
- A product that is subtracted from squares of its own operands, as in ``|a|^2 + |b|^2 - 2ab``, is in float32: the
  distance can be much smaller than all three.
- A product of matrices that solvers or factorizations read, such as ``x.T @ x`` of least squares, is in float32: these
  multiply its rounding by the matrix's condition, and after rounding it can fail to be positive definite. If solvers
  read a function of differences or scores, as a kernel ``exp(-|a - b|^2)``, the differences and scores are in float32.
- A value from which a mean or an equal term is subtracted, and that full work alone reads, is held in float32: the
  difference can be much smaller.
- A sum of a value and a small multiple of another, such as a step of a solver, is in float32.
- A constant by which something is divided has to be kept to its smallest element.
- A state that is written, such as a moving average, is an accumulator: what is computed from its old value up to its
  new one is in float32. In 16 bits ``0.999 * state + 0.001 * y`` stands still.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence, Set
from typing import Any, NamedTuple

from polyamp.flow import (
    ACCUMULATES,
    IN_DISTANCE,
    IN_QUOTIENT,
    READ_IN_FULL,
    READ_IN_NORMS,
    SMALL_STEPS,
    SOLVED,
    SOLVERS,
    Value,
    statistic,
)

DIVIDES = "a constant divisor"

_MOVES = frozenset({"reshape", "broadcast", "transpose", "slice", "gather", "identity", "cast", "neg", "where"})
_AFFINE = _MOVES | {"add", "sub", "mul", "div", "lerp", "addcmul"}
_KEEPING = _AFFINE | {"clip", "maximum", "minimum", "scatter", "scatter_add", "concat", "stack"}
_LINEAR = _AFFINE | {"avg_pool", "sum", "mean", "matmul", "conv", "einsum"}  # in one input, if the others are constants
_LOGARITHMS = frozenset({"log", "log2", "log10", "reciprocal", "rsqrt"})
# What takes the scores of attention or of classes, which may stay in 16 bits.
_SCORING = frozenset(
    {"exp", "softmax", "log_softmax", "logsumexp", "softplus", "log_sigmoid", "cross_entropy"}
    | {"binary_cross_entropy_with_logits"}
)
_SMALL = 2.0**-5  # of a step: in bfloat16 it would lose half of its bits and more
_LOW = Value("low")
_PASSING = frozenset({"follow", "neutral", "promote"})
_COMPUTING = _PASSING | {"full", "inner"}

_PRODUCTS = frozenset({"matmul", "tensordot", "conv", "bilinear"})
_SQUARES = frozenset({"square", "pow", "norm"})
_JOINING = frozenset({"concat", "stack", "tile", "diagonal"})
_ADDING = _MOVES | _JOINING | {"add", "sub"}
_SCALING = _AFFINE | {"maximum", "clip"}
_SUMMING = frozenset({*_SQUARES, "sum", "mean", "sqrt"})


def factor(operation: str, numbers: Sequence[float]) -> float:
    """Return the number by which an operation multiplies its operand, or 1; ``numbers`` are those of its operands."""
    if len(numbers) != 1 or operation not in ("mul", "div", "lerp") or not numbers[0]:
        return 1.0
    return 1.0 / numbers[0] if operation == "div" else numbers[0]


class Read(NamedTuple):
    """An operation, with what `look` needs to know of it."""

    operation: str  # its canonical name
    op_class: str
    inputs: Sequence[Hashable]  # the floating values that it reads the numbers of, in order
    outputs: Sequence[Hashable]  # its floating results
    factor: float = 1.0  # the number by which it multiplies an input


def look(
    reads: Sequence[Read],
    *,
    results: Collection[Hashable],
    constants: Collection[Hashable],
    written: Mapping[Hashable, Collection[Hashable]],
    number: Callable[[Any], Hashable] = lambda value: value,
) -> dict[Hashable, str]:
    """Return, by value, what its readers ask of it: one of the reasons of `polyamp.flow`, or `DIVIDES`.

    Args:
        reads: the operations of a graph, in their order.
        results: the values that the graph returns; what becomes of them is not known.
        constants: the values that are constants, or made of constants alone.
        written: for each state, as a value that is read, the values that can be its new ones.
        number: returns the same for values that are equal; see `polyamp.numbering`.
    """
    variable = [read._replace(inputs=[value for value in read.inputs if value not in constants]) for read in reads]
    found = dict.fromkeys(_divisors(reads, constants), DIVIDES)
    sums, scores, differences = (_made_by(reads, names) for names in (_PRODUCTS, _SCORING, ("sub",)))
    solved, behind = _solved(variable)
    found |= dict.fromkeys(_read_in_full(variable, results) - sums, READ_IN_FULL)
    found |= dict.fromkeys(_read_in_full(variable, results, but=scores - solved - behind) & sums, READ_IN_FULL)
    found |= dict.fromkeys(solved, SOLVED)
    found |= dict.fromkeys(_read_in_norms(variable, results), READ_IN_NORMS)
    found |= dict.fromkeys(_steps(variable), SMALL_STEPS)
    found |= dict.fromkeys(_in_quotients(variable), IN_QUOTIENT)
    found |= dict.fromkeys(_in_distances(reads, constants, number), IN_DISTANCE)
    found |= dict.fromkeys((solved | behind) & differences, SOLVED)
    return found | dict.fromkeys(_accumulated(variable, written), ACCUMULATES)


def _made_by(reads: Sequence[Read], operations: Collection[str]) -> set[Hashable]:
    return {value for read in reads if read.operation in operations for value in read.outputs}


def _divisors(reads: Sequence[Read], constants: Collection[Hashable]) -> set[Hashable]:
    """Return the constants that divide something, themselves or by an element, or whose logarithm is taken."""
    found: set[Hashable] = set()
    for read in reversed(reads):
        is_moved = read.operation in _MOVES and not found.isdisjoint(read.outputs)
        if is_moved or read.operation in _LOGARITHMS:
            found.update(read.inputs)
        elif read.operation == "div" and len(read.inputs) == 2:
            found.add(read.inputs[1])
    return found.intersection(constants)


def _read_in_full(
    reads: Sequence[Read], results: Collection[Hashable], but: Set[Hashable] = frozenset()
) -> Set[Hashable]:
    """Return the values that only full work reads; an operation that makes one of ``but`` does not count as full."""
    differences = _differences(reads)

    def wants(read: Read, after: int) -> int:
        if not but.isdisjoint(read.outputs):
            return _NO
        if read.op_class == "full" or read.operation == "sqrt" or not differences.isdisjoint(read.outputs):
            return _YES
        passes = read.op_class in _PASSING or (len(read.inputs) == 1 and read.operation in _LINEAR)
        return after if passes else _NO

    return _wanted(reads, results, wants).keys()


def _solved(reads: Sequence[Read]) -> tuple[set[Hashable], set[Hashable]]:
    """Return the values that solvers and factorizations read, and what these are functions of, up to products."""
    found: set[Hashable] = set()
    behind: set[Hashable] = set()
    for read in reversed(reads):
        if read.operation in SOLVERS or (read.op_class in _PASSING and not found.isdisjoint(read.outputs)):
            found.update(read.inputs)
        elif read.op_class in _COMPUTING and not (found | behind).isdisjoint(read.outputs):
            behind.update(read.inputs)
    return found, behind


def _read_in_norms(reads: Sequence[Read], results: Collection[Hashable]) -> list[Hashable]:
    """Return the values that full work alone reads, at least once after a mean or an equal term was subtracted."""
    means, multiplied = _means(reads), [read for read in reads if _is_product(read) or read.operation in _PRODUCTS]
    products = {value for read in multiplied for value in read.outputs}

    def wants(read: Read, after: int) -> int:
        if read.operation == "sub" and len(read.inputs) == 2 and (after or not means.isdisjoint(read.inputs)):
            return _CANCELS
        if read.op_class == "full":
            return _YES
        return after if len(read.inputs) == 1 and read.operation in _AFFINE else _NO

    found = _wanted(reads, results, wants)
    cancelled = [value for value, wanted in found.items() if wanted == _CANCELS and value not in products]
    differences = [read.outputs for read in reads if read.operation == "sub" and set(read.inputs) <= set(cancelled)]
    return [*cancelled, *(value for outputs in differences for value in outputs if value in found)]


_NO, _YES, _CANCELS = range(3)


def _is_product(read: Read) -> bool:
    return read.operation == "mul" and len(read.inputs) == 2


def _wanted(
    reads: Sequence[Read], results: Collection[Hashable], wants: Callable[[Read, int], int]
) -> dict[Hashable, int]:
    """Return the values that all their readers want, with the most that one wants.

    Args:
        reads: the operations.
        results: the values that the graph returns, which nobody wants.
        wants: returns what an operation wants of its inputs, by what is wanted of its outputs.
    """
    found: dict[Hashable, list[int]] = {value: [_NO] for value in results}  # what the readers so far want
    for read in reversed(reads):
        of_outputs = [min(found[value]) and max(found[value]) for value in read.outputs if value in found]
        after = min(of_outputs, default=_NO)
        wanted = wants(read, after)
        if not wanted and not of_outputs and read.op_class in _PASSING:
            continue  # nothing comes of it: a comparison, or a result that is not used
        for value in read.inputs:
            found.setdefault(value, []).append(wanted)
    return {value: max(wanted) for value, wanted in found.items() if min(wanted)}


def _means(reads: Sequence[Read]) -> set[Hashable]:
    """Return the statistics that a norm subtracts."""
    roles: dict[Hashable, str] = {}
    for read in reads:
        inputs = [Value("strong", role=roles[value]) if value in roles else _LOW for value in read.inputs]
        roles |= dict.fromkeys(read.outputs if inputs else (), statistic(read.operation, inputs))
    return {value for value, role in roles.items() if role not in ("", "sum")}


def _steps(reads: Sequence[Read]) -> set[Hashable]:
    """Return sums of a value and a small multiple of another, such as the steps of a solver."""
    small: set[Hashable] = set()
    found: set[Hashable] = set()
    for read in reads:
        shrinks = 0 < abs(read.factor) <= _SMALL
        if read.operation in _AFFINE and (small.issuperset(read.inputs) or (shrinks and len(read.inputs) == 1)):
            small.update(read.outputs)
        elif read.operation in ("add", "sub", "lerp") and (shrinks or not small.isdisjoint(read.inputs)):
            found.update(read.outputs)
        elif read.operation in ("mul", "div", "tanh") and not small.isdisjoint(read.inputs[:1]):
            small.update(read.outputs)
    return found


def _differences(reads: Sequence[Read]) -> set[Hashable]:
    """Return the differences of products of two values, and what follows from these differences."""
    products: set[Hashable] = set()
    differences: set[Hashable] = set()
    for read in reads:
        of_products = bool(read.inputs) and products.issuperset(read.inputs)
        if _is_product(read) or (of_products and read.operation in _LINEAR):
            products.update(read.outputs)
        is_difference = read.operation == "sub" and len(read.inputs) == 2 and of_products
        if is_difference or (read.op_class in _PASSING and not differences.isdisjoint(read.inputs)):
            differences.update(read.outputs)
    return differences


def _in_quotients(reads: Sequence[Read]) -> set[Hashable]:
    """Return products of matrices that divide, products that they divide, and products among their operands."""
    behind: defaultdict[Hashable, set[Hashable]] = defaultdict(set)  # for a value, the products that it scales or adds
    operands: dict[Hashable, set[Hashable]] = {}  # for a product, those behind its operands
    inverse: set[Hashable] = set()  # one over a product
    terms = {value for read in reads if _is_product(read) for value in read.outputs}
    found: set[Hashable] = set()
    for read in reads:
        operation, before = read.operation, {product for value in read.inputs for product in behind[value]}
        multiplies, is_alone = operation in _PRODUCTS, len(read.inputs) == 1
        if multiplies or (operation == "sum" and not terms.isdisjoint(read.inputs)):
            operands |= dict.fromkeys(read.outputs, before)
            behind |= {value: {value} for value in read.outputs}
        elif operation in _ADDING or (is_alone and operation in _SCALING):
            behind |= dict.fromkeys(read.outputs, before)
        is_inverse = not inverse.isdisjoint(read.inputs)
        if operation == "reciprocal" or (is_inverse and is_alone and operation in _SCALING):
            inverse.update(read.outputs if is_inverse or before else ())
        divides = operation == "div" and len(read.inputs) == 2 and behind[read.inputs[1]]
        if divides or operation == "reciprocal" or (is_inverse and (multiplies or operation == "mul")):
            found |= before | (operands.keys() & {*read.outputs})
    return found.union(*(operands[product] for product in found))


_Terms = dict[Hashable, int]  # what a sum has as its terms, with their signs; 0 if the sign is not known


def _in_distances(
    reads: Sequence[Read], constants: Collection[Hashable], number: Callable[[Any], Hashable]
) -> set[Hashable]:
    """Return products that are subtracted from squares of their own operands, or the other way round."""
    origins: dict[Hashable, set[Hashable]] = {}  # of a value that only moves or scales others, the numbers of those
    squares: dict[Hashable, _Terms] = {}  # for a value, the origins whose squares it adds up
    products: dict[Hashable, _Terms] = {}  # for a value, the products among its terms
    operands: dict[Hashable, set[Hashable]] = {}  # for a product, the origins of its operands
    found: set[Hashable] = set()

    def origins_of(values: Iterable[Hashable]) -> set[Hashable]:
        return {one for value in values for one in origins.get(value, {number(value)})}

    for read in reads:
        inputs = [value for value in read.inputs if value not in constants] or list(read.inputs)
        operation, own = read.operation, origins_of(inputs)  # the parameters of a scale do not count
        is_scaled = operation in ("mul", "div") and len(inputs) == 1
        is_product = operation in _PRODUCTS or (operation == "mul" and len(inputs) == 2)
        if operation in _MOVES | _JOINING or is_scaled:
            origins |= dict.fromkeys(read.outputs, own)
        adds = operation in _ADDING or is_scaled
        of_squares = _added(operation, inputs, squares) if adds or is_product or operation in _SUMMING else {}
        of_products = _added(operation, inputs, products) if adds else {}
        if operation in _SQUARES:
            of_squares |= dict.fromkeys(own, 1)
        if operation in ("diagonal", "gather"):  # of a product of rows with themselves, their squares
            of_squares |= {one: 1 for value in of_products if len(operands[value]) == 1 for one in operands[value]}
        for output in read.outputs:
            if is_product:
                operands[output], of_products = origins_of(read.inputs), {output: 1}
            squares[output], products[output] = of_squares, of_products
        found |= {
            product
            for product, sign in of_products.items()
            if any(sign * of_squares[one] < 1 for one in operands[product] & of_squares.keys())
        }
    return found


def _added(operation: str, inputs: Sequence[Hashable], terms: Mapping[Hashable, _Terms]) -> _Terms:
    """Return the terms of an operation's result, with their signs, from the ``terms`` of its inputs."""
    found: _Terms = {}
    is_known = operation not in ("mul", "div", *_PRODUCTS)
    for place, value in enumerate(inputs):
        is_negative = operation == "neg" or (operation == "sub" and place)
        factor = (-1 if is_negative else 1) if is_known else 0
        for one, sign in terms.get(value, {}).items():
            found[one] = factor * sign if found.get(one, factor * sign) == factor * sign else 0
    return found


def _accumulated(reads: Sequence[Read], written: Mapping[Hashable, Collection[Hashable]]) -> set[Hashable]:
    """Return the values between what is read of each state and what is written to it."""
    makers: defaultdict[Hashable, list[Hashable]] = defaultdict(list)
    readers: defaultdict[Hashable, list[Hashable]] = defaultdict(list)
    for read in reads if written else ():
        if read.operation in _KEEPING:
            for value in read.inputs:
                readers[value] += read.outputs
            for value in read.outputs:
                makers[value] += read.inputs
    found: set[Hashable] = set()
    for state, new in written.items():
        made = _reached([state], readers)
        found |= (_reached(made.intersection(new) - {state}, makers) & made) - {state}
    return found


def _reached(start: Iterable[Hashable], edges: Mapping[Hashable, Sequence[Hashable]]) -> set[Hashable]:
    found, left = set[Hashable](), list(start)
    while left:
        value = left.pop()
        if value not in found:
            found.add(value)
            left += edges.get(value, ())
    return found
