"""Sets the dtype policies of a built model's layers by a polyamp policy and its rules.

The work is in `layers`: each layer's class and formats are decided, then set. This file checks the model before, and
warns afterwards about rules that match no layer and about policies that change nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import keras

from polyamp.backends.keras.guard import CONVERTED, report_unscaled
from polyamp.backends.keras.layers import (
    Part,
    can_change,
    children,
    keras_policy,
    matches,
    own_weights,
    parts_of,
    set_formats,
    walk,
)
from polyamp.backends.keras.losses import widen_losses
from polyamp.backends.keras.native import CASTABLE, leave_unconverted
from polyamp.errors import InvalidTypeError, UnsupportedError, UsageError, kind_of, warn_once
from polyamp.formats import format_of
from polyamp.policies import Policy
from polyamp.policies import policy as make_policy
from polyamp.without_effect import report_nothing_lowered, report_unused


def convert(model: Any, policy: Policy | str) -> Any:
    """Set the format in which each layer of a built model computes; functions that ``fit`` compiled are made again.

    Layers compute in ``policy.compute``, except those that the rules keep in float32 (softmax) and, if
    ``policy.output`` is float32, the layers that return the model's outputs. Layers of class ``inner`` (norms, average
    pooling) compute in float32, from unrounded data, and return ``policy.compute``. A rule's path is the layer's names
    from the model down, such as ``encoder/attention/query``. Inside a ``MultiHeadAttention`` without dropout, Keras
    multiplies the values with the float32 softmax in float32; ``rules={"softmax": "lower"}`` runs both in 16 bits.

    Variables keep the format in which the model was built. If layers compute in float16, wrap the optimizer too, with
    `polyamp.wrap_optimizer`: a warning reports one that does not scale the loss. Keras' ``compile`` wraps an optimizer
    by itself only for a model whose own policy is ``mixed_float16``. Your own ``tf.function`` or ``jax.jit`` must be
    made again.

    >>> import polyamp
    >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(8), keras.layers.LayerNormalization(),
    ...     keras.layers.Dense(2)])
    >>> model = convert(model, polyamp.policy("mixed_bfloat16"))
    >>> [layer.compute_dtype for layer in model.layers]
    ['bfloat16', 'bfloat16', 'float32']

    Args:
        model: functional, sequential or subclassed; changed in place.
        policy: a policy or its name; its ``param`` must be the format in which the variables are stored.

    Returns:
        The same model.

    Raises:
        InvalidTypeError: the model is not a Keras model.
        UsageError: the model is not built.
        UnsupportedError: variables are stored in another format than ``policy.param``, which Keras cannot change in
            place; or Keras has no dtype policy for these formats. Nothing is changed.
    """
    _check_model(model)
    leave_unconverted()
    policy = make_policy(policy)
    parts = parts_of(model, policy)
    _check_storage(parts, policy)
    set_formats(parts, policy)
    for part in parts:
        widen_losses(part.layer)
    for container in (layer for layer in walk(model) if isinstance(layer, keras.Model)):
        # `fit`, `evaluate` and `predict` trace again, since their traces have the old formats.
        container.train_function = container.test_function = container.predict_function = None
    _report(model, parts, policy)
    CONVERTED[model] = policy
    if type(model).compile is keras.Model.compile:  # tasks of keras_hub compile themselves, and are compiled again
        report_unscaled(model)
    return model


def _check_model(model: Any) -> None:
    if not isinstance(model, keras.Model):
        raise InvalidTypeError(
            "convert needs a Keras model",
            where="convert(model)",
            found=kind_of(model),
            allowed="a built keras.Model",
            fix="pass the model itself; policy.cast_to_compute(tree) casts tensors",
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
    """Check, before anything is changed, that every variable is stored in an allowed format."""
    for part in filter(can_change, parts):
        allowed = {policy.param, "float32"} if part.is_head or part.border.is_crossed else {policy.param}
        is_free = part.is_head or part.border.is_crossed or (part.op_class == "inner" and part.in_code)
        if part.op_class in ("full", "inner") and not is_free:
            allowed = {"float32"}
        wrong = sorted({variable.dtype for variable in own_weights(part.layer)} & set(CASTABLE) - allowed)
        if wrong:
            raise UnsupportedError(
                "Keras cannot change the format of variables in place",
                where=f"convert(model, {str(policy)!r}), layer {part.path!r}",
                found=f"variables stored in {', '.join(wrong)}",
                allowed=", ".join(sorted(allowed)),
                fix=f"keras.config.set_dtype_policy({keras_policy(policy)!r}) before the model is made; "
                'layers that stay in float32 take dtype="float32"',
            )


def _report(model: Any, parts: list[Part], policy: Policy) -> None:
    leaves = [part for part in parts if not children(part.layer)]
    unused = [rule for rule in policy.own_rules if not any(matches(rule, part.operation, part.path) for part in parts)]
    report_unused(unused, where=repr(model.name), paths="a layer", of=policy)
    if not format_of(policy.compute).is_low:
        return
    if not any(part.layer.compute_dtype == policy.compute for part in leaves):
        why = "all of its layers stay in float32"
        report_nothing_lowered("convert", policy.compute, where=repr(model.name), why=why)
    is_cast = any(part.border.is_crossed and part.border.outside == "float32" for part in parts)
    is_ruled = any(rule.op_class == "full" for rule in policy.rules)
    is_head_known = is_cast or is_ruled or any(part.is_head for part in leaves)
    if policy.output == "float32" and not is_head_known:
        warn_once(
            f"{model.name!r} makes its outputs in Python code, so convert cannot tell which layer returns them: they "
            'may have 16 bits. Name that layer in a rule, rules={"its_name": "full"}, or cast the outputs to float32.'
        )
