"""Finds the state of a wrapped optimizer in a larger pytree, and refuses trees in which the loss scale cannot work."""

from __future__ import annotations

import sys
from collections import OrderedDict
from typing import Any

import jax

from polyamp.backends.jax.graphs.refusals import users_level
from polyamp.backends.jax.steps.state import LossScaleOptState, holds_state, is_state
from polyamp.errors import UsageError, warn_once


def find_state(holder: Any) -> LossScaleOptState:
    """Return the one wrapped optimizer's state in a pytree: an optax state, flax ``TrainState`` or ``nnx.Optimizer``.

    >>> find_state({"params": jax.numpy.ones(2)})
    Traceback (most recent call last):
    ...
    polyamp.errors.UsageError: there is no state of a wrapped optimizer in this tree...

    Raises:
        UsageError: there is none, or more than one; or ``optax.MultiSteps`` accumulates scaled gradients before it.
    """
    found: list[LossScaleOptState] = [leaf for leaf in jax.tree.leaves(holder, is_leaf=is_state) if is_state(leaf)]
    if len(found) == 1:
        if found[0].settings.check and _accumulates_before(holder):
            raise _accumulated_unchecked()
        if found[0].settings.check and (before := _states_before(holder)):
            warn_once(_SEES_SCALED.format(before), stacklevel=users_level())
        return found[0]
    raise UsageError(
        "there are several states of wrapped optimizers in this tree"
        if found
        else "there is no state of a wrapped optimizer in this tree",
        where="the optimizer state that holds the loss scale",
        found=f"{len(found)} in {type(holder).__name__}",
        allowed="one",
        fix="wrap the outermost optimizer, once: tx = polyamp.wrap_optimizer(optax.chain(...), policy), and pass the "
        "result of tx.init(params); if several optimizers are wrapped, pass the state of one of them",
    )


def _accumulates_before(holder: Any) -> bool:
    """Return whether the wrapped optimizer is inside ``optax.MultiSteps``, instead of the other way round."""
    optax = sys.modules.get("optax")
    if optax is None:
        return False
    nodes = jax.tree.leaves(holder, is_leaf=lambda node: isinstance(node, optax.MultiStepsState | LossScaleOptState))
    return any(isinstance(node, optax.MultiStepsState) and holds_state(node) for node in nodes)


def _states_before(holder: Any) -> str:
    """Return the names of the states before the wrapped optimizer in ``optax.chain`` or ``named_chain``, if known."""
    found: list[str] = []

    def look(node: Any) -> bool:
        states = list(node.values()) if type(node) is OrderedDict else node if type(node) is tuple else ()
        own = next((index for index, state in enumerate(states) if is_state(state)), 0)
        found.extend(type(state).__name__ for state in states[:own] if _is_of_optax(state))
        return is_state(node)

    jax.tree.leaves(holder, is_leaf=look)
    return ", ".join(dict.fromkeys(found))


def _is_of_optax(state: object) -> bool:
    """Return whether this is the state of one optax transformation."""
    return isinstance(state, tuple) and type(state).__module__.partition(".")[0] == "optax"


_SEES_SCALED = (
    "a transformation comes before the wrapped optimizer in optax.chain (its state: {}): it gets gradients that are "
    "still multiplied by the loss scale, so that clipping, noise and weight decay there are wrong. Wrap the whole "
    "chain, polyamp.wrap_optimizer(optax.chain(...), policy), or clip by its max_grad_norm=."
)


def _accumulated_unchecked() -> UsageError:
    return UsageError(
        "gradients are accumulated before they are tested: optax.MultiSteps keeps the NaN of one overflow forever, "
        "and every later step is skipped",
        where="the optimizer state that holds the loss scale",
        found="a wrapped optimizer inside optax.MultiSteps",
        allowed="optax.MultiSteps inside the wrapped optimizer",
        fix="polyamp.wrap_optimizer(optax.MultiSteps(tx, every_k_schedule=k), policy)",
    )
