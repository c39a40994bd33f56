"""What runs between the graphs of code under ``torch.compile(backend="polyamp")``: in the policy's autocast.

Where Dynamo breaks a graph, Python runs what it could not capture. Native autocast around the compiled model lowers
that too, so every call of compiled code is a region. While Dynamo traces, and while a planned graph runs, it is off:
they have their casts. A part that is given 16-bit values by Python is not planned: the region holds for it as well.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from types import CellType
from typing import Any

import torch
from torch import Tensor, nn

from polyamp.backends.torch import unstable
from polyamp.backends.torch.autocast import path_rules
from polyamp.backends.torch.autocast.context import Entered
from polyamp.backends.torch.autocast.regions import DEVICE_TYPES
from polyamp.backends.torch.dtypes import DTYPES, SIXTEEN_BIT
from polyamp.backends.torch.graphs.rewrite import report, report_rules
from polyamp.backends.torch.recording.reach import Reach
from polyamp.deciding import Decider, unused_in
from polyamp.operations import OPERATIONS
from polyamp.policy import Policy, current_policy
from polyamp.policy import policy as make_policy
from polyamp.rules import Rule

_OFF = make_policy("float32")
_NAME, _NAMES = "the compiled graph", "the compiled graphs"


class Session:
    """What is compiled for one model: its graphs are reported together, since each is a part of it.

    Attributes:
        root: the model, where it is a module.
        deciders: what decided each graph.
    """

    def __init__(self, options: Mapping[str, Any], root: Any) -> None:
        self._options = options
        self.root = root if isinstance(root, nn.Module) else None
        self.deciders: list[Decider] = []
        self._breaks = 0
        self._reported = 0

    def call(self) -> _Call:
        """A context for one call."""
        bound = (self._options.get("options") or {}).get("policy")
        return _Call(self, current_policy() if bound is None else make_policy(bound))

    def report(self, breaks: int) -> None:
        """Say once what had no effect in all graphs so far; parts that ran between them are not known."""
        self._breaks += breaks
        new, self._reported = self._reported < len(self.deciders), len(self.deciders)
        if new and len(self.deciders) == 1 and not self._breaks:
            report(self.deciders[0], _NAME)
        elif new:
            unused = [rule for rule in unused_in(self.deciders) if not self._may_be_elsewhere(rule)]
            report_rules(unused, self.deciders[0].policy, _NAMES)

    def _may_be_elsewhere(self, rule: Rule) -> bool:
        """Whether a rule may be about something that is in no graph: an operation, or a module that is there."""
        if not self._breaks:
            return False
        paths = [path for path, _ in self.root.named_modules()] if self.root is not None else []
        return self.root is None or rule.pattern in OPERATIONS or any(rule.matches("", path) for path in paths)


class _Call:
    """One call of compiled code.

    Attributes:
        session: of the model.
        lowers: whether it stands in a region that a call has entered, and not the user.
    """

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
        if low and not any(map(torch.is_autocast_enabled, DEVICE_TYPES)):  # else it is refused, or another call's
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
        """Dynamo begins to trace: what it sees has the dtypes of code without autocast, unless autocast made some."""
        if self._tracing is None and is_lowering() and not any(map(_holds_low, unstable.traced_values())):
            self._tracing = Entered(_OFF)
            self._tracing.__enter__()

    def traced(self) -> None:
        """It is done, before it compares the state with the one that it began in."""
        if self._tracing is not None:
            self._tracing.__exit__(None, None, None)
            self._tracing = None


class _Thread(threading.local):
    call: _Call | None = None


_here = _Thread()


def is_lowering() -> bool:
    """Whether the region of a call is on here: a graph that is traced in it has values that autocast has lowered."""
    return _here.call is not None and _here.call.lowers and any(map(torch.is_autocast_enabled, DEVICE_TYPES))


def _holds_low(value: Any) -> bool:
    """Whether 16-bit values are found in what a variable holds."""
    reach = Reach(getattr(value, "cell_contents", None) if isinstance(value, CellType) else value)
    held = (one for module in reach.all_of(nn.Module) for part in module.modules() for one in vars(part).values())
    return any(isinstance(one, Tensor) and one.dtype in SIXTEEN_BIT for one in (*reach.all_of(Tensor), *held))


def add(decider: Decider) -> None:
    """A graph was planned: it is reported with the others of its model, or now where no call of one is under way."""
    if _here.call is None:
        report(decider, _NAME)
    else:
        _here.call.session.deciders.append(decider)


def outside(compiled: Callable[..., Any]) -> Callable[..., Any]:
    """A compiled graph that runs outside of the region of its call."""

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
    """Have every call of code that a backend compiles be a `_Call`, from now on."""

    def call_for(options: Mapping[str, Any], fn: Any) -> Callable[[], AbstractContextManager[None]]:
        session = Session(options, getattr(fn, "__self__", None))

        def call() -> AbstractContextManager[None]:
            unstable.call_around_tracing(_begins, _ends)
            return session.call()

        return call

    unstable.give_context(backend, call_for)
