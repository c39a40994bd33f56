"""One operation on one of JAX's devices, for ``polyamp doctor --test``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax import numpy as jnp


def _conv(images: jax.Array, kernel: jax.Array) -> jax.Array:
    return jax.lax.conv_general_dilated(images, kernel, (1, 1), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC"))


_OPERATIONS: dict[str, Callable[..., jax.Array]] = {
    "matmul": jax.jit(jnp.matmul),
    "conv": jax.jit(_conv),
    "sum": jax.jit(lambda values: jnp.sum(values, -1)),
}


def trial(operation: str, arrays: tuple[Any, ...], format_name: str, device: str) -> tuple[Any, Any]:
    """Run an operation; return its result, and a function that runs it a given number of times and then waits."""
    function = _OPERATIONS[operation]
    place = next(one for one in jax.local_devices() if f"{one.platform}:{one.id}" == device)
    inputs = [jax.device_put(array.astype(jnp.dtype(format_name)), place) for array in arrays]
    wait: Callable[[object], object] = jax.block_until_ready
    return np.asarray(function(*inputs)), lambda times: wait([function(*inputs) for _ in range(times)])
