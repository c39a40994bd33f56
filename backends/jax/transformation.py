"""The verb `polyamp.wrap_optimizer` on optax optimizers, and its result. Only this file and the demo import optax."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from polyamp.backends.jax.optimizer import Step
from polyamp.backends.jax.state import state_type
from polyamp.errors import check_master_weights, importing, no_method, no_optimizer, wrapped_already
from polyamp.policies import Policy
from polyamp.settings import LossScale

with importing("optax", extra="jax"):
    import optax


class LossScaled(optax.GradientTransformationExtraArgs):  # type: ignore[misc]  # optax has no types
    """The result of `polyamp.wrap_optimizer` for an optax optimizer: an optax ``(init, update)`` pair."""

    @property
    def step(self) -> Step:
        """The `Step` whose methods are this pair's ``init`` and ``update``."""
        step: Step = self.update.__self__
        return step

    @property
    def policy(self) -> Policy | None:
        """The policy that the optimizer was wrapped for; None if nobody chose one."""
        return self.step.state_type.policy

    def __repr__(self) -> str:
        return f"LossScaled({self.step.inner!r}, {self.step.settings!r}, policy={self.policy})"

    def __getattr__(self, name: str) -> Any:
        raise no_method(self, name, _INSTEAD)


_GRADIENTS = "polyamp.value_and_grad(loss_fn, policy)(opt_state, params, ...) returns the loss and its gradients"
_INSTEAD = {
    "backward": _GRADIENTS,
    "scale": "polyamp.scale_loss(loss, opt_state) scales a loss; " + _GRADIENTS,
    "unscale_": "tx.update(grads, opt_state, params) unscales, tests and clips",
    "clip_grad_norm_": "give max_grad_norm= to polyamp.wrap_optimizer",
    "zero_grad": "leave it out: JAX's gradients are values",
    "loss_scale": "read opt_state.loss_scale: the state is what tx.init(params) and tx.update return",
    "last_step": "read opt_state.last_step: the state is what tx.init(params) and tx.update return",
}


def wrap_optimizer(
    tx: Any,
    policy: Policy | None,
    *,
    loss_scale: LossScale,
    max_grad_norm: float | None,
    axis_name: Hashable | None = None,
    master_weights: bool | None = None,
) -> LossScaled:
    """Return a wrapped optax optimizer; see `polyamp.backends.jax.wrap_optimizer`."""
    if isinstance(tx, LossScaled):
        raise wrapped_already("a wrapped optimizer")
    if isinstance(tx, optax.MultiSteps):
        tx = tx.gradient_transformation()
    if not isinstance(tx, optax.GradientTransformation):
        raise no_optimizer(tx, allowed="optax.GradientTransformation, such as optax.adam(1e-3)")
    check_master_weights(master_weights)
    step = Step(
        optax.with_extra_args_support(tx),
        state_type(loss_scale.in_float32(), policy),
        max_grad_norm,
        axis_name,
        master_weights=master_weights is not False,
        low_params=policy is not None and policy.needs_master_weights,
    )
    return LossScaled(step.init, step.update)
