"""The facts that `polyamp.lint` needs from Keras: optimizer, layer policies, and facts of the step on the backend."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import keras

from polyamp import registry
from polyamp.agreement import Disagreement, disagreement
from polyamp.backends.keras.dtypes import is_sixteen_bit
from polyamp.backends.keras.explain import own_plan
from polyamp.backends.keras.layers.policies import own_policy, remaining_policy
from polyamp.backends.keras.recording.tracing import Step, step_of
from polyamp.backends.keras.steps.mismatches import lowers_here
from polyamp.backends.keras.steps.optimizer import LossScaledOptimizer
from polyamp.backends.keras.unstable import all_layers
from polyamp.diagnosis.facts import Facts, OptimizerState
from polyamp.dispatch import EXPLAIN, FACTS
from polyamp.plan import Plan
from polyamp.policies import Policy
from polyamp.policies import policy as make_policy


def facts(target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], policy: Policy, optimizer: Any) -> Facts:
    """Collect the facts that lint judges; see `polyamp.diagnosis.facts.Facts`."""
    framework = registry.adapter_named(keras.backend.backend())
    verb = FACTS.of(framework)
    if not isinstance(target, keras.Model):
        found: Facts = verb(target, args, kwargs, policy, optimizer)
        return replace(found, optimizer=state_of(optimizer)) if optimizer is not None else found
    chosen = getattr(target, "optimizer", None) if optimizer is None else optimizer
    known = Facts(framework.name, policy, devices=tuple(framework.describe()["devices"]))
    if args:
        step = step_of(target, args, kwargs)
        known = verb(step.function, step.args, {}, remaining_policy(target, policy), None)
        is_wrapped = state_of(chosen) == "wrapped"
        known = replace(known, policy=policy, plan=_plan(target, step, known.plan, policy, is_wrapped))
    return replace(
        known,
        optimizer=state_of(chosen),
        low_parameters=tuple(one.path for one in target.trainable_variables if is_sixteen_bit(one)),
        has_masters=isinstance(chosen, LossScaledOptimizer) and chosen.master_weights is not False,
        layer_policies=tuple(_policies(target)),
        disagreement=_disagreement(chosen, policy),
    )


def _disagreement(optimizer: Any, policy: Policy) -> Disagreement | None:
    if not isinstance(optimizer, LossScaledOptimizer):
        return None
    return disagreement(optimizer.scaler.settings, optimizer.scaler.compute, policy)


def _plan(model: Any, step: Step, plan: Plan | None, policy: Policy, is_wrapped: bool) -> Plan | None:
    """Return the plan of what ``fit`` runs: layers use their own policies, unless the step is rewritten."""
    # If neither model nor optimizer has a policy yet, return the plan that they would have under ``policy``.
    if plan is None or own_policy(model) is not None:
        return plan and own_plan(plan, policy)
    if not is_wrapped or hasattr(model.train_step, "plan") or lowers_here():
        return plan
    framework = registry.adapter_named(keras.backend.backend())
    as_it_is = EXPLAIN.of(framework)(step.function, step.args, {}, make_policy("float32"))
    return replace(as_it_is, policy=str(policy), unused_rules=plan.unused_rules)


def state_of(optimizer: Any) -> OptimizerState:
    """Return the kind of an optimizer: wrapped by polyamp, scaled by Keras, plain, or wrapped twice."""
    if isinstance(getattr(optimizer, "inner_optimizer", None), keras.optimizers.LossScaleOptimizer):
        return "wrapped twice"
    if isinstance(optimizer, LossScaledOptimizer):
        return "wrapped"
    scales = isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
    if scales or getattr(optimizer, "loss_scale_factor", None):
        return "native scaler"
    return "" if optimizer is None else "plain"


def _policies(model: Any) -> list[tuple[str, str]]:
    """Return the layers that compute in float16 by their own policy. Inner models are replaced by their layers."""
    layers = (layer for layer in all_layers(model) if not isinstance(layer, keras.Model))
    return [(layer.path, layer.dtype_policy.name) for layer in layers if layer.compute_dtype == "float16"]
