"""Widen what a function's own code computes in 16 bits to float32, so that nothing overflows or is lost."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from polyamp.backends.tensorflow.graphs.decisions import Pass
from polyamp.backends.tensorflow.graphs.graph import FLOAT32, Node, NodeDef

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
