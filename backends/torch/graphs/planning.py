"""The entries of a plan, for operations and results that a pass decides, and the memory of tensors."""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Interpreter, Node
from torch.utils.checkpoint import checkpoint

from polyamp.backends.torch import unstable
from polyamp.backends.torch.dtypes import SIXTEEN_BIT, name_of
from polyamp.backends.torch.graphs.graph import line_of, native_name, path_of
from polyamp.backends.torch.graphs.values import Known
from polyamp.backends.torch.unstable import hint
from polyamp.flow import Decision
from polyamp.numbering import sizes_of_einsum
from polyamp.plan import BY_HAND, PlannedOperation, planned

Casts = Iterable[tuple[Known, torch.dtype]]


def plan_entry(node: Node, decision: Decision, inputs: Sequence[Known], known: Known, made: Casts) -> PlannedOperation:
    """Return a plan's entry for an operation, with the casts that were made for it."""
    cast = {id(source.node): dtype for source, dtype in made}
    read = sum(_bytes(one.fake, cast.get(id(one.node))) for one in inputs)
    tensors, out = _tensors([one.declared for one in inputs]), next(iter(_tensors(known.declared)), None)
    if decision.operation == "cast" and out is not None and out.dtype in SIXTEEN_BIT:
        decision = decision._replace(reason=f"{BY_HAND}{name_of(out.dtype)}")
    return planned(
        decision,
        native_name(node),
        _place(node),
        casts=_bytes_of_casts(made),
        moved=read + _bytes(known.fake),
        moved_float32=sum(_bytes(one.declared) for one in inputs) + _bytes(known.declared),
        sizes=sizes_of(decision.operation, native_name(node), (*node.args, *node.kwargs.values()), tensors, out),
    )


def sizes_of(
    name: str, native: str, args: Sequence[Any], tensors: Sequence[Tensor], out: Tensor | None
) -> tuple[int, ...]:
    """Return the sizes of a product, or the classes and rows of a loss; see `polyamp.plan.PlannedOperation`."""
    is_loss = name in ("log_softmax", "cross_entropy")
    if not (is_loss or name in ("conv", "matmul", "attention")) or not tensors or out is None:
        return ()
    given = tensors if len(tensors) > 1 else [*tensors, *tensors]  # x @ x has one input
    left, right, *others = (tuple(map(hint, one.shape)) for one in (given[-2:] if "add" in native else given))
    result = tuple(map(hint, out.shape))
    if is_loss and left:
        own = next((one for one in args if type(one) is int), -1)
        classes = left[own if name == "log_softmax" else min(len(left) - 1, 1)]
        return classes, math.prod(left) // max(classes, 1)
    if is_loss or min(len(left), len(right), len(result)) < 2:
        return ()
    if name == "conv":
        axis = 1 - len(right)
        return left[axis], result[axis]
    if native == "einsum":
        return () if others else sizes_of_einsum(args[0], [left, right])
    rows = math.prod(left[:-1]) if len(right) == 2 else left[-2]
    return rows, left[-1], right[-2] if name == "attention" else result[-1]


def result_entry(known: Known, made: Casts) -> PlannedOperation:
    """Return a plan's entry for the cast of a result to its declared dtype."""
    decision = Decision("cast", "keep", f"a result is {name_of(known.declared.dtype)}")
    return planned(decision, "to", _place(known.node), casts=_bytes_of_casts(made))


def _place(node: Node) -> str:
    return f"{path_of(node)} {line_of(node)}"


def _bytes_of_casts(made: Casts) -> list[tuple[int, int]]:
    return [(_bytes(source.fake), _bytes(source.fake, dtype)) for source, dtype in made]


def _tensors(fakes: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(fakes) if isinstance(leaf, Tensor)]


def _bytes(fakes: Any, dtype: torch.dtype | None = None) -> int:
    """Return the size of tensors, in another dtype if given; symbolic sizes count as in the example."""
    return sum(hint(one.numel()) * (dtype or one.dtype).itemsize for one in _tensors(fakes))


@dataclass(eq=False)
class Block:
    """Memory that tensors share."""

    number: int  # no other has it; a place in memory is used again
    size: int
    watch: object  # a weak reference that tells when it is freed


class Memory:
    """The memory of tensors: what is in use at every moment, and what autograd keeps."""

    def __init__(self) -> None:
        self.moments: list[int] = []  # the bytes in use whenever memory was allocated
        self._in_use = 0
        self._alive: dict[int | None, Block] = {}  # by place
        self._kept: dict[int, int] = {}  # sizes by number

    @property
    def saved(self) -> int:
        """All bytes that autograd has kept."""
        return sum(self._kept.values())

    def add(self, made: Iterable[Tensor]) -> None:
        """Count tensors' memory as in use until it is freed, unless that memory is counted already."""
        for one in made:
            place = unstable.storage_of(one)
            if place is not None and place not in self._alive:
                storage = one.untyped_storage()
                watch = weakref.ref(storage, partial(self._free, place))
                block = Block(len(self.moments), hint(storage.nbytes()), watch)
                self._alive[place] = block
                self._in_use += block.size
                self.moments.append(self._in_use)

    def of(self, tensor: Tensor) -> Block | None:
        """Return the memory that a tensor uses; None if it is not counted."""
        return self._alive.get(unstable.storage_of(tensor))

    def counts_what_is_kept(self) -> AbstractContextManager[None]:
        """Return a context in which `saved` counts what autograd keeps."""
        return torch.autograd.graph.saved_tensors_hooks(self._keep, lambda kept: kept)

    def _keep(self, tensor: Tensor) -> Tensor:
        self.add([tensor])
        block = self.of(tensor)
        if block is not None:
            self._kept[block.number] = block.size
        return tensor.detach()  # an output itself would hold the node that holds it

    def _free(self, place: int, _: object) -> None:
        self._in_use -= self._alive.pop(place).size


def bytes_saved(graph: Graph, attributes: Mapping[str, Any]) -> int | None:
    """Run a graph on fake tensors; return the bytes that autograd keeps, with parameters and arguments."""
    mode = unstable.fake_mode_of(node.meta.get("example_value") for node in graph.nodes)
    if mode is None:
        return None
    names = {str(node.target) for node in graph.find_nodes(op="get_attr")}
    root = {name: attributes.get(name, nn.Identity()) for name in names}  # parts with a fake are not read
    memory, interpreter = Memory(), _OnFakes(GraphModule(root, graph))
    try:
        with unstable.on_fakes(mode), torch.enable_grad(), memory.counts_what_is_kept():
            interpreter.run(*graph.find_nodes(op="placeholder"))
    except (RuntimeError, TypeError, NotImplementedError):  # one of the user's operators has no fake kernel
        return None
    return memory.saved


class _OnFakes(Interpreter):
    """Runs a graph on fake tensors, which have no data."""

    def run_node(self, n: Node) -> Any:
        """Return a node's value; for an input, its fake tensor."""
        if n.op in ("placeholder", "get_attr") and "example_value" in n.meta:
            return n.meta["example_value"]
        return super().run_node(n)

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        """Call a function; call Dynamo's operator for checkpoints as a checkpoint, which keeps nothing of its body."""
        if unstable.is_operator_of_bodies(target, "tag_activation_checkpoint"):
            return checkpoint(*args, **{**kwargs, "use_reentrant": False})
        return super().call_function(target, args, kwargs)
