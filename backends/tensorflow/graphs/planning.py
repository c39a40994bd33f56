"""Build the plan of a decided graph: where each operation is, its format, and the bytes that it moves.

A plan counts what `writing.Body` would write. For example, if two products take ``x`` in float16, there is one cast of
``x``, which counts with its bytes for the first product only.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeVar

import tensorflow as tf

from polyamp.backends.tensorflow.graphs.decisions import Pass, TypedNode
from polyamp.backends.tensorflow.graphs.graph import FLOAT32, Places
from polyamp.backends.tensorflow.graphs.values import is_number
from polyamp.backends.tensorflow.graphs.writing import RESULT, Body, Writer
from polyamp.flow import Decision
from polyamp.numbering import sizes_of_einsum
from polyamp.plan import BY_HAND, Plan, PlannedOperation, planned

One = TypeVar("One")
UNLISTED = frozenset({"Const", "NoOp", "Placeholder", "VarHandleOp"})
"""Operations that only hold things and compute nothing. A plan does not list them."""
LOW = {kind.as_datatype_enum: kind.name for kind in (tf.float16, tf.bfloat16)}


def plan_of(decisions: Pass, graph: Any) -> Plan:
    """Return the plan of a program."""
    results = [dtype for _, dtype in decisions.graph.results]
    operations = tuple(PlanBuilder(decisions, Places(graph)).operations(results))
    unused = tuple(rule.pattern for rule in decisions.program.unused)
    return Plan(str(decisions.program.policy), operations, unused_rules=unused)


class PlanBuilder:
    """The planned operations of one graph and of the functions that it calls."""

    def __init__(self, decisions: Pass, places: Places) -> None:
        self._decisions, self._places = decisions, places
        self._elements = functools.cache(functools.partial(places.elements, decisions.graph))
        self._body = Body(decisions, Writer(lambda definition: None))

    def operations(self, results: Sequence[int]) -> Iterator[PlannedOperation]:
        """Yield the operations in order: those of a called function before the call, casts of the results last."""
        for decided in self._decisions.nodes:
            for inside in decided.inside:
                builder = PlanBuilder(inside.decisions, self._places.within(inside.name))
                yield from builder.operations(inside.results)
            if decided.node.op not in UNLISTED:
                yield self._planned(decided)
        for value, dtype in zip(self._decisions.graph.returns, results, strict=True):
            before = len(self._body.casts)
            self._body.value(value, dtype, RESULT)
            if casts := _newest(self._body.casts, before):
                yield self._result_cast(value, casts)

    def _planned(self, decided: TypedNode) -> PlannedOperation:
        node, known = decided.node, self._decisions.known
        inputs = [
            (value, dtype) for value, dtype in zip(node.inputs, decided.input_types, strict=True) if value in known
        ]
        outputs = zip(node.outputs, (one.dtype for one in decided.results), strict=True)
        casts, anew = len(self._body.casts), len(self._body.anew)
        self._body.inputs(decided)
        new_casts, new_anew = _newest(self._body.casts, casts), _newest(self._body.anew, anew)
        again = [(value, FLOAT32) for value in {value for one in new_anew for value in (*one.inputs, *one.outputs)}]
        return planned(
            self._by_hand(decided),
            node.op,
            self._places.of(self._decisions.scopes.path_of(node), node.name),
            casts=self._bytes_of(new_casts),
            moved=self._size([*inputs, *outputs, *again] if _moves(decided) else again),
            moved_float32=self._moved_float32(decided) if _moves(decided) else 0,
            sizes=() if node.name in self._decisions.parts.backward else self._sizes(decided),
        )

    def _by_hand(self, decided: TypedNode) -> Decision:
        """Return the decision about a node; for a cast to 16 bits that the user wrote, with this as the reason."""
        node = decided.node
        target = LOW.get(node.definition.attr["DstT"].type) if node.op == "Cast" else None
        if target and node.name not in self._decisions.parts.backward and self._places.is_users(node.name):
            return decided.decision._replace(reason=f"{BY_HAND}{target}")
        return decided.decision

    def _sizes(self, decided: TypedNode) -> tuple[int, ...]:
        """Return the sizes of a product, or the classes and rows of a loss; see `polyamp.plan.PlannedOperation`."""
        node, name = decided.node, decided.operation
        shapes = [self._places.shape(self._decisions.graph, value) for value in node.inputs]
        if name in ("cross_entropy", "log_softmax") and shapes[0]:
            return shapes[0][-1], math.prod(shapes[0][:-1])
        if name not in ("matmul", "conv") or len(shapes) < 2 or not (shapes[0] and shapes[1]):
            return ()
        if node.op == "Einsum":
            return sizes_of_einsum(node.definition.attr["equation"].s.decode(), [shapes[0], shapes[1]])
        return shapes[1][-2:] if name == "conv" else (*shapes[0][-2:], *shapes[1][-2:])

    def _moved_float32(self, decided: TypedNode) -> int:
        """Return the bytes that a node moves as it was written, or those of the nodes that it replaces."""
        node, graph = decided.node, self._decisions.graph
        if node.name in graph.replaced_bytes:
            return graph.replaced_bytes[node.name]
        types = (port.dtype for port in [*node.input_ports, *node.output_ports])
        return self._size(zip([*node.inputs, *node.outputs], types, strict=True))

    def _result_cast(self, value: str, casts: Iterable[tuple[str, int]]) -> PlannedOperation:
        scopes, maker = self._decisions.scopes, self._decisions.graph.maker.get(value)
        decision, path = Decision("cast", "keep", "a function's result is float32"), scopes.path
        return planned(decision, "Cast", scopes.path_of(maker) if maker else path, casts=self._bytes_of(casts))

    def _bytes_of(self, casts: Iterable[tuple[str, int]]) -> list[tuple[int, int]]:
        """Return the bytes before and after each cast of a value to a type."""
        known = self._decisions.known
        return [(self._size([(value, known[value].dtype)]), self._size([(value, to)])) for value, to in casts]

    def _size(self, typed: Iterable[tuple[str, int]]) -> int:
        """Return the bytes of values in these types."""
        return sum(self._elements(value) * width_of(dtype) for value, dtype in typed)


def _newest(found: dict[One, str], before: int) -> list[One]:
    """Return the keys that a dict got since it had ``before`` keys."""
    return list(itertools.islice(reversed(found), len(found) - before))


def _moves(decided: TypedNode) -> bool:
    """Return whether a node moves values itself: called functions move their own, and a shape needs none."""
    return not decided.inside and decided.operation != "shape"


@functools.cache
def width_of(dtype: int) -> int:
    """Return the bytes of one element of a type; 0 for a type that is not a number."""
    kind = tf.as_dtype(dtype % 100)
    return int(kind.size) if is_number(dtype) or kind.is_bool else 0
