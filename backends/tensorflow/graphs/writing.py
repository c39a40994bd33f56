"""Write a decided graph: its nodes with their new types, and one cast for each value and type.

For example, for float16 the inputs of ``MatMul(x, w)`` become ``x/polyamp_cast_0_float16`` and
``w/polyamp_cast_0_float16``, two new ``Cast`` nodes.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from polyamp.backends.tensorflow.graphs.capture import POLICY_ATTRIBUTE
from polyamp.backends.tensorflow.graphs.decisions import Inside, Pass, TypedNode
from polyamp.backends.tensorflow.graphs.graph import FLOAT32, Node, NodeDef, changed
from polyamp.backends.tensorflow.graphs.parts import decisions_of, guarded

RESULT = ("saturated",)
"""Roles of results that a function returns unrounded."""

_numbers = itertools.count(1)  # numbers of functions, for names that are unique in the process
# Attributes about the function before the change: how to differentiate it, and what TensorFlow may replace it by.
_OUTDATED = ("api_implements", "api_preferred_device", "backward_function_name", "forward_function_name")


class Writer:
    """The rewritten functions of a program, each written once."""

    def __init__(self, publish: Callable[[Any], None]) -> None:
        self._publish = publish
        self._written: dict[Any, str] = {}

    def function(self, inside: Inside, definition: Any) -> str:
        """Write a function with its decided body and return its name; the old name if nothing changed."""
        key = (id(inside.decisions), inside.results)
        if key not in self._written:
            self._written[key] = self._new_function(inside, definition)
        return self._written[key]

    def graph(self, decisions: Pass) -> list[Any]:
        """Return the nodes of a ``GraphDef``. Outputs that no node takes keep their types and names."""
        body = self._body(decisions)
        consumers = decisions.graph.consumers()
        for decided in decisions.nodes:
            if not consumers[decided.node.name] and len(decided.results) == 1:
                body.restore(decided)
        return body.nodes

    def _body(self, decisions: Pass) -> Body:
        body = Body(decisions, self)
        for decided in decisions.nodes:
            body.add(decided)
        if decisions.graph.in_function:
            body.guard_averages()
        return body

    def _new_function(self, inside: Inside, definition: Any) -> str:
        decisions = inside.decisions
        body = self._body(decisions)
        results = zip(decisions.graph.returns, inside.results, strict=True)
        returned = [body.value(value, dtype, RESULT) for value, dtype in results]
        if not body.changed:
            return inside.name
        new = type(definition)()
        new.CopyFrom(definition)
        del new.node_def[:]
        new.node_def.extend(body.nodes)
        for name in body.must_run:
            new.control_ret[name] = name
            new.signature.control_output.append(name)
        new.signature.name = f"{inside.name}_polyamp_{next(_numbers)}"
        for arg in new.signature.input_arg:
            arg.type = decisions.known[arg.name].dtype
        for result, value, dtype in zip(new.signature.output_arg, returned, inside.results, strict=True):
            result.type, new.ret[result.name] = dtype, value
        for name in _OUTDATED:
            new.attr.pop(name, None)
        self._publish(new)
        return new.signature.name


class Body:
    """The nodes of one graph while it is written."""

    def __init__(self, decisions: Pass, writer: Writer) -> None:
        self.nodes: list[Any] = []
        self.must_run: list[str] = []
        self.changed = any(decisions.known[name].dtype != dtype for name, dtype in decisions.graph.arguments)
        self._decisions, self._writer = decisions, writer
        self._mark = tf.compat.v1.AttrValue(s=str(decisions.program.policy).encode())
        self.casts: dict[tuple[str, int], str] = {}  # the names of casts, by their value and its new type
        self.anew: dict[Node, str] = {}  # the names of float32 copies, by the node that is computed again

    def add(self, decided: TypedNode) -> None:
        """Write a node, and before it the casts that its inputs need."""
        node, inputs = decided.node, self.inputs(decided)
        changes = {**decided.changes, **self._called(decided)}
        if changes:
            self.changed = True
            changes[POLICY_ATTRIBUTE] = self._mark
        self.nodes.append(changed(node.definition, [*inputs, *(f"^{name}" for name in node.controls)], changes))

    def inputs(self, decided: TypedNode) -> list[str]:
        """Write the casts that a node's inputs need; return their names."""
        pairs = zip(decided.node.inputs, decided.input_types, strict=True)
        return [self.value(value, dtype, decided.decision.anew) for value, dtype in pairs]

    def value(self, value: str, dtype: int, anew: Sequence[str] = ()) -> str:
        """Write a value in a type: cast or, for a role in ``anew``, computed again; return its name."""
        known = self._decisions.known[value]
        if known.dtype == dtype or known.dtype > 100:
            return value
        maker = self._decisions.computed_anew(value, anew) if dtype == FLOAT32 else None
        if maker is not None:
            return self._again(maker, anew)
        value = self._decisions.equal(value)
        if (value, dtype) not in self.casts:
            self.casts[value, dtype] = self._cast(value, known.dtype, dtype)
        return self.casts[value, dtype]

    def _cast(self, value: str, source: int, target: int) -> str:
        self.changed = True
        graph = self._decisions.graph
        maker = graph.maker.get(value)
        port = maker.outputs.index(value) if maker else 0
        name = f"{maker.name if maker else value}/polyamp_cast_{port}_{tf.as_dtype(target).name}"
        self._add_cast(name, value, source, target, maker.definition.device if maker else "")
        return f"{name}:y:0" if graph.in_function else name

    def _again(self, node: Node, anew: Sequence[str]) -> str:
        """Write a second node that computes a 16-bit node's output in float32; return the name of its output."""
        if node not in self.anew:
            again = self._in_float32(node, anew)
            again.name = f"{node.name}/polyamp_float32"
            self.nodes.append(again)
            self.anew[node] = node.outputs[0].replace(node.name, again.name, 1)
            self.changed = True
        return self.anew[node]

    def _in_float32(self, node: Node, anew: Sequence[str]) -> Any:
        inputs = [self.value(value, dtype, anew) for value, dtype in node.typed_inputs]
        return changed(node.definition, inputs, {POLICY_ATTRIBUTE: self._mark})

    def guard_averages(self) -> None:
        """Add nodes that keep moving averages unchanged if a wrapped optimizer skips the step."""
        decisions, graph = self._decisions, self._decisions.graph
        applied = decisions_of(graph)
        if applied and decisions.parts.averages:
            added = guarded(graph, decisions.parts.averages, applied, self.nodes)
            self.nodes.extend(added)
            self.must_run = [node.name for node in added if node.op == "AssignVariableOp"]
            self.changed = True

    def restore(self, decided: TypedNode) -> None:
        """Write a cast of a node's only output to the old type, and give the cast the node's name."""
        (port,), (known,) = decided.node.output_ports, decided.results
        if port.dtype == known.dtype:
            return
        place, node = next((place, node) for place, node in enumerate(self.nodes) if node.name == decided.node.name)
        if self._decisions.computed_anew(decided.node.outputs[0], RESULT) is not None:
            self.nodes[place] = self._in_float32(decided.node, RESULT)
            return
        node.name = f"{node.name}/polyamp_{tf.as_dtype(known.dtype).name}"
        self._add_cast(decided.node.name, node.name, known.dtype, port.dtype, node.device)

    def _add_cast(self, name: str, value: str, source: int, target: int, device: str) -> None:
        cast = NodeDef(name=name, op="Cast", input=[value], device=device)
        cast.attr["SrcT"].type, cast.attr["DstT"].type = source, target
        cast.attr[POLICY_ATTRIBUTE].CopyFrom(self._mark)
        self.nodes.append(cast)

    def _called(self, decided: TypedNode) -> dict[str, Any]:
        """Write the functions that a node calls; return the node's attributes with their new names."""
        if not decided.inside:
            return {}
        library = self._decisions.program.library
        names = {inside.name: self._writer.function(inside, library[inside.name]) for inside in decided.inside}
        return _renamed(decided.node.definition.attr, names)


def _renamed(attributes: Any, names: dict[str, str]) -> dict[str, Any]:
    changed: dict[str, Any] = {}
    for key, value in attributes.items():
        new = tf.compat.v1.AttrValue()
        new.CopyFrom(value)
        for function in [new.func] if value.HasField("func") else new.list.func:
            function.name = names.get(function.name, function.name)
        if new != value:
            changed[key] = new
    return changed
