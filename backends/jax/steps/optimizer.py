"""The public functions that wrap an optax optimizer and step with it. optax is imported at the first wrap."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from polyamp import verbs
from polyamp.backends.jax.steps.gradients import apply_updates
from polyamp.backends.jax.steps.step import Skip, Step
from polyamp.policies import Policy
from polyamp.scale import LossScale


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
    """Wrap an optax optimizer in one that runs the mixed-precision step in the right order.

    Test the raw gradients for inf and NaN, unscale them in float32, clip by the global norm, then update or skip, then
    advance the loss scale. A skipped step leaves the inner state and the master weights bit-identical, and its updates
    do not change any bit of the parameters.

    Losses whose gradients are added for one step share one loss scale: differentiate each with the same ``opt_state``,
    and an overflow in any of them skips the step. If two optimizers step separately (as in a GAN), wrap each, and
    differentiate each loss with the state of its own optimizer. To give the losses of one step separate loss scales,
    wrap ``optax.identity()`` once for each loss, add the updates (they are the unscaled gradients), and use `select` to
    keep the plain optimizer's step only if all of them were applied.

    >>> import jax.numpy as jnp, optax
    >>> tx = wrap_optimizer(optax.adam(1e-3), "mixed_float16", max_grad_norm=1.0)
    >>> params = {"w": jnp.ones(2)}
    >>> grads = {"w": jnp.array([jnp.inf, 1.0])}
    >>> updates, opt_state = tx.update(grads, tx.init(params), params)
    >>> bool(opt_state.last_step), float(opt_state.loss_scale), optax.apply_updates(params, updates)
    (False, 32768.0, {'w': Array([1., 1.], dtype=float32)})

    Args:
        tx: any ``optax.GradientTransformation``. Wrap the outermost one, so that everything inside
            (``optax.MultiSteps``, ``optax.apply_if_finite``, clipping) gets only unscaled, finite gradients.
        policy: a policy or its name; None means the current policy.
        loss_scale: replaces the policy's; a number is a fixed scale. With `LossScale.none` the updates are those of
            ``tx`` itself.
        max_grad_norm: clip unscaled gradients to this global L2 norm (> 0); None does not clip. Gradients that
            ``shard_map`` splits over ``axis_name`` count with all their shards, unless ``check_vma=False``: each device
            then clips by the norm of its own shards.
        axis_name: name, or names, of mapped axes (``pmap``, ``shard_map``): an overflow on one device skips the step on
            all. It is not needed under ``jit`` alone. Average the gradients over the axis before the update.
        master_weights: keep float32 copies of 16-bit parameters and update the copies. The updates then lead to the
            rounded master weights. ``optax.apply_updates`` gets there too, except if a parameter shrinks more than
            2**13-fold in one step: it is then off by at most 2**-24 of its old value until the next step.
        skip: how a compiled step skips. "cond" is one ``lax.cond``; a skipped step does no work. "select" always
            updates, with non-finite gradients too, and keeps the old values with ``lax.select``. The results are the
            same in every bit. "auto" is "cond": on a CPU it took a third of the time of "select" with donated buffers,
            and about 10 % more, less than the spread, without. It was not measured on a GPU or TPU yet.

    Returns:
        An ``optax.GradientTransformationExtraArgs``, whose state is a `LossScaleOptState`. Parameters that are not
        floating-point arrays are left out, as in ``equinox.filter``. Outside ``jit``, ``update`` waits for the device
        and warns or raises as set in ``LossScale(on_min=, max_skips=)``; for compiled steps see `check_limits`.

    Raises:
        InvalidTypeError: ``tx`` is not an optax optimizer.
        InvalidValueError: ``max_grad_norm`` is not a positive finite number, or ``skip`` is unknown.
        MissingFrameworkError: optax is not installed.
        UsageError: ``tx`` is wrapped already. If a wrapped optimizer is inside ``tx``, ``tx.init`` raises it.
    """
    options = {"axis_name": axis_name, "master_weights": master_weights, "skip": skip}
    return verbs.wrap_optimizer(
        tx, policy, loss_scale=loss_scale, max_grad_norm=max_grad_norm, backend="jax", **options
    )


def apply_gradients(tx: Any, grads: Any, opt_state: Any, params: Any, **extra: Any) -> tuple[Any, Any]:
    """Update the parameters, or skip, in one conditional; faster than ``tx.update`` followed by ``apply_updates``.

    A skipped step returns the very same parameters. (``optax.apply_updates`` adds -0.0 to them. This keeps every bit,
    except in subnormal numbers, which XLA flushes to zero on CPUs.)

    If you donate ``params`` and ``opt_state``, let the step take them in the order in which it returns them. JAX pairs
    donated buffers with results of the same shape by position: in another order, the buffer of a moment becomes a
    parameter, and XLA copies both.

    >>> import jax.numpy as jnp, optax
    >>> tx = wrap_optimizer(optax.sgd(0.5), "mixed_float16")
    >>> params = {"w": jnp.ones(2)}
    >>> grads = {"w": jnp.array([1.0, jnp.inf])}
    >>> params, opt_state = apply_gradients(tx, grads, tx.init(params), params)
    >>> params["w"], bool(opt_state.last_step)
    (Array([1., 1.], dtype=float32), False)

    Args:
        tx: a result of `polyamp.wrap_optimizer`; any other optax optimizer is updated and applied as usual.
        grads: gradients of the scaled loss.
        opt_state: the result of ``tx.init`` or of the last step.
        params: pytree of parameters; leaves without a gradient are returned unchanged.
        **extra: arguments for optimizers that take more, such as ``value=``.

    Returns:
        ``(params, opt_state)``; each array keeps its shape and dtype.
    """
    step = getattr(tx, "step", None)
    if isinstance(step, Step):
        return step.apply(grads, opt_state, params, **extra)
    updates, opt_state = tx.update(grads, opt_state, params, **extra)
    return apply_updates(params, updates), opt_state
