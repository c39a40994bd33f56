"""A wrapped optimizer's state dict: the inner optimizer's, with the loss scale and the master weights."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from polyamp.backends.torch.dtypes import SIXTEEN_BIT
from polyamp.backends.torch.step.masters import MasterWeights
from polyamp.backends.torch.step.provenance import WrappedOptimizer
from polyamp.backends.torch.step.scale import LossScaler
from polyamp.errors import StateError, shown, warn_once
from polyamp.settings import LossScaleState

_KEYS = ("state", "param_groups", "loss_scale", "master_weights")
_OURS = ("loss_scale", "loss_scales", "master_weights", "policy")
# the names that running means of gradients, of their parameter's shape, have in most optimizers
_MOMENTS = {"exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer"}

FIX = "load a result of state_dict()"

_PLAIN = (
    "the saved state is that of an optimizer that was not wrapped: it is loaded, the loss scale starts at init, and "
    "master weights are made from the parameters. polyamp.load_loss_scale(optimizer, saved) takes a scaler's state."
)
_OTHER_BITS = (
    "the saved moments have 16 bits, and the parameters 16 bits of another format: the moments were cast to it, and "
    "training does not resume bit for bit. With master weights it does."
)


def save(optimizer: WrappedOptimizer) -> dict[str, Any]:
    """Return the result of `LossScaledOptimizer.state_dict`. "loss_scales" has the scales of losses with an id."""
    return {**optimizer.inner.state_dict(), **own_part(optimizer)}


def own_part(optimizer: WrappedOptimizer) -> dict[str, Any]:
    """Return the entries that a plain optimizer's state does not have."""
    masters, scaler = optimizer.masters, optimizer.scaler
    others = {loss_id: _saved_scale(other) for loss_id, other in scaler.others.items()}
    return {
        "loss_scale": _saved_scale(scaler),
        **({"loss_scales": others} if others else {}),
        "master_weights": None if masters is None else masters.state(),
        **({} if optimizer.scaler.policy is None else {"policy": str(optimizer.scaler.policy)}),
    }


def load(optimizer: WrappedOptimizer, saved: Mapping[str, Any]) -> None:
    """Load a state; see `LossScaledOptimizer.load_state_dict`. Everything is tested before anything is changed."""
    _check_state(optimizer, saved)
    plain = _is_plain(saved)
    scales = _scales(optimizer, saved)
    own = {key: value for key, value in saved.items() if key not in _OURS}
    before, groups = vars(optimizer.inner).copy(), optimizer.inner.param_groups
    try:
        optimizer.inner.load_state_dict({**own, "state": {**saved["state"]}})  # ZeroRedundancyOptimizer changes it
        _keep_dtypes(optimizer.inner, saved, widened=plain and optimizer.masters is not None)
        _check_moments(optimizer.inner)
        for old, new in zip(groups, optimizer.inner.param_groups, strict=True):
            if lacking := optimizer.inner.defaults.keys() & old.keys() - new.keys():
                raise bad_state("a saved parameter group lacks options", ", ".join(sorted(lacking)), "all of them", FIX)
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
    policy = str(optimizer.scaler.policy)
    if saved.get("policy", policy) != policy:
        warn_once(f"the saved state is of an optimizer for {saved['policy']}, and goes on in one for {policy}.")


def _saved_scale(scaler: LossScaler) -> dict[str, Any]:
    return scaler.settings.to_state_dict(scaler.state)


def _scales(optimizer: WrappedOptimizer, saved: Mapping[str, Any]) -> list[tuple[Any, LossScaleState]]:
    """Return each loss id with the state of its scale: the saved state, or if there is none, the initial state."""
    settings, others = optimizer.scaler.settings, saved.get("loss_scales", {})
    if _is_plain(saved):
        return [(loss_id, settings.initial_state()) for loss_id in (None, *optimizer.scaler.others)]
    if not isinstance(others, Mapping):
        raise bad_state(
            "the saved loss scales must be a mapping",
            type(others).__name__,
            "a mapping from loss ids to their states",
            FIX,
        )
    read = settings.from_state_dict
    return [(None, read(saved["loss_scale"])), *((loss_id, read(state)) for loss_id, state in others.items())]


def _keep_dtypes(inner: torch.optim.Optimizer, saved: Mapping[str, Any], *, widened: bool) -> None:
    """Restore the saved dtypes of moments, which torch casts to their parameter's dtype."""
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


def _is_plain(saved: object) -> bool:
    """Return whether a saved state is that of an optimizer that was not wrapped."""
    return isinstance(saved, Mapping) and not any(key in saved for key in _OURS)


def _check_state(optimizer: WrappedOptimizer, saved: Mapping[str, Any]) -> None:
    """Raise if a saved state is not one of this optimizer."""
    if not isinstance(saved, Mapping) or not {"state", "param_groups"} <= set(saved):
        found = f"keys {', '.join(map(str, saved))}" if isinstance(saved, Mapping) else type(saved).__name__
        raise bad_state("the saved state is not an optimizer's", found, f"keys {', '.join(_KEYS)}", FIX)
    _check_groups(optimizer.param_groups, saved)
    if _is_plain(saved):
        return
    missing = [key for key in _KEYS if key not in saved]
    if missing:
        fix = f"{FIX}; without any of {', '.join(_OURS)} it is taken as a plain optimizer's"
        raise bad_state(
            "the saved state is incomplete", f"no {' and no '.join(missing)}", f"keys {', '.join(_KEYS)}", fix
        )
    if optimizer.masters is not None:
        _check_masters(optimizer.masters, saved["master_weights"])
    elif saved["master_weights"] is not None:
        raise bad_state(
            "the saved state has master weights, and this optimizer has none",
            'something under "master_weights"',
            "None",
            "convert the model to the policy that it was saved under before its optimizer is wrapped",
        )


def _check_masters(masters: MasterWeights, saved: object) -> None:
    own, found = _layouts(masters.masters), None
    if isinstance(saved, Mapping) and all(isinstance(master, Tensor) for master in saved.values()):
        found = _layouts(saved.values())
    if found != own:
        raise bad_state(
            "the saved master weights are not those of this optimizer",
            'no float32 tensors under "master_weights"' if found is None else f"{len(found)} tensors of shapes {found}",
            f"{len(own)} tensors of shapes {own}",
            "convert the model, and wrap its optimizer, as they were when the state was saved; of a state without "
            'masters, load {"state": saved["state"], "param_groups": saved["param_groups"]} after the model',
        )


def _check_groups(groups: Sequence[Mapping[str, Any]], saved: Mapping[str, Any]) -> None:
    sizes, found = _sizes(groups), _sizes(saved["param_groups"])
    states = saved["state"]
    if found is None or not (isinstance(states, Mapping) and all(isinstance(s, Mapping) for s in states.values())):
        raise bad_state(
            "the saved state is not an optimizer's",
            f"param_groups: {type(saved['param_groups']).__name__}, state: {type(states).__name__}",
            "a list of groups, and a mapping from numbers of parameters to their states",
            FIX,
        )
    if sizes != found:
        raise bad_state(
            "the parameter groups differ",
            f"groups of {found} parameters",
            f"groups of {sizes} parameters",
            "build the same model and optimizer as when the state was saved",
        )


def _sizes(groups: object) -> list[int] | None:
    """Return the number of parameters in each group; None if these are not groups."""
    if not isinstance(groups, list | tuple):
        return None
    params = [group.get("params") if isinstance(group, Mapping) else None for group in groups]
    sizes = [len(each) for each in params if isinstance(each, list | tuple)]
    return sizes if len(sizes) == len(groups) else None


def _layouts(tensors: Iterable[Tensor]) -> list[Any]:
    """Return shapes, and for distributed tensors also their placements over ranks."""
    return [
        (tuple(tensor.shape), tensor.placements) if hasattr(tensor, "placements") else tuple(tensor.shape)
        for tensor in tensors
    ]


def _check_moments(inner: torch.optim.Optimizer) -> None:
    """Refuse running means that do not have their parameter's shape; the next step would fail in the middle."""
    for param, state in inner.state.items():
        for key in _MOMENTS & (state or {}).keys():  # another rank may have the state
            value = state[key]
            if key != "momentum_buffer" or value is not None:  # SGD's is None before the first step
                found = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else shown(value)
                if found != f"shape {tuple(param.shape)}":
                    allowed = f"a tensor of the parameter's shape {tuple(param.shape)}"
                    raise bad_state(f"the saved {key} does not fit its parameter", found, allowed, FIX)


def bad_state(what: str, found: str, allowed: str, fix: str) -> StateError:
    """Return the error for a saved state that cannot be loaded."""
    return StateError(what, where="load_state_dict(saved)", found=found, allowed=allowed, fix=fix)
