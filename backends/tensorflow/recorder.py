"""What was decided for a graph, as a plan: where each operation stands, and the bytes that it moves."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import tensorflow as tf

from polyamp.backends.tensorflow.decisions import Decided, Pass
from polyamp.backends.tensorflow.places import Places
from polyamp.plan import Plan, PlannedOperation

_UNLISTED = {"Const", "NoOp", "Placeholder", "VarHandleOp"}  # they hold things, and compute nothing


def plan_of(decisions: Pass, graph: Any) -> Plan:
    """The plan of a program.

    Args:
        decisions: of its outermost function.
        graph: the ``tf.Graph`` that it was traced into, for shapes and source lines; None where there is none.
    """
    rules = decisions.rules
    patterns = tuple(rule.pattern for rule in rules.unused)
    return Plan(str(rules.policy), tuple(_operations(decisions, Places(graph))), unused_rules=patterns)


def _operations(decisions: Pass, places: Places) -> Iterator[PlannedOperation]:
    cast: set[tuple[str, int]] = set()
    for decided in decisions.nodes:
        if decided.inside:
            for inside in decided.inside:
                yield from _operations(inside.decisions, places.within(inside.name))
        elif decided.node.op not in _UNLISTED:
            yield _planned(decisions, decided, places, cast)


def _planned(decisions: Pass, decided: Decided, places: Places, cast: set[tuple[str, int]]) -> PlannedOperation:
    node, known = decided.node, decisions.known
    wanted = [(value, dtype) for value, dtype in zip(node.inputs, decided.takes, strict=True) if value in known]
    needed = {(value, dtype) for value, dtype in wanted if known[value].dtype != dtype} - cast
    cast |= needed

    def size(pairs: Iterable[tuple[str, int]]) -> int:
        return sum(places.elements(decisions.graph, value) * _width(dtype) for value, dtype in pairs)

    bytes_cast = size((value, known[value].dtype) for value, _ in needed)
    given = zip(node.outputs, (one.dtype for one in decided.gives), strict=True)
    declared = zip([*node.inputs, *node.outputs], (port.dtype for port in [*node.takes, *node.gives]), strict=True)
    return PlannedOperation(
        decided.operation,
        node.op,
        " ".join(filter(None, (decisions.path_of(node), places.line(node.name)))),
        decided.decision.op_class,
        decided.outcome.format,
        decided.outcome.reason,
        casts=len(needed),
        bytes_cast=bytes_cast,
        bytes_moved=size([*wanted, *given]) + bytes_cast + size(needed),
        bytes_moved_float32=size(declared),
    )


def _width(dtype: int) -> int:
    """Bytes of an element; 0 of what is no number."""
    return _WIDTHS.get(dtype % 100, 0)


_WIDTHS = {
    kind.as_datatype_enum: kind.size
    for kind in (
        tf.float16,
        tf.bfloat16,
        tf.float32,
        tf.float64,
        tf.complex64,
        tf.complex128,
        tf.bool,
        tf.int8,
        tf.int16,
        tf.int32,
        tf.int64,
        tf.uint8,
        tf.uint16,
        tf.uint32,
        tf.uint64,
    )
}
