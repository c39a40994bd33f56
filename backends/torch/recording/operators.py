"""What the recorder has to know of each aten operator."""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

from polyamp.backends.torch.autocast.overrides import class_name
from polyamp.backends.torch.operations import canonical
from polyamp.operations import OPERATIONS


class Operation(NamedTuple):
    """What is known of an aten operator.

    Attributes:
        native: its name, without that of the overload.
        name: the canonical one, or its own.
        moves: whether it only moves or chooses values.
        keeps: whether it moves all of them: a view, a copy or a cast.
        computes: whether its results are recorded.
        values: how many of its results are; others are statistics, kept for the backward pass.
    """

    native: str
    name: str
    moves: bool
    keeps: bool
    computes: bool
    values: int


@cache
def operation_of(op: Any) -> Operation:
    """What is known of an operator.

    >>> import torch
    >>> operation_of(torch.ops.aten.addmm.default).name, operation_of(torch.ops.aten.relu.default).moves
    ('matmul', True)
    """
    ours = op.name().startswith("aten::")
    native = op.name().partition(".")[0].removeprefix("aten::")
    base = native.removeprefix("_foreach_").removesuffix("_")
    name = canonical(base) if ours else None
    op_class = OPERATIONS[name].op_class if name else ""
    keeps = op.is_view or name in _KEEPS or (ours and base in _MOVES)
    moves = keeps or op_class == "neutral"
    values = _VALUES.get(native, 1 if name in _ONE_VALUE and "backward" not in native else _ALL)
    return Operation(native, name or class_name(op.name()), moves, keeps, not moves and op_class != "keep", values)


_ALL = 1000
_KEEPS = {"cast", "reshape", "transpose", "identity", "flip", "roll"}
_ONE_VALUE = {"layer_norm", "group_norm", "batch_norm", "rms_norm", "attention", "nll_loss", "ctc_loss"}
_VALUES = {"_thnn_fused_lstm_cell": 2, "_thnn_fused_gru_cell": 1, "mkldnn_rnn_layer": 3, "_cudnn_rnn": 3}

# Operators that move values or make memory and have no canonical name: users do not write them.
_MOVING = """
copy resize resize_as set lift lift_fresh_copy _lazy_clone unsafe_split_with_sizes empty_strided empty_permuted
new_empty_strided _new_zeros_with_same_feature_meta _pin_memory _to_dense _to_sparse _coalesce _coalesced _values values
sparse_mask to_mkldnn _pack_padded_sequence _nested_get_values _nested_view_from_buffer _nested_view_from_jagged
_unsafe_masked_index
"""
_MOVES = frozenset(_MOVING.split())
