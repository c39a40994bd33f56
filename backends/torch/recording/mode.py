"""Observes every operation of a step, forward and backward, in execution order, and counts its results."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from polyamp.backends.torch import unstable
from polyamp.backends.torch.dtypes import SIXTEEN_BIT
from polyamp.backends.torch.recording import widening
from polyamp.backends.torch.recording.changes import Changes
from polyamp.backends.torch.recording.counting import Counts
from polyamp.backends.torch.recording.operators import Operator, operator_of
from polyamp.backends.torch.tracking import Tracker
from polyamp.diagnosis.recording import ACTIVATION, GRADIENT, Kind
from polyamp.policy import Policy
from polyamp.rules import decide


class Row(NamedTuple):
    """One tensor of a step; becomes a `polyamp.diagnosis.recording.Observation` when its counts are on the host.

    Attributes:
        counted: index of its counts.
        made_of: the rows whose plain sum, or cast, it is.
    """

    kind: Kind
    name: str
    native: str
    where: str
    op_class: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    counted: int
    made_of: tuple[int, ...] = ()


class UpdateBegins(BaseException):
    """Ends a step where its optimizer's update begins. Not an error, so that no ``except Exception`` stops it.

    Args:
        scale: the loss scale, if the code that unscales the gradients knows it.
    """

    def __init__(self, scale: float | None = None) -> None:
        super().__init__()
        self.scale = scale


class Watcher(unstable.EagerDispatchMode):  # type: ignore[no-untyped-call]
    """Runs every operation of a step, in float32 if required, and records what it changes.

    Args:
        wide: whether 16-bit values are computed in float32.
        changes: saves the old values of tensors that existed before.
    """

    def __init__(self, wide: bool, changes: Changes) -> None:
        super().__init__()
        self.changes = changes
        self._run = widening.run if wide else widening.run_as_it_is

    @unstable.never_compiled
    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if op is torch.ops.aten._amp_foreach_non_finite_check_and_unscale_.default:
            raise UpdateBegins(1.0 / float(args[2]))  # torch's own loss scaler is about to unscale
        self.changes.before(op, args, kwargs)
        out = self._run(op, args, kwargs)
        self.changes.made(out, args)
        self.look(op, args, out)
        return out

    def look(self, op: Any, args: Sequence[Any], out: Any) -> None:
        """Handle an operation that has run."""


class Recorder(Watcher):
    """Counts every result that an operation computes.

    Attributes:
        rows: the tensors, in order.
        leaves: the leaves that require gradients and were used, each with the row of its gradient once it exists.
        replaced: the rows that are parameters' gradients, or parts of them.

    Args:
        policy: its rules decide the classes of operations.
        tracker: tracks which module runs.
        wide: see `Watcher`; also changes.
    """

    def __init__(self, policy: Policy, tracker: Tracker, wide: bool, changes: Changes) -> None:
        super().__init__(wide, changes)
        self.counts = Counts()
        self.rows: list[Row] = []
        self.leaves: dict[Tensor, int | None] = {}
        self.replaced: set[int] = set()
        self._policy, self._tracker = policy, tracker
        self._row_of: dict[int, tuple[int, bool]] = {}  # by the storage of a result; whether it still has those values
        self._narrowed: dict[tuple[int, torch.dtype], int] = {}  # by the row that was cast, and the target
        self._recorded_at: dict[int, str] = {}  # the module path of each autograd node, by its number
        self._hooks: list[Any] = []
        self._classes: dict[tuple[str, str], str] = {}

    @contextmanager
    def hooked(self) -> Iterator[None]:
        """Remove the gradient hooks of the leaves that were used, on exit."""
        try:
            yield
        finally:
            for hook in self._hooks:
                hook.remove()

    def look(self, op: Any, args: Sequence[Any], out: Any) -> None:
        """Count the results of the operation."""
        node, given, results = unstable.running_node(), list(widening.tensors(args)), list(widening.tensors([out]))
        again = node is not None and _runs_again(node)
        if node is None or again:
            self._recorded_at.setdefault(unstable.next_sequence_number() - 1, self._tracker.path)
        if node is None:
            self._meet(given)
        if again:
            self._forget(results)
        elif node is None:
            self._count(operator_of(op), ACTIVATION, self._tracker.path, given, results)
        else:
            self._count(_in_backward(operator_of(op), node), GRADIENT, self._path_of(node), given, results)

    def _count(
        self, operator: Operator, kind: Kind, path: str, given: Sequence[Tensor], results: Sequence[Tensor]
    ) -> None:
        """Add rows for the results that an operator computes; those that it only moves keep the row of their input."""
        known = [self._row_of[key] for key in map(_storage, given) if key in self._row_of]
        for index, result in enumerate(results):
            self._forget([result])
            if not result.is_floating_point() or not result.numel():
                continue
            if operator.computes and index < operator.values:
                self._add(operator, kind, path, result, [row for row, _ in known] if operator.name == "add" else [])
            elif operator.moves and known:
                row, same = known[0]
                self._row_of[_storage(result)] = self._moved(row, same and operator.keeps, kind, result)

    def _forget(self, results: Sequence[Tensor]) -> None:
        """Forget the rows of results' memory, which may have belonged to a tensor that was freed."""
        for result in results:
            self._row_of.pop(_storage(result), None)

    def _moved(self, row: int, same: bool, kind: Kind, result: Tensor) -> tuple[int, bool]:
        """Return the row of a tensor that was moved or cast.

        A cast to 16 bits gets a row of its own, once, because values overflow or are lost there when full work is
        between two 16-bit operations.
        """
        maker = self.rows[row]
        if result.dtype not in SIXTEEN_BIT or maker.dtype in SIXTEEN_BIT or maker.kind != kind:
            return row, same
        if (row, result.dtype) not in self._narrowed:
            self._narrowed[row, result.dtype] = self._count_as(row, result)
        return self._narrowed[row, result.dtype], True

    def _count_as(self, row: int, result: Tensor) -> int:
        """Add a row for the tensor that another row's tensor was moved to."""
        counted, shape = self.counts.add(result), tuple(result.shape)
        self.rows.append(self.rows[row]._replace(dtype=result.dtype, shape=shape, counted=counted, made_of=(row,)))
        return len(self.rows) - 1

    def _add(self, operator: Operator, kind: Kind, path: str, result: Tensor, parts: Sequence[int]) -> int:
        counted = self.counts.add(result)
        op_class = self._class_of(operator.name, path)
        made_of = tuple(parts) if kind == GRADIENT else ()
        self._row_of[_storage(result)] = len(self.rows), True
        dtype, shape = result.dtype, tuple(result.shape)
        self.rows.append(Row(kind, operator.name, operator.native, path, op_class, dtype, shape, counted, made_of))
        return len(self.rows) - 1

    def _class_of(self, name: str, path: str) -> str:
        key = name, path
        if key not in self._classes:
            self._classes[key] = decide(self._policy.rules, name, path).op_class
        return self._classes[key]

    def _path_of(self, node: Any) -> str:
        return self._recorded_at.get(unstable.sequence_number(node), "")

    def _meet(self, given: Sequence[Tensor]) -> None:
        for one in given:
            if one.requires_grad and one.is_leaf and one not in self.leaves:
                self.leaves[one] = None
                self.changes.take_gradient(one)
                hook = one.register_post_accumulate_grad_hook(self._accumulated)  # type: ignore[no-untyped-call]
                self._hooks.append(hook)

    def _accumulated(self, leaf: Tensor) -> None:
        self.took(leaf, leaf.grad)

    def took(self, leaf: Tensor, grad: Any) -> None:
        """Record a leaf's gradient: the row that computed it becomes that of the leaf's gradient."""
        row, same = self._row_of.get(_storage(grad), (None, False))
        if row is None or self.rows[row].kind == ACTIVATION:
            row = self._add(_ACCUMULATES, GRADIENT, "", grad, ())
        elif not same or math.prod(self.rows[row].shape) != grad.numel():
            row = self._count_as(row, grad)
        self.leaves[leaf] = row
        self.replaced.update(self._parts_of(row))

    def _parts_of(self, row: int) -> Iterator[int]:
        yield row
        for part in self.rows[row].made_of:
            if part not in self.replaced and self.rows[part].kind == GRADIENT:
                yield from self._parts_of(part)


def _in_backward(operator: Operator, node: Any) -> Operator:
    """Return an operator as it counts inside a node; DistributedDataParallel only averages gradients there."""
    if node.name() == _ACCUMULATION and operator.name != "add":
        return operator._replace(moves=True, computes=False)
    return operator


_ACCUMULATES = Operator("accumulate_grad", "add", moves=False, keeps=False, computes=True, values=1)
_ACCUMULATION = "torch::autograd::AccumulateGrad"


def _runs_again(node: Any) -> bool:
    """Return whether a checkpointed function runs again: its results were recorded in the first run."""
    return unstable.checkpointing() is not None or (
        torch.is_grad_enabled() and node.name().startswith("CheckpointFunction")
    )


def _storage(tensor: Tensor) -> int:
    """Return a number that views of the same memory share."""
    return unstable.storage_of(widening.values_of(tensor)) or id(tensor)
