"""A wrapped optimizer's state dict: the inner one's, and beside it the loss scale and the master weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor

from polyamp.errors import StateError

if TYPE_CHECKING:
    import torch

    from polyamp.backends.torch.optimizer import LossScaledOptimizer

KEYS = ("state", "param_groups", "loss_scale", "master_weights")


def save(optimizer: LossScaledOptimizer) -> dict[str, Any]:
    """See `LossScaledOptimizer.state_dict`."""
    masters = optimizer.masters
    return {
        **optimizer.inner.state_dict(),
        "loss_scale": optimizer.scaler.config.to_state_dict(optimizer.scaler.state),
        "master_weights": None if masters is None else masters.state(),
    }


def load(optimizer: LossScaledOptimizer, saved: Mapping[str, Any]) -> None:
    """See `LossScaledOptimizer.load_state_dict`. Everything is tested before anything is changed."""
    _check(optimizer, saved)
    scale_state = optimizer.scaler.config.from_state_dict(saved["loss_scale"])
    own = {key: value for key, value in saved.items() if key not in ("loss_scale", "master_weights")}
    optimizer.inner.load_state_dict(own)
    _keep_dtypes(optimizer.inner, saved)
    if optimizer.masters is not None:
        optimizer.masters.load(saved["master_weights"])
    optimizer.scaler.resume(scale_state)


def _check(optimizer: LossScaledOptimizer, saved: Mapping[str, Any]) -> None:
    if not isinstance(saved, Mapping) or not {"state", "param_groups"} <= set(saved):
        found = f"keys {', '.join(map(str, saved))}" if isinstance(saved, Mapping) else type(saved).__name__
        raise _bad("not an optimizer's state", found, f"keys {', '.join(KEYS)}", "load what state_dict() gave")
    missing = [key for key in KEYS if key not in saved]
    if missing:
        raise _bad(
            "this is the state of an optimizer that was not wrapped",
            f"no {' and no '.join(missing)}",
            f"keys {', '.join(KEYS)}",
            "load it into the plain optimizer, by plain.load_state_dict(saved), and wrap that",
        )
    sizes, found_sizes = (
        [len(group["params"]) for group in groups] for groups in (optimizer.param_groups, saved["param_groups"])
    )
    if sizes != found_sizes:
        raise _bad(
            "the parameter groups differ",
            f"groups of {found_sizes} parameters",
            f"groups of {sizes} parameters",
            "build the same model and optimizer as when the state was saved",
        )
    if optimizer.masters is not None:
        optimizer.masters.check(saved["master_weights"])
    elif saved["master_weights"] is not None:
        raise _bad(
            "the saved state has master weights, and this optimizer has none",
            f"{len(saved['master_weights'])} master weights",
            "none",
            "convert the model to the policy that it was saved under before its optimizer is wrapped",
        )


def _keep_dtypes(inner: torch.optim.Optimizer, saved: Mapping[str, Any]) -> None:
    """torch casts loaded moments to the parameter's dtype; give those that had another one their bits back."""
    params = [param for group in inner.param_groups for param in group["params"]]
    numbers = [number for group in saved["param_groups"] for number in group["params"]]
    for param, number in zip(params, numbers, strict=True):
        for key, value in saved["state"].get(number, {}).items():
            loaded = inner.state[param].get(key)
            if isinstance(value, Tensor) and isinstance(loaded, Tensor) and loaded.dtype != value.dtype:
                inner.state[param][key] = value.to(loaded.device)


def _bad(what: str, found: str, allowed: str, fix: str) -> StateError:
    return StateError(what, where="load_state_dict(saved)", found=found, allowed=allowed, fix=fix)
