"""One step of a wrapped optimizer: unscale, test, clip, update or skip, then advance the loss scale, in this order."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp

from polyamp.backends.jax.dtypes import is_low, is_traced
from polyamp.backends.jax.steps import marks, trees
from polyamp.backends.jax.steps.state import LossScaleOptState, holds_state, initial_scalars, state_type
from polyamp.errors import InvalidValueError, StateError, UsageError
from polyamp.limits import report_limits
from polyamp.loss_scale import LossScale, advance, on_host
from polyamp.refusals import wrapped_already

Skip = Literal["auto", "cond", "select"]


@dataclass(frozen=True)
class Step:
    """The two functions of a gradient transformation, and a third that updates and applies at once.

    Attributes:
        inner: the wrapped optax transformation, taking extra arguments.
        config: settings of the loss scale.
        max_grad_norm: clip unscaled gradients to this global L2 norm.
        axis_name: mapped axis, or axes, over which the finite flag is combined.
        master_weights: whether 16-bit parameters get float32 copies.
        skip: how a compiled step chooses between update and skip.
    """

    inner: Any
    config: LossScale
    max_grad_norm: float | None
    axis_name: Hashable | None
    master_weights: bool
    skip: Skip

    def init(self, params: Any) -> LossScaleOptState:
        """Return the state before the first step."""
        params = trees.trainable(params)
        masters = _masters_of(params) if self.master_weights else None
        inner_state = self.inner.init(self._full(params, masters))
        if holds_state(inner_state):
            raise wrapped_already(
                "the state of a wrapped optimizer, inside of what is wrapped",
                fix="wrap once, outermost: polyamp.wrap_optimizer(optax.chain(...), policy)",
            )
        return state_type(self.config)(*initial_scalars(self.config), inner_state, masters)

    def update(
        self, grads: Any, state: LossScaleOptState, params: Any = None, **extra: Any
    ) -> tuple[Any, LossScaleOptState]:
        """Return updates for ``optax.apply_updates`` and the new state. A skipped step's updates change nothing."""
        grads, params = self._checked(grads, state, params)
        template = _updated(grads, params)

        def taken() -> tuple[Any, Any, Any]:
            updates, inner_state, full = self._inner_update(grads, state, params, extra)
            masters = _picked(full, state.master_weights)
            if masters is not None:
                updates = jax.tree.map(_update_to, masters, params, updates, is_leaf=_is_none)
            if self.config.check:  # both branches must have the same dtypes
                updates = jax.tree.map(lambda update, like: update.astype(like.dtype), updates, trees.widened(template))
            return updates, inner_state, masters

        def skipped() -> tuple[Any, Any, Any]:
            return trees.zero_updates(template), state.inner_state, state.master_weights

        finite = self._finite(grads)
        with _telling(grads, params):
            updates, inner_state, masters = self._choose(finite, taken, skipped)
        return updates, self._advanced(state, finite, inner_state, masters)

    def apply(self, grads: Any, state: LossScaleOptState, params: Any, **extra: Any) -> tuple[Any, LossScaleOptState]:
        """Return the new parameters and the new state, with one conditional around update and apply."""
        grads, trained = self._checked(grads, state, params)

        def taken() -> tuple[Any, Any, Any]:
            _, inner_state, full = self._inner_update(grads, state, trained, extra)
            new = jax.tree.map(lambda value, param: value.astype(param.dtype), full, trained)
            return new, inner_state, _picked(full, state.master_weights)

        def skipped() -> tuple[Any, Any, Any]:
            return trained, state.inner_state, state.master_weights

        finite = self._finite(grads)
        with _telling(grads, trained):
            new, inner_state, masters = self._choose(finite, taken, skipped)
        return trees.merged(new, params), self._advanced(state, finite, inner_state, masters)

    def _checked(self, grads: Any, state: LossScaleOptState, params: Any) -> tuple[Any, Any]:
        if not isinstance(state, LossScaleOptState):
            raise StateError(
                "not the state of this optimizer",
                where="tx.update(grads, state, params)",
                found=type(state).__name__,
                allowed="LossScaleOptState",
                fix="give what tx.init(params), or the last update, returned",
            )
        if params is None and state.master_weights is not None:
            raise UsageError(
                "16-bit parameters are updated through their float32 master weights, which needs the parameters",
                where="tx.update(grads, state, params)",
                found="params=None",
                fix="give the parameters",
            )
        return marks.gradients(trees.trainable(grads)), None if params is None else trees.trainable(params)

    def _finite(self, grads: Any) -> Any:
        if not self.config.check:
            return True
        finite = trees.all_finite(grads)
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
        return updates, inner_state, None if full is None else trees.apply_updates(full, updates)

    def _prepared(self, grads: Any, state: LossScaleOptState) -> Any:
        if self.config.check:
            grads = trees.unscaled(grads, state.loss_scale)
        elif state.master_weights is not None:
            grads = trees.widened(grads)
        return grads if self.max_grad_norm is None else trees.clipped(grads, self.max_grad_norm)

    def _full(self, params: Any, masters: Any) -> Any:
        """Return the parameters as the optimizer sees them: float32, like its moments, if gradients are unscaled."""
        if masters is not None:
            return trees.merged(masters, params)
        return trees.widened(params) if self.config.check else params

    def _advanced(self, state: LossScaleOptState, finite: Any, inner_state: Any, masters: Any) -> LossScaleOptState:
        scalars = advance(self.config, state.scalars, finite, where=jnp.where)
        if not is_traced(scalars.scale):
            report_limits(self.config, on_host(scalars))
        return state_type(self.config)(*scalars, inner_state, masters)


@contextmanager
def _telling(grads: Any, params: Any) -> Iterator[None]:
    """Replace JAX's error about trees that do not match by one that names both trees.

    The gradients may have another structure than the parameters, as with ``optax.lookahead``: only the optimizer knows.
    """
    try:
        yield
    except (ValueError, TypeError) as error:
        own, wanted = str(jax.tree.structure(grads)), str(jax.tree.structure(params))
        if params is None or own == wanted:
            raise
        raise InvalidValueError(
            "the gradients have another structure than the parameters",
            where="tx.update(grads, state, params)",
            found=_difference(grads, params) or own,
            allowed=f"the structure of the parameters: {wanted}",
            fix="give the gradients that value_and_grad returned, and the parameters that they are of",
        ) from error


def _difference(grads: Any, params: Any) -> str:
    own, wanted = ([marks.name_of(path) for path, _ in jax.tree.leaves_with_path(tree)] for tree in (grads, params))
    parts = {"no gradient of": set(wanted) - set(own), "a gradient of": set(own) - set(wanted)}
    return "; ".join(f"{what} {', '.join(sorted(names))}" for what, names in parts.items() if names)


def _updated(grads: Any, params: Any) -> Any:
    """Return a tree shaped like the updates: the gradients, unless the optimizer updates more (``optax.lookahead``)."""
    structures = {jax.tree.structure(tree) for tree in (grads, params)}
    return grads if params is None or len(structures) == 1 else params


def _masters_of(params: Any) -> Any:
    """Return float32 copies of the 16-bit parameters, with None for the others; None if no parameter has 16 bits."""
    masters = jax.tree.map(lambda leaf: leaf.astype(jnp.float32) if is_low(leaf) else None, params)
    return masters if jax.tree.leaves(masters) else None


def _picked(full: Any, masters: Any) -> Any:
    """Return the new master weights: those leaves of ``full`` that have one."""
    if masters is None:
        return None
    return jax.tree.map(lambda master, value: None if master is None else value, masters, full, is_leaf=_is_none)


def _update_to(master: Any, param: Any, update: Any) -> Any:
    """Return the float32 update that takes a 16-bit parameter to its rounded master weight."""
    if master is None:
        return update
    return master.astype(param.dtype).astype(jnp.float32) - param.astype(jnp.float32)


def _is_none(leaf: object) -> bool:
    return leaf is None
