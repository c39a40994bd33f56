"""Write a step's functions again, with added nodes that count, and with 16-bit parts of its own code in float32."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import tensorflow as tf

from polyamp.backends.tensorflow.graphs.decisions import Pass
from polyamp.backends.tensorflow.graphs.graph import FLOAT32, Node, NodeDef
from polyamp.backends.tensorflow.graphs.writing import cast_name
from polyamp.backends.tensorflow.recording.counting import TURNS, Totals
from polyamp.backends.tensorflow.recording.values import Body

_LOW = frozenset(kind.as_datatype_enum for kind in (tf.float16, tf.bfloat16))
_RESOURCE: int = tf.resource.as_datatype_enum
_OUTSIDE = ("Bitcast", "Const", "DecodeRaw", "EagerPyFunc", "PyFunc", "PyFuncStateless")  # their values are in 16 bits


class Widening:
    """A function in which 16-bit floats become float32."""

    # Variables and constants keep their stored type. So do values that Python code, iterators and functions of other
    # programs take or return: there, casts are inserted. The outermost function's arguments keep their types too.

    def __init__(self, definition: Any, decisions: Pass, *, outermost: bool, active: bool) -> None:
        self.changed = False
        self._definition = definition
        self._wide: dict[str, str] = {}  # the widened copies of values that stay in 16 bits
        if active:
            self._widen(decisions, outermost)

    def _widen(self, decisions: Pass, outermost: bool) -> None:
        by_name = {node.name: node for node in self._definition.node_def}
        staying = [one.node for one in decisions.nodes if _stays(one.node, is_seen_through=bool(one.inside))]
        for name, dtype in decisions.graph.arguments if outermost else ():
            self._stand_in(name, name, dtype)
        for node in staying:
            for value, port in zip(node.outputs, node.output_ports, strict=True):
                self._stand_in(value, node.name, port.dtype)
        for node in decisions.graph.nodes:
            self._write(node, by_name[node.name], stays=node in staying)
        self._sign(outermost)

    def _stand_in(self, value: str, name: str, dtype: int) -> None:
        if dtype in _LOW:
            self._wide[value] = self._cast(f"{name}/polyamp_wide_{len(self._wide)}", value, dtype, FLOAT32)

    def value(self, value: str) -> str:
        """Return the float32 copy of a value that stays in 16 bits; for any other value, the value itself."""
        return self._wide.get(value, value)

    def _write(self, node: Node, written: Any, *, stays: bool) -> None:
        inputs = list(map(self.value, node.inputs))
        if stays:
            pairs = zip(node.inputs, inputs, node.input_ports, strict=True)
            inputs = [self._narrow(node, *pair) for pair in pairs]
        else:
            self._retype(written)
        written.input[:] = [*inputs, *(f"^{name}" for name in node.controls)]

    def _narrow(self, node: Node, value: str, wide: str, port: Any) -> str:
        if port.dtype not in _LOW or wide != value:
            return value
        return self._cast(f"{node.name}/polyamp_narrow_{len(self._definition.node_def)}", value, FLOAT32, port.dtype)

    def _retype(self, written: Any) -> None:
        for attribute in written.attr.values():
            if attribute.type in _LOW:
                attribute.type, self.changed = FLOAT32, True
            if not _LOW.isdisjoint(attribute.list.type):
                attribute.list.type[:] = [FLOAT32 if dtype in _LOW else dtype for dtype in attribute.list.type]
                self.changed = True

    def _sign(self, outermost: bool) -> None:
        signature, returned = self._definition.signature, self._definition.ret
        for name, value in list(returned.items()):
            returned[name] = self.value(value)
        for arg in [*([] if outermost else signature.input_arg), *signature.output_arg]:
            if arg.type in _LOW:
                arg.type, self.changed = FLOAT32, True

    def _cast(self, name: str, value: str, source: int, target: int) -> str:
        cast = NodeDef(name=name, op="Cast", input=[value])
        cast.attr["SrcT"].type, cast.attr["DstT"].type = source, target
        self._definition.node_def.append(cast)
        self.changed = True
        return f"{name}:y:0"


def _stays(node: Node, is_seen_through: bool) -> bool:
    """Return whether the types of a node's values are fixed by something outside the graph."""
    if is_seen_through:
        return False
    calls = any(value.HasField("func") or value.list.func for value in node.definition.attr.values())
    return calls or node.op in _OUTSIDE or any(port.dtype == _RESOURCE or port.dtype > 100 for port in node.input_ports)


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
