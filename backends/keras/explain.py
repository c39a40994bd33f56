"""Explain a model: the plan of its loss or its call, made by the adapter of the framework that Keras runs on.

That adapter decides operations under a policy. If the layers have their own 16-bit policies, it must lower nothing
more, so it plans under float32: the plan then shows the layers' formats as written, and `own_plan` puts them in.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import keras

from polyamp import registry
from polyamp.backends.keras.layers import amended, own_policy, remaining_policy
from polyamp.backends.keras.recording import Step, as_tensors, step_of
from polyamp.dispatch import having
from polyamp.flow import AS_WRITTEN
from polyamp.plan import Plan, PlannedOperation
from polyamp.policies import Policy

_OWN = "its layer's own policy"


def explain(fn: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], policy: Policy) -> Plan:
    """Return the plan of a compiled model's loss for a batch, or of a model's call for its inputs alone."""
    verb = having(registry.adapter_named(keras.backend.backend()), "explain").explain
    if not isinstance(fn, keras.Model):
        return verb(fn, args, kwargs, policy)
    step = Step(fn, tuple(map(as_tensors, args))) if len(args) < 2 else step_of(fn, args, kwargs)
    with amended(fn, policy):
        plan = verb(step.function, step.args, kwargs if len(args) < 2 else {}, remaining_policy(fn, policy))
    return plan if own_policy(fn) is None else own_plan(plan, policy)


def own_plan(plan: Plan, policy: Policy) -> Plan:
    """Return a plan under which nothing was lowered as the plan of layers with their own formats."""
    return replace(plan, policy=str(policy), operations=tuple(map(_by_layer, plan.operations)))


def _by_layer(operation: PlannedOperation) -> PlannedOperation:
    """Return an operation with its layer's 16-bit format, if its 16-bit input shows that it has one."""
    found = operation.reason.removeprefix("an input is ")
    if operation.format == AS_WRITTEN and found in ("float16", "bfloat16"):
        return operation._replace(format=found, reason=_OWN)
    is_product = operation.op_class == "lower" and operation.format == "float32"
    return operation._replace(reason=_OWN) if is_product else operation
