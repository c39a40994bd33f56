"""`amp.state_dict` and `amp.load_state_dict`: the loss scales, in Apex's form."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from polyamp.backends.torch.compat.apex.amp._amp_state import _amp_state
from polyamp.errors import StateError, warn_deprecated
from polyamp.validation import shown


def state_dict(destination: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return the loss scales as ``{"loss_scaler0": {"loss_scale": ..., "unskipped": ...}, ...}``.

    The state of an optimizer has them too, with everything else that it needs to resume bit for bit.
    """
    warn_deprecated(
        "apex.amp.state_dict()", "opt.state_dict(), which has the loss scale, or polyamp.save_loss_scale(opt)"
    )
    destination = {} if destination is None else destination
    for number, scaler in enumerate(_amp_state.loss_scalers):
        destination[f"loss_scaler{number}"] = {"loss_scale": scaler.loss_scale(), "unskipped": scaler._unskipped}
    return destination


def load_state_dict(state_dict: Mapping[str, Any]) -> None:
    """Resume the loss scales from a result of `state_dict`, also of Apex's own.

    If there are more losses in the state than ``num_losses``, the others are left out, as in Apex.

    Raises:
        StateError: it is another kind of state, or a scale is outside the settings; nothing is changed.
    """
    warn_deprecated(
        "apex.amp.load_state_dict(saved)", "opt.load_state_dict(saved), or polyamp.load_loss_scale(opt, saved)"
    )
    if not isinstance(state_dict, Mapping) or any("loss_scaler" not in str(key) for key in state_dict):
        found = ", ".join(map(repr, state_dict)) if isinstance(state_dict, Mapping) else shown(state_dict)
        raise StateError(
            "this is not a state of apex.amp",
            where="amp.load_state_dict(saved)",
            found=found,
            allowed="loss_scaler0, ...",
        )
    if len(state_dict) != len(_amp_state.loss_scalers):
        print(f"Warning: state_dict has {len(state_dict)} entries, and {len(_amp_state.loss_scalers)} losses are used")
    pairs = list(zip(_amp_state.loss_scalers, state_dict.values(), strict=False))
    states = [_read(scaler, saved) for scaler, saved in pairs]
    for (scaler, saved), state in zip(pairs, states, strict=True):
        if state is None:
            scaler._loss_scale, scaler._unskipped = saved["loss_scale"], saved["unskipped"]
        else:
            scaler.scaler.resume(state)


def _read(scaler: Any, saved: Any) -> Any:
    """Return the saved state under the scaler's settings; None for a static scale, which may be any number."""
    if not (isinstance(saved, Mapping) and {"loss_scale", "unskipped"} <= set(saved)):
        raise StateError(
            "this is not a loss scale of apex.amp",
            where="amp.load_state_dict(saved)",
            found=shown(saved),
            allowed="loss_scale and unskipped",
        )
    if not scaler.dynamic:
        return None
    return scaler.scaler.settings.from_state_dict({"loss_scaler0": dict(saved)})
