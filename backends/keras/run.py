"""`polyamp run --policy` for Keras on TensorFlow, whose autocast already runs the layers' products in 16 bits.

- ``compile`` wraps the optimizer of a model whose ``train_step`` is Keras' own, which scales the loss by it.
- Everything else that applies gradients is a loop of the script's own: the tensorflow adapter scales and unscales them.

On JAX and torch only layers have formats, not operations: there the script is refused when it makes an optimizer.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any
from weakref import WeakSet

import keras

from polyamp.backends.keras.native import BACKEND, script_loops
from polyamp.backends.keras.optimizer import LossScaledOptimizer, wrap_optimizer
from polyamp.backends.keras.unstable import built_on, choose_optimizers
from polyamp.formats import format_of
from polyamp.policies import Policy
from polyamp.run import Session


def begin(session: Session) -> None:
    """Train the script's models under the policy, if there is one."""
    if session.policy is None:
        return
    if BACKEND == "tensorflow":
        _refuse_own(session)
        _Models(session, session.policy)
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


class _Models:
    """The models of a script: ``compile`` wraps their optimizers, those of loops are the tensorflow adapter's."""

    def __init__(self, session: Session, policy: Policy) -> None:
        self._session, self._policy, self._loops = session, policy, script_loops()
        self._wrapped: WeakSet[Any] = WeakSet()
        session.at_end(choose_optimizers(self._optimizer_for))
        session.check_calls(keras.optimizers.Optimizer, "__init__", self._note_optimizer)
        session.replace(_owner(keras.Model, "train_step"), "train_step", self._own_step(keras.Model.train_step))
        for kind in (_owner(keras.optimizers.Optimizer, "apply"), LossScaledOptimizer):
            session.replace(kind, "apply", self._applied(vars(kind)["apply"]))

    def _optimizer_for(self, model: Any, optimizer: Any) -> Any:
        """Return the optimizer that a model trains with."""
        if isinstance(optimizer, LossScaledOptimizer) and optimizer not in self._wrapped:
            self._session.found("polyamp.wrap_optimizer")
        takes_gradients = type(model).train_step is not keras.Model.train_step
        if optimizer in self._wrapped or takes_gradients or self._loops.Loops.current is None:
            return optimizer
        wrapped = wrap_optimizer(optimizer, self._policy, loss_scale=self._policy.loss_scale, max_grad_norm=None)
        self._wrapped.add(wrapped)
        self._session.holders.append(wrapped)
        return wrapped

    def _note_optimizer(self, *_: Any, **__: Any) -> None:
        if self._loops.Loops.current is not None:
            self._loops.Loops.current.has_optimizer = True

    def _own_step(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def train_step(model: Any, *args: Any, **kwargs: Any) -> Any:
            with self._loops.as_written(isinstance(model.optimizer, LossScaledOptimizer)):
                return original(model, *args, **kwargs)

        return train_step

    def _applied(self, original: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(original)
        def apply(optimizer: Any, grads: Sequence[Any], trainable_variables: Sequence[Any] | None = None) -> None:
            loops = self._loops.Loops.current
            if loops is None or self._loops.SCALED.get():
                original(optimizer, grads, trainable_variables)
                return
            variables = list(built_on(optimizer) if trainable_variables is None else trainable_variables)
            if not optimizer.built:
                with keras.name_scope(optimizer.name, caller=optimizer):
                    optimizer.build(variables)
            plain = getattr(optimizer, "inner_optimizer", optimizer)  # these gradients are unscaled

            def update(pairs: Sequence[tuple[Any, Any]]) -> None:
                plain.apply([grad for grad, _ in pairs], [variable for _, variable in pairs])

            loops.step(SimpleNamespace(apply_gradients=update), list(zip(grads, variables, strict=True)))

        return apply


def _owner(kind: type, name: str) -> type:
    return next(one for one in kind.__mro__ if name in vars(one))
