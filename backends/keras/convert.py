"""Sets the dtype policies of a built model's layers as a polyamp policy and its rules say."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakSet

import keras

from polyamp.backends.keras.borders import Border, border_of, casts_inside, set_border
from polyamp.backends.keras.parts import (
    CHANGEABLE,
    KERAS_POLICIES,
    Part,
    can_change,
    children,
    keras_policy,
    matches,
    op_class_of,
    parts_of,
    policy_of,
    walk,
)
from polyamp.errors import InvalidTypeError, UnsupportedError, UsageError, warn_once
from polyamp.formats import format_of
from polyamp.policy import Policy
from polyamp.policy import policy as make_policy
from polyamp.reports import report_nothing_lowered, report_unused

_converted: WeakSet[Any] = WeakSet()
_waiting: WeakSet[Any] = WeakSet()  # models that compiled themselves, of which something is to be said when they train


def convert(model: Any, policy: Policy) -> Any:
    """Set what each layer of a built model computes in, and compile anew what was traced before.

    Layers compute in ``policy.compute``, except those that the rules hold in float32 (softmax) and, where
    ``policy.output`` is float32, the layers that give the model's outputs. Layers of class ``inner`` (norms, average
    pooling) compute in float32, from unrounded data, and return ``policy.compute``. A rule's path is the layer's names
    from the model down, such as ``encoder/attention/query``. Inside a ``MultiHeadAttention`` without dropout, Keras
    multiplies the values with the float32 softmax in float32; ``rules={"softmax": "lower"}`` runs both in 16 bits.

    Variables keep the format in which the model was built. Where layers compute in float16 the optimizer must be
    wrapped too: `polyamp.wrap_optimizer`. Keras' ``compile`` does it by itself only for a model whose own policy is
    ``mixed_float16``, so there is a warning where that is not so, and no wrapped optimizer in sight: the rules hold the
    model itself in float32 or keep it, its variables have 16 bits, or it is part of a larger model. A ``tf.function``
    or ``jax.jit`` of your own must be made anew.

    >>> import polyamp
    >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(8), keras.layers.LayerNormalization(),
    ...     keras.layers.Dense(2)])
    >>> model = convert(model, polyamp.policy("mixed_bfloat16"))
    >>> [layer.compute_dtype for layer in model.layers]
    ['bfloat16', 'bfloat16', 'float32']

    Args:
        model: functional, sequential or subclassed; changed in place.
        policy: its ``param`` must be what the variables are stored in.

    Returns:
        The same model.

    Raises:
        InvalidTypeError: no Keras model.
        UsageError: the model is not built.
        UnsupportedError: variables are stored in another format than ``policy.param``, which Keras cannot change in
            place; or Keras has no dtype policy for these formats. Nothing is changed.
    """
    _check_model(model)
    parts = list(parts_of(model, policy, op_class_of))
    _check_storage(parts, policy)
    _set(parts, policy)
    for container in (layer for layer in walk(model) if isinstance(layer, keras.Model)):
        _forget_compiled(container)
    _report(model, parts, policy)
    _converted.add(model)
    return model


def was_converted(model: Any) -> bool:
    """Whether somebody converted a model, to whatever policy."""
    return model in _converted


@contextmanager
def amended(model: Any, policy: Policy) -> Iterator[None]:
    """Have the layers of a model that a policy's own rules name compute as those say, for as long as this lasts.

    All others stay as they are. That is how rules are tried on a model that computes in 16 bits by itself.

    >>> import polyamp
    >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(8, name="wide"), keras.layers.Dense(2)])
    >>> model = convert(model, polyamp.policy("mixed_bfloat16"))
    >>> with amended(model, polyamp.policy("mixed_float16", rules={"wide": "full"})):
    ...     model.layers[0].compute_dtype
    'float32'
    >>> model.layers[0].compute_dtype
    'bfloat16'
    """
    own = own_policy(model)
    if own is None or not policy.own_rules:
        yield
        return
    tried = make_policy(own, rules=dict(policy.own_rules))
    parts = [part for part in parts_of(model, tried, _amended_class) if can_change(part)]
    before = [(part.layer, part.layer.dtype_policy, border_of(part.layer)) for part in parts]
    _set(parts, tried)
    try:
        yield
    finally:
        for layer, dtype_policy, border in before:
            layer.dtype_policy = dtype_policy
            set_border(layer, border)


def own_policy(model: Any) -> str | None:
    """Return the name of the 16-bit dtype policy that layers of a model have; None where all compute in float32.

    >>> own_policy(keras.Sequential([keras.Input((4,)), keras.layers.Dense(2, dtype="mixed_bfloat16")]))
    'mixed_bfloat16'
    """
    layers = (layer for layer in walk(model) if format_of(border_of(layer).inside).is_low)
    names = (layer.dtype_policy.name for layer in layers)
    return next((name for name in names if name in KERAS_POLICIES.values()), None)


def _set(parts: Iterable[Part], policy: Policy) -> None:
    for layer, name, border in [(one.layer, policy_of(one, policy), one.border) for one in parts if can_change(one)]:
        layer.dtype_policy = name
        set_border(layer, Border(border.inside) if casts_inside(layer) else border)
        if casts_inside(layer):
            layer.autocast = False  # it casts data to float32 itself, which must not be rounded before


def _amended_class(policy: Policy, operation: str, layer: Any, path: str, is_head: bool) -> str:
    """The class that the rules say, else that of what the layer computes in now."""
    if any(matches(rule, operation, path) for rule in policy.own_rules):
        return op_class_of(policy, operation, layer, path, is_head)
    inside, outside = border_of(layer)
    crosses = bool(outside) and format_of(outside).is_low
    return "lower" if format_of(inside).is_low else "inner" if crosses else "full"


def _check_model(model: Any) -> None:
    if not isinstance(model, keras.Model):
        raise InvalidTypeError(
            "no Keras model",
            where="convert(model)",
            found=f"{type(model).__module__}.{type(model).__qualname__}",
            allowed="a built keras.Model",
            fix="give the model itself; tensors are cast by policy.cast_to_compute(tree)",
        )
    unbuilt = [layer.name for layer in walk(model) if not layer.built]
    if unbuilt:
        raise UsageError(
            "the model is not built",
            where="convert(model)",
            found=f"unbuilt: {', '.join(unbuilt)}",
            fix="give it an input shape (keras.Input), call build(input_shape), or call it on a batch first",
        )


def _check_storage(parts: Iterable[Part], policy: Policy) -> None:
    """Before anything is changed: is every variable stored as the policy says?"""
    for part in filter(can_change, parts):
        allowed = {policy.param, "float32"} if part.is_head or part.border.is_crossed else {policy.param}
        is_free = part.is_head or part.border.is_crossed or (part.op_class == "inner" and part.in_code)
        if part.op_class in ("full", "inner") and not is_free:
            allowed = {"float32"}
        inside = {id(variable) for child in children(part.layer) for variable in child.weights}
        own = [variable.dtype for variable in part.layer.weights if id(variable) not in inside]
        wrong = sorted(set(own) & set(CHANGEABLE) - allowed)
        if wrong:
            raise _wrong_storage(part, wrong, allowed, policy)


def _wrong_storage(part: Part, found: list[str], allowed: set[str], policy: Policy) -> UnsupportedError:
    build = f"keras.config.set_dtype_policy({keras_policy(policy)!r}) before the model is made"
    return UnsupportedError(
        "Keras cannot change the format of variables in place",
        where=f"convert(model, {str(policy)!r}), layer {part.path!r}",
        found=f"variables stored in {', '.join(found)}",
        allowed=", ".join(sorted(allowed)),
        fix=f'{build}; layers that stay in float32 take dtype="float32"',
    )


def _forget_compiled(model: Any) -> None:
    """`fit`, `evaluate` and `predict` trace again; what they traced has the old dtypes."""
    from polyamp.backends.keras.steps.averages import guard_anew  # which asks here what a model was converted to

    model.train_function = model.test_function = model.predict_function = None
    guard_anew(model)


def _report(model: Any, parts: list[Part], policy: Policy) -> None:
    _report_unused(model, parts, policy)
    _report_unscaled(model, parts, policy)
    if not format_of(policy.compute).is_low:
        return
    leaves = [part for part in parts if not children(part.layer)]
    if not any(part.layer.compute_dtype == policy.compute for part in leaves):
        why = "all of its layers stay in float32"
        report_nothing_lowered("convert", policy.compute, where=repr(model.name), why=why, stacklevel=3)
    is_cast = any(part.border.is_crossed and part.border.outside == "float32" for part in parts)
    is_ruled = any(rule.op_class == "full" for rule in policy.rules)
    is_head_known = is_cast or is_ruled or any(part.is_head for part in leaves)
    if policy.output == "float32" and not is_head_known:
        warn_once(
            f"{model.name!r} makes its outputs in Python code, so convert cannot tell which layer gives them: they may "
            'come in 16 bits. Name that layer in a rule, rules={"its_name": "full"}, or cast the outputs to float32.'
        )


def _report_unscaled(model: Any, parts: list[Part], policy: Policy) -> None:
    """Gradients in float16 want a scaled loss, and Keras sees to that by itself in one case alone."""
    own_choice = policy.compute == "float16" and not policy.loss_scale.check
    if own_choice or not any(part.layer.compute_dtype == "float16" for part in parts if not children(part.layer)):
        return
    optimizer = getattr(model, "optimizer", None)  # there once the model is compiled
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        return
    remedy = _REMEDY
    if optimizer is not None and _compiles_itself(model):
        _waiting.add(model)
    elif optimizer is not None:
        warn_once(_compiled_with(model))
    elif model.dtype_policy.name != "mixed_float16":
        warn_once(
            f"{model.name!r} has layers in float16 but is {model.dtype_policy.name} itself, and Keras' compile scales "
            f"the loss only where that is mixed_float16: {remedy}"
        )
    elif model._inbound_nodes:  # nothing public tells that it was called in another one
        warn_once(
            f"{model.name!r} is part of a larger model, and Keras' compile scales the loss only where that one is "
            f"mixed_float16 itself: {remedy.replace('Compile it', 'Compile the larger one')}"
        )


_REMEDY = "gradients in float16 underflow. Compile it with polyamp.wrap_optimizer(optimizer, policy)."


def _compiled_with(model: Any) -> str:
    kind = type(model.optimizer).__name__
    return f"{model.name!r} is compiled with {kind}, which does not scale the loss: {_REMEDY}"


def _compiles_itself(model: Any) -> bool:
    """Whether a model's class compiles it, as tasks of keras_hub do when they are made, and it was not trained yet."""
    owner = next(kind for kind in keras.Model.__mro__ if "compile" in vars(kind))
    return type(model).compile is not owner.compile and int(model.optimizer.iterations) == 0


def report_waiting(model: Any) -> None:
    """Say of a model that compiled itself, when it trains, that its optimizer scales no loss."""
    if model in _waiting:
        _waiting.discard(model)
        if model.optimizer is not None and not isinstance(model.optimizer, keras.optimizers.LossScaleOptimizer):
            warn_once(_compiled_with(model))


def _report_unused(model: Any, parts: list[Part], policy: Policy) -> None:
    unused = [rule for rule in policy.own_rules if not any(matches(rule, part.operation, part.path) for part in parts)]
    report_unused(unused, where=repr(model.name), paths="a layer", of=policy, stacklevel=3)
