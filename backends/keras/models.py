"""Record, explain and lint a model with the adapter of the framework that Keras runs on.

That adapter takes the model's loss as a function that it can trace. On TensorFlow and torch the function reads the
model's variables. On JAX it is a pure function, and the trainable variables are its first argument, by their paths, so
that a recording can name their gradients.

The adapter decides operations under a policy. If the layers have their own 16-bit policies, it must lower nothing more.
It then plans under float32, and `explain` puts the layers' formats into that plan.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import keras
from keras import ops

from polyamp.arrays import has_sixteen_bits
from polyamp.backends.keras.layers import amended, own_policy, remaining_policy
from polyamp.backends.keras.native import BACKEND, framework
from polyamp.backends.keras.optimizer import LossScaledOptimizer
from polyamp.backends.keras.unstable import build_loss, build_metrics_and_optimizer, variable_path
from polyamp.diagnosis.lint import Holder, Kind
from polyamp.diagnosis.recording import Recording
from polyamp.errors import InvalidTypeError, UsageError
from polyamp.flow import AS_WRITTEN
from polyamp.nesting import check_tree
from polyamp.plan import Plan, PlannedOperation
from polyamp.policies import Policy

Step = tuple[Callable[..., Any], tuple[Any, ...]]
"""A function that returns the loss, and its arguments."""

_OWN = "its layer's own policy"


def record(
    step: Any,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    policy: Policy,
    *,
    widened: bool,
    scale: float | None = None,
) -> Recording:
    """Record one step of a compiled model; the model does not change."""
    verb = framework().record
    if not isinstance(step, keras.Model):
        return verb(step, args, kwargs, policy, widened=widened, scale=scale)
    own = _scale_of(step)
    used = own if scale is None else scale
    function, inputs = _step_of(step, args, kwargs, used)
    with amended(step, policy):
        recorded = verb(function, inputs, {}, remaining_policy(step, policy), widened=widened, scale=used)
    # Without the model's name: in rules it would name one copy, as a name such as ``sequential_1`` counts models.
    named = (
        one._replace(name=variable_path(one.name), where=f"{one.where}/".removeprefix(f"{step.name}/").rstrip("/"))
        for one in recorded.observations
    )
    return replace(recorded, policy=str(policy), observations=tuple(named), differentiates=own is not None)


def _scale_of(model: Any) -> float | None:
    """Return the factor by which the model's optimizer multiplies the loss; None if the loss is not scaled."""
    optimizer = getattr(model, "optimizer", None)
    if isinstance(optimizer, LossScaledOptimizer):
        return optimizer.scaler.host_state.scale
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        scale = getattr(optimizer, "dynamic_scale", None)  # Keras' class makes it at the first step
        return optimizer.initial_scale if scale is None else float(ops.convert_to_numpy(scale))
    factor = getattr(optimizer, "loss_scale_factor", None)
    return None if factor is None else float(factor)


def _step_of(model: Any, args: Sequence[Any], kwargs: Mapping[str, Any], scale: float | None = None) -> Step:
    """Return the loss of a batch as ``fit`` computes it; for a model with its own ``train_step``, return that step."""
    _check(model, args, kwargs)
    batch = _as_tensors(args)
    build_loss(model, batch)
    train_step = type(model).train_step
    if train_step is not keras.Model.train_step:
        return _own_step(model, train_step, batch, scale)

    def loss_of(x: Any, y: Any = None, sample_weight: Any = None) -> Any:
        predicted = model(x, training=True)
        return model.compute_loss(x=x, y=y, y_pred=predicted, sample_weight=sample_weight, training=True)

    return _pure(model, loss_of, batch) if BACKEND == "jax" else (loss_of, batch)


def _own_step(model: Any, train_step: Callable[..., Any], batch: tuple[Any, ...], scale: float | None) -> Step:
    def data_of(batch: Sequence[Any]) -> Any:
        return batch if len(batch) > 1 else batch[0]

    build_metrics_and_optimizer(model, data_of(batch))
    if BACKEND != "jax":
        return lambda *batch: train_step(model, data_of(batch)), batch

    def stateless(parameters: Mapping[str, Any], states: Sequence[Any], *batch: Any) -> Any:
        return train_step(model, ([parameters[name] for name in trained], *states), data_of(batch))

    trained = _by_path(model.trainable_variables)
    parameters = {name: one.value for name, one in trained.items()}
    optimizer = getattr(model, "optimizer", None)
    groups = (model.non_trainable_variables, optimizer.variables if optimizer else (), model.metrics_variables)
    states = [[one.value for one in group] for group in groups]
    if scale is not None and isinstance(optimizer, LossScaledOptimizer):
        place = next(i for i, one in enumerate(optimizer.variables) if one is optimizer.scaler.stored.dynamic_scale)
        states[1][place] = ops.full_like(states[1][place], scale)
    return stateless, (parameters, states, *batch)


def _as_tensors(args: Sequence[Any]) -> tuple[Any, ...]:
    check_tree(args, "the batch")
    return tuple(keras.tree.map_structure(ops.convert_to_tensor, arg) for arg in args)


def _pure(model: Any, loss_of: Callable[..., Any], batch: tuple[Any, ...]) -> Step:
    trained = _by_path(model.trainable_variables)
    others = list(model.non_trainable_variables)

    def stateless(parameters: Mapping[str, Any], states: Sequence[Any], *batch: Any) -> Any:
        mapping = [*((trained[name], value) for name, value in parameters.items()), *zip(others, states, strict=True)]
        with keras.StatelessScope(state_mapping=mapping, collect_losses=True):
            return loss_of(*batch)

    parameters = {name: variable.value for name, variable in trained.items()}
    return stateless, (parameters, [variable.value for variable in others], *batch)


def _by_path(variables: Sequence[Any]) -> dict[str, Any]:
    """Return variables by their paths, which are numbered where layers of one name share a path."""
    found: dict[str, Any] = {}
    for variable in variables:
        same = sum(name.partition("#")[0] == variable.path for name in found)
        found[f"{variable.path}#{same}" if same else variable.path] = variable
    return found


def _check(model: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    if not 1 <= len(args) <= 3 or kwargs:
        raise InvalidTypeError(
            "the arguments are not one batch",
            where=f"the step {model.name!r}",
            found=f"{len(args)} arguments" + (f" and {', '.join(kwargs)}" if kwargs else ""),
            allowed="x and y, and perhaps a sample weight",
            fix="give one batch: polyamp.probe(model, x, y)",
        )
    if not model.built:
        raise UsageError(
            "the model has no variables yet",
            where=f"the step {model.name!r}",
            found="a model that was not built",
            fix="call it once on a batch, or model.build(input_shape)",
        )
    if not model.compiled and type(model).compute_loss is keras.Model.compute_loss:
        raise UsageError(
            "the model has no loss",
            where=f"the step {model.name!r}",
            found="a model that was not compiled",
            fix="model.compile(optimizer=..., loss=...); or give a function that returns the loss",
        )


def explain(fn: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], policy: Policy) -> Plan:
    """Return the plan of a compiled model's loss for a batch, or of a model's call for its inputs alone."""
    verb = framework().explain
    if not isinstance(fn, keras.Model):
        return verb(fn, args, kwargs, policy)
    is_call = len(args) < 2
    function, inputs = (fn, _as_tensors(args)) if is_call else _step_of(fn, args, kwargs)
    with amended(fn, policy):
        plan = verb(function, inputs, kwargs if is_call else {}, remaining_policy(fn, policy))
    if own_policy(fn) is None:
        return plan
    return replace(plan, policy=str(policy), operations=tuple(map(_by_layer, plan.operations)))


def _by_layer(operation: PlannedOperation) -> PlannedOperation:
    """Return an operation with the format and the reason that its layer's own dtype policy gives it."""
    found = operation.reason.removeprefix("an input is ")
    if operation.format == AS_WRITTEN and found in ("float16", "bfloat16"):
        return operation._replace(format=found, reason=_OWN)
    is_product = operation.op_class == "lower" and operation.format == "float32"
    return operation._replace(reason=_OWN) if is_product else operation


def holder(target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], policy: Policy, optimizer: Any) -> Holder:
    """Return what lint judges in addition to a plan; see `polyamp.interface.Adapter.holder`."""
    if not isinstance(target, keras.Model):
        found: Holder = framework().holder(target, args, kwargs, policy, optimizer)
        return found if optimizer is None else found._replace(kind=_kind_of(optimizer))
    chosen = getattr(target, "optimizer", None) if optimizer is None else optimizer
    low = tuple(one.path for one in target.trainable_variables if has_sixteen_bits(one))
    has_masters = isinstance(chosen, LossScaledOptimizer) and chosen.master_weights is not False
    return Holder("keras", _kind_of(chosen), low, has_masters)


def _kind_of(optimizer: Any) -> Kind:
    """Return the kind of an optimizer: wrapped by polyamp, scaled by Keras, or plain."""
    if isinstance(optimizer, LossScaledOptimizer):
        return "wrapped"
    scales = isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
    if scales or getattr(optimizer, "loss_scale_factor", None):
        return "native scaler"
    return "" if optimizer is None else "plain"
