"""The window of gradients between two steps of an optimizer: which scale each of their losses was multiplied by."""

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
    """A loss scaler, its state when it multiplied a loss, and the results that may be inf or NaN."""

    scaler: LossScaler
    state: LossScaleState
    suspects: Sequence[Tensor] = ()

    def same_scale(self, other: Scaling) -> bool:
        """Return whether gradients of both can be added directly. Scales on a device are compared by identity only."""
        one, two = self.state.scale, other.state.scale
        return self.scaler is other.scaler and (one is two or (isinstance(one, float) and one == two))


class LossScalers:
    """The loss scalers of one optimizer, or of several that train on the same losses: one per loss id.

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
        """Notify an optimizer of every loss that is scaled."""
        self._members.append(weakref.ref(optimizer))

    def scale(self, loss: Any, loss_id: Hashable, by: WindowedOptimizer) -> Any:
        """Return the loss times its scale; see `LossScaler.scale`.

        Args:
            loss: the loss.
            loss_id: its id.
            by: the optimizer whose method was called.
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
    """The last scaling in this thread, by any optimizer, and the number of scalings."""

    scaling: Scaling | None = None
    count = 0

    def note(self, scaling: Scaling) -> None:
        self.scaling = scaling
        self.count += 1


class All:
    """The number of scaled losses in this process, and of those whose backward passes are not followed."""

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
        scaling: the scaling of their loss; None before the first loss.
        is_own: whether this optimizer itself scaled a loss, not only another one that shares its loss scales.
        said: whether they are multiplied by the loss scale, if the user declared it; else None.
        found: float32 scalar after all are unscaled: 1.0 if any was not finite on any rank, else 0.0.
        reports: the same flag for each loss scaler that was used, for its gradients alone.

    Args:
        left_over: the first gradient after the last step: a weak reference, and the gradient's version.
    """

    def __init__(self, left_over: tuple[Any, int] | None = None) -> None:
        self.left_over = left_over
        self.scaling: Scaling | None = None
        self.is_own = False
        self.said: bool | None = None
        self.found: Tensor | None = None
        self.reports: dict[LossScaler, Tensor] = {}
        self._aside: dict[Tensor, Tensor] = {}  # unscaled gradients of earlier losses with other scales
        self._suspects: dict[LossScaler, list[Tensor]] = {}
        self._opened, self._opened_at = LATEST.count, (ALL.count, ALL.not_followed, PASSES.count)

    def __bool__(self) -> bool:
        """Return whether gradients are set aside, in addition to those that the parameters have."""
        return bool(self._aside)

    @property
    def is_untouched(self) -> bool:
        """Whether the window's gradients are those that the parameters have, still scaled."""
        return self.found is None and not self.reports and not self._aside

    @property
    def saw_loss(self) -> bool | None:
        """True if a loss was scaled in this window, else None: gradients were set by hand."""
        return True if self.scaling is not None else None

    @property
    def may_be_scaled(self) -> bool:
        """Whether any loss in this process was scaled since the window began."""
        return self.scaling is not None or ALL.count != self._opened_at[0]

    @property
    def follows_all(self) -> bool:
        """Whether all losses scaled since the window began have backward passes that are followed."""
        return ALL.not_followed == self._opened_at[1]

    @property
    def saw_pass(self) -> bool:
        """Whether a backward pass of any scaled loss has started since the window began."""
        return PASSES.count != self._opened_at[2]

    @property
    def follows_others(self) -> bool:
        """Whether the losses of this window were scaled by another optimizer."""
        return self._others is not None

    def expect(self, scaling: Scaling, *, own: bool) -> None:
        """Record a scaled loss whose gradients are about to be computed."""
        self.scaling, self.left_over, self.is_own = scaling, None, self.is_own or own
        if scaling.suspects:
            self._suspects.setdefault(scaling.scaler, []).extend(scaling.suspects)

    def suspects(self, scaler: LossScaler) -> Sequence[Tensor]:
        """Return the losses of a loss scaler that may be inf or NaN."""
        others = self._others
        if others is not None and others.scaler is scaler:
            return others.suspects
        return self._suspects.get(scaler, ())

    def losses_were_finite(self) -> bool:
        """Return whether all losses were finite. Waits for the device."""
        scalers = {*self.reports, *self._suspects}
        return all(is_finite(loss) for scaler in scalers for loss in self.suspects(scaler))

    def scaling_or(self, own: LossScaler) -> Scaling:
        """Return the scaling of the gradients that the parameters have now.

        If no loss was multiplied by the optimizer's own scale, it steps on the loss that another optimizer scaled in
        this window, and reports to that optimizer's scale.
        """
        if self.said is not None:
            return self._as_said(self.said, own)
        return self._others or self.scaling or Scaling(own, own.state)

    @property
    def _others(self) -> Scaling | None:
        """The last scaling of this window, if another optimizer made it."""
        return LATEST.scaling if self.scaling is None and self.said is None and LATEST.count > self._opened else None

    def _as_said(self, scaled: bool, own: LossScaler) -> Scaling:
        mine = self.scaling or Scaling(own, own.state)
        return mine if scaled else mine._replace(state=mine.state._replace(scale=1.0))

    def unscale(self, gradients: Gradients, own: LossScaler, *, simple: bool) -> None:
        """Unscale the gradients that the parameters have now, and record whether they were finite."""
        scaler, state, _ = self.scaling_or(own)
        self.note(scaler, gradients.unscale(scaler.inverse_scale(state), simple=simple))

    def note(self, scaler: LossScaler, flag: Tensor) -> None:
        """Record the flag of unscaled gradients for the loss scaler that was used."""
        if losses := self.suspects(scaler):
            flag = torch.maximum(flag, non_finite(losses, flag.device))
        earlier = self.reports.get(scaler)
        self.reports[scaler] = flag if earlier is None else torch.maximum(earlier, flag)

    def set_aside(self, params: Iterable[Tensor]) -> None:
        """Move the parameters' unscaled gradients away, so that the next loss gets gradients of its own."""
        for param in params:
            if (grad := param.grad) is not None:
                kept = self._aside.get(param)
                self._aside[param] = grad if kept is None else kept + grad
                param.grad = None
        self.found = None

    def close(self, gradients: Gradients, process_group: Any) -> tuple[Tensor, Gradients]:
        """Add the gradients that were set aside, and combine the flags over losses and ranks.

        Returns:
            The new value of `found`, and the gradients that the parameters have now.
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
        """Yield whether gradients were finite, for each loss scaler that was used: bools if ``finite`` is a bool."""
        if len(self.reports) < 2:
            return ((scaler, finite) for scaler in self.reports)
        if isinstance(finite, Tensor):
            return ((scaler, flag == 0) for scaler, flag in self.reports.items())
        found = torch.stack(list(self.reports.values())).tolist()
        return ((scaler, not flag) for scaler, flag in zip(self.reports, found, strict=True))
