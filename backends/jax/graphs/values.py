"""What is known of a program's values before it runs: which are equal, which are constants, and who reads them.

For example, in ``(x @ w) * (x @ w)`` the two products have equal numbers, so the flow rule sees a square. In
``(a * b).sum()`` only a sum reads the product, so it is computed in float32.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from polyamp.backends.jax import unstable
from polyamp.backends.jax.graphs.cells import FLOAT32, is_inexact
from polyamp.backends.jax.operations import canonical
from polyamp.flow import largest_integer
from polyamp.numbering import Numbering
from polyamp.operations import OPERATIONS
from polyamp.readers import Read, factor, look

_CALLS = frozenset({"jit", "closed_call", "remat2", "remat_opt", "custom_jvp_call", "custom_vjp_call"})
_PASSING_ON = frozenset({"scan", "cond"})  # their programs take the last of their arguments and return all results
_LITERAL = "a literal"


class Values:
    """The facts about the values of a program, and of the programs in it.

    A function that is called once is a part of the program. A function that is called more often, and the body of a
    loop, are read as if their arguments, and the uses of their results, could be any.
    """

    def __init__(self, closed: Any, is_repeated: Callable[[Any], bool], states: Sequence[bool] = ()) -> None:
        # ``states`` are flags for arguments that the program may return with other numbers
        self.numbering = Numbering()
        self._numbers: dict[Any, int] = {}
        self._literals: dict[Hashable, int] = {}
        self._largest: dict[Any, float] = {}  # how large the integers in an array may be
        self._reads: list[Read] = []
        self._results: list[Any] = []  # what becomes of them is not known
        self._is_repeated = is_repeated
        self._times = Counter[int]()
        self._count(closed)
        self._backward: set[Any] = set()  # results of a backward pass, in programs that it holds too
        self._apart: dict[int, tuple[Any, bool]] = {}  # the programs to look at for any arguments
        self._add(closed)
        done = set[int]()
        while new := self._apart.keys() - done:
            done |= new
            for key in new:
                self._add(*self._apart[key])
        atoms = {value for read in self._reads for value in read.inputs if value is not _LITERAL}
        constants = {_LITERAL, *filter(self.is_constant, atoms)}
        self._asked = look(
            self._reads,
            results=self._results,
            constants=constants,
            written=_written(closed, states),
            number=lambda value: self._numbers.get(value, value),
        )

    def operation(self, equation: Any) -> str:
        """Return the canonical name of an operation: a ``mul`` of equal values is a ``square``."""
        name, inputs = canonical(equation.primitive.name, equation.params), equation.invars
        if equation.primitive.name == "dot_general":
            return self._product(equation)
        return self.numbering.specific(name, *map(self.number, inputs)) if len(inputs) == 2 else name

    def _product(self, equation: Any) -> str:
        """Return the canonical name of a product; in a backward pass always ``matmul``."""
        if self.is_backward(equation):
            return "matmul"
        first, second = equation.invars
        contracting, batch = equation.params["dimension_numbers"]
        contracted = math.prod(first.aval.shape[place] for place in contracting[0])
        is_aligned = contracting[0] == contracting[1] and batch[0] == batch[1]
        is_aligned &= equation.outvars[0].aval.size * contracted == first.aval.size == second.aval.size
        return self.numbering.product(map(self.number, equation.invars), contracted, is_aligned=is_aligned)

    def largest(self, atom: Any) -> float:
        """Return how large an array's integers can be; 0 for a scalar, which is like a constant."""
        if not unstable.is_variable(atom) or _shape(atom) == ():
            return 0
        return self._largest.get(atom, float(np.iinfo(atom.aval.dtype).max) if is_integer(atom) else 1)

    def number(self, atom: Any) -> int:
        """Return the number of a value; equal values have the same."""
        if unstable.is_variable(atom):
            return self._numbers[atom]
        key = (atom.aval.dtype, np.asarray(atom.val).tobytes())  # a scalar
        if key not in self._literals:
            self._literals[key] = self.numbering.new(_shape(atom), is_constant=True)
        return self._literals[key]

    def is_constant(self, atom: Any) -> bool:
        """Return whether a value is a constant, or made of constants alone."""
        return self.numbering.is_constant(self.number(atom))

    def is_backward(self, equation: Any) -> bool:
        """Return whether an operation is in a backward pass, or in a program that a backward pass holds."""
        return not self._backward.isdisjoint(equation.outvars)

    def asked_of(self, atom: Any) -> str:
        """Return what the readers of a value ask of it; see `polyamp.readers.look`."""
        return self._asked.get(atom, "") if unstable.is_variable(atom) else ""

    def _count(self, closed: Any) -> None:
        for equation in unstable.opened(closed)[0].eqns:
            for part in unstable.inner_programs(equation):
                self._times[id(part)] += 1
                if self._times[id(part)] == 1:
                    self._count(part)

    def _add(self, closed: Any, is_backward: bool = False) -> None:
        """Read the operations of a program, as if nothing is known about its arguments."""
        jaxpr, _ = unstable.opened(closed)
        self._results += filter(unstable.is_variable, jaxpr.outvars)
        self._numbers.update({variable: self.numbering.new(_shape(variable)) for variable in jaxpr.invars})
        self._walk(closed, is_backward)

    def _walk(self, closed: Any, is_backward: bool) -> None:
        jaxpr, constants = unstable.opened(closed)
        for variable, array in zip(jaxpr.constvars, constants, strict=False):
            is_constant = not isinstance(array, jax.core.Tracer)
            self._numbers[variable] = self.numbering.new(_shape(variable), is_constant=is_constant)
            if is_constant and is_integer(variable) and np.size(array):
                self._largest[variable] = float(np.abs(np.asarray(array, float)).max())
        for equation in jaxpr.eqns:
            inputs, parts = list(map(self.number, equation.invars)), unstable.inner_programs(equation)
            if is_backward or "transpose" in unstable.transformations(equation):
                self._backward.update(equation.outvars)
            results = self._programs(equation, inputs, parts) if parts else self._operation(equation, inputs)
            self._numbers.update(zip(equation.outvars, results, strict=True))

    def _programs(self, equation: Any, inputs: list[int], parts: Sequence[Any]) -> list[int]:
        """Read the programs that an equation holds; return the numbers of its results."""
        name, inner = equation.primitive.name, unstable.opened(parts[0])[0]
        is_backward = self.is_backward(equation)
        new = [self.numbering.new(_shape(variable)) for variable in equation.outvars]
        is_call = name in _CALLS and len(inner.invars) == len(inputs)
        if not is_call:
            self._read(canonical(name, equation.params), equation.invars, equation.outvars)
        for part in parts if is_call or name in _PASSING_ON else ():
            self._pass_on(equation.invars[-len(unstable.opened(part)[0].invars) :], unstable.opened(part)[0].invars)
        if is_call and self._times[id(parts[0])] == 1 and not self._is_repeated(parts[0]):
            self._numbers.update(zip(inner.invars, inputs, strict=True))
            self._walk(parts[0], is_backward)
            self._pass_on(inner.outvars, equation.outvars)
            numbers = list(map(self.number, inner.outvars))
            if name.startswith("custom_"):
                return [self.numbering.of("custom derivative", [number], id(equation)) for number in numbers]
            return numbers if len(numbers) == len(new) else new
        for part in parts if is_call or name in _PASSING_ON else ():  # a state may be written through them
            self._pass_on(unstable.opened(part)[0].outvars, equation.outvars)
        self._apart.update({id(part): (part, is_backward) for part in parts})
        if is_call and equation.params.get("name") == "norm":  # of a distance
            self._read("norm", equation.invars, equation.outvars)
        if name != "jit" or equation.effects:
            return new
        keys = ((id(parts[0]), place) for place in range(len(equation.outvars)))
        return [self.numbering.of("jit", inputs, key) for key in keys]

    def _operation(self, equation: Any, inputs: list[int]) -> list[int]:
        """Read the inputs of an equation that holds no program; return the numbers of its results."""
        operation, name = self.operation(equation), equation.primitive.name
        shapes = list(map(_shape, equation.outvars))
        self._read(operation, equation.invars, equation.outvars, _factor(operation, equation.invars))
        self._bound(equation, operation)
        if equation.effects or operation == "random" or not inputs:
            return [self.numbering.new(shape, is_constant=name == "iota") for shape in shapes]
        is_cast = name == "convert_element_type"
        if name in ("copy", "name") or (is_cast and equation.params["new_dtype"] == equation.invars[0].aval.dtype):
            return inputs
        if _is_reshape(equation):
            return [self.numbering.of("reshape", inputs, shape=shapes[0])]
        attributes = tuple(sorted(equation.params.items()))
        try:
            return [self.numbering.of(name, inputs, (place, attributes), shape) for place, shape in enumerate(shapes)]
        except TypeError:  # an attribute that cannot be compared
            return [self.numbering.new(shape) for shape in shapes]

    def _bound(self, equation: Any, operation: str) -> None:
        """Note how large the integers in the results of an operation can be."""
        if equation.primitive.name == "iota":
            size = equation.params["shape"][equation.params["dimension"]]
            self._largest[equation.outvars[0]] = size - 1 if isinstance(size, int) else math.inf
            return
        whole = [one for one in equation.outvars if is_integer(one)]
        inputs = [self.largest(one) for one in equation.invars if whole and not is_inexact(unstable.dtype_in(one))]
        self._largest.update({one: largest_integer(operation, inputs, self.largest(one)) for one in whole})

    def _read(self, operation: str, inputs: Sequence[Any], outputs: Sequence[Any], factor: float = 1.0) -> None:
        op_class = OPERATIONS[operation].op_class if operation in OPERATIONS else "keep"
        values = [atom if unstable.is_variable(atom) else _LITERAL for atom in _floating(inputs)]
        self._reads.append(Read(operation, op_class, values, _floating(outputs), factor))

    def _pass_on(self, atoms: Sequence[Any], to: Sequence[Any]) -> None:
        for atom, variable in zip(atoms, to, strict=False):
            self._read("identity", [atom], [variable])


def is_integer(atom: Any) -> bool:
    """Return whether an array has integers."""
    dtype = unstable.dtype_in(atom)
    return dtype is not None and bool(jnp.issubdtype(dtype, np.integer))


def _shape(atom: Any) -> Any:
    return getattr(atom.aval, "shape", None)


def _factor(operation: str, inputs: Sequence[Any]) -> float:
    """Return the literal number by which an operation multiplies its operand."""
    literals = [atom for atom in inputs if not unstable.is_variable(atom) and unstable.dtype_in(atom) == FLOAT32]
    return factor(operation, [float(atom.val) for atom in literals])


def _is_reshape(equation: Any) -> bool:
    """Return whether an equation returns the same elements in the same order."""
    name = equation.primitive.name
    if name == "broadcast_in_dim":  # to the same size: dimensions of length 1 are added
        return len(equation.invars) == 1 and equation.invars[0].aval.size == equation.outvars[0].aval.size
    return name == "squeeze" or (name == "reshape" and equation.params["dimensions"] is None)


def _floating(atoms: Sequence[Any]) -> list[Any]:
    return [atom for atom in atoms if is_inexact(unstable.dtype_in(atom))]


def _written(closed: Any, states: Sequence[bool]) -> dict[Any, list[Any]]:
    """Return, for each argument that can be a state, the results of its shape: one can be its new value."""
    jaxpr, _ = unstable.opened(closed)
    returned = [atom for atom in jaxpr.outvars if unstable.dtype_in(atom) == FLOAT32 and unstable.is_variable(atom)]
    arguments = [one for one, is_state in zip(jaxpr.invars, states, strict=False) if is_state and _floating([one])]
    return {one: [atom for atom in returned if _shape(atom) == _shape(one)] for one in arguments}
