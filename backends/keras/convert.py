"""Sets the dtype policies of a built model's layers as a polyamp policy and its rules say."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from weakref import WeakSet

import keras

from polyamp.backends.keras.borders import Border, border_of, casts_inside, norm_of, set_border
from polyamp.backends.keras.operations import ACTIVATIONS, OPERATIONS
from polyamp.backends.keras.unstable import layers_inside
from polyamp.errors import InvalidTypeError, UnsupportedError, UsageError, warn_once
from polyamp.formats import format_of
from polyamp.operations import OPERATIONS as TABLE
from polyamp.policy import Policy
from polyamp.policy import policy as make_policy
from polyamp.rules import Rule

_converted: WeakSet[Any] = WeakSet()
_waiting: WeakSet[Any] = WeakSet()  # models that compiled themselves, of which something is to be said when they train
_CHANGEABLE = ("float32", "float16", "bfloat16")


class _Part(NamedTuple):
    """One layer: where it stands, what it does, whether the model's outputs come from it, its class and its border."""

    path: str
    layer: Any
    operation: str
    is_head: bool
    op_class: str
    border: Border


def convert(model: Any, policy: Policy) -> Any:
    """Set what each layer of a built model computes in, and compile anew what was traced before.

    Layers compute in ``policy.compute``, except those that the rules hold in float32 (norms, softmax) and, where
    ``policy.output`` is float32, the layers that give the model's outputs. A rule's path is the layer's names from the
    model down, such as ``encoder/attention/query``. Inside a ``MultiHeadAttention`` without dropout, Keras multiplies
    the values with the float32 softmax in float32; ``rules={"softmax": "lower"}`` runs both in 16 bits.

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
    ['bfloat16', 'float32', 'float32']

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
    parts = list(_parts(model, policy, _op_class))
    _check_storage(parts, policy)
    _set(parts, policy)
    for container in (layer for layer in _walk(model) if isinstance(layer, keras.Model)):
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
    parts = [part for part in _parts(model, tried, _amended_class) if _can_change(part)]
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
    layers = (layer for layer in _walk(model) if format_of(border_of(layer).inside).is_low)
    names = (layer.dtype_policy.name for layer in layers)
    return next((name for name in names if name in _KERAS_POLICIES.values()), None)


def _set(parts: Iterable[_Part], policy: Policy) -> None:
    for layer, name, border in [(one.layer, _policy_of(one, policy), one.border) for one in parts if _can_change(one)]:
        layer.dtype_policy = name
        set_border(layer, Border(border.inside) if casts_inside(layer) else border)


def _amended_class(policy: Policy, operation: str, layer: Any, path: str, is_head: bool) -> str:
    """The class that the rules say, else that of what the layer computes in now."""
    if any(_matches(rule, operation, path) for rule in policy.own_rules):
        return _op_class(policy, operation, layer, path, is_head)
    return "lower" if format_of(border_of(layer).inside).is_low else "full"


def _check_model(model: Any) -> None:
    if not isinstance(model, keras.Model):
        raise InvalidTypeError(
            "no Keras model",
            where="convert(model)",
            found=f"{type(model).__module__}.{type(model).__qualname__}",
            allowed="a built keras.Model",
            fix="give the model itself; tensors are cast by policy.cast_to_compute(tree)",
        )
    unbuilt = [layer.name for layer in _walk(model) if not layer.built]
    if unbuilt:
        raise UsageError(
            "the model is not built",
            where="convert(model)",
            found=f"unbuilt: {', '.join(unbuilt)}",
            fix="give it an input shape (keras.Input), call build(input_shape), or call it on a batch first",
        )


def _walk(layer: Any) -> Iterator[Any]:
    yield layer
    for child in _children(layer):
        yield from _walk(child)


def _children(layer: Any) -> list[Any]:
    return [child for child in layers_inside(layer) if not isinstance(child, keras.layers.InputLayer)]


def _parts(
    layer: Any,
    policy: Policy,
    choose: Callable[[Policy, str, Any, str, bool], str],
    above: str = "",
    gives_output: bool = True,
    outside: str = "",
    depth: int = 0,
) -> Iterator[_Part]:
    """A layer and those inside; ``outside`` is the format that the Python code computes in which calls the layer."""
    path = f"{above}/{layer.name}" if above else layer.name
    operation = _operation(layer)
    is_head = gives_output and not isinstance(layer, keras.Model)
    if is_head and _runs_code(layer) and not _is_named(policy, operation, path) and policy.output == "float32":
        is_head, outside = False, "float32"  # its code runs in 16 bits, and what it gives is cast
    op_class = choose(policy, operation, layer, path, is_head)
    inside = _inside(layer, op_class, policy)
    if depth == 1 and _is_named(policy, "", path):
        outside = ""  # the user says what a model's own code is given, such as its head
    yield _Part(path, layer, operation, is_head, op_class, Border(inside, outside))
    heads = _heads(layer) if gives_output else []
    ends, own = _ends(layer), inside if inside in _CHANGEABLE else ""
    around = own if _runs_code(layer) else outside
    for child in _children(layer):
        given = around if _runs_code(layer) or any(child is end for end in ends) else ""
        yield from _parts(child, policy, choose, path, any(child is head for head in heads), given, depth + 1)


def _inside(layer: Any, op_class: str, policy: Policy) -> str:
    if op_class == "keep" or layer.quantization_mode is not None or layer.compute_dtype not in _CHANGEABLE:
        return border_of(layer).inside
    return "float32" if op_class == "full" else policy.compute


def _runs_code(layer: Any) -> bool:
    """Whether a layer's own Python code calls the layers inside, and casts nothing: neither a graph nor Keras' code."""
    if not _children(layer) or isinstance(layer, keras.Sequential) or getattr(layer, "output_names", None):
        return False
    return type(layer).__module__.partition(".")[0] != "keras"


def _ends(layer: Any) -> list[Any]:
    """The layers that give what a model of layers gives to whoever calls it."""
    return _heads(layer) if isinstance(layer, keras.Model) else []


def _policy_of(part: _Part, policy: Policy) -> str:
    """The dtype policy that Keras knows, under which a layer computes as was decided, border included."""
    inside, outside = part.border
    if not part.border.is_crossed:
        return "float32" if inside == "float32" else _keras_policy(policy)
    if inside == "float32" and any(variable.dtype == "float32" for variable in part.layer.weights):
        return f"mixed_{outside}"
    return _keras_policy(policy)


def _operation(layer: Any) -> str:
    """The canonical name of what a layer does; empty for what the table does not know, such as a user's own layer."""
    if isinstance(layer, keras.layers.Activation):
        return ACTIVATIONS.get(getattr(layer.activation, "__name__", ""), "")
    names = (kind.__name__ for kind in type(layer).__mro__)
    return next((OPERATIONS[name] for name in names if name in OPERATIONS), "") or norm_of(layer)


def _op_class(policy: Policy, operation: str, layer: Any, path: str, is_head: bool) -> str:
    rule = next((rule for rule in policy.rules if _matches(rule, operation, path)), None)
    if rule is not None:
        return policy.decide(operation, path).op_class if rule.matches(operation, path) else "full"
    if is_head and policy.output == "float32":
        return "full"
    return policy.decide(operation, path).op_class if operation else "follow"


def _matches(rule: Rule, operation: str, path: str) -> bool:
    """Whether a rule is about a layer, or keeps in float32 an operation that the layer computes with."""
    *_, last = rule.pattern.replace(".", "/").split("/")
    names_inside = rule.op_class == "full" and last in TABLE and last != rule.pattern
    return rule.matches(operation, path) or (names_inside and rule.matches(last, path))


def _is_named(policy: Policy, operation: str, path: str) -> bool:
    return any(rule.matches(operation, path) for rule in policy.own_rules)


def _heads(layer: Any) -> list[Any]:
    """The layers directly inside that give a layer's outputs; none where its own Python code makes them."""
    if isinstance(layer, keras.Sequential):
        return list(layer.layers[-1:])
    if isinstance(layer, keras.Model):
        names = getattr(layer, "output_names", None) or ()  # of functional models
        return [child for child in layer.layers if child.name in names]
    return _children(layer) if type(layer).__module__.partition(".")[0] == "keras" else []


def _can_change(part: _Part) -> bool:
    layer = part.layer
    return part.op_class != "keep" and layer.quantization_mode is None and layer.compute_dtype in _CHANGEABLE


_KERAS_POLICIES = {
    ("float32", "float32"): "float32",
    ("float32", "float16"): "mixed_float16",
    ("float32", "bfloat16"): "mixed_bfloat16",
    ("float16", "float16"): "float16",
    ("bfloat16", "bfloat16"): "bfloat16",
}


def _keras_policy(policy: Policy) -> str:
    name = _KERAS_POLICIES.get((policy.param, policy.compute))
    if name is None:
        raise UnsupportedError(
            "Keras has no dtype policy for these formats",
            where="convert(model, policy)",
            found=f"param {policy.param}, compute {policy.compute}",
            allowed=", ".join(_KERAS_POLICIES.values()),
            fix='use one of those; for float8, Keras has model.quantize("float8")',
        )
    return name


def _check_storage(parts: Iterable[_Part], policy: Policy) -> None:
    """Before anything is changed: is every variable stored as the policy says?"""
    for part in filter(_can_change, parts):
        allowed = {policy.param, "float32"} if part.is_head or part.border.is_crossed else {policy.param}
        if part.op_class == "full" and not (part.is_head or part.border.is_crossed):
            allowed = {"float32"}
        inside = {id(variable) for child in _children(part.layer) for variable in child.weights}
        own = [variable.dtype for variable in part.layer.weights if id(variable) not in inside]
        wrong = sorted(set(own) & set(_CHANGEABLE) - allowed)
        if wrong:
            raise _wrong_storage(part, wrong, allowed, policy)


def _wrong_storage(part: _Part, found: list[str], allowed: set[str], policy: Policy) -> UnsupportedError:
    build = f"keras.config.set_dtype_policy({_keras_policy(policy)!r}) before the model is made"
    return UnsupportedError(
        "Keras cannot change the format of variables in place",
        where=f"convert(model, {str(policy)!r}), layer {part.path!r}",
        found=f"variables stored in {', '.join(found)}",
        allowed=", ".join(sorted(allowed)),
        fix=f'{build}; layers that stay in float32 take dtype="float32"',
    )


def _forget_compiled(model: Any) -> None:
    """`fit`, `evaluate` and `predict` trace again; what they traced has the old dtypes."""
    from polyamp.backends.keras.statistics import guard_anew  # which asks here what a model was converted to

    model.train_function = model.test_function = model.predict_function = None
    guard_anew(model)


def _report(model: Any, parts: list[_Part], policy: Policy) -> None:
    _report_unused(model, parts, policy)
    _report_unscaled(model, parts, policy)
    if not format_of(policy.compute).is_low:
        return
    leaves = [part for part in parts if not _children(part.layer)]
    if not any(part.layer.compute_dtype == policy.compute for part in leaves):
        warn_once(f"policy {policy} changes nothing in {model.name!r}: all of its layers stay in float32.")
    is_cast = any(part.border.is_crossed and part.border.outside == "float32" for part in parts)
    is_ruled = any(rule.op_class == "full" for rule in policy.rules)
    is_head_known = is_cast or is_ruled or any(part.is_head for part in leaves)
    if policy.output == "float32" and not is_head_known:
        warn_once(
            f"{model.name!r} makes its outputs in Python code, so convert cannot tell which layer gives them: they may "
            'come in 16 bits. Name that layer in a rule, rules={"its_name": "full"}, or cast the outputs to float32.'
        )


def _report_unscaled(model: Any, parts: list[_Part], policy: Policy) -> None:
    """Gradients in float16 want a scaled loss, and Keras sees to that by itself in one case alone."""
    own_choice = policy.compute == "float16" and not policy.loss_scale.check
    if own_choice or not any(part.layer.compute_dtype == "float16" for part in parts if not _children(part.layer)):
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


def _report_unused(model: Any, parts: list[_Part], policy: Policy) -> None:
    for rule in policy.own_rules:
        if not any(_matches(rule, part.operation, part.path) for part in parts):
            warn_once(
                f"rule {rule.pattern!r} matches no layer of {model.name!r}. Give names of layers from the model down, "
                "joined by '/', or the canonical name of what a layer does."
            )
