"""How the memory of a forward and backward pass grows with the batch: XLA compiles two sizes, and reports each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from polyamp.backends.jax.casting import is_array
from polyamp.backends.jax.graphs.capture import Program, Run
from polyamp.backends.jax.modules import Call
from polyamp.batch import Footprint, Pass, batch_axes


def footprints(call: Call, examples: int, ways: Sequence[Run]) -> list[Footprint | None]:
    """Return the memory of a forward and backward pass for each way to run the program; None if it is unknown."""
    leaves, tree = jax.tree.flatten((call.args, call.kwargs))
    inputs = [
        place
        for place, (leaf, is_parameter) in enumerate(zip(leaves, call.parameters, strict=True))
        if not is_parameter and (is_array(leaf) or isinstance(leaf, jax.ShapeDtypeStruct))
    ]
    axes = dict(zip(inputs, batch_axes([leaves[place].shape for place in inputs], examples), strict=True))

    def program(times: int) -> Program:
        grown = [_grown(leaf, axes.get(place), times) for place, leaf in enumerate(leaves)]
        args, kwargs = jax.tree.unflatten(tree, grown)
        return Program(call.fn, args, kwargs, call.parameters)

    try:
        once, twice = program(1), program(2)
        return [Footprint(examples, _pass(once, run), _pass(twice, run)) for run in ways]
    except Exception:  # its code depends on this size, or it has no backward pass
        return [None for _ in ways]


def _grown(leaf: Any, axis: int | None, times: int) -> Any:
    if axis is None:
        return leaf
    shape = [length * times if place == axis else length for place, length in enumerate(leaf.shape)]
    return jax.ShapeDtypeStruct(tuple(shape), leaf.dtype)  # type: ignore[no-untyped-call]


def _trained(program: Program) -> list[int]:
    """Return the positions of the parameters among the arguments; without any, of the floating-point arguments."""
    return [place for place in program.floating if program.are_parameters[place]] or program.floating


def _pass(program: Program, run: Run) -> Pass:
    """Compile a forward and backward pass; return the memory that both use: arguments, gradients and all in between."""
    trained = _trained(program)

    def step(arrays: list[Any]) -> Any:
        results, backward = program.vjp(run, arrays, trained)
        return results, backward([jnp.ones_like(result) for result in results])

    memory: Any = jax.jit(step).lower(program.arrays).compile().memory_analysis()
    used = memory.argument_size_in_bytes + memory.output_size_in_bytes + memory.temp_size_in_bytes
    parameters = sum(program.arrays[place].size for place in trained)
    return Pass(parameters, program.bytes_saved(run) or 0, [int(used)])
