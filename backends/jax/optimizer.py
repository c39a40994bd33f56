"""The public functions that wrap an optax optimizer and step with it. optax is imported when one is wrapped."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from polyamp import verbs
from polyamp.backends.jax.step import Skip, Step
from polyamp.backends.jax.trees import apply_updates
from polyamp.loss_scale import LossScale
from polyamp.policy import Policy


def wrap_optimizer(
    tx: Any,
    policy: Policy | str | None = None,
    *,
    loss_scale: LossScale | float | None = None,
    max_grad_norm: float | None = None,
    axis_name: Hashable | None = None,
    master_weights: bool | None = None,
    skip: Skip = "auto",
) -> Any:
    """An optax optimizer that owns the order of a mixed-precision step.

    Test the raw gradients for inf and NaN, unscale them in float32, clip by the global norm, then update or skip, then
    advance the loss scale. A skipped step leaves the inner state and the master weights bit-identical, and its updates
    change no bit of the parameters.

    Losses whose gradients add up to one step share its scale: differentiate each with the same ``opt_state``, and an
    overflow in any skips the step. Optimizers that step by themselves (a GAN's two) are wrapped one by one, and each
    loss is differentiated with its own optimizer's state. To give losses of one step scales of their own, wrap
    ``optax.identity()`` for each, add the updates, which are the unscaled gradients, and let `select` keep the plain
    optimizer's step only where all were applied.

    >>> import jax.numpy as jnp, optax
    >>> tx = wrap_optimizer(optax.adam(1e-3), "mixed_float16", max_grad_norm=1.0)
    >>> params = {"w": jnp.ones(2)}
    >>> grads = {"w": jnp.array([jnp.inf, 1.0])}
    >>> updates, opt_state = tx.update(grads, tx.init(params), params)
    >>> bool(opt_state.last_step), float(opt_state.loss_scale), optax.apply_updates(params, updates)
    (False, 32768.0, {'w': Array([1., 1.], dtype=float32)})

    Args:
        tx: any ``optax.GradientTransformation``: wrap the outermost one, so that what it holds (``optax.MultiSteps``,
            ``optax.apply_if_finite``, clipping) sees only unscaled, finite gradients.
        policy: a policy or its name; None is the current policy.
        loss_scale: overrides the policy's; a number is a scale that never moves. `LossScale.none` gives the updates of
            ``tx`` itself.
        max_grad_norm: clip unscaled gradients to this global L2 norm (> 0); None does not clip.
        axis_name: name, or names, of mapped axes (``pmap``, ``shard_map``): an overflow on one device skips the step on
            all. Under ``jit`` alone it is not needed. Average the gradients over the axis before the update.
        master_weights: keep float32 copies of parameters that have 16 bits, and update those. The updates then lead to
            the rounded masters; so does ``optax.apply_updates``, except where a parameter shrinks more than
            2**13-fold in one step: it is then off by at most 2**-24 of its old value until the next step.
        skip: how a compiled step skips. "cond" is one ``lax.cond``, and a skipped step does no work. "select" updates
            always, on non-finite gradients too, and keeps the old values with ``lax.select``; every bit is the same.
            "auto" is "cond": on a CPU it took a third of the time of "select" where buffers are donated, and about 10 %
            more, less than the spread, where they are not. No GPU or TPU was measured yet.

    Returns:
        An ``optax.GradientTransformationExtraArgs``, whose state is a `LossScaleOptState`. Parameters that are no
        floating arrays are passed over, as ``equinox.filter`` does. Outside ``jit``, ``update`` waits for the device
        and warns or raises as ``LossScale(on_min=, max_skips=)`` say; for compiled steps see `check_limits`.

    Raises:
        InvalidTypeError: ``tx`` is no optax optimizer.
        InvalidValueError: ``max_grad_norm`` is not a positive finite number, or ``skip`` none of these.
        MissingFrameworkError: optax is not installed.
        UsageError: ``tx`` is wrapped already; ``tx.init`` raises it where a wrapped optimizer is inside of ``tx``.
    """
    options = {"axis_name": axis_name, "master_weights": master_weights, "skip": skip}
    return verbs.wrap_optimizer(
        tx, policy, loss_scale=loss_scale, max_grad_norm=max_grad_norm, backend="jax", **options
    )


def apply_gradients(tx: Any, grads: Any, opt_state: Any, params: Any, **extra: Any) -> tuple[Any, Any]:
    """Update the parameters, or skip, under one conditional; quicker than ``tx.update`` and ``apply_updates`` in turn.

    A skipped step gives back the very parameters. (``optax.apply_updates`` adds -0.0 to them, which keeps every bit but
    those of subnormal numbers, which XLA flushes to zero on CPUs.)

    Donate ``params`` and ``opt_state`` to a step that takes them in the order in which it returns them. JAX pairs
    donated buffers with results of the same shape by position: in another order, a moment's buffer becomes a parameter,
    and XLA copies both.

    >>> import jax.numpy as jnp, optax
    >>> tx = wrap_optimizer(optax.sgd(0.5), "mixed_float16")
    >>> params = {"w": jnp.ones(2)}
    >>> grads = {"w": jnp.array([1.0, jnp.inf])}
    >>> params, opt_state = apply_gradients(tx, grads, tx.init(params), params)
    >>> params["w"], bool(opt_state.last_step)
    (Array([1., 1.], dtype=float32), False)

    Args:
        tx: what `polyamp.wrap_optimizer` gave; any other optax optimizer is updated and applied as usual.
        grads: gradients of the scaled loss.
        opt_state: what ``tx.init``, or the last step, gave.
        params: pytree of parameters; leaves without a gradient are given back as they are.
        **extra: for optimizers that take more, such as ``value=``.

    Returns:
        ``(params, opt_state)``, each array with the shape and dtype it had.
    """
    step = getattr(tx, "step", None)
    if isinstance(step, Step):
        return step.apply(grads, opt_state, params, **extra)
    updates, opt_state = tx.update(grads, opt_state, params, **extra)
    return apply_updates(params, updates), opt_state
