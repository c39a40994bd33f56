"""The facts that `polyamp.lint` needs from TensorFlow, read from a function's graph, which is traced and not run."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import tensorflow as tf

from polyamp.backends.tensorflow.graphs.capture import concrete_of, walking
from polyamp.backends.tensorflow.graphs.decisions import Pass, TypedNode
from polyamp.backends.tensorflow.graphs.graph import Graph, Node, Places, closure, is_gradient
from polyamp.backends.tensorflow.graphs.program import decided_for
from polyamp.backends.tensorflow.provenance import collected
from polyamp.backends.tensorflow.recording.step import name_of, plain_function
from polyamp.backends.tensorflow.scaler import SCALES, LossScaler
from polyamp.diagnosis.lint import ClassLoss, Facts, OptimizerState, Product, UserCast
from polyamp.policies import Policy

_LOW = {kind.as_datatype_enum: kind.name for kind in (tf.float16, tf.bfloat16)}
_AVERAGED = ("Mean", "RealDiv", "Div", "DivNoNan")  # these follow a cross-entropy that is not a plain sum


def facts(target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], policy: Policy, optimizer: Any) -> Facts:
    """Collect the facts that lint judges; see `polyamp.adapters.Adapter.facts`."""
    kept = list(getattr(target, "trainable_variables", ()))
    scaler = getattr(optimizer, "scaler", optimizer)
    known = Facts("tensorflow", policy, has_masters=isinstance(scaler, LossScaler) and scaler.has_masters)
    if not _takes(target, args, kwargs):
        return replace(known, optimizer=_state_of(optimizer, []), low_parameters=_low(kept))
    with collected() as misscaled, walking(target, args, kwargs):
        concrete = concrete_of(plain_function(target), args, kwargs)
    decisions, variables = decided_for(concrete, policy), list(concrete.graph.variables)
    seen = list(_seen(decisions, Places(concrete.graph)))
    return replace(
        known,
        optimizer=_state_of(optimizer, variables),
        low_parameters=_low([*kept, *variables]),
        casts=tuple(cast for one in seen for cast in _casts(one)),
        products=tuple(product for one in seen for product in _products(one)),
        losses=tuple(loss for one in seen for loss in _losses(one)),
        unscaled=tuple(misscaled.unscaled),
        clipped=tuple(misscaled.clipped),
    )


class _ForwardNode(NamedTuple):
    """One node of the forward pass, with its surroundings."""

    decisions: Pass
    places: Places
    decided: TypedNode
    scope: str

    def shapes(self) -> list[tuple[int, ...] | None]:
        """Return the shapes of its inputs."""
        return [self.places.shape(self.decisions.graph, value) for value in self.decided.node.inputs]


def _seen(decisions: Pass, places: Places) -> Iterator[_ForwardNode]:
    """Yield the nodes of the forward pass, including those of the functions that it calls."""
    later = decisions.parts.backward | decisions.parts.update
    for decided in decisions.nodes:
        if decided.node.name not in later:
            for inside in decided.inside:
                yield from _seen(inside.decisions, places.within(inside.name))
            yield _ForwardNode(decisions, places, decided, decisions.scopes.scope_of(decided.node))


def _takes(target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Return whether it can be called with these arguments; lint also accepts a model alone."""
    if not callable(target):
        return False
    try:
        inspect.signature(plain_function(target)).bind(*args, **kwargs)
    except (TypeError, ValueError):
        return bool(args or kwargs)  # TensorFlow reports arguments that do not fit
    return True


def _state_of(optimizer: Any, variables: Sequence[Any]) -> OptimizerState:
    """Return the kind of an optimizer and of the step's own scaling, which is read from its variables."""
    names = {variable.name.rpartition("/")[2].partition(":")[0] for variable in variables}
    kinds = type(optimizer).__mro__
    if "skipped_in_a_row" in names or any(kind.__module__.startswith("polyamp.") for kind in kinds):
        return "wrapped"  # that variable is one of the loss scale's counters
    if not names.isdisjoint(SCALES) or any("LossScaleOptimizer" in kind.__name__ for kind in kinds):
        return "native scaler"
    return "plain" if optimizer is not None else ""


def _low(variables: Sequence[Any]) -> tuple[str, ...]:
    found = (one for one in variables if one.trainable and tf.as_dtype(one.dtype).as_datatype_enum in _LOW)
    return tuple(dict.fromkeys(name_of(one) for one in found))


def _casts(seen: _ForwardNode) -> Iterator[UserCast]:
    node = seen.decided.node
    if node.op == "Cast":
        source, target = node.definition.attr["SrcT"].type, node.definition.attr["DstT"].type
        if (source in _LOW) != (target in _LOW) and seen.places.is_users(node.name):
            yield UserCast(seen.places.of(seen.scope, node.name), "tf.cast", tf.as_dtype(target).name)


def _products(seen: _ForwardNode) -> Iterator[Product]:
    decided, shapes = seen.decided, seen.shapes()
    if decided.operation not in ("matmul", "conv") or len(shapes) < 2:
        return
    a, b = shapes[:2]
    if a and b:
        # 16 bits if the user wrote it so
        written = next((_LOW[known.dtype] for known in decided.results if known.dtype in _LOW), None)
        yield Product(seen.scope, decided.operation, written or decided.decision.format, _sizes(seen, a, b))


def _sizes(seen: _ForwardNode, a: tuple[int, ...], b: tuple[int, ...]) -> tuple[int, ...]:
    """Return the channels of a convolution; else the rows, columns and contracted dimension of a product."""
    if seen.decided.operation == "conv":
        return b[-2:]
    if seen.decided.node.op != "Einsum":
        return (*a[-2:], *b[-2:])
    # Of an einsum such as ``abc,cde->abde``: the rows have the labels of only the first input, the columns those of
    # only the second, and the contracted dimension those of both but not of the result.
    inputs, _, result = seen.decided.node.definition.attr["equation"].s.decode().replace(" ", "").partition("->")
    one, other = inputs.split(",")
    sizes = dict([*zip(one, a, strict=False), *zip(other, b, strict=False)])
    groups = (set(one) - set(other), set(one) & set(other) - set(result), set(other) - set(one))
    return tuple(math.prod(sizes.get(label, 1) for label in labels) for labels in groups)


def _losses(seen: _ForwardNode) -> Iterator[ClassLoss]:
    shape = next(iter(seen.shapes()), None)
    if seen.decided.operation in ("cross_entropy", "log_softmax") and shape:
        rows = math.prod(shape[:-1]) if _is_averaged(seen.decisions.graph, seen.decided.node) else 1
        yield ClassLoss(seen.scope, shape[-1], rows)


def _is_averaged(graph: Graph, node: Node) -> bool:
    consumers = graph.consumers()
    after = closure([node], lambda one: consumers[one.name])
    return any(one.op in _AVERAGED and not is_gradient(one.name) for one in after)
