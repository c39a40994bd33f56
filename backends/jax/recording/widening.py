"""Bind an equation that was traced for 16-bit floats to float32 arrays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from polyamp.backends.jax import unstable
from polyamp.backends.jax.graphs.cells import FLOAT32
from polyamp.backends.jax.operations import canonical
from polyamp.operations import OPERATIONS

_LOW = frozenset({np.dtype("float16"), np.dtype(jnp.bfloat16)})


def is_low(dtype: Any) -> bool:
    """Return whether values of a dtype are widened."""
    return dtype in _LOW


def widened(array: Any, dtype: Any) -> Any:
    """Return an array in float32 if its declared dtype has 16 bits; else unchanged."""
    return unstable.converted(array, FLOAT32) if is_low(dtype) else array


def bound_widened(equation: Any, arrays: Sequence[Any]) -> list[Any]:
    """Return the results of an equation, with float32 arrays in place of 16-bit ones."""
    # An equation that works on bits, has an inner program or does not accept float32 runs as written, on rounded
    # arrays.
    before, after = ([unstable.dtype_in(var) for var in side] for side in (equation.invars, equation.outvars))
    if not any(map(is_low, (*before, *after))):
        return unstable.bound(equation, arrays)
    if equation.primitive.name == "reduce_precision":
        return list(arrays)
    if _is_wide_too(equation, arrays, after):
        return unstable.bound(equation, arrays, _adapted(equation.params))
    given = [
        unstable.converted(array, dtype) if is_low(dtype) else array
        for array, dtype in zip(arrays, before, strict=True)
    ]
    return [widened(array, dtype) for array, dtype in zip(unstable.bound(equation, given), after, strict=True)]


def _is_wide_too(equation: Any, arrays: Sequence[Any], declared: Sequence[Any]) -> bool:
    """Return whether an equation means the same in float32 as in 16 bits."""
    name = canonical(equation.primitive.name, equation.params)
    if unstable.inner_programs(equation):
        return False
    if name in OPERATIONS:
        return name == "cast" or OPERATIONS[name].op_class != "keep"
    return _takes_float32(equation, arrays, declared)


def _takes_float32(equation: Any, arrays: Sequence[Any], declared: Sequence[Any]) -> bool:
    """Return whether an unknown primitive, such as one of a newer JAX, accepts float32 by its own type rule."""
    try:
        results = jax.eval_shape(lambda *own: unstable.bound(equation, own, _adapted(equation.params)), *arrays)
    except (TypeError, ValueError, NotImplementedError):
        return False
    wanted = [FLOAT32 if is_low(dtype) else dtype for dtype in declared]
    return [result.dtype for result in results] == wanted


def _adapted(params: dict[str, Any]) -> dict[str, Any]:
    changed = {key: FLOAT32 for key, value in params.items() if isinstance(value, np.dtype) and is_low(value)}
    if params.get("update_jaxpr") is not None:
        changed["update_jaxpr"] = _retraced(params["update_jaxpr"], params["update_consts"])
    return {**params, **changed}


def _retraced(jaxpr: Any, constants: Sequence[Any]) -> Any:
    """Return the function that a scatter applies to two elements, traced for float32."""
    scalar = jax.ShapeDtypeStruct((), FLOAT32)  # type: ignore[no-untyped-call]
    closed = unstable.traced(lambda *pair: jax.core.eval_jaxpr(jaxpr, constants, *pair), scalar, scalar)
    return unstable.opened(closed)[0]
