"""Updates rounded to 16 bits, as if there were no master weights; see `polyamp.controls`."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from polyamp.backends.jax.dtypes import dtype_of
from polyamp.backends.jax.trees import map_with_none
from polyamp.errors import UsageError


def with_rounded_updates(tx: Any, format_name: str) -> Any:
    """Return an optimizer whose updates take each parameter to a value of the format, rounded to nearest even."""
    # Its state is that of ``tx``. The sum of parameter and update is exact, except where the first update changes the
    # sign of a parameter that the format does not hold: there it is off by up to half of the parameter's last bit.
    dtype = dtype_of(format_name)

    def rounded(update: Any, param: Any) -> Any:
        if update is None or not jnp.issubdtype(param.dtype, jnp.floating):
            return update
        new = jnp.add(param, update).astype(dtype)
        wide = jnp.promote_types(param.dtype, jnp.float32)
        # XLA may drop a cast to 16 bits and back; the barrier keeps it
        return jax.lax.optimization_barrier(new).astype(wide) - param.astype(wide)  # type: ignore[no-untyped-call]

    def update(grads: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
        if params is None:
            raise UsageError(
                "updates are rounded for a negative control, which needs the parameters",
                where="tx.update(grads, state, params)",
                found="params=None",
                fix="pass the parameters",
            )
        updates, state = tx.update(grads, state, params, **extra)
        return map_with_none(rounded, updates, params), state

    return tx._replace(update=update)
