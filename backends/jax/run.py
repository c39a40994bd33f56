"""Refuse a JAX script under `polyamp run --policy`: only its own code can carry a loss scale from step to step."""

from __future__ import annotations

from polyamp.scripts.session import Session
from polyamp.scripts.sources import imported_in

_ROOTS = ("jax", "flax", "haiku", "equinox", "optax")


def begin(session: Session) -> None:
    """Refuse a script that imports JAX itself. A script of Keras that runs on JAX is the Keras adapter's."""
    if session.policy is None:
        return
    imported = [one for file in session.sources for one in imported_in(file)]
    if any(name.partition(".")[0] == "keras" for name, _ in imported):
        return
    for name, where in imported:
        if name.partition(".")[0] in _ROOTS:
            session.refuse(
                "a JAX script cannot be given a policy from outside: its functions are pure, and a loss scale is part "
                "of its optimizer's state",
                found=f"an import of {name}",
                where=where,
                fix="write tx = polyamp.wrap_optimizer(tx, policy); loss, grads = polyamp.value_and_grad(loss_fn, "
                "policy)(opt_state, params, batch); updates, opt_state = tx.update(grads, opt_state, params)",
            )
