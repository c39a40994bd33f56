"""A captured function as a program: expanded, decided, and written for the user's own arguments and parameters."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from polyamp.backends.torch import unstable
from polyamp.backends.torch.autocast.regions import DEVICE_TYPES
from polyamp.backends.torch.graphs.capture import CONSTANTS, Captured, capture, check_arguments, refusals
from polyamp.backends.torch.graphs.decisions import Pass, Shared, under_autocast
from polyamp.backends.torch.graphs.graph import is_composite, plain_target
from polyamp.backends.torch.graphs.planning import bytes_saved
from polyamp.backends.torch.graphs.values import Known, Numbers, constant_of, is_floating, known_value
from polyamp.backends.torch.graphs.writing import Attributes
from polyamp.errors import InvalidTypeError, kind_of
from polyamp.nesting import check_tree
from polyamp.plan import Decider, Plan, PlannedOperation
from polyamp.policies import Policy


class Program:
    """A function, captured and decided for one kind of arguments."""

    def __init__(
        self,
        fn: Callable[..., Any],
        policy: Policy,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        *,
        root: nn.Module,
        name: str = "0",
    ) -> None:
        check_no_autocast()
        check_tree((args, kwargs), "the arguments of a rewritten function", deepest=200)
        check_arguments(fn, pytree.tree_leaves((args, kwargs)))
        self.name, self.mode = name, mode_of(root)
        captured = capture(fn, args, kwargs)
        self.assigned = tuple(captured.assigned)  # the paths of tensors whose new values the graph returns too
        self.decider, self._operations = Decider(policy), list[PlannedOperation]()
        self.attributes = Attributes(name)
        with refusals():
            expand(captured.module)
            named = [*root.named_parameters(), *root.named_buffers()]
            names = {id(tensor): name for name, tensor in reversed(named)}  # tied ones have their first name
            writer = _Writer(captured, names, self.decider, self.attributes)
            self.graph = writer.written(self._operations, [*(f"arg_{index}" for index in range(len(args))), *kwargs])
            self.fits = _fitting(captured, writer)
        self._original = captured.module
        for node in self._original.graph.find_nodes(op="placeholder"):
            node.meta = {"example_value": node.meta["example_value"]}  # Dynamo's holds the example itself
        for module in self._original.modules():
            if isinstance(module, GraphModule):
                unstable.drop_source(module.forward.__code__.co_filename)
        unstable.let_go(node.meta.get("example_value") for node in self._original.graph.nodes)
        weakref.finalize(self, unstable.forget_sizes).atexit = False

    @functools.cached_property
    def plan(self) -> Plan:
        """The plan of the decisions, with the bytes that the backward pass needs."""
        return Plan(
            str(self.decider.policy),
            tuple(self._operations),
            bytes_saved(self.graph, self.attributes),
            bytes_saved(self._original.graph, dict(self._original.named_children())),
            tuple(rule.pattern for rule in self.decider.unused),
        )


class _Writer:
    """Writes the graph of a program, whose inputs it finds among arguments and parameters."""

    def __init__(self, captured: Captured, names: Mapping[int, str], decider: Decider, attributes: Attributes) -> None:
        self.captured, self.names, self.decider, self.attributes = captured, names, decider, attributes
        self.graph, self.numbers = Graph(), Numbers()
        self._leaves = [self.graph.placeholder(f"arg_{index}") for index, _ in enumerate(captured.leaves)]
        self._gotten: dict[int, Node] = {}

    def written(self, operations: list[PlannedOperation], names: Sequence[str]) -> Graph:
        """Return the graph, with these names for its arguments."""
        module, arguments = self.captured.module, self._arguments()
        shared = Shared(self.decider, self.attributes, operations, self.numbers)
        passed = Pass(module, self.graph, arguments, shared, state=self._state())
        computed = dict(zip(map(id, self.captured.outputs), passed.results(), strict=True))
        leaves = [self._result(leaf, computed) for leaf in self.captured.results]
        passed.finish(leaves)
        for known in arguments.values():
            if isinstance(known.node, Node) and known.node.op != "placeholder" and not known.node.users:
                self.graph.erase_node(known.node)
        unstable.with_trees(self.graph, names, self.captured.in_spec, self.captured.out_spec)
        return self.graph

    def _arguments(self) -> dict[Node, Known]:
        """Return the facts about the captured graph's placeholders, which are tensors and sizes of tensors."""
        placeholders = self.captured.module.graph.find_nodes(op="placeholder")
        pairs = list(zip(placeholders, self.captured.inputs, strict=True))
        known = {node: self._tensor(node, given) for node, given in pairs if isinstance(given, Tensor)}
        return known | {node: self._size(node, given, known) for node, given in pairs if node not in known}

    def _state(self) -> dict[Node, Node]:
        """Return, for each placeholder of a tensor that the code replaces by assignment, the node of the new value."""
        graph = self.captured.module.graph
        placeholders, (results,) = graph.find_nodes(op="placeholder"), graph.output_node().args
        computed = dict(zip(map(id, self.captured.outputs), cast(Any, results), strict=True))
        new = {id(old): computed[id(value)] for old, value in self.captured.assigned.values() if id(value) in computed}
        pairs = zip(placeholders, self.captured.inputs, strict=True)
        return {node: new[id(given)] for node, given in pairs if id(given) in new}

    def _tensor(self, node: Node, given: Tensor) -> Known:
        fake = node.meta["example_value"]
        assigned = [old for old, _ in self.captured.assigned.values()]
        is_ours = not any(one is given for one in (*self.captured.leaves, *assigned))
        new = self._input(given)
        new.meta["example_value"] = fake
        is_parameter = isinstance(given, nn.Parameter)
        value = constant_of(given, self.decider) if is_ours or is_parameter else known_value(fake, "input")
        is_constant = is_ours and not is_parameter
        self.numbers.add(node, is_constant=is_constant and is_floating(given))
        return Known(new, fake, fake, value, tensor=given if is_constant else None)

    def _input(self, given: Tensor) -> Node:
        """Return the node of an argument, parameter or buffer; any other tensor becomes an attribute."""
        for node, leaf in zip(self._leaves, self.captured.leaves, strict=True):
            if leaf is given:
                return node
        if id(given) not in self._gotten:
            name = self.names.get(id(given)) or self.attributes.add(given)
            self._gotten[id(given)] = self.graph.create_node("get_attr", name)
        return self._gotten[id(given)]

    def _size(self, node: Node, given: Any, tensors: Mapping[Node, Known]) -> Known:
        symbol = node.meta["example_value"]
        self.numbers.add_call(node, None)
        for known in tensors.values():
            for dim, length in enumerate(known.fake.shape):
                if unstable.same_symbol(length, symbol):
                    return Known(self.graph.call_method("size", (known.node, dim)), symbol, symbol)
        return Known(given, given, given)

    def _result(self, leaf: Any, computed: Mapping[int, Any]) -> Any:
        if id(leaf) in computed:
            return computed[id(leaf)]
        if isinstance(leaf, Tensor):
            return self._input(leaf)
        if isinstance(leaf, CONSTANTS):
            return leaf
        raise InvalidTypeError(
            "the function returns an object that a graph cannot return",
            where="rewrite(fn)",
            found=kind_of(leaf),
            allowed="tensors, numbers and strings, and dicts, lists, tuples and registered pytrees of them",
            fix="return the tensors themselves, or register the class: torch.utils._pytree.register_pytree_node",
        )


def _fitting(captured: Captured, writer: _Writer) -> Callable[[Sequence[Any], Any], bool]:
    """Return a function, holding no example argument, that tests whether leaves and their tree fit a graph."""
    nodes = captured.module.graph.find_nodes(op="placeholder")
    shaped = [
        (node.meta["example_value"], given)
        for node, given in zip(nodes, captured.inputs, strict=True)
        if isinstance(given, Tensor) and id(given) not in writer.names
    ]
    sizes_fit = unstable.size_guards([fake for fake, _ in shaped])
    places = [
        next((place for place, leaf in enumerate(captured.leaves) if leaf is given), given) for _, given in shaped
    ]
    kinds, in_spec = _kinds(captured.leaves), captured.in_spec

    def fits(leaves: Sequence[Any], spec: Any) -> bool:
        if spec != in_spec or _kinds(leaves) != kinds:
            return False
        return sizes_fit([leaves[place] if isinstance(place, int) else place for place in places])

    return fits


def mode_of(root: nn.Module) -> tuple[Any, ...]:
    """Return whether gradients are recorded, and each module's training mode, since code can depend on either."""
    return (torch.is_grad_enabled(), *(module.training for module in root.modules()))


def check_no_autocast() -> None:
    """Refuse to run inside autocast, which would cast a second time."""
    if any(map(torch.is_autocast_enabled, DEVICE_TYPES)):
        raise under_autocast("rewrite(module), or the call of its result")


def _kinds(leaves: Sequence[Any]) -> list[Any]:
    """Return the facts about arguments, except sizes, that a graph depends on, such as which are the same tensor."""
    places = list(map(id, leaves))
    return [
        (leaf.dtype, leaf.device, leaf.dim(), places.index(id(leaf)))
        if isinstance(leaf, Tensor)
        else (type(leaf), leaf)
        for leaf in leaves
    ]


def expand(module: GraphModule) -> None:
    """Replace each call of a composed function by the aten operators that it consists of, also in bodies."""
    # Functions that cannot be captured stay as they are.
    for inner in module.children():
        if isinstance(inner, GraphModule):
            expand(inner)
    for node in list(module.graph.nodes):
        node.target = plain_target(node)
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
    """Copy the nodes of ``inner`` into ``graph``, each with its fake tensor; return the copied results."""
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
