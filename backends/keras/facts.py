"""What `polyamp.lint` asks of Keras: a model's optimizer and layer policies, and facts of its step on the backend."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import keras

from polyamp import registry
from polyamp.backends.keras.convert import own_policy
from polyamp.backends.keras.gradients import is_sixteen_bit
from polyamp.backends.keras.optimizer import LossScaledOptimizer
from polyamp.backends.keras.recording import Step, judged, own_plan, step_of
from polyamp.backends.keras.unlowered import lowers_here
from polyamp.diagnosis.facts import Facts, OptimizerState
from polyamp.plan import Plan
from polyamp.policy import Policy
from polyamp.policy import policy as make_policy


def facts(target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], policy: Policy, optimizer: Any) -> Facts:
    """Collect what lint judges; see `polyamp.diagnosis.facts.Facts`.

    >>> from polyamp import policy
    >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2, dtype="mixed_float16", name="head")])
    >>> model.compile(optimizer="sgd", loss="mse")
    >>> found = facts(model, (), {}, policy("mixed_float16"), None)
    >>> found.optimizer, [name for _, name in found.layer_policies]
    ('plain', ['mixed_float16'])

    Args:
        target: a model, compiled or not; or a function of the framework that Keras runs on.
        args: of a compiled model, ``(x, y)``; without them no step is traced.
        kwargs: of a function.
        policy: the policy in question.
        optimizer: None is the one that the model was compiled with.
    """
    framework = registry.adapter_named(keras.backend.backend())
    verb = registry.verb(framework, "facts")
    if not isinstance(target, keras.Model):
        found: Facts = verb(target, args, kwargs, policy, optimizer)
        return replace(found, optimizer=state_of(optimizer)) if optimizer is not None else found
    chosen = getattr(target, "optimizer", None) if optimizer is None else optimizer
    known = Facts(framework.name, policy, devices=tuple(framework.describe()["devices"]))
    if args:
        step = step_of(target, args, kwargs)
        known = verb(step.function, step.args, {}, judged(target, policy), None)
        is_wrapped = state_of(chosen) == "wrapped"
        known = replace(known, policy=policy, plan=_plan(target, step, known.plan, policy, is_wrapped))
    return replace(
        known,
        optimizer=state_of(chosen),
        low_parameters=tuple(one.path for one in target.trainable_variables if is_sixteen_bit(one)),
        has_masters=isinstance(chosen, LossScaledOptimizer) and chosen.master_weights is not False,
        layer_policies=tuple(_policies(target)),
    )


def _plan(model: Any, step: Step, plan: Plan | None, policy: Policy, is_wrapped: bool) -> Plan | None:
    """The plan of what ``fit`` runs: layers run as their own policies say, unless the step is rewritten.

    Where neither model nor optimizer knows of a policy yet, it is the plan of what the policy would make of them.
    """
    if plan is None or own_policy(model) is not None:
        return plan and own_plan(plan, policy)
    if not is_wrapped or hasattr(model.train_step, "plan") or lowers_here():
        return plan
    framework = registry.adapter_named(keras.backend.backend())
    as_it_is: Plan = registry.verb(framework, "explain")(step.function, step.args, {}, make_policy("float32"))
    return replace(as_it_is, policy=str(policy), unused_rules=plan.unused_rules)


def state_of(optimizer: Any) -> OptimizerState:
    """What an optimizer is: polyamp's, one that Keras scales, plain, or one of the first two around another.

    >>> state_of(keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD()))
    'native scaler'
    """
    if isinstance(getattr(optimizer, "inner_optimizer", None), keras.optimizers.LossScaleOptimizer):
        return "wrapped twice"
    if isinstance(optimizer, LossScaledOptimizer):
        return "wrapped"
    scales = isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
    if scales or getattr(optimizer, "loss_scale_factor", None):
        return "native scaler"
    return "" if optimizer is None else "plain"


def _policies(model: Any) -> list[tuple[str, str]]:
    """The layers that compute in float16 by a policy of their own; those of a model inside are its layers."""
    layers = (layer for layer in model._flatten_layers(include_self=False) if not isinstance(layer, keras.Model))
    return [(layer.path, layer.dtype_policy.name) for layer in layers if layer.compute_dtype == "float16"]
