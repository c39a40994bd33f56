"""What is known of an optimizer's gradients between two steps: which scale each of their losses was multiplied by."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from polyamp.backends.torch.casting import leaves
from polyamp.backends.torch.steps.gradients import Gradients
from polyamp.backends.torch.steps.provenance import PASSES, follow
from polyamp.backends.torch.steps.ranks import any_rank, has_peers
from polyamp.backends.torch.steps.scaler import LossScaler, is_finite, non_finite
from polyamp.loss_scale import LossScale, LossScaleState

if TYPE_CHECKING:
    from polyamp.backends.torch.steps.windowed import WindowedOptimizer


class Scaling(NamedTuple):
    """A loss scaler, the state in which it multiplied a loss, and what it multiplied, where that may be inf or NaN."""

    scaler: LossScaler
    state: LossScaleState
    suspects: Sequence[Tensor] = ()

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

    def __init__(self, config: LossScale, compute: str | None = None) -> None:
        self.main = LossScaler(config, compute)
        self.others: dict[Hashable, LossScaler] = {}
        self._members: list[weakref.ref[WindowedOptimizer]] = []

    def __getstate__(self) -> dict[str, Any]:
        return {"main": self.main, "others": self.others}  # copied optimizers join again

    def __setstate__(self, saved: dict[str, Any]) -> None:
        self.__dict__.update(saved, _members=[])

    def __getitem__(self, loss_id: Hashable) -> LossScaler:
        if loss_id is None:
            return self.main
        return self.others.setdefault(loss_id, LossScaler(self.main.config, self.main.compute))

    def __iter__(self) -> Iterator[LossScaler]:
        return iter((self.main, *self.others.values()))

    def join(self, optimizer: WindowedOptimizer) -> None:
        """Tell an optimizer of every loss that is scaled."""
        self._members.append(weakref.ref(optimizer))

    def scale(self, loss: Any, loss_id: Hashable, by: WindowedOptimizer) -> Any:
        """The loss times its scale; see `LossScaler.scale`.

        Args:
            loss: the loss.
            loss_id: of it.
            by: the optimizer that was asked.
        """
        scaler = self[loss_id]
        suspects = scaler.suspects(loss, alone=not has_peers(by.process_group))
        scaled = scaler.scale(loss)
        scaling = Scaling(scaler, scaler.state, suspects)
        followed = scaler.multiplies and follow(leaves(scaled))
        for member in self._members:
            if (optimizer := member()) is not None:
                optimizer.expect(scaling, own=optimizer is by)
        LATEST.note(scaling)
        ALL.note(followed=followed)
        return scaled


class Latest(threading.local):
    """The last scaling in this thread, by whatever optimizer, and how many there were."""

    scaling: Scaling | None = None
    count = 0

    def note(self, scaling: Scaling) -> None:
        self.scaling = scaling
        self.count += 1


class All:
    """How many losses were scaled in this process, and of how many the backward passes are not known."""

    def __init__(self) -> None:
        self.count = self.not_followed = 0

    def note(self, *, followed: bool) -> None:
        self.count += 1
        self.not_followed += not followed


ALL = All()
LATEST = Latest()


class Window:
    """The gradients since the last step.

    Attributes:
        scaling: what their loss was multiplied by; None before the first loss.
        is_own: whether the optimizer itself was asked to scale one, and not another one that shares its loss scales.
        said: where somebody says so, whether they are multiplied by the loss scale.
        found: float32 scalar once all are unscaled: 1.0 if any was not finite on any rank, else 0.0.
        reports: for each loss scaler that had a part, the same of its gradients alone.

    Args:
        left_over: what the last step left of the first gradient: a weak reference, and the gradient's version.
    """

    def __init__(self, left_over: tuple[Any, int] | None = None) -> None:
        self.left_over = left_over
        self.scaling: Scaling | None = None
        self.is_own = False
        self.said: bool | None = None
        self.found: Tensor | None = None
        self.reports: dict[LossScaler, Tensor] = {}
        self._aside: dict[Tensor, Tensor] = {}  # unscaled gradients of earlier losses, of other scales
        self._suspects: dict[LossScaler, list[Tensor]] = {}
        self._opened, self._opened_at = LATEST.count, (ALL.count, ALL.not_followed, PASSES.count)

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

    @property
    def may_be_scaled(self) -> bool:
        """Whether any loss in this process was scaled since the window began."""
        return self.scaling is not None or ALL.count != self._opened_at[0]

    @property
    def follows_all(self) -> bool:
        """Whether the backward passes of all losses that were scaled since the window began are known."""
        return ALL.not_followed == self._opened_at[1]

    @property
    def saw_pass(self) -> bool:
        """Whether a backward pass of any scaled loss has begun since."""
        return PASSES.count != self._opened_at[2]

    @property
    def follows_others(self) -> bool:
        """Whether the losses of this window were scaled by another optimizer."""
        return self._others is not None

    def expect(self, scaling: Scaling, *, own: bool) -> None:
        """The gradients of a scaled loss are to come."""
        self.scaling, self.left_over, self.is_own = scaling, None, self.is_own or own
        if scaling.suspects:
            self._suspects.setdefault(scaling.scaler, []).extend(scaling.suspects)

    def suspects(self, scaler: LossScaler) -> Sequence[Tensor]:
        """The losses of a loss scaler that may be inf or NaN."""
        others = self._others
        if others is not None and others.scaler is scaler:
            return others.suspects
        return self._suspects.get(scaler, ())

    def losses_were_finite(self) -> bool:
        """Whether all losses were. Waits for the device."""
        scalers = {*self.reports, *self._suspects}
        return all(is_finite(loss) for scaler in scalers for loss in self.suspects(scaler))

    def scaling_or(self, own: LossScaler) -> Scaling:
        """What the gradients that the parameters have now were multiplied by.

        An optimizer whose own scale no loss was multiplied by steps on the loss that another one scaled in this
        window, and reports to that one's scale.
        """
        if self.said is not None:
            return self._as_said(self.said, own)
        return self._others or self.scaling or Scaling(own, own.state)

    @property
    def _others(self) -> Scaling | None:
        """The last scaling of this window, where it was another optimizer's."""
        return LATEST.scaling if self.scaling is None and self.said is None and LATEST.count > self._opened else None

    def _as_said(self, scaled: bool, own: LossScaler) -> Scaling:
        mine = self.scaling or Scaling(own, own.state)
        return mine if scaled else mine._replace(state=mine.state._replace(scale=1.0))

    def unscale(self, gradients: Gradients, own: LossScaler, *, simple: bool) -> None:
        """Unscale the gradients that the parameters have now, and note what was found."""
        scaler, state, _ = self.scaling_or(own)
        self.note(scaler, gradients.unscale(scaler.inverse_scale(state), simple=simple))

    def note(self, scaler: LossScaler, flag: Tensor) -> None:
        """Gradients that a loss scaler had a part in are unscaled, and this was found in them."""
        if losses := self.suspects(scaler):
            flag = torch.maximum(flag, non_finite(losses, flag.device))
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
