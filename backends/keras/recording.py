"""A compiled model as a training step, for the framework that Keras runs on to record, to explain and to lint."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import keras
from keras import ops

from polyamp import registry
from polyamp.backends.keras.convert import amended, own_policy
from polyamp.backends.keras.steps.optimizer import LossScaledOptimizer
from polyamp.backends.keras.unstable import build_loss
from polyamp.diagnosis.recording import Recording
from polyamp.dispatch import EXPLAIN, RECORD
from polyamp.errors import InvalidTypeError, UsageError
from polyamp.flow import AS_WRITTEN
from polyamp.plan import Plan, PlannedOperation
from polyamp.policy import Policy
from polyamp.policy import policy as make_policy

_OWN = "its layer's own policy"
_IN_TORCH = "_torch_params."  # stands before a variable's path, where a Keras layer is a torch module


class Step(NamedTuple):
    """The loss of a model as a function of the framework that Keras runs on.

    Attributes:
        function: gives the loss.
        args: its arguments; on JAX the trainable variables come first.
    """

    function: Callable[..., Any]
    args: tuple[Any, ...]


def record(
    step: Any,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    policy: Policy,
    *,
    widened: bool,
    scale: float | None = None,
) -> Recording:
    """One step of a compiled model, as the adapter of Keras' backend records it; the model stays as it was.

    Args:
        step: a compiled model; or a function of the framework that Keras runs on, which that framework records.
        args: of a model, ``(x, y)`` or ``(x, y, sample_weight)``: a batch.
        kwargs: of a function.
        policy: what is 16-bit; layers whose own policy says so are in any case.
        widened: compute that in float32 nevertheless.
        scale: None is that of the model's optimizer where it scales the loss, else 1.

    Raises:
        InvalidTypeError: a model without a batch.
        UsageError: the model has no loss, or was not built.
    """
    verb = RECORD.of(registry.adapter_named(keras.backend.backend()))
    if not isinstance(step, keras.Model):
        return verb(step, args, kwargs, policy, widened=widened, scale=scale)
    made, own = step_of(step, args, kwargs), _scale_of(step)
    used = own if scale is None else scale
    with amended(step, policy):
        recorded = verb(made.function, made.args, {}, judged(step, policy), widened=widened, scale=used)
    named = (one._replace(name=one.name.rpartition(_IN_TORCH)[2]) for one in recorded.observations)
    return replace(recorded, policy=str(policy), observations=tuple(named), differentiates=own is not None)


def judged(model: Any, policy: Policy) -> Policy:
    """Return the policy of a model's step: that of layers which compute in 16 bits by themselves lowers nothing more.

    >>> from polyamp import policy
    >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2, dtype="mixed_float16")])
    >>> str(judged(model, policy("mixed_float16")))
    'float32'
    """
    return policy if own_policy(model) is None else make_policy("float32")


def explain(fn: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], policy: Policy) -> Plan:
    """The plan of a compiled model's loss for a batch, or of a model's call for its inputs alone, on Keras' backend.

    Raises:
        UnsupportedError: that backend explains no functions.
    """
    verb = EXPLAIN.of(registry.adapter_named(keras.backend.backend()))
    if not isinstance(fn, keras.Model):
        return verb(fn, args, kwargs, policy)
    step = Step(fn, tuple(map(_tensors, args))) if len(args) < 2 else step_of(fn, args, kwargs)
    with amended(fn, policy):
        plan = verb(step.function, step.args, kwargs if len(args) < 2 else {}, judged(fn, policy))
    return plan if own_policy(fn) is None else own_plan(plan, policy)


def own_plan(plan: Plan, policy: Policy) -> Plan:
    """Return a plan under which nothing was lowered as that of layers which have their own formats."""
    return replace(plan, policy=str(policy), operations=tuple(map(_by_layer, plan.operations)))


def _by_layer(operation: PlannedOperation) -> PlannedOperation:
    """What a layer runs in 16 bits, a plan has as written, since an input is of that format."""
    found = operation.reason.removeprefix("an input is ")
    if operation.format == AS_WRITTEN and found in ("float16", "bfloat16"):
        return operation._replace(format=found, reason=_OWN)
    is_product = operation.op_class == "lower" and operation.format == "float32"
    return operation._replace(reason=_OWN) if is_product else operation


def step_of(model: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Step:
    """The loss of a batch, as ``fit`` computes it.

    Raises:
        InvalidTypeError: no batch.
        UsageError: the model has no loss, or was not built.
    """
    _check(model, args, kwargs)
    batch = tuple(map(_tensors, args))
    build_loss(model, batch)

    def loss_of(x: Any, y: Any = None, sample_weight: Any = None) -> Any:
        predicted = model(x, training=True)
        return model.compute_loss(x=x, y=y, y_pred=predicted, sample_weight=sample_weight, training=True)

    if keras.backend.backend() != "jax":
        return Step(loss_of, batch)
    trained = _by_path(model.trainable_variables)
    others = list(model.non_trainable_variables)

    def stateless(parameters: Mapping[str, Any], states: Sequence[Any], *batch: Any) -> Any:
        mapping = [*((trained[name], value) for name, value in parameters.items()), *zip(others, states, strict=True)]
        with keras.StatelessScope(state_mapping=mapping, collect_losses=True):
            return loss_of(*batch)

    parameters = {name: variable.value for name, variable in trained.items()}
    return Step(stateless, (parameters, [variable.value for variable in others], *batch))


def _tensors(tree: Any) -> Any:
    return keras.tree.map_structure(ops.convert_to_tensor, tree)


def _by_path(variables: Sequence[Any]) -> dict[str, Any]:
    """Variables by their paths, which layers with the same name share."""
    found: dict[str, Any] = {}
    for variable in variables:
        same = sum(name.partition("#")[0] == variable.path for name in found)
        found[f"{variable.path}#{same}" if same else variable.path] = variable
    return found


def _scale_of(model: Any) -> float | None:
    """What the model's optimizer multiplies the loss by; None where it does not."""
    optimizer = getattr(model, "optimizer", None)
    if isinstance(optimizer, LossScaledOptimizer):
        return optimizer.loss_scale
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        return float(ops.convert_to_numpy(optimizer.dynamic_scale)) if optimizer.built else optimizer.initial_scale
    factor = getattr(optimizer, "loss_scale_factor", None)
    return None if factor is None else float(factor)


def _check(model: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    if not 1 <= len(args) <= 3 or kwargs:
        raise InvalidTypeError(
            "a model takes a batch",
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
