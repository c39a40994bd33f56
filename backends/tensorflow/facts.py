"""The facts that `polyamp.lint` needs from TensorFlow, read from a function's graph, which is traced and not run."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import tensorflow as tf

from polyamp.agreement import disagreement
from polyamp.backends.tensorflow.devices import devices
from polyamp.backends.tensorflow.graphs.capture import concrete_of
from polyamp.backends.tensorflow.graphs.decisions import Decided, Pass
from polyamp.backends.tensorflow.graphs.graph import Graph, Node
from polyamp.backends.tensorflow.graphs.places import Places
from polyamp.backends.tensorflow.graphs.planning import plan_of
from polyamp.backends.tensorflow.graphs.program import decided_for
from polyamp.backends.tensorflow.graphs.scaling import SCALES, scaling_of
from polyamp.backends.tensorflow.graphs.update import backward_pass, is_gradient
from polyamp.backends.tensorflow.recording.tracing import name_of, plain_function
from polyamp.backends.tensorflow.steps.scaler import LossScaler
from polyamp.diagnosis.facts import ClassLoss, Facts, OptimizerState, Product, UserCast
from polyamp.policies import Policy

_LOW = {kind.as_datatype_enum: kind.name for kind in (tf.float16, tf.bfloat16)}
_AVERAGED = ("Mean", "RealDiv", "Div", "DivNoNan")  # these follow a cross-entropy that is not a plain sum


def facts(target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], policy: Policy, optimizer: Any) -> Facts:
    """Collect the facts that lint judges; see `polyamp.diagnosis.facts.Facts`."""
    kept = list(getattr(target, "trainable_variables", ()))
    scaler = _scaler_of(optimizer)
    known = Facts(
        "tensorflow",
        policy,
        has_masters=scaler is not None and scaler.has_masters,
        devices=devices(),
        disagreement=None if scaler is None else disagreement(scaler.settings, scaler.compute, policy),
    )
    if not _takes(target, args, kwargs):
        return replace(known, optimizer=_state_of(optimizer, []), low_parameters=_low(kept))
    concrete = concrete_of(plain_function(target), args, kwargs)
    decisions, variables = decided_for(concrete, policy), list(concrete.graph.variables)
    seen, scaling = list(_seen(decisions, Places(concrete.graph))), scaling_of(decisions, concrete.graph)
    return replace(
        known,
        plan=plan_of(decisions, concrete.graph),
        optimizer=_state_of(optimizer, variables),
        low_parameters=_low([*kept, *variables]),
        casts=tuple(cast for one in seen for cast in _casts(one)),
        products=tuple(product for one in seen for product in _products(one)),
        losses=tuple(loss for one in seen for loss in _losses(one)),
        unscaled=scaling.unscaled,
        clipped=scaling.clipped,
    )


class _Seen(NamedTuple):
    """One node of the forward pass, with its surroundings."""

    decisions: Pass
    places: Places
    decided: Decided
    scope: str

    def shapes(self) -> list[tuple[int, ...] | None]:
        """Return the shapes of its inputs."""
        return [self.places.shape(self.decisions.graph, value) for value in self.decided.node.inputs]

    def attribute(self, name: str) -> Any:
        """Return one of its attributes."""
        return self.decided.node.definition.attr[name]


def _seen(decisions: Pass, places: Places) -> Iterator[_Seen]:
    """Yield the nodes of the forward pass, including those of the functions that it calls."""
    backward = backward_pass(decisions.graph, decisions.functions.library) | decisions.parts.update
    for decided in decisions.nodes:
        if decided.node.name not in backward:
            for inside in decided.inside:
                yield from _seen(inside.decisions, places.within(inside.name))
            yield _Seen(decisions, places, decided, decisions.scopes.scope_of(decided.node))


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
    names = [variable.name.rpartition("/")[2].partition(":")[0] for variable in variables]
    scales = sum(name in SCALES for name in names)
    kinds = type(optimizer).__mro__
    if any(kind.__module__.startswith("polyamp.") for kind in kinds):
        return "wrapped twice" if scales > 1 or _scales_inside(optimizer) else "wrapped"
    if any("LossScaleOptimizer" in kind.__name__ for kind in kinds):
        return "wrapped twice" if "skipped_in_a_row" in names else "native scaler"
    if "skipped_in_a_row" in names:  # one of the loss scale's counters
        return "wrapped"
    if scales:
        return "native scaler"
    return "plain" if optimizer is not None else ""


def _scales_inside(optimizer: Any) -> bool:
    inner = getattr(optimizer, "inner", None)
    return any("LossScale" in kind.__name__ for kind in type(inner).__mro__)


def _scaler_of(optimizer: Any) -> LossScaler | None:
    scaler = getattr(optimizer, "scaler", optimizer)
    return scaler if isinstance(scaler, LossScaler) else None


def _low(variables: Sequence[Any]) -> tuple[str, ...]:
    found = (one for one in variables if one.trainable and tf.as_dtype(one.dtype).as_datatype_enum in _LOW)
    return tuple(dict.fromkeys(name_of(one) for one in found))


def _casts(seen: _Seen) -> Iterator[UserCast]:
    node = seen.decided.node
    if node.op == "Cast":
        source, target = seen.attribute("SrcT").type, seen.attribute("DstT").type
        if (source in _LOW) != (target in _LOW) and seen.places.is_users(node.name):
            where = " ".join(filter(None, (seen.scope, seen.places.line(node.name))))
            yield UserCast(where, "tf.cast", tf.as_dtype(target).name)


def _products(seen: _Seen) -> Iterator[Product]:
    node, shapes = seen.decided.node, seen.shapes()
    if seen.decided.operation not in ("matmul", "conv") or len(shapes) < 2 or None in shapes[:2]:
        return
    measure = _SIZES.get("conv" if seen.decided.operation == "conv" else node.op)
    if measure is not None:
        known = [shape for shape in shapes[:2] if shape is not None]
        yield Product(seen.scope, seen.decided.operation, _format(seen.decided), measure(seen, *known))


def _format(decided: Decided) -> str:
    """Return the format in which a product runs: 16 bits if the user wrote it so."""
    written = next((_LOW[known.dtype] for known in decided.results if known.dtype in _LOW), None)
    return written or decided.outcome.format


def _of_matmul(seen: _Seen, a: tuple[int, ...], b: tuple[int, ...]) -> dict[str, int]:
    names = ("transpose_a", "transpose_b") if seen.decided.node.op == "MatMul" else ("adj_x", "adj_y")
    is_turned = [seen.attribute(name).b for name in names]
    (m, k), n = (a[-2:][::-1] if is_turned[0] else a[-2:]), b[-2] if is_turned[1] else b[-1]
    return {"m": m, "n": n, "k": k}


def _of_einsum(seen: _Seen, a: tuple[int, ...], b: tuple[int, ...]) -> dict[str, int]:
    """Return the sizes of an einsum such as ``abc,cde->abde``."""
    # ``m`` has the labels of only the first input, ``n`` those of only the second, and ``k`` those of both but not of
    # the result.
    inputs, _, result = seen.attribute("equation").s.decode().replace(" ", "").partition("->")
    one, other = inputs.split(",")
    sizes = dict([*zip(one, a, strict=False), *zip(other, b, strict=False)])
    groups = {"m": set(one) - set(other), "n": set(other) - set(one), "k": set(one) & set(other) - set(result)}
    return {name: math.prod(sizes.get(label, 1) for label in labels) for name, labels in groups.items()}


def _of_conv(seen: _Seen, image: tuple[int, ...], kernel: tuple[int, ...]) -> dict[str, int]:
    return {"in_channels": kernel[-2], "out_channels": kernel[-1]}


_SIZES: dict[str, Callable[[_Seen, tuple[int, ...], tuple[int, ...]], dict[str, int]]] = {
    **dict.fromkeys(("MatMul", "BatchMatMul", "BatchMatMulV2", "BatchMatMulV3"), _of_matmul),
    "Einsum": _of_einsum,
    "conv": _of_conv,
}


def _losses(seen: _Seen) -> Iterator[ClassLoss]:
    shape = next(iter(seen.shapes()), None)
    if seen.decided.operation in ("cross_entropy", "log_softmax") and shape:
        rows = math.prod(shape[:-1]) if _is_averaged(seen.decisions.graph, seen.decided.node) else 1
        yield ClassLoss(seen.scope, shape[-1], rows)


def _is_averaged(graph: Graph, node: Node) -> bool:
    consumers, pending, found = graph.consumers(), [node], set[str]()
    while pending:
        for one in consumers[pending.pop().name]:
            if one.op in _AVERAGED and not is_gradient(one.name):
                return True
            if one.name not in found:
                found.add(one.name)
                pending.append(one)
    return False
