"""How the memory of a forward and backward pass grows with the batch: it runs twice, on tensors without data."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from operator import attrgetter
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch.fx import GraphModule

from polyamp.backends.torch import unstable
from polyamp.backends.torch.autocast.plan import OnFakes, run_on_fakes
from polyamp.backends.torch.graphs.capture import root_of
from polyamp.backends.torch.graphs.program import Program
from polyamp.backends.torch.recording.widening import tensors
from polyamp.batch import Footprint, Pass, batch_axes, footprint
from polyamp.policies import Policy


def footprint_of(
    fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], policy: Policy, examples: int
) -> Footprint | None:
    """Return the memory of a forward and backward pass under `polyamp.autocast`; None if it is unknown."""
    leaves = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    inputs = [leaf for leaf in leaves if not isinstance(leaf, nn.Parameter)]
    axes = zip(inputs, batch_axes([leaf.shape for leaf in inputs], examples), strict=True)
    axis_of = {id(leaf): axis for leaf, axis in axes if axis is not None}

    def measured(times: int) -> Meter:
        def grown(leaf: Any, fake: Any) -> Any:  # a copy, since a view would hold all memory that it is of
            if id(leaf) not in axis_of:
                return fake
            return torch.cat([fake] * times, axis_of[id(leaf)]).detach().requires_grad_(fake.requires_grad)

        meter: Meter = run_on_fakes(fn, args, kwargs, policy, Meter, grown)
        return meter

    try:
        once, twice = measured(1), measured(2)
    except Exception:  # its code reads values or depends on this size, or an operator has no kernel for such tensors
        return None
    return footprint(examples, once.parameters, once.measured, twice.measured)


def rewritten(program: Program, fn: Callable[..., Any]) -> GraphModule:
    """Return a program's graph as a function over the parameters of the function that it is of."""
    root, own = root_of(fn), program.attributes
    names = {str(node.target) for node in program.graph.find_nodes(op="get_attr")}
    return GraphModule({name: own[name] if name in own else attrgetter(name)(root) for name in names}, program.graph)


class Meter(OnFakes):  # type: ignore[no-untyped-call]
    """Adds up the bytes in use, and those that autograd keeps."""

    def __init__(self, run: Any, policy: Policy) -> None:
        super().__init__(run, policy)
        self._run = self._run_on_fakes
        self._alive: dict[int, tuple[int, int]] = {}
        self._saved: dict[int, int] = {}
        self._count = self._in_use = self.parameters = 0
        self._moments: list[int] = []

    @property
    def measured(self) -> Pass:
        """What was measured."""
        return Pass(sum(self._saved.values()), self._moments)

    def follow(self, mode: AbstractContextManager[Any]) -> Meter:
        """Measure a forward and backward pass in a mode."""
        trained = list(self._step.reach.parameters())
        self.parameters = sum(one.numel() for one in trained)
        with mode, torch.autograd.set_multithreading_enabled(False):
            held = pytree.tree_leaves((self._step._args, self._step._kwargs))
            for module in self._step.reach.modules():
                held += [*module.parameters(), *module.buffers()]
            self._add(tensors(held))
            with torch.autograd.graph.saved_tensors_hooks(self._keep, lambda kept: kept):
                result = self._step.forward(self)
            results = [one for one in tensors([result]) if one.requires_grad]
            if not self._step.differentiates:
                with self:
                    torch.autograd.backward(results, [torch.ones_like(one) for one in results])
        return self

    def look(self, op: Any, args: Sequence[Any], out: Any) -> None:
        """Add the memory of new results."""
        super().look(op, args, out)
        self._add(tensors([out]))

    def _run_on_fakes(self, op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run an operator, also recurrent layers, of whose memory PyTorch's fakes know nothing."""
        if op is not _CUDNN_BACKWARD:
            out = op(*args, **kwargs)
            return _with_reserve(out, op, args) if op in _RECURRENT else out
        data, weights, hidden, cells, mode, width, layers, is_bidirectional = (
            args[place] for place in (0, 1, 4, 5, 10, 11, 13, 17)
        )
        grads = (
            *pytree.tree_map_only(Tensor, torch.empty_like, (data, hidden, cells)),
            [*map(torch.empty_like, weights)],
        )
        # The gradients of the gates of all layers are its workspace. Weights that autocast flattened have no shape.
        gates = _GATES.get(mode, 1) * width * layers * (1 + is_bidirectional)
        self._add([*tensors([grads]), data.new_empty(gates, data.numel() // data.shape[-1])])
        return grads

    def _add(self, made: Iterable[Tensor]) -> None:
        for one in made:
            storage = one.untyped_storage()
            if storage._cdata not in self._alive:
                self._count += 1
                self._alive[storage._cdata] = self._count, storage.nbytes()
                self._in_use += storage.nbytes()
                self._moments.append(self._in_use)
                weakref.finalize(storage, _free, weakref.ref(self), storage._cdata).atexit = False

    def _keep(self, tensor: Tensor) -> Tensor:
        memory = tensor.untyped_storage()._cdata
        self._saved.update([self._alive.get(memory, (0, 0))])
        return tensor.detach()


def _free(weak: weakref.ref[Meter], memory: int) -> None:
    meter = weak()
    if meter is not None:
        meter._in_use -= meter._alive.pop(memory)[1]


_RECURRENT = {torch.ops.aten._cudnn_rnn.default, torch.ops.aten.mkldnn_rnn_layer.default}
_CUDNN_BACKWARD = torch.ops.aten._cudnn_rnn_backward.default
_GATES = {2: 4, 3: 3}  # by cuDNN's number of the layer: LSTM and GRU


def _with_reserve(out: Any, op: Any, args: Sequence[Any]) -> Any:
    """Return the results of a recurrent layer with the memory that it keeps, which only its kernel knows."""
    with unstable.with_data(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about the memory of the weights
        real = op(*pytree.tree_map_only(Tensor, _zeros, args))
    return *out[:3], out[3].new_empty(real[3].numel()), *out[4:]


def _zeros(like: Tensor) -> Tensor:
    return torch.zeros(like.shape, dtype=like.dtype, device=like.device)
