"""Write a step's functions again, with added nodes that count."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import tensorflow as tf

from polyamp.backends.tensorflow.graphs.graph import NodeDef
from polyamp.backends.tensorflow.graphs.writing import cast_name
from polyamp.backends.tensorflow.recording.counting import TURNS, Totals
from polyamp.backends.tensorflow.recording.values import Body
from polyamp.backends.tensorflow.recording.widening import Widening

_numbers = itertools.count(1)  # numbers of functions, for names that are unique in the process
_CHUNK = 32
"""Number of values that one node counts: they stay alive until it has run."""

# Attributes that describe the function before the change, and attributes that compile it separately.
_OUTDATED = ("api_implements", "api_preferred_device", "backward_function_name", "forward_function_name")
_COMPILED = ("_XlaMustCompile", "_XlaCompile")
_WITH_EFFECTS = {
    "PartitionedCall": "StatefulPartitionedCall",
    "StatelessCase": "Case",
    "StatelessIf": "If",
    "StatelessWhile": "While",
}


class Instrumented:
    """Functions with nodes that count, each written once."""

    def __init__(self, library: Mapping[str, Any], totals: Totals, *, widened: bool) -> None:
        self.definitions: list[Any] = []
        self.counting: list[Any] = []
        self._library, self._totals, self._widened = library, totals, widened
        self._written: dict[tuple[Body, str], str] = {}

    def step(self, body: Body, name: str, wanted: Sequence[str]) -> None:
        """Write the outermost function: it returns ``wanted``, and computes only what is counted or returned."""
        new, counts, widening = self._body(body, name, outermost=True)
        types = [body.spec(value, widened=self._widened).dtype.as_datatype_enum for value in wanted]
        wanted = list(map(widening.value, wanted))
        drivers = _drivers(new.node_def, counts)
        kept = _needed(new.node_def, [*wanted, *(f"^{one}" for one in (*counts, *drivers))])
        nodes = [node for node in new.node_def if node.name in kept]
        del new.node_def[:], new.signature.output_arg[:], new.signature.control_output[:]
        new.node_def.extend(nodes)
        new.ret.clear()
        new.control_ret.clear()
        for index, (value, dtype) in enumerate(zip(wanted, types, strict=True)):
            new.signature.output_arg.add(name=f"result_{index}", type=dtype)
            new.ret[f"result_{index}"] = value
        self._finish(new, [*counts, *drivers])

    def _function(self, body: Body, name: str) -> str:
        """Return the name of the counting function; the old name if there is nothing to count or to widen."""
        if (body, name) not in self._written:
            new, counts, widening = self._body(body, name, outermost=False)
            self._written[body, name] = self._finish(new, counts) if counts or widening.changed else name
        return self._written[body, name]

    def _body(self, body: Body, name: str, *, outermost: bool) -> tuple[Any, list[str], Widening]:
        """Return a copy with nodes that count, the names of all nodes that must run, and its widening."""
        new = type(self._library[name])()
        new.CopyFrom(self._library[name])
        widening = Widening(new, body.decisions, outermost=outermost, active=self._widened)
        counts = [node.name for node in new.node_def if self._calls_inside(body, node)]
        for chunk in _chunks(body.rows):
            node = self._count(body, chunk, widening, len(counts))
            new.node_def.append(node)
            counts.append(node.name)
        return new, counts, widening

    def _calls_inside(self, body: Body, node: Any) -> bool:
        """Make a node call functions that count, and return whether there are any."""
        for key in _COMPILED:
            node.attr.pop(key, None)
        called = _called(node)
        names = [self._function(one, f.name) for one, f in zip(body.inside.get(node.name, ()), called, strict=False)]
        changed = [f.name for f in called][: len(names)] != names
        for function, name in zip(called, names, strict=False):
            function.name = name
        if changed:
            node.op = _WITH_EFFECTS.get(node.op, node.op)
        return changed

    def _count(self, body: Body, rows: Mapping[str, int], widening: Widening, number: int) -> Any:
        specs = [body.spec(value, widened=self._widened) for value in rows]
        turns = TURNS if body.repeated else 1
        count = tf.function(lambda *tensors: self._totals.add(list(rows.values()), tensors, turns), autograph=False)
        concrete = count.get_concrete_function(*specs)
        self.counting.append(concrete)
        node = NodeDef(name=f"polyamp_count_{number}", op="StatefulPartitionedCall")
        node.input.extend(self._counted(body, widening, value) for value in rows)
        node.attr["Tin"].list.type.extend(spec.dtype.as_datatype_enum for spec in specs)
        node.attr["Tout"].list.SetInParent()
        node.attr["f"].func.name = concrete.name
        return node

    def _counted(self, body: Body, widening: Widening, value: str) -> str:
        """Return the name of a value as it is counted: a rounded value after rounding."""
        if self._widened or value not in body.rounded:
            return widening.value(value)
        return f"{cast_name(body.decisions.graph, value, body.rounded[value])}:y:0"

    def _finish(self, new: Any, counts: Sequence[str]) -> str:
        new.signature.name = f"{new.signature.name}_polyamp_counted_{next(_numbers)}"
        new.signature.is_stateful = True
        for name in counts:
            new.control_ret[name] = name
            new.signature.control_output.append(name)
        for key in (*_OUTDATED, *_COMPILED):
            new.attr.pop(key, None)
        self.definitions.append(new)
        return str(new.signature.name)


def _called(node: Any) -> list[Any]:
    """Return the functions that a node calls, in the order in which they are decided."""
    keys = [key for key in ("f", "cond", "body", "then_branch", "else_branch") if key in node.attr]
    branches = node.attr["branches"].list.func if "branches" in node.attr else ()
    return [*(node.attr[key].func for key in keys), *branches]


def _drivers(nodes: Iterable[Any], counts: Sequence[str]) -> list[str]:
    """Return the names of the nodes that run datasets whose functions count: a dataset alone computes nothing."""
    found, drivers = set(counts), list[str]()
    for node in nodes:  # each node comes after its inputs
        takes = any(text.partition(":")[0] in found for text in node.input if not text.startswith("^"))
        if takes and node.op.endswith("Dataset"):
            found.add(node.name)
            drivers += [node.name] if node.op == "ReduceDataset" else []
    return drivers


def _needed(nodes: Iterable[Any], wanted: Iterable[str]) -> set[str]:
    """Return the names of the nodes that must run for some values, which are named as in node inputs."""
    inputs = {node.name: node.input for node in nodes}
    found, pending = set[str](), list(wanted)
    while pending:
        name = pending.pop().removeprefix("^").partition(":")[0]
        if name in inputs and name not in found:
            found.add(name)
            pending.extend(inputs[name])
    return found


def _chunks(rows: Mapping[str, int]) -> Iterator[dict[str, int]]:
    items = list(rows.items())
    return (dict(items[start : start + _CHUNK]) for start in range(0, len(items), _CHUNK))
