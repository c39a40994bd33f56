"""What is known of an optimizer's gradients between two steps: which scale each of their losses was multiplied by."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Hashable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from polyamp.backends.torch.steps.gradients import Gradients
from polyamp.backends.torch.steps.ranks import any_rank
from polyamp.backends.torch.steps.scaler import LossScaler
from polyamp.loss_scale import LossScale, LossScaleState

if TYPE_CHECKING:
    from polyamp.backends.torch.steps.optimizer import LossScaledOptimizer


class Scaling(NamedTuple):
    """A loss scaler, and the state in which it multiplied a loss."""

    scaler: LossScaler
    state: LossScaleState

    def same_scale(self, other: Scaling) -> bool:
        """Whether gradients of both may be added up as they are; scales on a device are not looked at."""
        one, two = self.state.scale, other.state.scale
        return self.scaler is other.scaler and (one is two or (isinstance(one, float) and one == two))


class LossScalers:
    """The loss scalers of one optimizer, or of several that train on the same losses: one for each loss.

    >>> scalers = LossScalers(LossScale(init=8.0))
    >>> scalers["discriminator"].state.scale, scalers.main is scalers[None]
    (8.0, True)
    """

    def __init__(self, config: LossScale) -> None:
        self.main = LossScaler(config)
        self.others: dict[Hashable, LossScaler] = {}
        self._members: list[weakref.ref[LossScaledOptimizer]] = []

    def __getstate__(self) -> dict[str, Any]:
        return {"main": self.main, "others": self.others}  # copied optimizers join again

    def __setstate__(self, saved: dict[str, Any]) -> None:
        self.__dict__.update(saved, _members=[])

    def __getitem__(self, loss_id: Hashable) -> LossScaler:
        if loss_id is None:
            return self.main
        return self.others.setdefault(loss_id, LossScaler(self.main.config))

    def __iter__(self) -> Iterator[LossScaler]:
        return iter((self.main, *self.others.values()))

    def forget_losses(self) -> None:
        """A window was abandoned: its losses are not to be reported."""
        for scaler in self:
            scaler.forget_losses()

    def losses_were_finite(self) -> bool:
        """Whether the losses were that were not looked at when they were scaled. Waits for the device."""
        return all(scaler.losses_were_finite() for scaler in self)

    def join(self, optimizer: LossScaledOptimizer) -> None:
        """Tell an optimizer of every loss that is scaled."""
        self._members.append(weakref.ref(optimizer))

    def scale(self, loss: Any, loss_id: Hashable, *, alone: bool) -> Any:
        """The loss times its scale; see `LossScaler.scale`."""
        scaler = self[loss_id]
        scaled = scaler.scale(loss, alone=alone)
        scaling = Scaling(scaler, scaler.state)
        for member in self._members:
            if (optimizer := member()) is not None:
                optimizer.expect(scaling)
        LATEST.note(scaling)
        return scaled


class Latest(threading.local):
    """The last scaling in this thread, by whatever optimizer, and how many there were."""

    scaling: Scaling | None = None
    count = 0

    def note(self, scaling: Scaling) -> None:
        self.scaling = scaling
        self.count += 1


LATEST = Latest()


class Window:
    """The gradients since the last step.

    Attributes:
        scaling: what their loss was multiplied by; None before the first loss.
        found: float32 scalar once all are unscaled: 1.0 if any was not finite on any rank, else 0.0.
        reports: for each loss scaler that had a part, the same of its gradients alone.

    Args:
        left_over: what the last step left of the first gradient: a weak reference, and the gradient's version.
    """

    def __init__(self, left_over: tuple[Any, int] | None = None) -> None:
        self.left_over = left_over
        self.scaling: Scaling | None = None
        self.found: Tensor | None = None
        self.reports: dict[LossScaler, Tensor] = {}
        self._aside: dict[Tensor, Tensor] = {}  # unscaled gradients of earlier losses, of other scales
        self._opened = LATEST.count

    def __bool__(self) -> bool:
        """Whether gradients are set aside, beside those that the parameters have."""
        return bool(self._aside)

    @property
    def is_untouched(self) -> bool:
        """Whether the gradients of the window are those that the parameters have, scaled as they were made."""
        return self.found is None and not self.reports and not self._aside

    @property
    def saw_loss(self) -> bool | None:
        """True where a loss was scaled in this window, else None: gradients were set by hand."""
        return True if self.scaling is not None else None

    def scaling_or(self, own: LossScaler) -> Scaling:
        """What the gradients that the parameters have now were multiplied by.

        An optimizer whose own scale no loss was multiplied by steps on the loss that another one scaled in this
        window, and reports to that one's scale; gradients that were set by hand count as scaled by its own.
        """
        if self.scaling is None and LATEST.count > self._opened and LATEST.scaling is not None:
            return LATEST.scaling
        return self.scaling or Scaling(own, own.state)

    def unscale(self, gradients: Gradients, own: LossScaler, *, simple: bool) -> None:
        """Unscale the gradients that the parameters have now, and note what was found."""
        scaler, state = self.scaling_or(own)
        self.note(scaler, gradients.unscale(scaler.inverse_scale(state), simple=simple))

    def note(self, scaler: LossScaler, flag: Tensor) -> None:
        """Gradients that a loss scaler had a part in are unscaled, and this was found in them."""
        earlier = self.reports.get(scaler)
        self.reports[scaler] = flag if earlier is None else torch.maximum(earlier, flag)

    def set_aside(self, params: Iterable[Tensor]) -> None:
        """Take the parameters' unscaled gradients away, so that those of another loss come alone."""
        for param in params:
            if (grad := param.grad) is not None:
                kept = self._aside.get(param)
                self._aside[param] = grad if kept is None else kept + grad
                param.grad = None
        self.found = None

    def close(self, gradients: Gradients, process_group: Any) -> tuple[Tensor, Gradients]:
        """Put back what was set aside, and combine what was found, over losses and ranks.

        Returns:
            What `found` is from now on, and the gradients that the parameters have now.
        """
        if self._aside:
            for param, kept in self._aside.items():
                param.grad = kept if param.grad is None else param.grad + kept
            self._aside.clear()
            gradients = gradients.now()
        first, *others = self.reports.values()
        if others:
            combined = any_rank(torch.stack([first, *(flag.to(first.device) for flag in others)]), process_group)
            self.reports = dict(zip(self.reports, combined.unbind(), strict=True))
            self.found = found = combined.amax()
        else:
            self.found = found = any_rank(first, process_group)
            self.reports = dict.fromkeys(self.reports, found)
        return found, gradients

    def reports_of(self, finite: bool | Tensor) -> Iterator[tuple[LossScaler, bool | Tensor]]:
        """For each loss scaler that had a part, whether its gradients were finite: bools where ``finite`` is one."""
        if len(self.reports) < 2:
            return ((scaler, finite) for scaler in self.reports)
        if isinstance(finite, Tensor):
            return ((scaler, flag == 0) for scaler, flag in self.reports.items())
        found = torch.stack(list(self.reports.values())).tolist()
        return ((scaler, not flag) for scaler, flag in zip(self.reports, found, strict=True))
