"""The facts that `polyamp.lint` needs from Keras: optimizer, layer policies, and facts of the step on the backend."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import keras

from polyamp import registry
from polyamp.backends.keras.casting import is_sixteen_bit
from polyamp.backends.keras.explain import own_plan
from polyamp.backends.keras.layers import own_policy, remaining_policy
from polyamp.backends.keras.recording import step_of
from polyamp.backends.keras.steps.optimizer import LossScaledOptimizer
from polyamp.backends.keras.unstable import all_layers
from polyamp.diagnosis.facts import Facts, OptimizerState
from polyamp.dispatch import having
from polyamp.policies import Policy


def facts(target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], policy: Policy, optimizer: Any) -> Facts:
    """Collect the facts that lint judges; see `polyamp.adapter.FullAdapter`."""
    framework = registry.adapter_named(keras.backend.backend())
    verb = having(framework, "facts").facts
    if not isinstance(target, keras.Model):
        found: Facts = verb(target, args, kwargs, policy, optimizer)
        return replace(found, optimizer=state_of(optimizer)) if optimizer is not None else found
    chosen = getattr(target, "optimizer", None) if optimizer is None else optimizer
    known = Facts(framework.name, policy)
    if args:
        step = step_of(target, args, kwargs)
        known = verb(step.function, step.args, {}, remaining_policy(target, policy), None)
        if own_policy(target) is not None and known.plan:  # the layers use their own policies
            known = replace(known, plan=own_plan(known.plan, policy))
    layers = (layer for layer in all_layers(target) if not isinstance(layer, keras.Model))
    return replace(
        known,
        policy=policy,
        optimizer=state_of(chosen),
        low_parameters=tuple(one.path for one in target.trainable_variables if is_sixteen_bit(one)),
        has_masters=isinstance(chosen, LossScaledOptimizer) and chosen.master_weights is not False,
        layer_policies=tuple(
            (layer.path, layer.dtype_policy.name) for layer in layers if layer.compute_dtype == "float16"
        ),
    )


def state_of(optimizer: Any) -> OptimizerState:
    """Return the kind of an optimizer: wrapped by polyamp, scaled by Keras, or plain."""
    if isinstance(optimizer, LossScaledOptimizer):
        return "wrapped"
    scales = isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
    if scales or getattr(optimizer, "loss_scale_factor", None):
        return "native scaler"
    return "" if optimizer is None else "plain"
