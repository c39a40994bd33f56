"""Refuse a Keras script under `polyamp run --policy`: its models are converted, and only its own code has them."""

from __future__ import annotations

import keras

from polyamp.run import Session


def begin(session: Session) -> None:
    """Refuse a script that makes an optimizer of Keras."""
    if session.policy is not None:
        session.refuse_calls(
            keras.optimizers.Optimizer,
            "__init__",
            what="a Keras script cannot be given a policy from outside: only its own code can convert its models",
            fix="write polyamp.convert(model, policy), and polyamp.wrap_optimizer(optimizer, policy) in compile",
        )
