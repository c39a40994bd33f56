"""Refuse a TensorFlow script under `polyamp run --policy`: only its own code can rewrite a step and scale a loss."""

from __future__ import annotations

import tensorflow as tf

from polyamp.run import Session

_TAKE_GRADIENTS = [
    *((owner, "gradients") for owner in (tf, tf.compat.v1)),
    *((tf.compat.v1.train.Optimizer, name) for name in ("minimize", "compute_gradients")),
    (tf.GradientTape, "gradient"),
]
_WRITE = (
    "write opt = polyamp.wrap_optimizer(opt, policy); in the step, take gradients of polyamp.scale_loss(loss, opt); "
    "and step = polyamp.rewrite(step, policy=policy)"
)


def begin(session: Session) -> None:
    """Refuse a script that itself takes gradients by TensorFlow. Keras' own training step has its own adapter."""
    for owner, name in _TAKE_GRADIENTS:
        session.refuse_call(owner, name, what="the script takes gradients itself", fix=_WRITE, unless_by="keras")
