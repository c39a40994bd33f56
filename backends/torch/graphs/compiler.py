"""The backend of ``torch.compile(model, backend="polyamp")``: plans Dynamo's graphs, which another backend compiles."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node

from polyamp.backends.torch import unstable
from polyamp.backends.torch.graphs import between
from polyamp.backends.torch.graphs.decisions import Pass
from polyamp.backends.torch.graphs.program import check_no_autocast, expand
from polyamp.backends.torch.graphs.rewrite import usable
from polyamp.backends.torch.graphs.values import Known, constant_of, known_value, map_known
from polyamp.backends.torch.graphs.writing import Attributes
from polyamp.errors import InvalidTypeError, InvalidValueError, did_you_mean, shown, unknown_options
from polyamp.plan import Decider
from polyamp.policies import Policy, chosen_policy

Compiled = Callable[..., Any]


def polyamp(
    module: GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Compiled:
    """Plan one of Dynamo's graphs by a policy, and let another backend compile it."""
    # After a graph break each part is planned by itself, and returns values of the declared dtypes. The code between
    # the parts runs in `polyamp.autocast`, and so do parts that receive 16-bit values from that code.
    chosen = dict(options or {})
    _check_names(chosen)
    bound, inner = chosen.pop("policy", None), _backend(chosen.pop("backend", "inductor"), mode, chosen)
    if between.is_lowering():
        return inner(module, example_inputs)
    check_no_autocast()
    expand(module)
    if bound is not None:
        return between.outside(inner(_planned(module, example_inputs, usable(bound)), example_inputs))
    return between.outside(_ByPolicy(module, example_inputs, inner))


def _check_names(options: Mapping[str, Any]) -> None:
    """Refuse a misspelt option: the backend that compiles may ignore it, and the policy with it."""
    own = ("policy", "backend")
    mistaken = [name for name in options if name not in own and did_you_mean(name, own, cutoff=0.75)]
    if mistaken:
        fix = "leave it out; other options are passed to the backend that compiles"
        raise unknown_options(mistaken, own, where='torch.compile(backend="polyamp", options=)', fix=fix)


class _ByPolicy:
    """A graph, compiled for each policy that is current at a call; for the first with symbolic sizes."""

    # Dynamo guards a module's code and inputs, but not a context variable.

    def __init__(self, module: GraphModule, example_inputs: Sequence[Any], inner: Callable[..., Compiled]) -> None:
        self._module, self._inner = module, inner
        policy = usable(None)
        nodes = module.graph.find_nodes(op="placeholder")
        static = map(unstable.is_static_input, nodes)
        self._static = [given if kept else None for given, kept in zip(example_inputs, static, strict=True)]
        self._compiled: dict[Policy, Compiled] = {
            policy: inner(_planned(module, example_inputs, policy), example_inputs)
        }

    def __call__(self, *inputs: Any) -> Any:
        policy = chosen_policy(None, 'torch.compile(backend="polyamp")')
        if policy not in self._compiled:
            planned = _planned(self._module, self._static, usable(policy))
            self._compiled[policy] = torch.compile(planned, backend=self._inner, fullgraph=True)
        return self._compiled[policy](*inputs)


def _planned(module: GraphModule, inputs: Sequence[Any], policy: Policy) -> GraphModule:
    """Return the graph with its casts, for the same inputs; it depends on the values of parameters and buffers."""
    decider, graph, attributes = Decider(policy), Graph(), Attributes("0")
    arguments = {
        node: _argument(node, given, graph, decider)
        for node, given in zip(module.graph.find_nodes(op="placeholder"), inputs, strict=True)
    }
    passed = Pass(module, decider, graph, arguments, attributes)
    graph.output(map_known(passed.results(), lambda known: known.node))
    passed.drop_unused()
    between.add(decider)
    return GraphModule(attributes, graph, "Planned")


def _argument(node: Node, given: Any, graph: Graph, decider: Decider) -> Known:
    """Return the facts about an input; the values of a module's buffers are known."""
    new, fake = graph.node_copy(node), node.meta.get("example_value")
    is_ours = unstable.is_static_input(node)
    if is_ours and isinstance(given, Tensor) and not isinstance(given, nn.Parameter):
        return constant_of(new, fake, given, decider)
    return Known(new, fake, fake, known_value(fake, "weak" if is_ours or isinstance(given, nn.Parameter) else "input"))


def _backend(backend: Any, mode: str | None, options: dict[str, Any]) -> Callable[..., Compiled]:
    """Return the backend that compiles the planned graph."""
    if backend == "inductor":
        return _inductor(mode, options)
    found = _looked_up(backend) if isinstance(backend, str) else backend
    if not callable(found):
        raise InvalidTypeError(
            "the backend of torch.compile is neither a name nor a function",
            where='torch.compile(options={"backend": ...})',
            found=shown(backend),
            allowed="the name of a backend, or a function of a graph and its inputs",
            fix='leave it out for inductor, or use a name such as "aot_eager"',
        )
    given = {"mode": mode} if mode else {}
    return lambda module, inputs: found(module, inputs, **given, **({"options": options} if options else {}))


def _inductor(mode: str | None, options: dict[str, Any]) -> Callable[..., Compiled]:
    import torch._inductor as inductor  # takes seconds to load

    patches = {**(inductor.list_mode_options(mode) if mode else {}), **options}
    return lambda module, inputs: inductor.compile(module, inputs, options=patches or None)


def _looked_up(name: str) -> Any:
    import torch._dynamo as dynamo

    if name == "polyamp" or name not in dynamo.list_backends(exclude_tags=()):
        raise InvalidValueError(
            "unknown backend of torch.compile",
            where='torch.compile(options={"backend": ...})',
            found=repr(name),
            allowed=", ".join(one for one in dynamo.list_backends() if one != "polyamp"),
            fix="use one of these, or pass the function itself",
        )
    return dynamo.lookup_backend(name)


between.watch(polyamp)
