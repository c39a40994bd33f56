"""Observe every operation of a step, forward and backward, in execution order, and count its results."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from polyamp.backends.torch import unstable
from polyamp.backends.torch.autocast.behaviours import class_name
from polyamp.backends.torch.dtypes import SIXTEEN_BIT, name_of
from polyamp.backends.torch.operations import canonical
from polyamp.backends.torch.recording import widening
from polyamp.backends.torch.recording.changes import Changes
from polyamp.backends.torch.recording.widening import values_of
from polyamp.backends.torch.tracking import Tracker
from polyamp.diagnosis.recording import ACTIVATION, GRADIENT, Kind, Observation
from polyamp.diagnosis.spread import Spread, stride
from polyamp.flow import decide
from polyamp.operations import OPERATIONS
from polyamp.policies import Policy


class Operator(NamedTuple):
    """Facts about an aten operator."""

    native: str  # its name, without the overload
    name: str  # its canonical name; for an operator of the user, the name of the operator
    moves: bool  # whether it only moves or selects values
    keeps: bool  # whether it moves all values and drops none, like a view, a copy or a cast
    computes: bool  # whether its results are recorded
    values: int  # how many of its results are recorded; the others are statistics for the backward pass


@cache
def operator_of(op: Any) -> Operator:
    """Return the facts about an operator."""
    is_aten = op.name().startswith("aten::")
    native = op.name().partition(".")[0].removeprefix("aten::")
    base = native.removeprefix("_foreach_").removesuffix("_")
    name = canonical(base) if is_aten else None
    op_class = OPERATIONS[name].op_class if name else ""
    keeps = op.is_view or name in _KEEPS or (is_aten and base in _MOVES)
    moves = keeps or op_class == "neutral"
    values = _VALUES.get(native, 1 if name in _ONE_VALUE and "backward" not in native else _ALL)
    return Operator(native, name or class_name(op.name()), moves, keeps, not moves and op_class != "keep", values)


_ALL = 1000
_KEEPS = {"cast", "reshape", "transpose", "identity", "flip", "roll"}
_ONE_VALUE = {"layer_norm", "group_norm", "batch_norm", "rms_norm", "attention", "nll_loss", "ctc_loss"}
_VALUES = {"_thnn_fused_lstm_cell": 2, "_thnn_fused_gru_cell": 1, "mkldnn_rnn_layer": 3, "_cudnn_rnn": 3}

# Operators that move values or allocate memory and have no canonical name, since users do not call them.
_MOVING = """
copy resize resize_as set lift lift_fresh_copy _lazy_clone unsafe_split_with_sizes empty_strided empty_permuted
new_empty_strided _new_zeros_with_same_feature_meta _pin_memory _to_dense _to_sparse _coalesce _coalesced _values values
sparse_mask to_mkldnn _pack_padded_sequence _nested_get_values _nested_view_from_buffer _nested_view_from_jagged
_unsafe_masked_index
"""
_MOVES = frozenset(_MOVING.split())


def spread_of(tensor: Tensor) -> Spread:
    """Return how a tensor's elements, on this rank, spread over powers of two."""
    magnitudes = _flat(tensor).abs()
    sample = magnitudes[:: stride(magnitudes.numel())].cpu().numpy()
    inf, nan, largest = 0, 0, float(magnitudes.amax())
    if not math.isfinite(largest):
        inf, nan = int(magnitudes.isinf().sum()), int(magnitudes.isnan().sum())
        largest = float(torch.where(magnitudes.isfinite(), magnitudes, 0.0).amax())
    return Spread.of_sample(magnitudes.numel(), sample, inf, nan, largest)


def _flat(tensor: Tensor) -> Tensor:
    """Return the elements in float32, in memory order if they fill their memory, since flattening could copy."""
    tensor = values_of(tensor).detach()
    if tensor.is_sparse:
        tensor = tensor.coalesce().values()
    values = tensor.float()
    steps = zip(values.shape, values.stride(), strict=True)
    if values.numel() == 1 + sum((size - 1) * step for size, step in steps):
        return values.as_strided((values.numel(),), (1,))
    return values.reshape(-1)


class UpdateBegins(BaseException):
    """Raised to end a step where its optimizer's update begins. No ``except Exception`` catches it."""

    def __init__(self, scale: float | None = None) -> None:
        super().__init__()
        self.scale = scale


class Watcher(unstable.EagerDispatchMode):  # type: ignore[no-untyped-call]
    """A mode that runs every operation of a step, in float32 if required, and saves tensors before they change."""

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
    """A mode that counts every result that an operation computes."""

    def __init__(self, policy: Policy, tracker: Tracker, wide: bool, changes: Changes) -> None:
        super().__init__(wide, changes)
        self.rows: list[Observation] = []
        self.leaves: dict[Tensor, int | None] = {}
        self.replaced: set[int] = set()
        self._policy, self._tracker = policy, tracker
        # by row: the rows of the tensors that were added up, or the row of the tensor that was cast, to make this one
        self._made_of: dict[int, Sequence[int]] = {}
        self._row_of: dict[int, tuple[int, bool]] = {}  # by the storage of a result; whether it still has those values
        self._narrowed: dict[tuple[int, torch.dtype], int] = {}  # by the row that was cast, and the target
        self._recorded_at: dict[int, str] = {}  # the module path of each autograd node, by its number
        self.hooks = ExitStack()  # removes the gradient hooks of all used leaves when it ends

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
            path = self._recorded_at.get(unstable.sequence_number(node), "")
            self._count(_in_backward(operator_of(op), node), GRADIENT, path, given, results)

    def _count(
        self, operator: Operator, kind: Kind, path: str, given: Sequence[Tensor], results: Sequence[Tensor]
    ) -> None:
        """Add rows for computed results. A result that an operator only moves keeps the row of its input."""
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
        """Forget the rows of tensors that were freed and whose memory these results use now."""
        for result in results:
            self._row_of.pop(_storage(result), None)

    def _moved(self, row: int, same: bool, kind: Kind, result: Tensor) -> tuple[int, bool]:
        """Return the row of a moved or cast tensor, and whether it has the row's values."""
        # The first cast to 16 bits adds a row: between float32 work and the next 16-bit operation, values can overflow
        # or be lost in this cast.
        maker = self.rows[row]
        if result.dtype not in SIXTEEN_BIT or maker.is_low or maker.kind != kind:
            return row, same
        if (row, result.dtype) not in self._narrowed:
            self._narrowed[row, result.dtype] = self._count_as(row, result)
        return self._narrowed[row, result.dtype], True

    def _count_as(self, row: int, result: Tensor) -> int:
        """Add a row for a tensor that was moved or cast from the tensor of another row."""
        shape, spread = tuple(result.shape), spread_of(result)
        self._made_of[len(self.rows)] = [row]
        self.rows.append(self.rows[row]._replace(format=name_of(result.dtype), shape=shape, spread=spread))
        return len(self.rows) - 1

    def _add(self, operator: Operator, kind: Kind, path: str, result: Tensor, parts: Sequence[int]) -> int:
        op_class, shape = decide(self._policy.rules, operator.name, path).op_class, tuple(result.shape)
        made = Observation(kind, operator.name, path, op_class, name_of(result.dtype), shape, spread_of(result))
        self._made_of[len(self.rows)] = parts if kind == GRADIENT else []
        self._row_of[_storage(result)] = len(self.rows), True
        self.rows.append(made)
        return len(self.rows) - 1

    def _meet(self, given: Sequence[Tensor]) -> None:
        for one in given:
            if one.requires_grad and one.is_leaf and one not in self.leaves:
                self.leaves[one] = None
                self.changes.take_gradient(one)
                hook = one.register_post_accumulate_grad_hook(lambda leaf: self.took(leaf, leaf.grad))  # type: ignore[no-untyped-call]
                self.hooks.callback(hook.remove)

    def took(self, leaf: Tensor, grad: Any) -> None:
        """Record a leaf's gradient: the row of its computation becomes that of the leaf's gradient."""
        row, same = self._row_of.get(_storage(grad), (None, False))
        if row is None or self.rows[row].kind == ACTIVATION:
            row = self._add(_ACCUMULATES, GRADIENT, "", grad, ())
        elif not same or math.prod(self.rows[row].shape) != grad.numel():
            row = self._count_as(row, grad)
        self.leaves[leaf] = row
        self.replaced.update(self._parts_of(row))

    def _parts_of(self, row: int) -> Iterator[int]:
        yield row
        for part in self._made_of[row]:
            if part not in self.replaced and self.rows[part].kind == GRADIENT:
                yield from self._parts_of(part)


def _in_backward(operator: Operator, node: Any) -> Operator:
    """Return the facts about an operator in a backward node; operators of DistributedDataParallel only average."""
    if node.name() == _ACCUMULATION and operator.name != "add":
        return operator._replace(moves=True, computes=False)
    return operator


_ACCUMULATES = Operator("accumulate_grad", "add", moves=False, keeps=False, computes=True, values=1)
_ACCUMULATION = "torch::autograd::AccumulateGrad"


def _runs_again(node: Any) -> bool:
    """Return whether a checkpointed function runs again; its first run's results are recorded."""
    return unstable.checkpointing() is not None or (
        torch.is_grad_enabled() and node.name().startswith("CheckpointFunction")
    )


def _storage(tensor: Tensor) -> int:
    """Return a number that views of the same memory share."""
    return unstable.storage_of(widening.values_of(tensor)) or id(tensor)
