"""`polyamp run --policy` for Keras on TensorFlow and JAX: ``compile`` and ``fit`` train under the policy.

``compile`` wraps the optimizer, so that Keras' own training step scales the loss and skips. The first training step
converts the model, which is built by then. A script that takes gradients itself is refused by the framework's adapter.
"""

from __future__ import annotations

import functools
from typing import Any

import keras

from polyamp.backends.keras.convert import convert
from polyamp.backends.keras.guard import CONVERTED
from polyamp.backends.keras.native import BACKEND
from polyamp.backends.keras.optimizer import wrap_optimizer
from polyamp.run import Session


def begin(session: Session) -> None:
    """Train the script's models under the policy, if there is one."""
    policy = session.policy
    if policy is None:
        return
    if BACKEND == "torch":
        what = "Keras on torch cannot be given a policy from outside"
        fix = "write polyamp.convert(model, policy), and polyamp.wrap_optimizer(optimizer, policy) in compile"
        return session.refuse_call(keras.Model, "compile", unless_by="keras", what=what, fix=fix)
    original, make = keras.Model.compile, keras.Model.make_train_function

    @functools.wraps(original)
    def compile(model: keras.Model, optimizer: Any = "rmsprop", *args: Any, **kwargs: Any) -> Any:
        optimizer = keras.optimizers.get(optimizer)
        if optimizer is not None and optimizer not in session.holders and policy.loss_scale.check:
            optimizer = wrap_optimizer(optimizer, policy, loss_scale=policy.loss_scale, max_grad_norm=None)
            session.holders.append(optimizer)
        return original(model, optimizer, *args, **kwargs)

    @functools.wraps(make)
    def make_train_function(model: keras.Model, *args: Any, **kwargs: Any) -> Any:
        if model not in CONVERTED:
            convert(model, policy)
            session.is_applied = True
        return make(model, *args, **kwargs)

    session.replace(keras.Model, "compile", compile)
    session.replace(keras.Model, "make_train_function", make_train_function)
