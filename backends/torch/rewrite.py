"""`rewrite`: a module as a graph with explicit casts, which trains the module's own parameters."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import torch
import torch.utils._pytree as pytree
from torch import nn
from torch.fx import Graph, GraphModule

from polyamp.backends.torch.capture import root_of
from polyamp.backends.torch.decisions import HOLDER, Rules
from polyamp.backends.torch.program import Program, check_no_autocast, mode_of
from polyamp.errors import InvalidTypeError, UnsupportedError, UsageError, warn_once
from polyamp.formats import format_of
from polyamp.plan import Plan
from polyamp.policy import Policy
from polyamp.policy import policy as make_policy
from polyamp.refusals import not_traced


class Rewritten(GraphModule):
    """What `rewrite` gives: a graph over the original's own submodules, parameters and buffers.

    Training, saving and moving it is training, saving and moving the original. `graph` is the one for the first
    arguments; arguments that it is not made for (other ranks or dtypes, sizes for which the code took another way),
    and another training mode, get graphs of their own when they come.

    Attributes:
        programs: the graphs so far, each decided.
    """

    def __init__(self, fn: Callable[..., Any], policy: Policy) -> None:
        root = root_of(fn)
        graph = Graph()
        graph.output(())
        super().__init__(nn.Module(), graph, "Rewritten")
        self._source = (fn, root, policy)  # a tuple, so that the original does not become a submodule
        self.programs: list[Program] = []
        self._runs: list[Callable[..., Any]] = []
        self._modules |= {**root._modules, HOLDER: nn.Module()}
        self._parameters, self._buffers = root._parameters, root._buffers
        self._non_persistent_buffers_set = root._non_persistent_buffers_set
        self.training = root.training

    @property
    def plan(self) -> Plan:
        """The plan for the arguments that were seen first.

        Raises:
            UsageError: none were seen yet.
        """
        if not self.programs:
            raise not_traced(where="rewrite(module).plan")
        return self.programs[0].plan()

    def train(self, mode: bool = True) -> Rewritten:
        """Set the mode of the original and all its parts."""
        self._source[1].train(mode)
        super().train(mode)
        return self

    def recompile(self) -> Any:
        """Make code of ``graph``, as it is now; see `torch.fx.GraphModule.recompile`."""
        code = super().recompile()
        kind = type(self)
        kind._own = kind.forward  # type: ignore[attr-defined]
        kind.forward = Rewritten._run  # type: ignore[method-assign]
        return code

    def trace(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Program:
        """Decide the function for these arguments too."""
        fn, root, policy = self._source
        program = Program(fn, policy, args, kwargs)
        offset = sum(len(one.attributes) for one in self.programs)
        _hold(getattr(self, HOLDER), program, offset)
        if not self.programs:
            self.graph = program.graph
        self._runs.append(self._own if not self.programs else self._view(program.graph))
        self.programs.append(program)
        _report(program.rules, getattr(fn, "__name__", type(fn).__name__))
        return program

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        """The graph that fits the arguments."""
        leaves, spec = pytree.tree_flatten((args, kwargs))
        mode = mode_of(self._source[1])
        for program, run in zip(self.programs, self._runs, strict=True):
            if program.mode == mode and program.fits(leaves, spec):
                return run(*args, **kwargs)
        self.trace(args, kwargs)
        return self._runs[-1](*args, **kwargs)

    def _view(self, graph: Graph) -> GraphModule:
        """Another graph over the same submodules."""
        other = GraphModule(self, graph, "Rewritten")
        other._modules, other._parameters, other._buffers = self._modules, self._parameters, self._buffers
        return other
