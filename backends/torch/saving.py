"""A wrapped optimizer's state dict: the inner optimizer's, with the loss scale and the master weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from polyamp.backends.torch.dtypes import SIXTEEN_BIT
from polyamp.backends.torch.refusals import FIX, OURS, bad_state, check_moments, check_state, is_plain
from polyamp.backends.torch.scale import LossScaler
from polyamp.errors import StateError, warn_once
from polyamp.settings import LossScaleState

if TYPE_CHECKING:
    from polyamp.backends.torch.optimizer import LossScaledOptimizer

_PLAIN = (
    "the saved state is that of an optimizer that was not wrapped: it is loaded, the loss scale starts at init, and "
    "master weights are made from the parameters. polyamp.load_loss_scale(optimizer, saved) takes a scaler's state."
)
_OTHER_BITS = (
    "the saved moments have 16 bits, and the parameters 16 bits of another format: the moments were cast to it, and "
    "training does not resume bit for bit. With master weights it does."
)


def save(optimizer: LossScaledOptimizer) -> dict[str, Any]:
    """Return the result of `LossScaledOptimizer.state_dict`. "loss_scales" has the scales of losses with an id."""
    return {**optimizer.inner.state_dict(), **own_part(optimizer)}


def own_part(optimizer: LossScaledOptimizer) -> dict[str, Any]:
    """Return the entries that a plain optimizer's state does not have."""
    masters, scaler = optimizer.masters, optimizer.scaler
    others = {loss_id: _saved_scale(other) for loss_id, other in scaler.others.items()}
    return {
        "loss_scale": _saved_scale(scaler),
        **({"loss_scales": others} if others else {}),
        "master_weights": None if masters is None else masters.state(),
    }


def load(optimizer: LossScaledOptimizer, saved: Mapping[str, Any]) -> None:
    """Load a state; see `LossScaledOptimizer.load_state_dict`. Everything is tested before anything is changed."""
    check_state(optimizer, saved)
    plain = is_plain(saved)
    scales = _initial_scales(optimizer) if plain else _scales(optimizer, saved)
    own = {key: value for key, value in saved.items() if key not in OURS}
    before = vars(optimizer.inner).copy()
    try:
        optimizer.inner.load_state_dict({**own, "state": {**saved["state"]}})  # ZeroRedundancyOptimizer changes it
        _keep_dtypes(optimizer.inner, saved, widened=plain and optimizer.masters is not None)
        check_moments(optimizer.inner)
    except Exception as error:  # torch assigns the state, and then converts what the optimizer needs of it
        vars(optimizer.inner).update(before)
        if isinstance(error, StateError):
            raise
        found = f"{type(error).__name__}: {error}"
        raise bad_state("the optimizer cannot load this state", found, "a state of this optimizer", FIX) from error
    if plain:
        warn_once(_PLAIN)
    elif optimizer.masters is not None:
        optimizer.masters.load(saved["master_weights"])
    for loss_id, state in scales:
        optimizer.scaler.of(loss_id).resume(state)


def _initial_scales(optimizer: LossScaledOptimizer) -> list[tuple[Any, LossScaleState]]:
    state = optimizer.scaler.settings.initial_state()
    return [(loss_id, state) for loss_id in (None, *optimizer.scaler.others)]


def _saved_scale(scaler: LossScaler) -> dict[str, Any]:
    return scaler.settings.to_state_dict(scaler.state)


def _scales(optimizer: LossScaledOptimizer, saved: Mapping[str, Any]) -> list[tuple[Any, LossScaleState]]:
    read = optimizer.scaler.settings.from_state_dict
    others = saved.get("loss_scales", {})
    if not isinstance(others, Mapping):
        raise bad_state(
            "the saved loss scales must be a mapping",
            type(others).__name__,
            "a mapping from loss ids to their states",
            FIX,
        )
    return [(None, read(saved["loss_scale"])), *((loss_id, read(state)) for loss_id, state in others.items())]


def _keep_dtypes(inner: torch.optim.Optimizer, saved: Mapping[str, Any], *, widened: bool) -> None:
    """Restore the dtypes of loaded moments, which torch casts to the parameter's dtype."""
    # 16-bit moments are not restored if masters have replaced the parameters.
    params = [param for group in inner.param_groups for param in group["params"]]
    numbers = [number for group in saved["param_groups"] for number in group["params"]]
    for param, number in zip(params, numbers, strict=True):
        for key, value in saved["state"].get(number, {}).items():
            loaded = (inner.state.get(param) or {}).get(key)  # another rank may have the state
            if not (isinstance(value, Tensor) and isinstance(loaded, Tensor)) or loaded.dtype == value.dtype:
                continue
            if {loaded.dtype, value.dtype} == SIXTEEN_BIT:
                warn_once(_OTHER_BITS)
            elif not (widened and value.dtype in SIXTEEN_BIT):
                inner.state[param][key] = value.to(loaded.device)
