"""The accumulation window of an optimizer: the gradients since its last step, and what they are multiplied by.

A step has to know what the gradients that it finds are. A window records this as one of five states:

    NEW       no loss was scaled yet
    SCALED    the parameters' gradients are those of scaled losses
    MIXED     the same, and unscaled gradients of earlier losses are set aside, since a later loss had another scale
              or came after `unscale_`
    UNSCALED  all gradients are unscaled and tested
    STEPPED   a step was made, and its gradients are still there

For example, with a second loss that has its own loss scale:

    opt.zero_grad()                            a new window                                     NEW
    opt.backward(loss)                         gradients of ``loss`` times 1024                 SCALED
    opt.backward(penalty, loss_id="penalty")   the gradients so far are unscaled and set aside;
                                               the parameters get those of ``penalty`` times 8  MIXED
    opt.unscale_()                             all are unscaled, tested and added up            UNSCALED
    opt.step()                                 applied or skipped: the next window              STEPPED
    opt.zero_grad()                            a new window                                     NEW

`step` does the work of `unscale_` if nobody called it. A second `backward` with the same scale stays in SCALED: its
gradients are added by autograd. Gradients that the user sets by hand leave a window NEW until `step` or `unscale_`.

A `backward` after `unscale_` leads from UNSCALED to MIXED: until the next `unscale_`, the parameters have only the
gradients of the later losses.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from polyamp.backends.torch.steps.gradients import Gradients
from polyamp.backends.torch.steps.losses import COUNTS, LATEST, Scaling
from polyamp.backends.torch.steps.ranks import Overflowed, any_rank
from polyamp.backends.torch.steps.scaler import LossScaler, is_finite, non_finite
from polyamp.backends.torch.unstable import keeps_gradients_here


class State(enum.Enum):
    """The state of a window's gradients; see the top of ``window.py``."""

    NEW = enum.auto()
    SCALED = enum.auto()
    MIXED = enum.auto()
    UNSCALED = enum.auto()
    STEPPED = enum.auto()


class Window:
    """The gradients since the last step."""

    # It is opened again for the next window, so that all who hold it see the same one: trainers look the attributes of
    # a wrapped optimizer up through an object of theirs.

    def __init__(self) -> None:
        self.open()

    def open(self, last_gradient: tuple[Any, int] | None = None) -> None:
        """Forget everything and begin a window: in the state STEPPED with a last gradient, else in NEW."""
        self.state = State.NEW if last_gradient is None else State.STEPPED
        self.scaling: Scaling | None = None
        self.is_own, self.is_reduced = False, True
        self.declared: bool | None = None
        self.overflow: Tensor | None = None
        self.overflowed: Overflowed | None = None
        self.flags: dict[LossScaler, Tensor] = {}
        self.unscaled_from: tuple[Any, int] | None = None
        self.last_flag: Tensor | None = None
        self.last_gradient = last_gradient
        self._noted: dict[LossScaler, Tensor] = {}  # the flags of this rank
        self._aside: dict[Tensor, Tensor] = {}  # unscaled gradients of earlier losses
        self._suspects: dict[LossScaler, list[Tensor]] = {}
        self._opened_at = LATEST.count, COUNTS.losses, COUNTS.not_followed, COUNTS.passes

    @property
    def is_unscaled(self) -> bool:
        """Whether all gradients are unscaled and tested."""
        return self.state is State.UNSCALED

    @property
    def is_untouched(self) -> bool:
        """Whether all gradients of the window are those that the parameters have, still scaled."""
        return self.state not in (State.MIXED, State.UNSCALED)

    @property
    def has_aside(self) -> bool:
        """Whether gradients are set aside, in addition to those that the parameters have."""
        return bool(self._aside)

    @property
    def may_be_scaled(self) -> bool:
        """Whether any loss in this process was scaled since the window began."""
        return self.scaling is not None or COUNTS.losses != self._opened_at[1]

    @property
    def follows_all(self) -> bool:
        """Whether all losses scaled since the window began have backward passes that are followed."""
        return COUNTS.not_followed == self._opened_at[2]

    @property
    def saw_pass(self) -> bool:
        """Whether a backward pass of any scaled loss has started since the window began."""
        return COUNTS.passes != self._opened_at[3]

    @property
    def others_scaling(self) -> Scaling | None:
        """The last scaling since the window began, if only losses of other optimizers were scaled; else None."""
        is_other = self.scaling is None and self.declared is None and LATEST.count > self._opened_at[0]
        return LATEST.scaling if is_other else None

    def expect(self, scaling: Scaling, *, own: bool) -> None:
        """Record a scaled loss whose gradients are about to be computed."""
        if self.state is not State.MIXED:
            self.state = State.SCALED
        self.scaling, self.is_own, self.overflow = scaling, self.is_own or own, None
        self.is_reduced = not keeps_gradients_here()
        if scaling.suspects:
            self._suspects.setdefault(scaling.scaler, []).extend(scaling.suspects)

    def suspects(self, scaler: LossScaler) -> Sequence[Tensor]:
        """Return the losses of a loss scaler that may be inf or NaN."""
        other = self.others_scaling
        if other is not None and other.scaler is scaler:
            return other.suspects
        return self._suspects.get(scaler, ())

    def losses_were_finite(self) -> bool:
        """Return whether all losses were finite. Waits for the device."""
        scalers = {*self.flags, *self._suspects}
        return all(is_finite(loss) for scaler in scalers for loss in self.suspects(scaler))

    def scaling_or(self, own: LossScaler) -> Scaling:
        """Return the scaling of the gradients that the parameters have now."""
        # In this order: that of the loss that this optimizer scaled; that of the last loss that another one scaled
        # since the window began; for gradients set by hand, its own scale. If they were declared unscaled, the scale is
        # 1.
        scaling = self.scaling or self.others_scaling or Scaling(own, own.state)
        return scaling._replace(state=scaling.state._replace(scale=1.0)) if self.declared is False else scaling

    def unscale(self, gradients: Gradients, own: LossScaler, *, simple: bool, over_mesh: bool) -> None:
        """Unscale the gradients that the parameters have now, and record whether they were finite."""
        scaler, state, _ = self.scaling_or(own)
        self.note(scaler, gradients.unscale(scaler.inverse_scale(state), simple=simple, over_mesh=over_mesh))

    def note(self, scaler: LossScaler, flag: Tensor) -> None:
        """Record the flag of unscaled gradients for the loss scaler that was used."""
        if losses := self.suspects(scaler):
            flag = torch.maximum(flag, non_finite(losses, flag.device))
        earlier = self._noted.get(scaler)
        self._noted[scaler] = flag if earlier is None else torch.maximum(earlier, flag)
        self.last_flag = flag

    def add_overflow(self, scaler: LossScaler, flag: Tensor) -> None:
        """In the state UNSCALED, count the overflow of another optimizer, which skips together with this one."""
        for flags in (self._noted, self.flags):
            flags[scaler] = torch.maximum(flags[scaler], flag.to(flags[scaler].device)) if scaler in flags else flag
        self.overflow = flag if self.overflow is None else torch.maximum(self.overflow, flag.to(self.overflow.device))

    def set_aside(self, params: Iterable[Tensor], *, copies: bool) -> None:
        """Move the parameters' unscaled gradients away, so that the next loss gets its own gradients."""
        for param in params:
            if (grad := param.grad) is not None:
                kept = self._aside.get(param)
                self._aside[param] = _sum(kept, grad) if kept is not None else grad.clone() if copies else grad
                param.grad = None
        self.overflow = self.declared = None
        self.state = State.MIXED if self._aside or self._noted else State.NEW

    def pass_untested(self) -> Tensor:
        """Record that the gradients need neither unscaling nor a test, and return the attribute `overflow`."""
        self.overflow, self.state = torch.zeros((), device="cpu"), State.UNSCALED
        return self.overflow

    def combine(self, gradients: Gradients, process_group: Any) -> tuple[Tensor, Gradients]:
        """Add the gradients that were set aside, and combine the flags over losses and ranks."""
        if self._aside:
            for param, kept in self._aside.items():
                param.grad = kept if param.grad is None else _sum(kept, param.grad)
            self._aside.clear()
            gradients = gradients.now()
        first, *others = self._noted.values()
        if others:
            every = torch.stack([first, *(flag.to(first.device) for flag in others)])
            combined, self.overflowed = any_rank(every, process_group)
            self.flags = dict(zip(self._noted, combined.unbind(), strict=True))
            overflow = combined.amax()
        else:
            overflow, self.overflowed = any_rank(first, process_group)
            self.flags = dict.fromkeys(self._noted, overflow)
        self.overflow, self.state = overflow, State.UNSCALED
        return overflow, gradients

    def finite_by_scaler(self, finite: bool | Tensor) -> Iterator[tuple[LossScaler, bool | Tensor]]:
        """Yield whether gradients were finite, for each loss scaler that was used: bools if ``finite`` is a bool."""
        if len(self.flags) < 2:
            return ((scaler, finite) for scaler in self.flags)
        if isinstance(finite, Tensor):
            return ((scaler, flag == 0) for scaler, flag in self.flags.items())
        flags = torch.stack(list(self.flags.values())).tolist()
        return ((scaler, not flag) for scaler, flag in zip(self.flags, flags, strict=True))


def _sum(kept: Tensor, grad: Tensor) -> Tensor:
    """Return the sum of two gradients of one parameter. PyTorch adds a sparse tensor to a dense one, not vice versa."""
    return kept + grad if kept.layout == torch.strided else grad + kept
