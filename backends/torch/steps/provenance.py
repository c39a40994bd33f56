"""Provenance of gradients: whether the backward passes that made them started from a scaled loss.

A step divides gradients by the loss scale, so gradients of an unscaled loss would be divided too. A window knows most
of this from its losses; the rest is found by watching the gradient of one parameter:

    opt.backward(first)  # backward pass of a scaled loss
    second.backward()  # backward pass of an unscaled loss: the sum is right for neither
    opt.step()  # refused

A hook on a scaled loss reports when a backward pass starts from it, and a hook on one parameter of the optimizer
reports every pass that adds to its gradient. Both are autograd hooks, and neither reads values.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from polyamp.backends.torch.unstable import is_transformed, not_traced, until_backward_ends


class _Pass:
    """One backward pass of a scaled loss. autograd holds this object until the pass ends, even if the pass fails."""

    def __call__(self) -> None:
        """Do nothing when the pass ends."""


class Passes:
    """The backward passes of scaled losses in this process.

    Attributes:
        count: number of passes that have started.
        running: passes that are running now.
    """

    def __init__(self) -> None:
        self.count = 0
        self.running: weakref.WeakSet[_Pass] = weakref.WeakSet()


PASSES = Passes()


@not_traced
def _begins(grad: Tensor) -> None:
    begun = _Pass()
    PASSES.count += 1
    PASSES.running.add(begun)
    until_backward_ends(begun)


def follow(scaled: Iterable[Any]) -> bool:
    """Register the backward passes of scaled losses, so that they are known while they run.

    Passes inside another pass, as in reentrant checkpointing, are part of it.

    >>> weight = torch.ones(2, requires_grad=True)
    >>> follow([weight.sum()]), follow([torch.ones(())])
    (True, False)

    Returns:
        Whether they will be known: not in traced code, and not if there is nothing to differentiate.
    """
    if torch.compiler.is_compiling() or is_transformed():
        return False
    followed = False
    for tensor in scaled:
        if tensor.requires_grad:
            tensor.register_hook(_begins)
            followed = True
    return followed


class Witness:
    """Observes which kinds of backward pass contribute to the gradient of one parameter.

    >>> weight = torch.ones(2, requires_grad=True)
    >>> witness = Witness(weight)
    >>> weight.sum().backward()
    >>> witness.scaled, witness.unscaled
    (False, True)

    Attributes:
        scaled: whether a pass of a scaled loss contributed.
        unscaled: whether a pass of any other loss did.
    """

    def __init__(self, param: Tensor) -> None:
        self.scaled = self.unscaled = False
        self._param = weakref.ref(param)
        self._seen: tuple[Any, int] | None = None
        handle = param.register_post_accumulate_grad_hook(partial(_told, weakref.ref(self)))  # type: ignore[no-untyped-call]
        weakref.finalize(self, handle.remove).atexit = False

    @classmethod
    def of(cls, params: Iterable[Tensor]) -> Witness | None:
        """Return a witness for the first parameter that is trained, or None."""
        param = next((param for param in params if param.requires_grad and param.is_leaf), None)
        return None if param is None else cls(param)

    @property
    def is_current(self) -> bool:
        """Return whether the observed gradient is the one that the parameter has now."""
        param = self._param()
        return self._seen is not None and param is not None and param.grad is self._seen[0]()

    def note(self, grad: Tensor) -> None:
        """Record that a backward pass added to the gradient or created it. A write in between restarts the record."""
        version = grad._version
        if self._seen is None or self._seen[0]() is not grad or self._seen[1] + 1 != version:
            self.scaled = self.unscaled = False
        self._seen = (weakref.ref(grad), version)
        if PASSES.running:
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
def _told(witness: weakref.ref[Witness], param: Tensor) -> None:
    alive = witness()
    if alive is not None and param.grad is not None:
        alive.note(param.grad)
