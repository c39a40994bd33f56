"""The verb `polyamp.wrap_optimizer` on optax optimizers. The other verbs on their states are in `state`."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from polyamp.backends.jax.steps.step import Skip
from polyamp.loss_scale import LossScale
from polyamp.policy import Policy
from polyamp.refusals import missing


def wrap_optimizer(
    optimizer: Any,
    policy: Policy,
    *,
    loss_scale: LossScale,
    max_grad_norm: float | None,
    axis_name: Hashable | None = None,
    master_weights: bool | None = None,
    skip: Skip = "auto",
) -> Any:
    """Return a wrapped optax optimizer; see `polyamp.backends.jax.wrap_optimizer`.

    Raises:
        MissingFrameworkError: optax is not installed.
    """
    try:
        from polyamp.backends.jax.steps.transformation import wrap
    except ModuleNotFoundError as error:
        if error.name != "optax":
            raise
        raise missing("optax", extra="jax") from error
    return wrap(
        optimizer,
        loss_scale,
        max_grad_norm=max_grad_norm,
        axis_name=axis_name,
        master_weights=master_weights,
        skip=skip,
    )
