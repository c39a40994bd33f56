"""The scaled losses: which loss scale multiplied each of them, and which gradients their backward passes made.

A step divides gradients by the loss scale, so gradients of a loss that was not multiplied would be divided too:

    opt.backward(first)  # the backward pass of a scaled loss
    second.backward()  # the backward pass of an unscaled loss: the sum is right for neither
    opt.step()  # refused

`LossScalers` multiplies the losses and notifies the optimizers that share it. Usually that is enough to know what the
gradients are. The rest is observed: a hook on each scaled loss reports when a backward pass starts from it (`follow`),
and a hook on one parameter of each optimizer reports every pass that adds to its gradient (`Witness`). Both are
autograd hooks, and neither reads values.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Hashable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from polyamp.backends.torch.casting import leaves
from polyamp.backends.torch.steps import refusals
from polyamp.backends.torch.steps.scaler import LossScaler
from polyamp.backends.torch.unstable import backward_runs, is_transformed, not_traced, until_backward_ends
from polyamp.scale import LossScale, LossScaleState


class Scaling(NamedTuple):
    """The multiplication of one loss: the loss scaler, its state at that time, and losses that may be inf or NaN."""

    scaler: LossScaler
    state: LossScaleState
    suspects: Sequence[Tensor] = ()

    def same_scale(self, other: Scaling) -> bool:
        """Return whether gradients of both can be added directly. Scales on a device must be the same tensor."""
        one, two = self.state.scale, other.state.scale
        return self.scaler is other.scaler and (one is two or (isinstance(one, float) and one == two))


class Member(Protocol):
    """An optimizer that trains on the losses of a `LossScalers`."""

    def expect(self, scaling: Scaling, *, own: bool) -> None:
        """Record a loss that was scaled, before its backward pass. ``own``: this optimizer's method was called."""


class LossScalers:
    """The loss scalers of one optimizer, or of several that train on the same losses: one per loss id."""

    def __init__(self, settings: LossScale, compute: str | None = None) -> None:
        self.main = LossScaler(settings, compute)
        self.others: dict[Hashable, LossScaler] = {}
        self._members: list[weakref.ref[Member]] = []

    def __getstate__(self) -> dict[str, Any]:
        return {"main": self.main, "others": self.others}  # copied optimizers join again

    def __setstate__(self, saved: dict[str, Any]) -> None:
        self.__dict__.update(saved, _members=[])

    def __getitem__(self, loss_id: Hashable) -> LossScaler:
        if loss_id is None:
            return self.main
        return self.others.setdefault(loss_id, LossScaler(self.main.settings, self.main.compute))

    def __iter__(self) -> Iterator[LossScaler]:
        return iter((self.main, *self.others.values()))

    def join(self, member: Member) -> None:
        """Notify an optimizer of every loss that is scaled."""
        self._members.append(weakref.ref(member))

    def scale(self, loss: Any, loss_id: Hashable, by: Member, *, alone: bool) -> Any:
        """Return the loss times its scale; see `LossScaler.scale`."""
        scaler = self[loss_id]
        if any(map(is_scaled, leaves(loss))):
            raise refusals.loss_scaled_twice()
        suspects = scaler.suspects(loss, alone=alone)
        scaled = scaler.scale(loss)
        scaling = Scaling(scaler, scaler.state, suspects)
        followed = scaler.multiplies and follow(leaves(scaled))
        for member in self._members:
            if (optimizer := member()) is not None:
                optimizer.expect(scaling, own=optimizer is by)
        LATEST.note(scaling)
        COUNTS.note(followed=followed)
        return scaled


_SCALED = "polyamp_scaled"


class Latest(threading.local):
    """The last scaling in this thread, by any optimizer, and the number of scalings."""

    scaling: Scaling | None = None
    count = 0

    def note(self, scaling: Scaling) -> None:
        """Record the scaling as the latest one, and count it."""
        self.scaling = scaling
        self.count += 1


class Counts:
    """Counts of the scaled losses in this process and of their backward passes."""

    def __init__(self) -> None:
        self.losses = self.not_followed = self.passes = 0

    def note(self, *, followed: bool) -> None:
        """Record a scaled loss."""
        self.losses += 1
        self.not_followed += not followed


LATEST = Latest()
COUNTS = Counts()


class _Pass:
    """One backward pass of a scaled loss. autograd holds this object until the pass ends, even if the pass fails."""

    def __call__(self) -> None:
        """Do nothing when the pass ends."""


_running: weakref.WeakSet[_Pass] = weakref.WeakSet()


def follow(scaled: Iterable[Any]) -> bool:
    """Register the backward passes of scaled losses, so that they are known while they run."""
    # Passes inside another pass, as in reentrant checkpointing, are part of it.
    if torch.compiler.is_compiling() or is_transformed():
        return False
    followed = False
    for tensor in scaled:
        if tensor.requires_grad:
            tensor.register_hook(_pass_begins)
            if tensor.grad_fn is not None:
                tensor.grad_fn.metadata[_SCALED] = True
            followed = True
    return followed


def is_scaled(loss: Any) -> bool:
    """Return whether a loss is itself the result of scaling, as far as this is known."""
    if torch.compiler.is_compiling() or loss.grad_fn is None:
        return False
    return _SCALED in loss.grad_fn.metadata


@not_traced
def _pass_begins(grad: Tensor) -> None:
    begun = _Pass()
    COUNTS.passes += 1
    _running.add(begun)
    until_backward_ends(begun)


class Witness:
    """An observer of one parameter's gradient: which kinds of backward pass have contributed to it."""

    def __init__(self, param: Tensor) -> None:
        self.scaled = self.unscaled = False
        self._param = weakref.ref(param)
        self._seen: tuple[Any, int] | None = None  # the gradient, as a weak reference, and its version
        handle = param.register_post_accumulate_grad_hook(partial(_tell, weakref.ref(self)))  # type: ignore[no-untyped-call]
        weakref.finalize(self, handle.remove).atexit = False

    @classmethod
    def of(cls, params: Iterable[Tensor]) -> Witness | None:
        """Return a witness for the first parameter that is trained, or None."""
        param = next((param for param in params if param.requires_grad and param.is_leaf), None)
        return None if param is None else cls(param)

    @property
    def is_current(self) -> bool:
        """Whether the observed gradient is the one that the parameter has now."""
        param = self._param()
        return self._seen is not None and param is not None and param.grad is self._seen[0]()

    def note(self, grad: Tensor) -> None:
        """Record that a backward pass added to the gradient or created it. A write in between restarts the record."""
        if not backward_runs():  # a pipeline schedule lets FSDP reduce gradients after all its passes
            self._seen = None
            return
        version = grad._version
        if self._seen is None or self._seen[0]() is not grad or self._seen[1] + 1 != version:
            self.scaled = self.unscaled = False
        self._seen = (weakref.ref(grad), version)
        if _running:
            self.scaled = True
        else:
            self.unscaled = True
        until_backward_ends(partial(until_backward_ends, self._settle))  # after other callbacks, such as DDP's

    def _settle(self) -> None:
        """Count writes to the gradient before a backward pass ended as part of that pass."""
        param = self._param()
        if param is not None and param.grad is not None:
            self._seen = (weakref.ref(param.grad), param.grad._version)


@not_traced
def _tell(witness: weakref.ref[Witness], param: Tensor) -> None:
    alive = witness()
    if alive is not None and param.grad is not None:
        alive.note(param.grad)
