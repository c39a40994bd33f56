"""The function `profiler`: how a step runs under TensorFlow's profiler, and what the file of the profiler shows.

In that file an event is a node of a graph, named by its scopes, its name and its type: ``head/MatMul:MatMul``. Its
dtype is looked up in the graph. A gradient's name contains the name of its forward node.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import tensorflow as tf

from polyamp.backends.tensorflow.graphs.capture import concrete_of
from polyamp.backends.tensorflow.graphs.rewrite import rewrite
from polyamp.backends.tensorflow.operations import OPERATIONS
from polyamp.backends.tensorflow.unstable import as_asked, events_in
from polyamp.diagnosis.profile import Profiler, Timed, Trace, union
from polyamp.policies import Policy


def profiler(
    step: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], policy: Policy | None
) -> Profiler:
    """Run a step, and return how it is profiled; see `polyamp.interface.Adapter.profiler`."""
    call = step if policy is None else rewrite(step, args, dict(kwargs), policy)
    call(*args, **kwargs)

    def read(folder: Path, runs: int) -> Trace:
        (file,) = folder.glob("**/*.xplane.pb")
        nodes = [node for event in events_in(file) if (node := _node(*event)) is not None]
        traced = named = None
        if hasattr(call, "get_concrete_function"):
            traced = named = call.get_concrete_function(*args, **kwargs).graph
        if hasattr(call, "plain"):  # of a rewritten function: only its own trace knows the names its code asked for
            named = concrete_of(call.plain, args, kwargs).graph
        gpus, formats, updates = tf.config.list_physical_devices("GPU"), dict(_formats(traced)), _update_scopes(nodes)
        device = tf.config.experimental.get_device_details(gpus[0])["device_name"] if gpus else "cpu"
        operations = tuple(_timed(node, named, formats, updates) for node in nodes)
        return Trace(str(file), device, operations, union((node.start, node.end) for node in nodes), {})

    return Profiler("tensorflow", call, _wait, lambda folder: tf.profiler.experimental.Profile(str(folder)), read)


def _wait(result: Any) -> None:
    for leaf in tf.nest.flatten(result):
        if isinstance(leaf, tf.Tensor):
            leaf.numpy()


class _Node(NamedTuple):
    """One run of a node."""

    path: tuple[str, ...]  # its scopes and its name
    op: str  # its type
    start: float  # in seconds
    end: float

    @property
    def name(self) -> str:
        """The node's canonical name, found without the prefixes of oneDNN."""
        names = (self.op, *(re.sub(prefix, "", self.op) for prefix in ("^_Mkl(Native)?", "^_(Mkl)?(Native)?Fused")))
        known = (OPERATIONS[name] for name in names if name in OPERATIONS)
        return "call" if "Xla" in self.op else next(known, self.op)


_EVENT = re.compile(r"(?:(.*)/)?([\w.-]+):(\w+)")
_CALLS = re.compile(r"(Stateful)?PartitionedCall(_\d+)?$")
_GRADIENT = "gradient_tape"


def _node(name: str, start: float, end: float) -> _Node | None:
    """Return the node that an event names; None for other events and nodes that only run other nodes."""
    found = _EVENT.fullmatch(name)
    if found is None or OPERATIONS.get(found[3]) in ("call", "while_loop", "cond"):
        return None
    path = [part for part in name.rpartition(":")[0].split("/") if not _CALLS.match(part)]
    return _Node(tuple(path), found[3], start, end)


def _update_scopes(nodes: list[_Node]) -> set[str]:
    """Return the outermost scopes of optimizers: those that write variables and have no products."""
    writing = {node.path[0] for node in nodes if "Assign" in node.op or node.op.startswith("ResourceApply")}
    return writing - {node.path[0] for node in nodes if node.name in ("matmul", "conv")} - {_GRADIENT}


def _timed(node: _Node, graph: Any, formats: Mapping[str, str], updates: set[str]) -> Timed:
    """Return a run of a node as a timed operation; a gradient has the scope of its forward operation."""
    name = "/".join(node.path)
    scopes = as_asked(graph, name).split("/")
    where = scopes[1:-2] if scopes[0] == _GRADIENT else scopes[:-1]
    known = (formats[name],) if name in formats else ()
    return Timed(node.name, "/".join(where), known, node.end - node.start, node.path[0] in updates)


def _formats(graph: Any) -> Iterator[tuple[str, str]]:
    """Yield the name and the format of each node of a graph and of the functions that it calls."""
    definition = tf.compat.v1.GraphDef() if graph is None else graph.as_graph_def()
    for nodes in (definition.node, *(function.node_def for function in definition.library.function)):
        for node in nodes:
            kind = tf.dtypes.as_dtype(node.attr["SrcT" if node.op == "Cast" else "T"].type or tf.bool)
            if kind.is_floating:
                yield node.name, kind.name
