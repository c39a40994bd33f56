"""What was decided for a graph, as a plan: where each operation stands, and the bytes that it moves."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from polyamp.backends.tensorflow.graphs.decisions import Decided, Pass
from polyamp.backends.tensorflow.graphs.graph import FLOAT32
from polyamp.backends.tensorflow.graphs.places import Places
from polyamp.backends.tensorflow.graphs.writing import RESULT
from polyamp.flow import AS_WRITTEN
from polyamp.plan import Plan, PlannedOperation

_UNLISTED = {"Const", "NoOp", "Placeholder", "VarHandleOp"}  # they hold things, and compute nothing


def plan_of(decisions: Pass, graph: Any) -> Plan:
    """The plan of a program.

    Args:
        decisions: of its outermost function.
        graph: the ``tf.Graph`` that it was traced into, for shapes and source lines; None where there is none.
    """
    results = [dtype for _, dtype in decisions.graph.results]
    operations = tuple(_operations(decisions, Places(graph), results))
    return Plan(
        str(decisions.rules.policy),
        operations,
        unused_rules=tuple(one.pattern for one in decisions.rules.decider.unused),
    )


def _operations(decisions: Pass, places: Places, results: Sequence[int]) -> Iterator[PlannedOperation]:
    """The nodes of a graph and, before a call, those inside; then the casts of what a function returns."""
    cast, anew = set[tuple[str, int]](), set[str]()
    for decided in decisions.nodes:
        for inside in decided.inside:
            yield from _operations(inside.decisions, places.within(inside.name), inside.results)
        if decided.node.op not in _UNLISTED:
            yield _planned(decisions, decided, places, cast, anew)
    for value, dtype in zip(decisions.graph.returns, results, strict=True):
        if needed := _needed(decisions, [(value, dtype)], cast, RESULT):
            yield _result_cast(decisions, places, value, needed)


def _needed(
    decisions: Pass, wanted: Iterable[tuple[str, int]], cast: set[tuple[str, int]], anew: Sequence[str] = ()
) -> set[tuple[str, int]]:
    """Values and types to which they are cast here, and were not before; for what is computed anew, those it takes."""
    needed = set[tuple[str, int]]()
    for value, dtype in wanted:
        maker = decisions.computed_anew(value, anew) if dtype == FLOAT32 else None
        if maker is not None:
            inputs = zip(maker.inputs, (port.dtype for port in maker.takes), strict=True)
            needed |= _needed(decisions, inputs, cast, anew)
        elif decisions.known[value].dtype != dtype and (value, dtype) not in cast:
            needed.add((value, dtype))
    cast |= needed
    return needed


def _computed_anew(decisions: Pass, wanted: Iterable[tuple[str, int]], done: set[str], anew: Sequence[str]) -> set[str]:
    """Values that float32 versions of nodes read and write here, and did not before."""
    found = set[str]()
    for value, dtype in wanted:
        maker = decisions.computed_anew(value, anew) if dtype == FLOAT32 else None
        if maker is not None and maker.name not in done:
            done.add(maker.name)
            inputs = [(one, port.dtype) for one, port in zip(maker.inputs, maker.takes, strict=True)]
            found |= {*maker.inputs, *maker.outputs} | _computed_anew(decisions, inputs, done, anew)
    return found


def _size(decisions: Pass, places: Places, typed: Iterable[tuple[str, int]]) -> int:
    """Bytes of values in these types."""
    return sum(places.elements(decisions.graph, value) * _width(dtype) for value, dtype in typed)


def _planned(
    decisions: Pass, decided: Decided, places: Places, cast: set[tuple[str, int]], anew: set[str]
) -> PlannedOperation:
    node, known = decided.node, decisions.known
    wanted = [(value, dtype) for value, dtype in zip(node.inputs, decided.takes, strict=True) if value in known]
    needed = _needed(decisions, wanted, cast, decided.anew)
    again = _computed_anew(decisions, wanted, anew, decided.anew) if decided.anew else ()
    given = zip(node.outputs, (one.dtype for one in decided.gives), strict=True)
    moves = not decided.inside and decided.operation != "shape"  # what is inside moves them; a shape is read off
    bytes_cast = _size(decisions, places, ((value, known[value].dtype) for value, _ in needed))
    moved = _size(decisions, places, [*wanted, *given]) if moves else 0
    return PlannedOperation(
        decided.operation,
        node.op,
        " ".join(filter(None, (decisions.path_of(node), places.line(node.name)))),
        decided.decision.op_class,
        decided.outcome.format,
        decided.outcome.reason,
        casts=len(needed),
        bytes_cast=bytes_cast,
        bytes_moved=moved
        + bytes_cast
        + _size(decisions, places, needed)
        + _size(decisions, places, ((value, FLOAT32) for value in again)),
        bytes_moved_float32=_moved_float32(decisions, decided, places),
    )


def _moved_float32(decisions: Pass, decided: Decided, places: Places) -> int:
    """Bytes that a node moved as it was written, or those that it stands for."""
    node = decided.node
    if decided.inside or decided.operation == "shape":
        return 0
    if node.name in decisions.graph.instead:
        return decisions.graph.instead[node.name]
    types = (port.dtype for port in [*node.takes, *node.gives])
    return _size(decisions, places, zip([*node.inputs, *node.outputs], types, strict=True))


def _result_cast(decisions: Pass, places: Places, value: str, needed: set[tuple[str, int]]) -> PlannedOperation:
    maker = decisions.graph.maker.get(value)
    before = _size(decisions, places, [(value, decisions.known[value].dtype)])
    return PlannedOperation(
        "cast",
        "Cast",
        decisions.path_of(maker) if maker else decisions.path,
        "keep",
        AS_WRITTEN,
        "a function's result is float32",
        casts=1,
        bytes_cast=before,
        bytes_moved=before + _size(decisions, places, needed),
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
