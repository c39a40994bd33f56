"""Wrap an optax optimizer in one that runs the mixed-precision step, and step with it.

`Step` has the order of a step: unscale, test, clip, update or skip, then advance the loss scale. optax is imported at
the first wrap.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from polyamp import verbs
from polyamp.agreement import report_disagreement
from polyamp.backends.jax import gradients, unstable
from polyamp.backends.jax.casting import check_tree, fitting, is_traced, merged, same_structure, trainable, widened
from polyamp.backends.jax.gradients import apply_updates
from polyamp.backends.jax.state import LossScaleOptState, check_single, holds_state, initial_scalars, only_a_part
from polyamp.errors import StateError, UsageError, wrapped_already, wrong_type
from polyamp.policies import Policy
from polyamp.scale import advance, can_divide, on_host
from polyamp.settings import LossScale
from polyamp.skips import report_limits


def wrap_optimizer(
    tx: Any,
    policy: Policy | str | None = None,
    *,
    loss_scale: LossScale | float | None = None,
    max_grad_norm: float | None = None,
    axis_name: Hashable | None = None,
    master_weights: bool | None = None,
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

    Returns:
        An ``optax.GradientTransformationExtraArgs``, whose state is a `LossScaleOptState`. Parameters that are not
        floating-point arrays are left out, as in ``equinox.filter``. Outside ``jit``, ``update`` waits for the device
        and warns or raises as set in ``LossScale(on_min=, max_skips=)``; for compiled steps see `check_limits`.

    Raises:
        InvalidTypeError: ``tx`` is not an optax optimizer.
        InvalidValueError: ``max_grad_norm`` is not a positive finite number.
        MissingFrameworkError: optax is not installed.
        UsageError: ``tx`` is wrapped already. If a wrapped optimizer is inside ``tx``, ``tx.init`` raises it.
    """
    options = {"axis_name": axis_name, "master_weights": master_weights}
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
    where = "apply_gradients(tx, grads, opt_state, params)"
    if not (callable(getattr(tx, "init", None)) and callable(getattr(tx, "update", None))):
        fix = "pass the optimizer that polyamp.wrap_optimizer returned"
        raise wrong_type(tx, where=where, allowed="a wrapped optimizer, or one of optax", fix=fix)
    with fitting(grads, params, where=where, names=("gradients", "parameters"), fix=_GRADIENTS):
        updates, opt_state = tx.update(grads, opt_state, params, **extra)
    return apply_updates(params, updates), opt_state


@dataclass(frozen=True)
class Step:
    """A gradient transformation's ``init`` and ``update``, and ``apply``, which updates and applies at once."""

    inner: Any  # the wrapped optax transformation, taking extra arguments
    state_type: type[LossScaleOptState]
    max_grad_norm: float | None  # clip unscaled gradients to this global L2 norm
    axis_name: Hashable | None  # mapped axis, or axes, over which the finite flag is combined
    master_weights: bool  # whether 16-bit parameters get float32 copies
    low_params: bool  # whether the policy stores parameters in 16 bits

    @property
    def settings(self) -> LossScale:
        """The settings of the loss scale."""
        return self.state_type.settings

    def init(self, params: Any) -> LossScaleOptState:
        """Return the state before the first step."""
        check_tree(params, where="tx.init(params)")
        params = trainable(params)
        masters = gradients.masters_of(params, low=self.low_params) if self.master_weights else None
        inner_state = self.inner.init(self._full(params, masters))
        if holds_state(inner_state):
            raise wrapped_already(
                "the state of a wrapped optimizer, inside the optimizer to wrap",
                fix="wrap once, outermost: polyamp.wrap_optimizer(optax.chain(...), policy)",
            )
        return self.state_type(*initial_scalars(self.settings), inner_state, masters)

    def update(
        self, grads: Any, state: LossScaleOptState, params: Any = None, **extra: Any
    ) -> tuple[Any, LossScaleOptState]:
        """Return updates for ``optax.apply_updates`` and the new state. A skipped step's updates change nothing."""
        where = "tx.update(grads, state, params)"
        if self.settings.check and (place := unstable.conditional_of_optax()):
            raise only_a_part(place, where=where)  # it also needs updates in the gradients' dtypes
        check_tree((grads, state, params), where=where)
        grads, params = trainable(grads), None if params is None else trainable(params)
        # The updates have the structure of the gradients, unless the optimizer updates more (``optax.lookahead``).
        template = grads if params is None or same_structure(grads, params) else params

        def when_applied(updates: Any, full: Any) -> Any:
            if state.master_weights is not None:
                updates = gradients.updates_to(gradients.masters_in(full, state.master_weights), params, updates)
            if self.settings.check:  # both branches must have the same dtypes
                updates = jax.tree.map(lambda update, like: update.astype(like.dtype), updates, widened(template))
            return updates

        return self._stepped(grads, state, params, extra, when_applied, lambda: gradients.zero_updates(template))

    def apply(self, grads: Any, state: LossScaleOptState, params: Any, **extra: Any) -> tuple[Any, LossScaleOptState]:
        """Return the new parameters and the new state, with one conditional around update and apply."""
        check_tree((grads, state, params), where="apply_gradients(tx, grads, opt_state, params)")
        trained = trainable(params)
        if jax.tree.leaves(grads) and not jax.tree.leaves(trained):
            where, allowed = "apply_gradients(tx, grads, opt_state, params)", "a pytree with floating-point arrays"
            raise wrong_type(params, where=where, allowed=allowed, fix=_GRADIENTS, what="no parameter to update")

        def when_applied(updates: Any, full: Any) -> Any:
            return jax.tree.map(lambda value, param: value.astype(param.dtype), full, trained)

        new, state = self._stepped(trainable(grads), state, trained, extra, when_applied, lambda: trained)
        return merged(new, params), state

    def _stepped(
        self,
        grads: Any,
        state: LossScaleOptState,
        params: Any,
        extra: dict[str, Any],
        when_applied: Callable[[Any, Any], Any],
        when_skipped: Callable[[], Any],
    ) -> tuple[Any, LossScaleOptState]:
        """Return ``when_applied(updates, parameters)``, or ``when_skipped()`` after a skip; and the new state."""
        _check(state, params)
        if self.state_type.policy is None:  # else the gradients may be of another policy than the one around this call
            report_disagreement(None, None, self.settings)
        grads = gradients.at_scale(grads, state.scalars.scale)
        state = state._replace(loss_scale=gradients.marked(state.scalars.scale, gradients.SCALE))
        grads = gradients.marked_gradients(grads)

        def update_branch() -> tuple[Any, Any, Any]:
            full = None if params is None else self._full(params, state.master_weights)
            updates, inner_state = self.inner.update(self._prepared(grads, state), state.inner_state, full, **extra)
            full = None if full is None else apply_updates(full, updates)
            return when_applied(updates, full), inner_state, gradients.masters_in(full, state.master_weights)

        def skip_branch() -> tuple[Any, Any, Any]:
            return when_skipped(), state.inner_state, state.master_weights

        finite = self._finite(grads, state)
        with self._naming_trees(grads, state, params):
            if is_traced(finite):
                result, *memory = jax.lax.cond(finite, update_branch, skip_branch)
            else:  # outside jit, lax.cond would compile again at each call
                result, *memory = update_branch() if finite else skip_branch()
        scalars = advance(self.settings, state.scalars, finite, where=jnp.where)
        scalars = scalars._replace(scale=gradients.marked(scalars.scale, gradients.NEXT_SCALE))
        if not is_traced(scalars.scale):
            report_limits(self.settings, on_host(scalars))
        return result, self.state_type(*scalars, *memory)

    @contextmanager
    def _naming_trees(self, grads: Any, state: LossScaleOptState, params: Any) -> Iterator[None]:
        """Replace an error of JAX or optax about trees that do not fit together by one that names the differences."""
        # This cannot be checked before, since optimizers such as ``optax.lookahead`` accept trees of other structures.
        where, known = "tx.update(grads, state, params)", grads if params is None else params
        with fitting(grads, known, where=where, names=("gradients", "parameters"), fix=_GRADIENTS):
            try:
                yield
            except Exception:
                with fitting(state, self.init(known), where=where, names=_STATES, fix=_STATE):
                    raise

    def _finite(self, grads: Any, state: LossScaleOptState) -> Any:
        if not self.settings.check:
            return True
        finite = gradients.all_finite(grads, can_divide(state.loss_scale))
        if self.axis_name is None:
            return finite
        return jax.lax.pmin(finite.astype(jnp.int32), self.axis_name) == 1  # type: ignore[no-untyped-call]

    def _prepared(self, grads: Any, state: LossScaleOptState) -> Any:
        if self.settings.check:
            grads = gradients.unscaled(grads, state.loss_scale)
        elif state.master_weights is not None:
            grads = widened(grads)
        return grads if self.max_grad_norm is None else gradients.clipped(grads, self.max_grad_norm, self.axis_name)

    def _full(self, params: Any, masters: Any) -> Any:
        """Return the parameters as the optimizer sees them: float32, like its moments, if gradients are unscaled."""
        if masters is not None:
            return merged(gradients.followed(masters, params), params)
        return widened(params) if self.settings.check else params


_GRADIENTS = "pass the gradients that value_and_grad returned, with the parameters that it differentiated"
_STATE = "pass the result of tx.init(params), or the state that the last update returned"
_STATES = "fields of the state", "fields that tx.init returns"


def _check(state: object, params: Any) -> None:
    if not isinstance(state, LossScaleOptState):
        raise StateError(
            "the state does not come from this optimizer",
            where="tx.update(grads, state, params)",
            found=type(state).__name__,
            allowed="LossScaleOptState",
            fix=_STATE,
        )
    check_single(state)
    if params is None and state.master_weights is not None:
        raise UsageError(
            "16-bit parameters are updated through their float32 master weights, which needs the parameters",
            where="tx.update(grads, state, params)",
            found="params=None",
            fix="pass the parameters",
        )
