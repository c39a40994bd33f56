"""The loss scales of several losses in the form of Apex, which numbers them: the loss without an id is its number 0."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from polyamp.backends.torch.steps.losses import LossScalers
from polyamp.loss_scale import on_host
from polyamp.written_scales import apex_losses, apex_order, one_apex_loss, report_lost


def save_apex_losses(scalers: LossScalers) -> dict[str, Any]:
    """Return the states of all losses as ``apex.amp.load_state_dict`` takes them."""
    settings = scalers.main.settings
    initial = settings.initial_state()._asdict()
    states = {None: scalers.main, **scalers.others}
    fields = {loss_id: on_host(scaler.state)._asdict() for loss_id, scaler in states.items()}
    report_lost(settings, fields[None], "apex")
    ordered = (fields.get(loss_id, initial) for loss_id in apex_order(list(fields)))
    return apex_losses([one_apex_loss(settings, state) for state in ordered])


def load_apex_losses(scalers: LossScalers, saved: Mapping[int, Any]) -> None:
    """Resume from the states of Apex' losses: number 0 is the loss without an id, the others are those of their ids."""
    # Nothing is changed unless all states fit.
    states = {number: scalers.main.settings.from_state_dict(state) for number, state in saved.items()}
    if 0 in states:
        scalers.main.resume(states[0])
    for number, state in states.items():
        if number or number in scalers.others:
            scalers[number].resume(state)
