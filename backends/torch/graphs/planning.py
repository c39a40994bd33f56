"""Builds a plan: one entry for each operation that a pass decides."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor
from torch.fx import Node

from polyamp.backends.torch.graphs.nodes import line_of, native_name, path_of
from polyamp.backends.torch.unstable import hint
from polyamp.flow import AS_WRITTEN, Flow
from polyamp.plan import PlannedOperation
from polyamp.rules import Decision

if TYPE_CHECKING:
    from polyamp.backends.torch.graphs.values import Known

Casts = Iterable[tuple["Known", torch.dtype]]


class PlanBuilder:
    """The entries of a plan for one graph, in order."""

    def __init__(self) -> None:
        self.operations: list[PlannedOperation] = []

    def add(
        self,
        node: Node,
        operation: str,
        decision: Decision,
        outcome: Flow,
        inputs: Sequence[Known],
        known: Known,
        made: Casts,
    ) -> None:
        """Add an operation, with the casts that were made for it."""
        cast = {id(source.node): dtype for source, dtype in made}
        read = sum(_bytes(one.fake, cast.get(id(one.node))) for one in inputs)
        count, before, traffic = _traffic(made)
        self.operations.append(
            PlannedOperation(
                operation,
                native_name(node),
                _place(node),
                decision.op_class,
                outcome.format,
                outcome.reason,
                casts=count,
                bytes_cast=before,
                bytes_moved=read + _bytes(known.fake) + traffic,
                bytes_moved_float32=sum(_bytes(one.declared) for one in inputs) + _bytes(known.declared),
            )
        )

    def add_result(self, known: Known, made: Casts) -> None:
        """Add the cast of a result to its declared dtype."""
        count, before, traffic = _traffic(made)
        reason = f"a result is {str(known.declared.dtype).removeprefix('torch.')}"
        self.operations.append(
            PlannedOperation(
                "cast",
                "to",
                _place(known.node),
                "keep",
                AS_WRITTEN,
                reason,
                casts=count,
                bytes_cast=before,
                bytes_moved=traffic,
            )
        )


def _place(node: Node) -> str:
    return f"{path_of(node)} {line_of(node)}".strip()


def _traffic(made: Casts) -> tuple[int, int, int]:
    """Return the number of casts, the bytes before them, and the bytes that they read and write."""
    pairs = [(_bytes(source.fake), _bytes(source.fake, dtype)) for source, dtype in made]
    return len(pairs), sum(before for before, _ in pairs), sum(map(sum, pairs))


def _bytes(fakes: Any, dtype: torch.dtype | None = None) -> int:
    """Return the size of tensors, in another dtype if given; symbolic sizes count as in the example."""
    tensors = [leaf for leaf in pytree.tree_leaves(fakes) if isinstance(leaf, Tensor)]
    return sum(hint(one.numel()) * (dtype or one.dtype).itemsize for one in tensors)
