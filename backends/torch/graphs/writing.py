"""Writes the new graph: copies of nodes on other inputs, and the casts between them."""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from polyamp.backends.torch import unstable
from polyamp.backends.torch.graphs.inner import saturated
from polyamp.backends.torch.graphs.values import Known, dtypes_of, fake_as, target_of, value_of
from polyamp.flow import Value


class Writing:
    """A new graph while it is being written."""

    def __init__(self, graph: Graph, mode: Any) -> None:
        self.graph, self.mode = graph, mode
        self.records = True
        self.made: list[tuple[Known, torch.dtype]] = []
        self._casts: dict[tuple[Any, torch.dtype, bool], Node] = {}

    def run_on_fakes(self, node: Node, fakes: Mapping[Node, Any]) -> Any:
        """Return the fake result of a node for these fake inputs."""
        args, kwargs = map_arg((node.args, node.kwargs), fakes.__getitem__)
        with unstable.on_fakes(self.mode):
            if node.op == "call_method":
                return getattr(args[0], str(node.target))(*args[1:], **kwargs)
            return node.target(*args, **kwargs)  # type: ignore[operator]

    def copy(self, node: Node, inputs: Mapping[Node, Any], fake: Any) -> Node:
        """Add a copy of a node on other inputs; ``fake`` is a fake of its result."""
        args, kwargs = map_arg((node.args, node.kwargs), inputs.__getitem__)
        new = self.graph.create_node(node.op, node.target, args, kwargs, name=node.name)
        new.meta = {**node.meta, "example_value": fake}
        return new

    def cast(self, known: Known, dtype: torch.dtype | None, *, own: bool = False, adds: bool = False) -> Any:
        """Return a value in a dtype: the node itself, or a cast, which is written once."""
        if isinstance(known.fake, tuple | list) and dtypes_of(known.fake) != dtypes_of(known.declared):
            return tuple(self.cast(part, dtype) for part in self._parts(known))
        if not isinstance(known.fake, Tensor) or known.fake.dtype == (target := target_of(known, dtype)):
            return known.node
        key = (known.node, target, self.records)
        if own or key not in self._casts:
            self.made.append((known, target))
            source = saturated(self.graph, known.node, target) if adds and may_exceed(value_of(known)) else known.node
            new = self.graph.call_method("to", (source, target))
            new.meta = {**known.node.meta, "example_value": fake_as(known, dtype, self.mode)}
            if own:
                return new
            self._casts[key] = new
        return self._casts[key]

    def forget(self, stale: Collection[Any]) -> None:
        """Drop casts of nodes whose values have changed."""
        self._casts = {key: made for key, made in self._casts.items() if key[0] not in stale}

    def _parts(self, known: Known) -> Iterator[Known]:
        """Yield the single results of an operation that returns several."""
        for index, (fake, declared) in enumerate(zip(known.fake, known.declared, strict=True)):
            node = self.graph.call_function(operator.getitem, (known.node, index))
            yield Known(node, fake, declared)


def may_exceed(value: Value) -> bool:
    """Return whether a value may be finite, but beyond the compute format."""
    return value.state in ("input", "strong") or bool(value.unfit)
