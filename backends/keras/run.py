"""`polyamp run --policy` for Keras: models that a script compiles are trained under the policy.

- On TensorFlow, its autocast already runs the layers' products in 16 bits. On JAX and torch, layers that are made from
  now on have Keras' dtype policy of that name, and models return float32.
- ``compile`` wraps the optimizer of a model whose ``train_step`` is Keras' own, which scales the loss by it.
- Everything else that applies gradients is a loop of the script's own. On TensorFlow, the tensorflow adapter scales
  and unscales its gradients. Elsewhere, such a loop is refused under float16.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import Any
from weakref import WeakSet

import keras

from polyamp.backends.keras.layers import children, keras_policy, operation_of
from polyamp.backends.keras.native import is_sixteen_bit
from polyamp.backends.keras.optimizer import LossScaledOptimizer, wrap_optimizer
from polyamp.backends.keras.unstable import built_on, choose_optimizers
from polyamp.formats import format_of
from polyamp.plan import PlannedOperation
from polyamp.policies import Policy
from polyamp.run import Session

_FIX = (
    "train with Keras' own train_step; or wrap the optimizer in the script: polyamp.wrap_optimizer; or --policy "
    "mixed_bfloat16, which needs no loss scale"
)


def begin(session: Session) -> None:
    """Train the script's models under the policy, if there is one."""
    policy = session.policy
    if policy is None:
        return
    if keras.backend.backend() != "tensorflow":
        before = keras.config.dtype_policy()
        session.at_end(lambda: keras.config.set_dtype_policy(before))
        keras.config.set_dtype_policy(keras_policy(policy))
        _return_float32(session, policy)
    _refuse_own(session)
    models = _Models(session, policy)
    session.at_end(choose_optimizers(models.optimizer_for))
    if policy.loss_scale.scales:
        models.watch_steps()


class _Models:
    """The optimizers of a script: those that ``compile`` wraps, and those of loops."""

    def __init__(self, session: Session, policy: Policy) -> None:
        self._session, self._policy = session, policy
        self._wrapped: WeakSet[Any] = WeakSet()

    def _scaling_of_loops(self, what: str, found: str) -> Any:
        """Return what scales the loops of the script's own on TensorFlow; elsewhere, refuse them."""
        # Keras imports TensorFlow for its data sets on the other backends too.
        backend = keras.backend.backend()
        if backend == "tensorflow" and self._session.own_loops is not None:
            return self._session.own_loops
        self._session.refuse(
            f"a {what} of the script's own cannot be scaled from outside", found=f"{found}, on {backend}", fix=_FIX
        )

    def optimizer_for(self, model: Any, optimizer: Any) -> Any:
        """Return the optimizer that a model trains with."""
        self._check_optimizer(optimizer)
        if optimizer in self._wrapped:
            return optimizer
        if self._policy.rules and keras.backend.backend() != "tensorflow":
            self._session.refuse(
                "rules by operation or layer are not for an unmodified script on this backend of Keras",
                found=str(self._policy),
                fix="leave the rules out of --policy; or write polyamp.convert(model, policy) in the script",
            )
        if not self._policy.loss_scale.scales:
            return optimizer
        if type(model).train_step is not keras.Model.train_step:  # it takes and applies gradients itself
            self._scaling_of_loops("train_step", f"{type(model).__qualname__}.train_step")
            return optimizer
        wrapped = wrap_optimizer(optimizer, self._policy, loss_scale=self._policy.loss_scale, max_grad_norm=None)
        self._wrapped.add(wrapped)
        self._session.add(wrapped)
        return wrapped

    def watch_steps(self) -> None:
        """Tell Keras' own steps from others, wherever an optimizer applies gradients."""
        original = keras.Model.train_step
        owner = next(kind for kind in keras.Model.__mro__ if "train_step" in vars(kind))

        @functools.wraps(original)
        def train_step(model: Any, *args: Any, **kwargs: Any) -> Any:
            if not isinstance(model.optimizer, LossScaledOptimizer):
                return original(model, *args, **kwargs)
            with self._session.as_written():
                return original(model, *args, **kwargs)

        self._session.replace(owner, "train_step", train_step)
        base = next(kind for kind in keras.optimizers.Optimizer.__mro__ if "apply" in vars(kind))
        for kind in (base, LossScaledOptimizer):
            self._session.replace(kind, "apply", self._applied(vars(kind)["apply"]))

    def _applied(self, original: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(original)
        def apply(optimizer: Any, grads: Sequence[Any], trainable_variables: Sequence[Any] | None = None) -> None:
            if self._session.is_as_written:
                original(optimizer, grads, trainable_variables)
                return
            self._check_optimizer(optimizer)
            scaling = self._scaling_of_loops("training loop", "gradients applied outside of Keras' own train_step")
            variables = list(built_on(optimizer) if trainable_variables is None else trainable_variables)
            if not optimizer.built:
                with keras.name_scope(optimizer.name, caller=optimizer):
                    optimizer.build(variables)
            scaling.step(_Update(optimizer), list(zip(grads, variables, strict=True)))

        return apply

    def _check_optimizer(self, optimizer: Any) -> None:
        if isinstance(optimizer, LossScaledOptimizer) and optimizer not in self._wrapped:
            self._session.found("polyamp.wrap_optimizer")


class _Update:
    """The update of a Keras optimizer, whose gradients are true ones, as an object with ``apply_gradients``."""

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer.inner_optimizer if isinstance(optimizer, LossScaledOptimizer) else optimizer

    def apply_gradients(self, pairs: Sequence[tuple[Any, Any]]) -> None:
        self._optimizer.apply([grad for grad, _ in pairs], [variable for _, variable in pairs])


def _refuse_own(session: Session) -> None:
    """Refuse 16-bit dtype policies and loss scales that the script makes."""
    make_policy, make_optimizer = keras.DTypePolicy.__init__, keras.optimizers.LossScaleOptimizer.__init__
    own = keras.config.dtype_policy().name

    @functools.wraps(make_policy)
    def init_policy(policy: Any, name: str | None = None) -> None:
        make_policy(policy, name)
        if policy.name != own and format_of(policy.compute_dtype).is_low:
            session.found(f"keras.DTypePolicy({policy.name!r})")

    @functools.wraps(make_optimizer)
    def init_optimizer(optimizer: Any, *args: Any, **kwargs: Any) -> None:
        if not isinstance(optimizer, LossScaledOptimizer):
            session.found("keras.optimizers.LossScaleOptimizer")
        make_optimizer(optimizer, *args, **kwargs)

    session.replace(keras.DTypePolicy, "__init__", init_policy)
    session.replace(keras.optimizers.LossScaleOptimizer, "__init__", init_optimizer)


def _return_float32(session: Session, policy: Policy) -> None:
    """Make models return float32, as without a policy, and report the formats of the layers that they call."""
    depth: ContextVar[int] = ContextVar("depth", default=0)
    seen: WeakSet[Any] = WeakSet()

    def outermost(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def call(layer: Any, *args: Any, **kwargs: Any) -> Any:
            token = depth.set(depth.get() + 1)
            try:
                result = original(layer, *args, **kwargs)
            finally:
                depth.reset(token)
            session.has_low |= format_of(layer.compute_dtype).is_low
            if keras.backend.backend() == "jax" and layer not in seen and not children(layer):  # torch records more
                seen.add(layer)
                kind = type(layer).__name__
                name = operation_of(layer) or kind
                op_class = policy.decide(name, layer.path).op_class
                reason = "its layer's own policy"
                session.operations.append(
                    PlannedOperation(name, kind, layer.path, op_class, layer.compute_dtype, reason)
                )
            is_outermost = depth.get() == 0 and isinstance(layer, keras.Model)
            return keras.tree.map_structure(_widened, result) if is_outermost else result

        return call

    if keras.backend.backend() == "jax":
        session.looked_at = "the layers of the models that were called"
    for name in ("__call__", "stateless_call"):
        owner = next(kind for kind in keras.Model.__mro__ if name in vars(kind))
        session.replace(owner, name, outermost(vars(owner)[name]))


def _widened(value: Any) -> Any:
    is_low = keras.ops.is_tensor(value) and is_sixteen_bit(value)
    return keras.ops.cast(value, "float32") if is_low else value
