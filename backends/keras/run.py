"""`polyamp run --policy` for Keras on TensorFlow, whose autocast already runs the layers' products in 16 bits.

``compile`` wraps the optimizer, by which Keras' own training step scales the loss and skips. float16 gradients that the
script takes itself are refused by the tensorflow adapter. On JAX and torch only layers have formats, not operations:
there the script is refused when it makes an optimizer.
"""

from __future__ import annotations

import functools
from typing import Any

import keras

from polyamp.backends.keras.native import BACKEND
from polyamp.backends.keras.optimizer import LossScaledOptimizer, wrap_optimizer
from polyamp.policies import Policy
from polyamp.run import Session


def begin(session: Session) -> None:
    """Train the script's models under the policy, if there is one."""

    def check_policy(_: Any, name: str | None = None) -> None:
        if "float16" in str(name):
            session.note_own_precision(f"keras.DTypePolicy({name!r})")

    def check_optimizer(optimizer: Any, *_: Any, **__: Any) -> None:
        if not isinstance(optimizer, LossScaledOptimizer):
            session.note_own_precision("keras.optimizers.LossScaleOptimizer")

    if session.policy is not None and BACKEND == "tensorflow":
        session.check_calls(keras.DTypePolicy, "__init__", check_policy)
        session.check_calls(keras.optimizers.LossScaleOptimizer, "__init__", check_optimizer)
        _wrap_in_compile(session, session.policy)
    elif session.policy is not None:
        session.refuse_calls(
            keras.optimizers.Optimizer,
            "__init__",
            what=f"Keras on {BACKEND} cannot be given a policy from outside",
            fix="write polyamp.convert(model, policy), and polyamp.wrap_optimizer(optimizer, policy) in compile",
        )


def _wrap_in_compile(session: Session, policy: Policy) -> None:
    original = keras.Model.compile

    @functools.wraps(original)
    def compile(model: keras.Model, optimizer: Any = "rmsprop", *args: Any, **kwargs: Any) -> Any:
        optimizer = keras.optimizers.get(optimizer)
        if isinstance(optimizer, LossScaledOptimizer) and optimizer not in session.holders:
            session.note_own_precision("polyamp.wrap_optimizer")
        if optimizer is not None and optimizer not in session.holders and policy.loss_scale.check:
            optimizer = wrap_optimizer(optimizer, policy, loss_scale=policy.loss_scale, max_grad_norm=None)
            session.holders.append(optimizer)
        return original(model, optimizer, *args, **kwargs)

    session.replace(keras.Model, "compile", compile)
