"""The layers of a model as parts: what each does, its class, what it computes in, and Keras' dtype policy for that."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import keras

from polyamp.backends.keras.borders import Border, border_of, is_wide_inside, norm_of
from polyamp.backends.keras.operations import ACTIVATIONS, OPERATIONS
from polyamp.backends.keras.unstable import layers_inside
from polyamp.errors import UnsupportedError
from polyamp.operations import OPERATIONS as TABLE
from polyamp.policy import Policy
from polyamp.rules import Rule

CHANGEABLE = ("float32", "float16", "bfloat16")
KERAS_POLICIES = {
    ("float32", "float32"): "float32",
    ("float32", "float16"): "mixed_float16",
    ("float32", "bfloat16"): "mixed_bfloat16",
    ("float16", "float16"): "float16",
    ("bfloat16", "bfloat16"): "bfloat16",
}


class Part(NamedTuple):
    """One layer: where it stands, what it does, and what was decided.

    Attributes:
        path: its names from the model down.
        layer: itself.
        operation: the canonical name.
        is_head: whether the model's outputs come from it.
        op_class: its class.
        border: what it computes in and gives back.
        in_code: whether Python code calls it, and not a graph of layers.
    """

    path: str
    layer: Any
    operation: str
    is_head: bool
    op_class: str
    border: Border
    in_code: bool


def parts_of(
    layer: Any,
    policy: Policy,
    choose: Callable[[Policy, str, Any, str, bool], str],
    above: str = "",
    gives_output: bool = True,
    outside: str = "",
    depth: int = 0,
) -> Iterator[Part]:
    """Return a layer and those inside; ``outside`` is the format that the Python code computes in which calls it."""
    path = f"{above}/{layer.name}" if above else layer.name
    operation = _operation(layer)
    is_head = gives_output and not isinstance(layer, keras.Model)
    if is_head and _runs_code(layer) and not _is_named(policy, operation, path) and policy.output == "float32":
        is_head, outside = False, "float32"  # its code runs in 16 bits, and what it gives is cast
    op_class = choose(policy, operation, layer, path, is_head)
    inside = _inside(layer, operation, op_class, policy)
    if depth == 1 and _is_named(policy, "", path):
        outside = ""  # the user says what a model's own code is given, such as its head
    returned = policy.compute if op_class == "inner" and inside == "float32" and _can_compute(layer) else ""
    border = Border(inside, outside or returned)
    yield Part(path, layer, operation, is_head, op_class, border, bool(outside))
    heads = _heads(layer) if gives_output else []
    ends, own = _ends(layer), inside if inside in CHANGEABLE else ""
    around = own if _runs_code(layer) else outside
    for child in children(layer):
        given = around if _runs_code(layer) or any(child is end for end in ends) else ""
        yield from parts_of(child, policy, choose, path, any(child is head for head in heads), given, depth + 1)


def _inside(layer: Any, operation: str, op_class: str, policy: Policy) -> str:
    if op_class == "keep" or not _can_compute(layer):
        return border_of(layer).inside
    if op_class == "inner" and not is_wide_inside(layer, operation):
        return "float32"
    return "float32" if op_class == "full" else policy.compute


def _runs_code(layer: Any) -> bool:
    """Whether a layer's own Python code calls the layers inside, and casts nothing: neither a graph nor Keras' code."""
    if not children(layer) or isinstance(layer, keras.Sequential) or getattr(layer, "output_names", None):
        return False
    return type(layer).__module__.partition(".")[0] != "keras"


def _ends(layer: Any) -> list[Any]:
    """The layers that give what a model of layers gives to whoever calls it."""
    return _heads(layer) if isinstance(layer, keras.Model) else []


def _heads(layer: Any) -> list[Any]:
    """The layers directly inside that give a layer's outputs; none where its own Python code makes them."""
    if isinstance(layer, keras.Sequential):
        return list(layer.layers[-1:])
    if isinstance(layer, keras.Model):
        names = getattr(layer, "output_names", None) or ()  # of functional models
        return [child for child in layer.layers if child.name in names]
    return children(layer) if type(layer).__module__.partition(".")[0] == "keras" else []


def _operation(layer: Any) -> str:
    """The canonical name of what a layer does; empty for what the table does not know, such as a user's own layer."""
    if isinstance(layer, keras.layers.Activation):
        return ACTIVATIONS.get(getattr(layer.activation, "__name__", ""), "")
    names = (kind.__name__ for kind in type(layer).__mro__)
    return next((OPERATIONS[name] for name in names if name in OPERATIONS), "") or norm_of(layer)


def op_class_of(policy: Policy, operation: str, layer: Any, path: str, is_head: bool) -> str:
    """Return the class of what a layer does: a rule's, float32 for what gives the outputs, else the table's."""
    rule = next((rule for rule in policy.rules if matches(rule, operation, path)), None)
    if rule is not None:
        return policy.decide(operation, path).op_class if rule.matches(operation, path) else "full"
    if is_head and policy.output == "float32":
        return "full"
    return policy.decide(operation, path).op_class if operation else "follow"


def matches(rule: Rule, operation: str, path: str) -> bool:
    """Whether a rule is about a layer, or keeps in float32 an operation that the layer computes with."""
    *_, last = rule.pattern.replace(".", "/").split("/")
    names_inside = rule.op_class == "full" and last in TABLE and last != rule.pattern
    return rule.matches(operation, path) or (names_inside and rule.matches(last, path))


def _is_named(policy: Policy, operation: str, path: str) -> bool:
    return any(rule.matches(operation, path) for rule in policy.own_rules)


def _can_compute(layer: Any) -> bool:
    """Return whether what a layer computes in is ours to say."""
    return layer.quantization_mode is None and layer.compute_dtype in CHANGEABLE


def can_change(part: Part) -> bool:
    """Return whether a part computes in what polyamp says."""
    return part.op_class != "keep" and _can_compute(part.layer)


def policy_of(part: Part, policy: Policy) -> str:
    """Return the dtype policy that Keras knows, under which a layer computes as was decided, border included."""
    inside, outside = part.border
    if inside == "float32" and not (part.in_code and part.border.is_crossed):
        return "float32"
    given = outside or inside
    is_wide = inside == "float32" or part.op_class == "inner"
    if is_wide and given != "float32" and any(variable.dtype == "float32" for variable in part.layer.weights):
        return f"mixed_{given}"
    return keras_policy(policy)


def keras_policy(policy: Policy) -> str:
    """Return the name of the dtype policy that stores and computes as a policy does."""
    name = KERAS_POLICIES.get((policy.param, policy.compute))
    if name is None:
        raise UnsupportedError(
            "Keras has no dtype policy for these formats",
            where="convert(model, policy)",
            found=f"param {policy.param}, compute {policy.compute}",
            allowed=", ".join(KERAS_POLICIES.values()),
            fix='use one of those; for float8, Keras has model.quantize("float8")',
        )
    return name


def walk(layer: Any) -> Iterator[Any]:
    """Return a layer and all layers inside, from the outside in."""
    yield layer
    for child in children(layer):
        yield from walk(child)


def children(layer: Any) -> list[Any]:
    """Return the layers directly inside a layer, without the inputs of graphs."""
    return [child for child in layers_inside(layer) if not isinstance(child, keras.layers.InputLayer)]
