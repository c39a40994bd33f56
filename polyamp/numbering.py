"""Numbers for the values of a graph: values with equal numbers are equal, however they are written.

For example, both factors of ``(x @ w) * (x @ w)`` get one number, so the flow rule sees a square.

Source: value numbering (Briggs, Cooper and Simpson, "Value numbering", 1997).
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Sequence

# Operations whose results have the magnitude of their operands.
_UNSIGNED = frozenset({"neg", "abs", "stop_gradient", "custom derivative"})


class Numbering:
    """The numbers of the values of one graph, and which of them are constants."""

    def __init__(self) -> None:
        self._made: dict[Hashable, int] = {}
        self._shapes: list[Hashable] = []  # by number
        self._reshaped: dict[int, int] = {}  # by the number of a reshaped value, the number before all reshapes
        self._unsigned: dict[int, int] = {}
        self._constants: set[int] = set()

    def new(self, shape: Hashable = None, *, is_constant: bool = False) -> int:
        """Return the number of a value that equals no earlier one: an input, random numbers, changed memory."""
        self._shapes.append(shape)
        number = len(self._shapes) - 1
        if is_constant:
            self._constants.add(number)
        return number

    def of(self, operation: str, inputs: Sequence[int], attributes: Hashable = (), shape: Hashable = None) -> int:
        """Return the number of the result of an operation, which must return the same for the same inputs.

        Args:
            operation: its canonical name, or another name that tells it from all others.
            inputs: the numbers of all its inputs; none for a constant.
            attributes: everything else that its result depends on.
            shape: the shape of its result; None if it is not known.
        """
        if operation == "identity":
            return inputs[0]
        key: Hashable = (operation, *inputs, attributes)
        before = None
        if operation == "reshape" and shape is not None:  # whatever the shapes in between
            before = self._reshaped.get(inputs[0], inputs[0])
            if shape == self._shapes[before]:
                return before
            key = ("reshape", before, shape)
        if key in self._made:
            return self._made[key]
        number = self.new(shape, is_constant=self._constants.issuperset(inputs))
        if before is not None:
            self._reshaped[number] = before
        if operation in _UNSIGNED:
            self._unsigned[number] = self._unsigned.get(inputs[0], inputs[0])
        return self._made.setdefault(key, number)

    def is_constant(self, number: int) -> bool:
        """Return whether a value is a constant, or made of constants alone."""
        return number in self._constants

    def specific(self, operation: str, first: int, second: int) -> str:
        """Return the more specific name of an operation on two values: a ``mul`` of a value by itself is a ``square``.

        A constant over another value is a ``reciprocal``. Signs do not count: ``-y * y`` is a square too.
        """
        if operation == "mul" and self._unsigned.get(first, first) == self._unsigned.get(second, second):
            return "square"
        over = operation == "div" and self.is_constant(first) and not self.is_constant(second)
        return "reciprocal" if over else operation

    def product(self, operands: Iterable[int], contracted: int, *, is_aligned: bool) -> str:
        """Return the specific name of a product of matrices, by the number of terms that it adds up.

        One that adds up nothing is a ``mul``. ``is_aligned``: each element of one operand meets one of the other, as in
        dot products of rows; such a product of a value by itself is a ``square``.
        """
        before = (self._reshaped.get(number, number) for number in operands)
        name = self.specific("mul", *before) if is_aligned else "mul"
        return name if name == "square" or contracted == 1 else "matmul"


def terms_of_einsum(equation: str, shapes: Sequence[Sequence[int]]) -> int:
    """Return how many terms each element of an einsum adds up.

    >>> terms_of_einsum("i,j->ij", [(2,), (3,)]), terms_of_einsum("...k,kj", [(2, 5), (5, 3)])
    (1, 5)
    """
    inputs, arrow, output = equation.replace(" ", "").partition("->")
    sizes = _sizes_of_labels(inputs, shapes)
    kept = output if arrow else [label for label in sizes if inputs.count(label) == 1]
    hidden = 2 if arrow and "..." in inputs and "..." not in output else 1  # at least
    return hidden * math.prod(size for label, size in sizes.items() if label not in kept)


def sizes_of_einsum(equation: str, shapes: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """Return the rows, terms and columns of an einsum as a product of two matrices.

    >>> sizes_of_einsum("abc,cde->abde", [(2, 5, 8), (8, 3, 4)])
    (10, 8, 12)
    """
    inputs, _, output = equation.replace(" ", "").partition("->")
    sizes, (one, other) = _sizes_of_labels(inputs, shapes), map(set, inputs.split(","))
    groups = (one - other, (one & other) - set(output), other - one)
    return tuple(math.prod(sizes.get(label, 1) for label in labels) for labels in groups)


def _sizes_of_labels(inputs: str, shapes: Sequence[Sequence[int]]) -> dict[str, int]:
    sizes: dict[str, int] = {}
    for name, shape in zip(inputs.split(","), shapes, strict=True):
        first, _, last = name.partition("...")
        sizes |= dict(zip(first, shape, strict=False)) | dict(zip(last[::-1], shape[::-1], strict=False))
    return sizes
