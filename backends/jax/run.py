"""Refuse a JAX script under `polyamp run --policy`: only its own code can carry a loss scale from step to step."""

from __future__ import annotations

from polyamp.run import Session, Use

_ROOTS = ("jax", "flax", "haiku", "equinox", "optax")


def begin(session: Session) -> None:
    """Refuse a script that imports JAX itself. A script of Keras that runs on JAX is the Keras adapter's."""
    if session.policy is None:
        return
    imported: set[str] = set()

    def check(use: Use) -> None:
        root = use.name.partition(".")[0]
        if use.arguments is None:
            imported.add(root)
        elif root in _ROOTS and "keras" not in imported:
            session.refuse(
                "a JAX script cannot be given a policy from outside: its functions are pure, and a loss scale is part "
                "of its optimizer's state",
                found=f"{use.name}()",
                where=use.where,
                fix="write tx = polyamp.wrap_optimizer(tx, policy); loss, grads = polyamp.value_and_grad(loss_fn, "
                "policy)(opt_state, params, batch); updates, opt_state = tx.update(grads, opt_state, params)",
            )

    session.check_sources(check)
