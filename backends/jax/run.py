"""Refuse a JAX script under `polyamp run --policy`: only its own code can carry a loss scale from step to step."""

from __future__ import annotations

import jax

from polyamp.run import Session


def begin(session: Session) -> None:
    """Refuse a script that takes gradients of JAX, itself or by a library of layers."""
    if session.policy is not None:
        session.refuse_calls(
            jax,
            *("grad", "value_and_grad", "vjp"),
            what="a JAX script cannot be given a policy from outside: its functions are pure, and a loss scale is part "
            "of its optimizer's state",
            fix="write tx = polyamp.wrap_optimizer(tx, policy); loss, grads = polyamp.value_and_grad(loss_fn, "
            "policy)(opt_state, params, batch); updates, opt_state = tx.update(grads, opt_state, params)",
        )
