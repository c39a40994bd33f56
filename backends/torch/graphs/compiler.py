"""The backend of ``torch.compile(model, backend="polyamp")``: plans Dynamo's graphs, which another backend compiles.

Where Dynamo breaks a graph, Python runs the code that it could not capture. So every call of compiled code enters a
region of the policy. The region is off while Dynamo traces and while a planned graph runs, since that graph has its own
casts. A part that receives 16-bit values from Python is not planned; the region holds for it too. A call of a model
with one graph break runs like this::

    enter the region of the policy
        graph 1            planned: autocast off
        print(x)           Python: autocast on
        graph 2            planned: autocast off
    leave the region, and report what had no effect in both graphs
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import CellType
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule

from polyamp.backends.torch import unstable
from polyamp.backends.torch.autocast import path_rules
from polyamp.backends.torch.autocast.context import Entered
from polyamp.backends.torch.autocast.regions import DEVICE_TYPES
from polyamp.backends.torch.dtypes import DTYPES, SIXTEEN_BIT
from polyamp.backends.torch.graphs.decisions import Pass
from polyamp.backends.torch.graphs.program import check_no_autocast, expand
from polyamp.backends.torch.graphs.rewrite import report, report_rules, usable
from polyamp.backends.torch.graphs.values import input_of
from polyamp.backends.torch.graphs.writing import Attributes
from polyamp.backends.torch.recording.reach import Reach
from polyamp.errors import InvalidTypeError, InvalidValueError, did_you_mean, shown, unknown_options
from polyamp.flow import Rule
from polyamp.operations import OPERATIONS
from polyamp.plan import Decider, unused_in
from polyamp.policies import Policy, chosen_policy, current_policy
from polyamp.policies import policy as make_policy

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
    if is_lowering():
        return inner(module, example_inputs)
    check_no_autocast()
    expand(module)
    if bound is not None:
        return outside(inner(_planned(module, example_inputs, usable(bound)), example_inputs))
    return outside(_ByPolicy(module, example_inputs, inner))


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
        node: input_of(
            graph.node_copy(node),
            node.meta.get("example_value"),
            given,
            decider,
            is_ours=unstable.is_static_input(node),
        )
        for node, given in zip(module.graph.find_nodes(op="placeholder"), inputs, strict=True)
    }
    passed = Pass(module, decider, graph, arguments, attributes, operations=[])
    passed.finish(passed.results())
    add(decider)
    return GraphModule(attributes, graph, "Planned")


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


# --- the code between the graphs --------------------------------------------------------------------------------------

_OFF = make_policy("float32")
_NAME, _NAMES = "the compiled graph", "the compiled graphs"


class Session:
    """The compiled graphs of one model, which are reported together."""

    def __init__(self, options: Mapping[str, Any], root: Any) -> None:
        self._options = options
        self.root = root if isinstance(root, nn.Module) else None
        self.deciders: list[Decider] = []
        self._breaks = 0
        self._reported = 0

    def call(self) -> _Call:
        """Return a context for one call."""
        bound = (self._options.get("options") or {}).get("policy")
        return _Call(self, current_policy() if bound is None else make_policy(bound))

    def report(self, breaks: int) -> None:
        """Report once what had no effect in all graphs so far; the code between them is not known."""
        self._breaks += breaks
        new, self._reported = self._reported < len(self.deciders), len(self.deciders)
        if new and len(self.deciders) == 1 and not self._breaks:
            report(self.deciders[0], _NAME)
        elif new:
            unused = [rule for rule in unused_in(self.deciders) if not self._may_be_elsewhere(rule)]
            report_rules(unused, self.deciders[0].policy, _NAMES)

    def _may_be_elsewhere(self, rule: Rule) -> bool:
        """Return whether a rule may match code that is not in a graph: an operation, or an existing module."""
        if not self._breaks:
            return False
        paths = [path for path, _ in self.root.named_modules()] if self.root is not None else []
        return self.root is None or rule.pattern in OPERATIONS or any(rule.matches("", path) for path in paths)


class _Call:
    """One call of compiled code."""

    def __init__(self, session: Session, policy: Policy) -> None:
        self.session = session
        self._policy, self._outer, self._breaks = policy, _here.call, 0
        self._region: AbstractContextManager[None] = nullcontext()
        self._around: AbstractContextManager[None] = nullcontext()
        self._tracing: AbstractContextManager[None] | None = None
        self.lowers: bool = self._outer is not None and self._outer.lowers

    @unstable.never_compiled
    def __enter__(self) -> None:
        low = DTYPES.get(self._policy.compute) in SIXTEEN_BIT
        if low and not any(
            map(torch.is_autocast_enabled, DEVICE_TYPES)
        ):  # else it is refused, or another call entered it
            self._region, self.lowers = Entered(self._policy, reports=False), True
        self._region.__enter__()
        self._around = path_rules.around_graphs(self.session.root)
        self._around.__enter__()
        self._breaks = unstable.graph_breaks()
        _here.call = self

    @unstable.never_compiled
    def __exit__(self, *error: Any) -> None:
        self.traced()
        _here.call = self._outer
        self._around.__exit__(*error)
        self._region.__exit__(*error)
        self.session.report(unstable.graph_breaks() - self._breaks)

    def tracing(self) -> None:
        """Turn autocast off while Dynamo traces, unless the frame already has 16-bit values from autocast."""
        if self._tracing is None and is_lowering() and not any(map(_holds_low, unstable.traced_values())):
            self._tracing = Entered(_OFF)
            self._tracing.__enter__()

    def traced(self) -> None:
        """Turn autocast on again, before Dynamo compares the state with that at the start of tracing."""
        if self._tracing is not None:
            self._tracing.__exit__(None, None, None)
            self._tracing = None


class _Thread(threading.local):
    call: _Call | None = None


_here = _Thread()


def is_lowering() -> bool:
    """Return whether the region of a call is on; a graph that is traced then has values that autocast lowered."""
    return _here.call is not None and _here.call.lowers and any(map(torch.is_autocast_enabled, DEVICE_TYPES))


def _holds_low(value: Any) -> bool:
    """Return whether a variable holds 16-bit values."""
    reach = Reach(getattr(value, "cell_contents", None) if isinstance(value, CellType) else value)
    held = (one for module in reach.all_of(nn.Module) for part in module.modules() for one in vars(part).values())
    return any(isinstance(one, Tensor) and one.dtype in SIXTEEN_BIT for one in (*reach.all_of(Tensor), *held))


def add(decider: Decider) -> None:
    """Add a planned graph; it is reported with the others of its model, or now if no call is running."""
    if _here.call is None:
        report(decider, _NAME)
    else:
        _here.call.session.deciders.append(decider)


def outside(compiled: Callable[..., Any]) -> Callable[..., Any]:
    """Return a compiled graph that runs with the region of its call turned off."""

    @unstable.never_compiled
    def run(*inputs: Any) -> Any:
        if not is_lowering():
            return compiled(*inputs)
        with Entered(_OFF):
            return compiled(*inputs)

    return run


def _begins() -> None:
    if _here.call is not None:
        _here.call.tracing()


def _ends() -> None:
    if _here.call is not None:
        _here.call.traced()


def watch(backend: Callable[..., Any]) -> None:
    """Enter a `_Call` around every call of code that a backend compiles, from now on."""

    def call_for(options: Mapping[str, Any], fn: Any) -> Callable[[], AbstractContextManager[None]]:
        session = Session(options, getattr(fn, "__self__", None))

        def call() -> AbstractContextManager[None]:
            unstable.call_around_tracing(_begins, _ends)
            return session.call()

        return call

    unstable.give_context(backend, call_for)


watch(polyamp)
