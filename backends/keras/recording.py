"""Record one step of a compiled model with the adapter of the framework that Keras runs on.

The step is the model's loss as a function that the framework can trace. On TensorFlow and torch the function reads the
model's variables. On JAX it is a pure function, and the trainable variables are its first argument, by their paths, so
that the recording can name their gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import keras
from keras import ops

from polyamp import registry
from polyamp.backends.keras.layers import amended, remaining_policy
from polyamp.backends.keras.steps.optimizer import LossScaledOptimizer
from polyamp.backends.keras.unstable import build_loss, variable_path
from polyamp.diagnosis.recording import Recording
from polyamp.dispatch import having
from polyamp.errors import InvalidTypeError, UsageError
from polyamp.policies import Policy


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
    verb = having(registry.adapter_named(keras.backend.backend()), "record").record
    if not isinstance(step, keras.Model):
        return verb(step, args, kwargs, policy, widened=widened, scale=scale)
    made, own = step_of(step, args, kwargs), _scale_of(step)
    used = own if scale is None else scale
    with amended(step, policy):
        recorded = verb(made.function, made.args, {}, remaining_policy(step, policy), widened=widened, scale=used)
    named = (one._replace(name=variable_path(one.name)) for one in recorded.observations)
    return replace(recorded, policy=str(policy), observations=tuple(named), differentiates=own is not None)


def _scale_of(model: Any) -> float | None:
    """Return the factor by which the model's optimizer multiplies the loss; None if it does not."""
    optimizer = getattr(model, "optimizer", None)
    if isinstance(optimizer, LossScaledOptimizer):
        return optimizer.scaler.host_state.scale
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        return float(ops.convert_to_numpy(optimizer.dynamic_scale)) if optimizer.built else optimizer.initial_scale
    factor = getattr(optimizer, "loss_scale_factor", None)
    return None if factor is None else float(factor)


class Step(NamedTuple):
    """The loss of a model as a function of the framework that Keras runs on."""

    function: Callable[..., Any]  # returns the loss
    args: tuple[Any, ...]  # its arguments; on JAX the trainable variables come first


def step_of(model: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Step:
    """Return the loss of a batch as ``fit`` computes it."""
    _check(model, args, kwargs)
    batch = tuple(map(as_tensors, args))
    build_loss(model, batch)

    def loss_of(x: Any, y: Any = None, sample_weight: Any = None) -> Any:
        predicted = model(x, training=True)
        return model.compute_loss(x=x, y=y, y_pred=predicted, sample_weight=sample_weight, training=True)

    return _pure(model, loss_of, batch) if keras.backend.backend() == "jax" else Step(loss_of, batch)


def as_tensors(tree: Any) -> Any:
    """Return a container with its arrays as tensors of Keras' backend."""
    return keras.tree.map_structure(ops.convert_to_tensor, tree)


def _pure(model: Any, loss_of: Callable[..., Any], batch: tuple[Any, ...]) -> Step:
    trained = _by_path(model.trainable_variables)
    others = list(model.non_trainable_variables)

    def stateless(parameters: Mapping[str, Any], states: Sequence[Any], *batch: Any) -> Any:
        mapping = [*((trained[name], value) for name, value in parameters.items()), *zip(others, states, strict=True)]
        with keras.StatelessScope(state_mapping=mapping, collect_losses=True):
            return loss_of(*batch)

    parameters = {name: variable.value for name, variable in trained.items()}
    return Step(stateless, (parameters, [variable.value for variable in others], *batch))


def _by_path(variables: Sequence[Any]) -> dict[str, Any]:
    """Return variables by their paths, numbered where layers with the same name share one."""
    found: dict[str, Any] = {}
    for variable in variables:
        same = sum(name.partition("#")[0] == variable.path for name in found)
        found[f"{variable.path}#{same}" if same else variable.path] = variable
    return found


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
