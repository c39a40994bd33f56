"""Refuse a JAX script under `polyamp run --policy`: only its own code can carry a loss scale from step to step."""

from __future__ import annotations

import jax

from polyamp.run import Session

_WRITE = (
    "write tx = polyamp.wrap_optimizer(tx, policy); loss, grads = polyamp.value_and_grad(loss_fn, policy)(opt_state, "
    "params, batch); updates, opt_state = tx.update(grads, opt_state, params)"
)


def begin(session: Session) -> None:
    """Refuse a script that takes gradients by JAX, itself or in a library of layers. Keras has its own adapter."""
    for name in ("grad", "value_and_grad", "vjp"):
        session.refuse_call(jax, name, what="a policy cannot scale losses inside JAX", fix=_WRITE, unless_by="keras")
