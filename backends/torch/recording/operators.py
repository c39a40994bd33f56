"""Facts about aten operators that recordings need: which move values, and which results are values."""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

from polyamp.backends.torch.autocast.behaviours import class_name
from polyamp.backends.torch.operations import canonical
from polyamp.operations import OPERATIONS


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
