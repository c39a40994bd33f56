"""The primitives that are not single operations, each with its handler.

Most hold a program: loops, branches, calls, custom derivatives. Two are handled here, because they only pass values on.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

from polyamp.backends.jax import unstable
from polyamp.backends.jax.graphs import branches, calls, derivatives, loops
from polyamp.backends.jax.graphs.cells import FLOAT32, Cell, around
from polyamp.backends.jax.graphs.run import Handler, Run
from polyamp.flow import INPUT, WEAK


def _barrier(run: Run, equation: Any, cells: list[Cell], path: str) -> list[Cell]:
    """Pass each operand on in its own format."""
    return around(cells, unstable.bound(equation, [cell.array for cell in cells], equation.params))


def _convert(run: Run, equation: Any, cells: list[Cell], path: str) -> list[Cell] | None:
    """Carry out a cast that the user wrote. A cast from float32 to float32 (of a weak type) does nothing."""
    # The result of a cast from integers is an input, such as labels or positions; that of a cast from booleans is 0 or
    # 1.
    (cell,) = cells
    target = np.dtype(equation.params["new_dtype"])
    if target == FLOAT32 and jnp.issubdtype(cell.declared, np.integer):
        (array,) = unstable.bound(equation, [cell.array])
        return [Cell.of(array, FLOAT32, WEAK if cell.constant else INPUT, cell.constant)]
    if cell.declared != FLOAT32:
        return None
    if target == FLOAT32:
        return [cell]
    if target == cell.dtype:
        return [Cell.of(cell.array, target)]
    return None


HANDLERS: dict[str, Handler] = {
    "jit": calls.jit,
    "closed_call": calls.closed_call,
    "remat_opt": calls.forward_rule,
    "remat2": calls.remat,
    "shard_map": calls.shard_map,
    "scan": loops.scan,
    "while": loops.while_loop,
    "cond": branches.cond,
    "custom_jvp_call": derivatives.custom_jvp,
    "custom_vjp_call": derivatives.custom_vjp,
    "custom_vmap_call": derivatives.custom_vmap,
    "optimization_barrier": _barrier,
    "convert_element_type": _convert,
}
