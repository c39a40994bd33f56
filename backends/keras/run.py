"""`polyamp run --policy` for Keras on TensorFlow, whose autocast already runs the layers' products in 16 bits.

``compile`` wraps the optimizer, by which Keras' own training step scales the loss. Gradients that the script takes
itself are refused by the tensorflow adapter. On JAX and torch only layers have formats, not operations: there the
script is refused when it makes an optimizer.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any
from weakref import WeakSet

import keras

from polyamp.backends.keras.native import BACKEND
from polyamp.backends.keras.optimizer import LossScaledOptimizer, wrap_optimizer
from polyamp.formats import format_of
from polyamp.policies import Policy
from polyamp.run import Session


def begin(session: Session) -> None:
    """Train the script's models under the policy, if there is one."""
    if session.policy is None:
        return
    if BACKEND == "tensorflow":
        _refuse_own(session)
        _wrap_in_compile(session, session.policy)
        return

    def refuse(*_: Any, **__: Any) -> None:
        session.refuse(
            "Keras on this backend cannot be given a policy from outside",
            found=f"an optimizer of Keras, on {BACKEND}",
            fix="write polyamp.convert(model, policy), and polyamp.wrap_optimizer(optimizer, policy) in compile",
        )

    session.check_calls(keras.optimizers.Optimizer, "__init__", refuse)


def _refuse_own(session: Session) -> None:
    """Refuse 16-bit dtype policies and loss scales that the script makes."""
    make_policy = keras.DTypePolicy.__init__

    @functools.wraps(make_policy)
    def init_policy(policy: Any, name: str | None = None) -> None:
        make_policy(policy, name)
        if format_of(policy.compute_dtype).is_low:
            session.found(f"keras.DTypePolicy({policy.name!r})")

    def check_optimizer(optimizer: Any, *_: Any, **__: Any) -> None:
        if not isinstance(optimizer, LossScaledOptimizer):
            session.found("keras.optimizers.LossScaleOptimizer")

    session.replace(keras.DTypePolicy, "__init__", init_policy)
    session.check_calls(keras.optimizers.LossScaleOptimizer, "__init__", check_optimizer)


def _wrap_in_compile(session: Session, policy: Policy) -> None:
    owner = next(kind for kind in keras.Model.__mro__ if "compile" in vars(kind))
    original, wrapped_here = vars(owner)["compile"], WeakSet[Any]()
    parameters = inspect.signature(original)

    def wrap(optimizer: Any) -> Any:
        if isinstance(optimizer, LossScaledOptimizer) and optimizer not in wrapped_here:
            session.found("polyamp.wrap_optimizer")
        if optimizer in wrapped_here or not policy.loss_scale.scales:
            return optimizer
        wrapped = wrap_optimizer(optimizer, policy, loss_scale=policy.loss_scale, max_grad_norm=None)
        wrapped_here.add(wrapped)
        session.holders.append(wrapped)
        return wrapped

    @functools.wraps(original)
    def compile(*args: Any, **kwargs: Any) -> Any:
        bound = parameters.bind(*args, **kwargs)
        bound.apply_defaults()
        if (given := bound.arguments["optimizer"]) is not None:
            bound.arguments.update(optimizer=wrap(keras.optimizers.get(given)), auto_scale_loss=False)
        return original(*bound.args, **bound.kwargs)

    session.replace(owner, "compile", compile)
