"""Refuse a JAX script under `polyamp run --policy`: only its own code can carry a loss scale from step to step."""

from __future__ import annotations

import functools
import sys
from typing import Any

import jax

from polyamp.run import Session


def begin(session: Session) -> None:
    """Refuse a script that takes gradients of JAX, unless Keras runs on JAX: that is the Keras adapter's."""

    def refuse(name: str, *args: Any, **kwargs: Any) -> Any:
        if "keras" in sys.modules:
            return originals[name](*args, **kwargs)
        session.refuse(
            "a JAX script cannot be given a policy from outside: its functions are pure, and a loss scale is part "
            "of its optimizer's state",
            found=f"jax.{name}()",
            fix="write tx = polyamp.wrap_optimizer(tx, policy); loss, grads = polyamp.value_and_grad(loss_fn, "
            "policy)(opt_state, params, batch); updates, opt_state = tx.update(grads, opt_state, params)",
        )

    originals = {name: getattr(jax, name) for name in ("grad", "value_and_grad", "vjp")}
    for name, original in originals.items() if session.policy is not None else ():
        session.replace(jax, name, functools.wraps(original)(functools.partial(refuse, name)))
