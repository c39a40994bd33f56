"""The entries of a plan, for operations and results that a pass decides, and the memory of tensors."""

from __future__ import annotations

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
from polyamp.backends.torch.dtypes import name_of
from polyamp.backends.torch.graphs.graph import line_of, native_name, path_of
from polyamp.backends.torch.graphs.values import Known
from polyamp.backends.torch.unstable import hint
from polyamp.flow import Decision
from polyamp.plan import PlannedOperation, planned

Casts = Iterable[tuple[Known, torch.dtype]]


def plan_entry(node: Node, decision: Decision, inputs: Sequence[Known], known: Known, made: Casts) -> PlannedOperation:
    """Return a plan's entry for an operation, with the casts that were made for it."""
    cast = {id(source.node): dtype for source, dtype in made}
    read = sum(_bytes(one.fake, cast.get(id(one.node))) for one in inputs)
    return planned(
        decision,
        native_name(node),
        _place(node),
        casts=_bytes_of_casts(made),
        moved=read + _bytes(known.fake),
        moved_float32=sum(_bytes(one.declared) for one in inputs) + _bytes(known.declared),
    )


def result_entry(known: Known, made: Casts) -> PlannedOperation:
    """Return a plan's entry for the cast of a result to its declared dtype."""
    decision = Decision("cast", "keep", f"a result is {name_of(known.declared.dtype)}")
    return planned(decision, "to", _place(known.node), casts=_bytes_of_casts(made))


def _place(node: Node) -> str:
    return f"{path_of(node)} {line_of(node)}"


def _bytes_of_casts(made: Casts) -> list[tuple[int, int]]:
    return [(_bytes(source.fake), _bytes(source.fake, dtype)) for source, dtype in made]


def _bytes(fakes: Any, dtype: torch.dtype | None = None) -> int:
    """Return the size of tensors, in another dtype if given; symbolic sizes count as in the example."""
    tensors = [leaf for leaf in pytree.tree_leaves(fakes) if isinstance(leaf, Tensor)]
    return sum(hint(one.numel()) * (dtype or one.dtype).itemsize for one in tensors)


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
        """Add the memory of tensors that is not known yet, until it is freed."""
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
        """Return the memory of a tensor, if it is known."""
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
    """Return the bytes that autograd keeps of a graph, including parameters and arguments; it runs on fakes."""
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
    """Runs a graph on the fakes of its inputs."""

    def run_node(self, n: Node) -> Any:
        """Return a node's value; for an input its fake."""
        if n.op in ("placeholder", "get_attr") and "example_value" in n.meta:
            return n.meta["example_value"]
        return super().run_node(n)

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        """Call a function; call Dynamo's operator for checkpoints as a checkpoint, which keeps nothing of its body."""
        if unstable.is_operator_of_bodies(target, "tag_activation_checkpoint"):
            return checkpoint(*args, **{**kwargs, "use_reentrant": False})
        return super().call_function(target, args, kwargs)
