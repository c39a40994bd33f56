"""Wrap an optax optimizer in another optax optimizer that runs the mixed-precision step in the right order."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, get_args

import optax

from polyamp.backends.jax.steps.step import Skip, Step
from polyamp.choices import check_master_weights
from polyamp.errors import InvalidValueError
from polyamp.loss_scale import LossScale
from polyamp.refusals import no_optimizer, wrapped_already


class LossScaled(optax.GradientTransformationExtraArgs):  # type: ignore[misc]  # optax has no types
    """The result of `polyamp.wrap_optimizer` for an optax optimizer: an optax ``(init, update)`` pair.

    >>> import jax.numpy as jnp, polyamp
    >>> tx = polyamp.wrap_optimizer(optax.sgd(0.5), "mixed_float16")
    >>> opt_state = tx.init(jnp.ones(1))
    >>> updates, opt_state = tx.update(jnp.array([65536.0]), opt_state, jnp.ones(1))
    >>> updates, opt_state.last_step.applied
    (Array([-0.5], dtype=float32), True)
    """

    @property
    def step(self) -> Step:
        """Return the `Step` that has this pair's ``init`` and ``update`` as methods."""
        step: Step = self.update.__self__
        return step


def wrap(
    tx: Any,
    config: LossScale,
    *,
    max_grad_norm: float | None,
    axis_name: Hashable | None,
    master_weights: bool | None,
    skip: Skip,
) -> LossScaled:
    """Return a wrapped optimizer; `polyamp.backends.jax.wrap_optimizer` documents and checks the arguments."""
    if isinstance(tx, LossScaled):
        raise wrapped_already("a wrapped optimizer")
    if isinstance(tx, optax.MultiSteps):
        tx = tx.gradient_transformation()
    if not isinstance(tx, optax.GradientTransformation):
        raise no_optimizer(tx, allowed="optax.GradientTransformation, such as optax.adam(1e-3)")
    check_master_weights(master_weights)
    masters = master_weights is not False
    inner, settings = optax.with_extra_args_support(tx), config.in_float32()  # as the scalars of the state are
    step = Step(inner, settings, max_grad_norm, axis_name, masters, _known(skip))
    return LossScaled(step.init, step.update)


def _known(skip: Skip) -> Skip:
    if skip in get_args(Skip):
        return skip
    raise InvalidValueError(
        "unknown way to skip a step",
        where="wrap_optimizer(skip=)",
        found=repr(skip),
        allowed=", ".join(map(repr, get_args(Skip))),
        fix="leave it out, or name one of these",
    )
