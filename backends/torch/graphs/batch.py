"""Measures how memory grows with the batch: runs a forward and backward pass twice, on tensors without data."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from operator import attrgetter
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch.fx import GraphModule

from polyamp.backends.torch.autocast.plan import OnFakes, run_on_fakes
from polyamp.backends.torch.graphs.capture import root_of
from polyamp.backends.torch.graphs.program import Program
from polyamp.backends.torch.recording.widening import tensors
from polyamp.batch import Footprint, Pass, batch_axes
from polyamp.policies import Policy


def footprint_of(
    fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], policy: Policy, examples: int
) -> Footprint | None:
    """Return the memory of a forward and backward pass under `polyamp.autocast`; None if it is unknown."""
    leaves = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    inputs = [leaf for leaf in leaves if not isinstance(leaf, nn.Parameter)]
    axes = zip(inputs, batch_axes([leaf.shape for leaf in inputs], examples), strict=True)
    axis_of = {id(leaf): axis for leaf, axis in axes if axis is not None}

    def measured(times: int) -> Pass:
        def grown(leaf: Any, fake: Any) -> Any:  # a copy, since a view would hold all memory that it is of
            if id(leaf) not in axis_of:
                return fake
            return torch.cat([fake] * times, axis_of[id(leaf)]).detach().requires_grad_(fake.requires_grad)

        done: Pass = run_on_fakes(fn, args, kwargs, policy, Meter, grown)
        return done

    try:
        once, twice = measured(1), measured(2)
    except Exception:  # its code reads values or depends on this size, or an operator has no kernel for such tensors
        return None
    return Footprint(examples, once, twice) if len(once.in_use) == len(twice.in_use) else None


def rewritten(program: Program, fn: Callable[..., Any]) -> GraphModule:
    """Return a program's graph as a function that uses the parameters of ``fn``."""
    root, own = root_of(fn), program.attributes
    names = {str(node.target) for node in program.graph.find_nodes(op="get_attr")}
    return GraphModule({name: own[name] if name in own else attrgetter(name)(root) for name in names}, program.graph)


class Meter(OnFakes):  # type: ignore[no-untyped-call]
    """Watches the memory of a forward and backward pass."""

    def follow(self, mode: AbstractContextManager[Any]) -> Pass:
        """Run a forward and backward pass in a mode; return the memory that it uses."""
        parameters = sum(one.numel() for one in self._step.reach.parameters())
        with mode, torch.autograd.set_multithreading_enabled(False):
            held = pytree.tree_leaves((self._step._args, self._step._kwargs))
            for module in self._step.reach.modules():
                held += [*module.parameters(), *module.buffers()]
            self.memory.add(tensors(held))
            with self.memory.counts_what_is_kept():
                result = self._step.forward(self)
            results = [one for one in tensors([result]) if one.requires_grad]
            if not self._step.differentiates:
                with self:
                    torch.autograd.backward(results, [torch.ones_like(one) for one in results])
        return Pass(parameters, self.memory.saved, self.memory.moments)
