"""The formats that each layer of a model computes in and returns: decided from a policy, and set on the layer.

The class comes from a policy's rules, else from the table of operations, as for an operation in a graph. A layer whose
outputs are the model's is of class ``full`` under a policy with float32 outputs; so are all layers that preprocess
data. A layer without products and weights stays in float32 before the first that computes in 16 bits: the user's data
are not rounded until then, since an index beyond 2,048 would become another one. The border follows from the class, and
from the code that calls the layer: Python code does not cast, so a layer that it calls returns the format of that code.

For example, a float16 policy makes of ``Dense -> LayerNormalization -> Dense``: the first ``Dense`` ``lower``
(float16); the norm ``inner`` (float32 inside, float16 outside); the last ``Dense``, which returns the model's output,
``full`` (float32).

Keras casts the inputs of layers and of ``keras.ops``, so in a functional model a float32 layer can follow a 16-bit one
without a cast of its own. Python code, such as ``x + self.norm(x)`` in a user's layer, does not cast, and TensorFlow
does not add float32 to float16. So a layer that such code calls returns the format of that code. Keras' own norms do
the same under Keras' own policies.

For example, a user's RMS norm in a float16 block has ``Border("float32", "float16")``: its ``call`` is replaced by a
`Crossing`, which casts the inputs to float32, calls the original with float32 weights, and casts the result to float16.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import keras
from keras import ops
from keras.backend import standardize_dtype

from polyamp.backends.keras.losses import adds_losses
from polyamp.backends.keras.native import BACKEND, CASTABLE, mixing_formats
from polyamp.backends.keras.operations import ACTIVATIONS, OPERATIONS
from polyamp.backends.keras.unstable import autocast_variables, calls_in, is_preprocessing, layers_inside
from polyamp.errors import UnsupportedError
from polyamp.formats import format_of
from polyamp.operations import OPERATIONS as TABLE
from polyamp.policies import Policy
from polyamp.policies import policy as make_policy
from polyamp.rules import Rule

_NORM = re.compile(r"(batch|layer|group|instance|rms|unit)?_?norm(alization|alize|alizer)?(_?\d+d)?$", re.IGNORECASE)
_NORMS = {"batch": "batch_norm", "layer": "layer_norm", "group": "group_norm"}
_CAST_INSIDE = ("BatchNormalization", "LayerNormalization", "GroupNormalization")


def operation_of(layer: Any) -> str:
    """Return the canonical name of a layer's work; empty if the table does not have it, as for most user layers."""
    if isinstance(layer, keras.layers.Activation):
        return ACTIVATIONS.get(getattr(layer.activation, "__name__", ""), "")
    names = (kind.__name__ for kind in type(layer).__mro__)
    return next((OPERATIONS[name] for name in names if name in OPERATIONS), "") or norm_of(layer)


def norm_of(layer: Any) -> str:
    """Return the canonical name of a user's own normalization layer, known by its class; empty for other layers."""
    if layers_inside(layer):
        return ""
    for kind in type(layer).__mro__[: type(layer).__mro__.index(keras.layers.Layer)]:
        if found := _NORM.search(kind.__name__):
            return _NORMS.get((found[1] or "").lower(), "rms_norm")
    return ""


def is_from_keras(layer: Any) -> bool:
    """Return whether a layer's class is part of Keras. The code of such classes casts the inputs of their inner layers.

    >>> is_from_keras(keras.layers.Dense(2))
    True
    """
    return type(layer).__module__.partition(".")[0] == "keras"


def has_users_code(layer: Any) -> bool:
    """Return whether a layer's ``call`` runs code that is not Keras' own."""
    function = getattr(layer, "function" if isinstance(layer, keras.layers.Lambda) else "activation", None)
    is_own = function is None or str(getattr(function, "__module__", "keras")).partition(".")[0] == "keras"
    return not (is_from_keras(layer) and is_own)


def casts_inside(layer: Any) -> bool:
    """Return whether Keras' code of a layer computes in float32 and returns 16 bits under a 16-bit policy."""
    kinds = (kind for kind in type(layer).__mro__ if kind.__module__.partition(".")[0] == "keras")
    own = next(kinds)
    return own.__name__ in _CAST_INSIDE and type(layer).call is vars(own).get("call")


def is_wide_inside(layer: Any, operation: str) -> bool:
    """Return whether a layer with 16-bit inputs computes in float32 by itself, and returns 16 bits."""
    # TensorFlow's average pooling on CPUs and XLA's windows add up in the format of their data; torch's kernels use
    # float32.
    pools = operation == "avg_pool" and BACKEND == "torch"
    return pools or operation in ("sigmoid", "tanh") or casts_inside(layer)


def can_compute(layer: Any) -> bool:
    """Return whether polyamp can choose a layer's format: not that of a quantized or float64 layer."""
    return layer.quantization_mode is None and layer.compute_dtype in CASTABLE


def walk(layer: Any) -> Iterator[Any]:
    """Return a layer and all layers inside, outer ones first."""
    yield layer
    for child in children(layer):
        yield from walk(child)


def children(layer: Any) -> list[Any]:
    """Return the layers directly inside a layer, without the input layers of functional models."""
    return [child for child in layers_inside(layer) if not isinstance(child, keras.layers.InputLayer)]


def is_graph(layer: Any) -> bool:
    """Return whether a layer is a sequential or functional model: Keras then casts between the layers inside."""
    return isinstance(layer, keras.Sequential) or bool(getattr(layer, "output_names", None))


def runs_code(layer: Any) -> bool:
    """Return whether a layer calls the layers inside from a user's Python code, which casts nothing."""
    return bool(children(layer)) and not is_graph(layer) and not is_from_keras(layer)


def heads(layer: Any) -> list[Any]:
    """Return the inner layers whose outputs are the layer's own; none if its Python code makes the outputs."""
    if isinstance(layer, keras.Sequential):
        return list(layer.layers[-1:])
    if isinstance(layer, keras.Model):
        names = getattr(layer, "output_names", None) or ()  # only functional models have names
        return [child for child in layer.layers if child.name in names]
    return children(layer) if is_from_keras(layer) else []


def own_weights(layer: Any) -> list[Any]:
    """Return the variables of a layer that no layer inside has."""
    inside = {id(variable) for child in children(layer) for variable in child.weights}
    return [variable for variable in layer.weights if id(variable) not in inside]


class Border(NamedTuple):
    """The formats on the two sides of a layer's border."""

    inside: str  # the format that the layer computes in
    outside: str = ""  # the format of the layer's outputs; empty if the code that uses the outputs casts them
    casts: bool = True  # whether float32 inputs are cast before the layer's code sees them

    @property
    def is_crossed(self) -> bool:
        """Whether outputs have to be cast."""
        return bool(self.outside) and self.outside != self.inside


class Crossing:
    """The ``call`` of a layer with a border around it; it takes the place of the layer's method."""

    # Keras does not save or clone it: a loaded layer computes by its Keras policy.

    def __init__(self, layer: Any, border: Border) -> None:
        self.call, self.border, self.autocast = layer.call, border, layer.autocast
        self.name, self.mixes = layer.name, _may_mix(layer, border)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the layer in the inside format, and return its outputs in the outside format."""
        inside, outside, casts = self.border
        if inside == "float32":
            args, kwargs = _cast((args, kwargs), inside)
        scope = autocast_variables(inside) if inside == "float32" or not casts else nullcontext()
        with scope, mixing_formats(self.name) if self.mixes else nullcontext():
            outputs = self.call(*args, **kwargs)
        return _cast(outputs, outside) if self.border.is_crossed else outputs


def _may_mix(layer: Any, border: Border) -> bool:
    """Return whether a layer's code can meet both float32 and 16 bits, which TensorFlow does not promote."""
    return BACKEND == "tensorflow" and border.inside != "float32" and (not border.casts or has_users_code(layer))


def set_border(layer: Any, border: Border) -> None:
    """Make a layer's ``call`` cast at a border; if the border changes nothing, remove one that was set before."""
    if isinstance(before := layer.__dict__.get("call"), Crossing):
        layer.autocast = before.autocast
        del layer.__dict__["call"]
    if border.is_crossed or not border.casts or _may_mix(layer, border):
        layer.call = Crossing(layer, border)
    if border.is_crossed or not border.casts:  # else Keras would round float32 inputs first
        layer.autocast = layer.autocast and border.casts and border.inside != "float32"


def border_of(layer: Any) -> Border:
    """Return the format that a layer computes in now, and the one it returns."""
    call = layer.__dict__.get("call")
    return call.border if isinstance(call, Crossing) else Border(layer.compute_dtype)


def _cast(tree: Any, format_name: str) -> Any:
    return keras.tree.map_structure(lambda leaf: _cast_leaf(leaf, format_name), tree)


def _cast_leaf(leaf: Any, format_name: str) -> Any:
    is_tensor = ops.is_tensor(leaf) or isinstance(leaf, keras.KerasTensor)
    if not is_tensor or standardize_dtype(leaf.dtype) not in CASTABLE or isinstance(leaf, keras.Variable):
        return leaf
    return leaf if standardize_dtype(leaf.dtype) == format_name else ops.cast(leaf, format_name)


Choose = Callable[[Policy, str, Any, str, bool], str]
"""Chooses a layer's class; see `op_class_of`."""


class Part(NamedTuple):
    """One layer and the decisions for it."""

    path: str  # the names from the model down to the layer
    layer: Any  # the layer
    operation: str  # the canonical name of its work
    is_head: bool  # whether the model's outputs come from it
    op_class: str  # its class
    border: Border  # the formats that it computes in and returns
    in_code: bool  # whether Python code calls it, and not a graph of layers


def op_class_of(policy: Policy, operation: str, layer: Any, path: str, is_head: bool) -> str:
    """Return the class of a layer: by a rule, else ``full`` for a head, else by the table."""
    rule = next((rule for rule in policy.rules if matches(rule, operation, path)), None)
    if rule is not None:
        return policy.decide(operation, path).op_class if rule.matches(operation, path) else "full"
    if is_preprocessing(layer) or (is_head and policy.output == "float32"):
        return "full"
    if adds_losses(layer):
        return "full" if isinstance(layer, keras.Model) else "inner"
    return policy.decide(operation, path).op_class if operation else "follow"


def matches(rule: Rule, operation: str, path: str) -> bool:
    """Return whether a rule matches a layer, or sets an operation in it to ``full``."""
    *_, last = rule.pattern.replace(".", "/").split("/")
    names_inside = rule.op_class == "full" and last in TABLE and last != rule.pattern
    return rule.matches(operation, path) or (names_inside and rule.matches(last, path))


def parts_of(model: Any, policy: Policy, choose: Choose = op_class_of) -> list[Part]:
    """Return the decisions for a model and all layers inside, outer ones first."""
    return list(_parts(model, policy, choose))


def can_change(part: Part) -> bool:
    """Return whether polyamp sets the formats of a part's layer."""
    return part.op_class != "keep" and can_compute(part.layer)


def _parts(
    layer: Any,
    policy: Policy,
    choose: Choose,
    above: str = "",
    gives_output: bool = True,
    outside: str = "",
    raw: bool = True,
) -> Iterator[Part]:
    """Yield the decisions for a layer, whose path starts with ``above``, and for the layers inside.

    ``outside`` is the format of Python code that calls the layer; ``raw`` is whether its inputs can be data that
    nothing rounded.
    """
    path = f"{above}/{layer.name}" if above else layer.name
    operation, calls, is_called = operation_of(layer), runs_code(layer), bool(outside)
    is_named = _is_named(policy, operation, path)
    is_head = gives_output and not isinstance(layer, keras.Model)
    if is_head and calls and not is_named and policy.output == "float32":
        is_head, outside = False, "float32"  # its code runs in 16 bits, and its outputs are cast
    op_class = choose(policy, operation, layer, path, is_head)
    if raw and not is_called and op_class == "inner" and _is_light(layer, policy, choose, path):
        op_class = "full"
    inside, casts = _inside(layer, operation, op_class, policy), True
    if path.count("/") == 1 and _is_named(policy, "", path):
        outside = ""  # the user decides what a model's own code receives, such as from its head
    if is_preprocessing(layer) and not is_named:
        outside = ""
    if raw and inside != "float32" and op_class in _FOLLOWING:
        if _is_light(layer, policy, choose, path) and (not is_called or outside == "float32"):
            inside = "float32"
        else:
            casts = not (calls or (is_called and not layer.weights))
    returned = policy.compute if op_class == "inner" and inside == "float32" and can_compute(layer) else ""
    yield Part(path, layer, operation, is_head, op_class, Border(inside, outside or returned, casts), bool(outside))
    last = heads(layer)
    of_code = inside if calls and inside in CASTABLE else ""
    # Of a model of layers, only the last ones return to the code that calls it.
    of_last = outside if isinstance(layer, keras.Model) and not calls else of_code
    gets_raw = (inside == "float32" or not casts) if calls else raw
    late = _late(layer, policy, choose, path)
    for child in children(layer):
        is_last = child in last
        is_raw = gets_raw and id(child) not in late
        yield from _parts(
            child, policy, choose, path, gives_output and is_last, of_last if is_last else of_code, is_raw
        )


_FOLLOWING = ("follow", "neutral", "promote")


def _is_light(layer: Any, policy: Policy, choose: Choose, path: str) -> bool:
    """Return whether a layer gains nothing from 16 bits: no products or weights in it or in the layers inside."""
    operation = operation_of(layer)
    op_class = choose(policy, operation, layer, path, False)
    is_inner = op_class == "inner" and bool(operation) and not _is_named(policy, operation, path)
    if own_weights(layer) or not (is_inner or op_class in _FOLLOWING):
        return op_class == "full"
    return all(_is_light(child, policy, choose, f"{path}/{child.name}") for child in children(layer))


def _late(model: Any, policy: Policy, choose: Choose, path: str) -> set[int]:
    """Return the ids of the layers that come after a 16-bit layer, in a model that is a graph of layers."""
    late, low = set[int](), set[int]()
    for operation, sources in calls_in(model) if is_graph(model) else ():
        if not low.isdisjoint(map(id, sources)):
            late.add(id(operation))
            low.add(id(operation))
        elif isinstance(operation, keras.Layer) and not _is_light(
            operation, policy, choose, f"{path}/{operation.name}"
        ):
            low.add(id(operation))
    return late


def _inside(layer: Any, operation: str, op_class: str, policy: Policy) -> str:
    if op_class == "keep" or not can_compute(layer):
        return border_of(layer).inside
    if op_class == "inner" and not is_wide_inside(layer, operation):
        return "float32"
    return "float32" if op_class == "full" else policy.compute


def _is_named(policy: Policy, operation: str, path: str) -> bool:
    return any(rule.matches(operation, path) for rule in policy.own_rules)


KERAS_POLICIES = {
    ("float32", "float32"): "float32",
    ("float32", "float16"): "mixed_float16",
    ("float32", "bfloat16"): "mixed_bfloat16",
    ("float16", "float16"): "float16",
    ("bfloat16", "bfloat16"): "bfloat16",
}


def keras_policy(policy: Policy) -> str:
    """Return the name of the dtype policy that stores and computes in a policy's formats."""
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


def policy_of(part: Part, policy: Policy) -> str:
    """Return the name of the dtype policy that makes a layer compute, with its border, as was decided."""
    inside, outside, _ = part.border
    if inside == "float32" and not (part.in_code and part.border.is_crossed):
        return "float32"
    given = outside or inside
    is_wide = inside == "float32" or part.op_class == "inner"
    if is_wide and given != "float32" and any(variable.dtype == "float32" for variable in part.layer.weights):
        return f"mixed_{given}"
    return keras_policy(policy)


def own_policy(model: Any) -> str | None:
    """Return the name of the 16-bit dtype policy that layers of a model have; None if all compute in float32."""
    layers = (layer for layer in walk(model) if format_of(border_of(layer).inside).is_low)
    names = (layer.dtype_policy.name for layer in layers)
    return next((name for name in names if name in KERAS_POLICIES.values()), None)


def remaining_policy(model: Any, policy: Policy) -> Policy:
    """Return the policy for Keras' backend to apply: float32 if layers have their own 16-bit policies already."""
    return policy if own_policy(model) is None else make_policy("float32")


def set_formats(parts: Iterable[Part], policy: Policy) -> None:
    """Set the dtype policy and the border of every layer that polyamp can change."""
    # All dtype policies are chosen before the first is set, so an error changes nothing.
    for layer, name, border in [(one.layer, policy_of(one, policy), one.border) for one in parts if can_change(one)]:
        layer.dtype_policy = name
        set_border(layer, Border(border.inside) if casts_inside(layer) else border)
        if casts_inside(layer):
            layer.autocast = False  # it casts its inputs to float32 itself; Keras would round them first


@contextmanager
def amended(model: Any, policy: Policy) -> Iterator[None]:
    """Apply a policy's own rules to the layers that they name, until the context ends."""
    # All other layers stay as they are. So rules can be tried on a model that computes in 16 bits by itself.
    own = own_policy(model)
    if own is None or not policy.own_rules:
        yield
        return
    tried = make_policy(own, rules=dict(policy.own_rules))
    parts = [part for part in parts_of(model, tried, _amended_class) if can_change(part)]
    before = [(part.layer, part.layer.dtype_policy, border_of(part.layer)) for part in parts]
    set_formats(parts, tried)
    try:
        yield
    finally:
        for layer, dtype_policy, border in before:
            layer.dtype_policy = dtype_policy
            set_border(layer, border)


def _amended_class(policy: Policy, operation: str, layer: Any, path: str, is_head: bool) -> str:
    """Return a layer's class: the one that rules give, else the one that fits the present formats."""
    if any(matches(rule, operation, path) for rule in policy.own_rules):
        return op_class_of(policy, operation, layer, path, is_head)
    inside, outside, casts = border_of(layer)
    if not casts:
        return "follow"
    crosses = bool(outside) and format_of(outside).is_low
    return "lower" if format_of(inside).is_low else "inner" if crosses else "full"
