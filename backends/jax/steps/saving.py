"""The loss scale of a wrapped optimizer on the host: read, save, load, and check its limits."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from polyamp.backends.jax.steps.finding import find_state
from polyamp.backends.jax.steps.state import LossScaleOptState, is_state
from polyamp.loss_scale import LossScale, LossScaleState
from polyamp.loss_scale_reports import report_limits
from polyamp.result import StepResult


def check_limits(holder: Any) -> StepResult:
    """Return what the last step did; warn or raise if the loss scale cannot help any more.

    A compiled step cannot warn or raise, so the limits ``LossScale(on_min=, max_skips=)`` are checked here: call it
    outside ``jit``, at each step or now and then. It waits for the device. Steps outside ``jit`` do not need it.

    >>> import optax, polyamp
    >>> tx = polyamp.wrap_optimizer(optax.sgd(0.1), "mixed_float16")
    >>> check_limits(tx.init({"w": jnp.ones(2)})).applied
    True

    Args:
        holder: a pytree that holds the state of one wrapped optimizer.

    Raises:
        LossScaleError: too many skipped steps in a row, or an overflow at the smallest scale under ``on_min="raise"``.
        UsageError: ``holder`` holds no such state, or more than one.
    """
    state = find_state(holder)
    scalars = _on_host(state)
    report_limits(state.settings, scalars)
    return StepResult(scalars)


def loss_scale_of(holder: Any) -> tuple[LossScale, LossScaleState]:
    """Return the settings of the loss scale in a pytree, and its state as Python numbers. Waits for the device."""
    state = find_state(holder)
    return state.settings, _on_host(state)


def load_loss_scale(holder: Any, saved: Mapping[str, Any]) -> Any:
    """Return the same pytree with a loss-scale state that `save_loss_scale` returned, in any framework.

    >>> import optax, polyamp
    >>> opt_state = polyamp.wrap_optimizer(optax.sgd(0.1), "mixed_float16").init(jnp.ones(2))
    >>> float(load_loss_scale(opt_state, save_loss_scale(opt_state) | {"scale": 8.0}).loss_scale)
    8.0

    Raises:
        StateError: the state is of another kind, lacks fields, or is outside the settings of the wrapped optimizer.
        UsageError: ``holder`` holds no state of a wrapped optimizer, or more than one.
    """
    old = find_state(holder)
    values = old.settings.from_state_dict(saved)
    names = old._fields[: len(values)]
    new = old._replace(
        **{n: jax.tree.map(_filled_with(v), getattr(old, n)) for n, v in zip(names, values, strict=True)}
    )
    return jax.tree.map(lambda leaf: new if is_state(leaf) else leaf, holder, is_leaf=is_state)


def _filled_with(value: float) -> Callable[[jax.Array], jax.Array]:
    return lambda leaf: jnp.full_like(leaf, value, dtype=leaf.dtype)  # keeps shape and devices of a replicated state


def _on_host(state: LossScaleOptState) -> LossScaleState:
    fields = jax.device_get(state.scalars)  # all copies at once
    return LossScaleState(*(np.asarray(field).flat[0].item() for field in fields))  # the first copy if replicated
