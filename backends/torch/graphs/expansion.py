"""Replaces torch's composed functions, such as attention with its projections, by operators that the table knows."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from polyamp.backends.torch import unstable
from polyamp.backends.torch.graphs.nodes import is_composite


def expand(module: GraphModule) -> None:
    """Replace each call of a composed function by the aten operators that it consists of, also in bodies."""
    # Functions that cannot be captured stay as they are.
    for inner in module.children():
        if isinstance(inner, GraphModule):
            expand(inner)
    for node in list(module.graph.nodes):
        if is_composite(node):
            _expand(module.graph, node)


def _expand(graph: Graph, node: Node) -> None:
    used = node.all_input_nodes
    fakes = [one.meta["example_value"] for one in used]
    mode = unstable.fake_mode_of([*fakes, node.meta["example_value"]])

    def call(*values: Any) -> Any:
        given = dict(zip(used, values, strict=True))
        args, kwargs = map_arg((node.args, node.kwargs), given.__getitem__)
        return node.target(*args, **kwargs)  # type: ignore[operator]

    try:
        with unstable.on_fakes(mode):
            inner = unstable.aten_graph(call, fakes)
    except (RuntimeError, TypeError, NotImplementedError):
        return  # it creates tensors, or reads values: it runs as it is written
    if inner.graph.find_nodes(op="get_attr"):
        return
    with graph.inserting_before(node):
        results = _inline(graph, inner, node, used, mode)
    _replace(node, results)
    graph.erase_node(node)


def _inline(graph: Graph, inner: GraphModule, node: Node, used: list[Node], mode: Any) -> Any:
    """Copy the nodes of a graph of operators, each with its fake; return the copies of its results."""
    placed = dict(zip(inner.graph.find_nodes(op="placeholder"), used, strict=True))
    for one in inner.graph.nodes:
        if one.op == "call_function":
            new = graph.node_copy(one, placed.__getitem__)
            args, kwargs = map_arg((new.args, new.kwargs), lambda had: had.meta.get("example_value"))
            with unstable.on_fakes(mode):
                fake = new.target(*args, **kwargs)  # type: ignore[operator]
            new.meta = {**node.meta, "example_value": fake}
            placed[one] = new
    (results,) = inner.graph.output_node().args
    return map_arg(results, placed.__getitem__)


def _replace(node: Node, results: Any) -> None:
    """Let every user of a composed function use the results of its operators."""
    if isinstance(results, Node):
        node.replace_all_uses_with(results)
        return
    for user in list(node.users):
        part = results[user.args[1]]
        if isinstance(part, Node | Tensor):
            user.replace_all_uses_with(part)  # type: ignore[arg-type]
        user.graph.erase_node(user)
