"""One step of a wrapped optimizer: unscale, test, clip, update or skip, then advance the loss scale, in this order."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp

from polyamp.backends.jax.casting import is_traced, merged, trainable, widened
from polyamp.backends.jax.steps import gradients
from polyamp.backends.jax.steps.gradients import (
    all_finite,
    apply_updates,
    clipped,
    masters_in,
    masters_of,
    unscaled,
    updates_to,
    zero_updates,
)
from polyamp.backends.jax.steps.state import LossScaleOptState, holds_state, initial_scalars, state_type
from polyamp.errors import InvalidValueError, StateError, UsageError, wrapped_already
from polyamp.scale import LossScale, advance, on_host, report_limits

Skip = Literal["auto", "cond", "select"]


@dataclass(frozen=True)
class Step:
    """The two functions of a gradient transformation, and a third that updates and applies at once."""

    inner: Any  # the wrapped optax transformation, taking extra arguments
    settings: LossScale  # settings of the loss scale
    max_grad_norm: float | None  # clip unscaled gradients to this global L2 norm
    axis_name: Hashable | None  # mapped axis, or axes, over which the finite flag is combined
    master_weights: bool  # whether 16-bit parameters get float32 copies
    low_params: bool  # whether the policy stores parameters in 16 bits
    skip: Skip  # how a compiled step chooses between update and skip
    unscaled: bool = False  # whether the settings leave the loss unscaled for a policy that computes in float16

    def init(self, params: Any) -> LossScaleOptState:
        """Return the state before the first step."""
        params = trainable(params)
        masters = masters_of(params, low=self.low_params) if self.master_weights else None
        inner_state = self.inner.init(self._full(params, masters))
        if holds_state(inner_state):
            raise wrapped_already(
                "the state of a wrapped optimizer, inside the optimizer to wrap",
                fix="wrap once, outermost: polyamp.wrap_optimizer(optax.chain(...), policy)",
            )
        return state_type(self.settings, self.unscaled)(*initial_scalars(self.settings), inner_state, masters)

    def update(
        self, grads: Any, state: LossScaleOptState, params: Any = None, **extra: Any
    ) -> tuple[Any, LossScaleOptState]:
        """Return updates for ``optax.apply_updates`` and the new state. A skipped step's updates change nothing."""
        grads, params = self._checked(grads, state, params)
        template = _updated(grads, params)

        def taken() -> tuple[Any, Any, Any]:
            updates, inner_state, full = self._inner_update(grads, state, params, extra)
            masters = masters_in(full, state.master_weights)
            if masters is not None:
                updates = updates_to(masters, params, updates)
            if self.settings.check:  # both branches must have the same dtypes
                updates = jax.tree.map(lambda update, like: update.astype(like.dtype), updates, widened(template))
            return updates, inner_state, masters

        def skipped() -> tuple[Any, Any, Any]:
            return zero_updates(template), state.inner_state, state.master_weights

        finite = self._finite(grads)
        with _naming_trees(grads, params):
            updates, inner_state, masters = self._choose(finite, taken, skipped)
        return updates, self._advanced(state, finite, inner_state, masters)

    def apply(self, grads: Any, state: LossScaleOptState, params: Any, **extra: Any) -> tuple[Any, LossScaleOptState]:
        """Return the new parameters and the new state, with one conditional around update and apply."""
        grads, trained = self._checked(grads, state, params)

        def taken() -> tuple[Any, Any, Any]:
            _, inner_state, full = self._inner_update(grads, state, trained, extra)
            new = jax.tree.map(lambda value, param: value.astype(param.dtype), full, trained)
            return new, inner_state, masters_in(full, state.master_weights)

        def skipped() -> tuple[Any, Any, Any]:
            return trained, state.inner_state, state.master_weights

        finite = self._finite(grads)
        with _naming_trees(grads, trained):
            new, inner_state, masters = self._choose(finite, taken, skipped)
        return merged(new, params), self._advanced(state, finite, inner_state, masters)

    def _checked(self, grads: Any, state: LossScaleOptState, params: Any) -> tuple[Any, Any]:
        if not isinstance(state, LossScaleOptState):
            raise StateError(
                "the state does not come from this optimizer",
                where="tx.update(grads, state, params)",
                found=type(state).__name__,
                allowed="LossScaleOptState",
                fix="pass the result of tx.init(params), or the state that the last update returned",
            )
        if params is None and state.master_weights is not None:
            raise UsageError(
                "16-bit parameters are updated through their float32 master weights, which needs the parameters",
                where="tx.update(grads, state, params)",
                found="params=None",
                fix="pass the parameters",
            )
        return gradients.marked_gradients(trainable(grads)), None if params is None else trainable(params)

    def _finite(self, grads: Any) -> Any:
        if not self.settings.check:
            return True
        finite = all_finite(grads)
        if self.axis_name is None:
            return finite
        return jax.lax.pmin(finite.astype(jnp.int32), self.axis_name) == 1  # type: ignore[no-untyped-call]

    def _choose(self, finite: Any, taken: Callable[[], Any], skipped: Callable[[], Any]) -> Any:
        if not is_traced(finite):
            return taken() if finite else skipped()  # outside jit, lax.cond would compile again at each call
        if self.skip == "select":
            return jax.tree.map(functools.partial(jax.lax.select, finite), taken(), skipped())
        return jax.lax.cond(finite, taken, skipped)

    def _inner_update(self, grads: Any, state: LossScaleOptState, params: Any, extra: Any) -> tuple[Any, Any, Any]:
        """Return the inner optimizer's updates, its new state, and the parameters after the update as it sees them."""
        full = None if params is None else self._full(params, state.master_weights)
        updates, inner_state = self.inner.update(self._prepared(grads, state), state.inner_state, full, **extra)
        return updates, inner_state, None if full is None else apply_updates(full, updates)

    def _prepared(self, grads: Any, state: LossScaleOptState) -> Any:
        if self.settings.check:
            grads = unscaled(grads, state.loss_scale)
        elif state.master_weights is not None:
            grads = widened(grads)
        return grads if self.max_grad_norm is None else clipped(grads, self.max_grad_norm, self.axis_name)

    def _full(self, params: Any, masters: Any) -> Any:
        """Return the parameters as the optimizer sees them: float32, like its moments, if gradients are unscaled."""
        if masters is not None:
            return merged(masters, params)
        return widened(params) if self.settings.check else params

    def _advanced(self, state: LossScaleOptState, finite: Any, inner_state: Any, masters: Any) -> LossScaleOptState:
        scalars = advance(self.settings, state.scalars, finite, where=jnp.where)
        if not is_traced(scalars.scale):
            report_limits(self.settings, on_host(scalars))
        return state_type(self.settings, self.unscaled)(*scalars, inner_state, masters)


@contextmanager
def _naming_trees(grads: Any, params: Any) -> Iterator[None]:
    """Replace JAX's error about two trees that do not match by an error that names both trees."""
    # This cannot be checked before, since optimizers such as ``optax.lookahead`` accept trees of different structures.
    try:
        yield
    except (ValueError, TypeError) as error:
        own, wanted = str(jax.tree.structure(grads)), str(jax.tree.structure(params))
        if params is None or own == wanted:
            raise
        raise InvalidValueError(
            "the gradients do not have the structure of the parameters",
            where="tx.update(grads, state, params)",
            found=_difference(grads, params) or own,
            allowed=f"the structure of the parameters: {wanted}",
            fix="pass the gradients that value_and_grad returned, with the parameters that it differentiated",
        ) from error


def _difference(grads: Any, params: Any) -> str:
    own, wanted = ([gradients.name_of(path) for path, _ in jax.tree.leaves_with_path(tree)] for tree in (grads, params))
    parts = {"no gradient of": set(wanted) - set(own), "a gradient of": set(own) - set(wanted)}
    return "; ".join(f"{what} {', '.join(sorted(names))}" for what, names in parts.items() if names)


def _updated(grads: Any, params: Any) -> Any:
    """Return a tree shaped like the updates: the gradients, unless the optimizer updates more (``optax.lookahead``)."""
    structures = {jax.tree.structure(tree) for tree in (grads, params)}
    return grads if params is None or len(structures) == 1 else params
