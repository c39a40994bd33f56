"""Where gradients come from: whether the backward passes that made them began at a scaled loss.

A step divides gradients by the loss scale, so a loss that nobody scaled would be divided all the same. What a window
knows of its losses tells most; what it cannot tell, one parameter's gradient does:

    opt.backward(first)  # a pass of a scaled loss
    second.backward()  # a pass of another loss: the sum is right for neither
    opt.step()  # refused

A scaled loss tells when a backward pass begins at it, and one parameter of the optimizer tells of every pass that adds
to its gradient. Both are hooks of autograd, and neither looks at a value.
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
    """One backward pass of a scaled loss. autograd holds it for as long as the pass runs, also where that fails."""

    def __call__(self) -> None:
        """Nothing is left to do when the pass ends."""


class Passes:
    """The backward passes of scaled losses in this process.

    Attributes:
        count: how many have begun.
        running: those that run now.
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
    """Have the backward passes of scaled losses known while they run.

    Passes inside of another one, as reentrant checkpointing makes them, are parts of it.

    >>> weight = torch.ones(2, requires_grad=True)
    >>> follow([weight.sum()]), follow([torch.ones(())])
    (True, False)

    Returns:
        Whether they will be known: not where code is traced, nor where there is nothing to differentiate.
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
    """Sees which kinds of backward pass the gradient of one parameter is the sum of.

    >>> weight = torch.ones(2, requires_grad=True)
    >>> witness = Witness(weight)
    >>> weight.sum().backward()
    >>> witness.scaled, witness.unscaled
    (False, True)

    Attributes:
        scaled: whether a pass of a scaled loss added to it.
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
        """One for the first parameter that is trained."""
        param = next((param for param in params if param.requires_grad and param.is_leaf), None)
        return None if param is None else cls(param)

    @property
    def is_current(self) -> bool:
        """Whether the gradient that it saw is the one that the parameter has."""
        param = self._param()
        return self._seen is not None and param is not None and param.grad is self._seen[0]()

    def note(self, grad: Tensor) -> None:
        """A backward pass has added to the gradient, or made it: what was written in between begins it anew."""
        version = grad._version
        if self._seen is None or self._seen[0]() is not grad or self._seen[1] + 1 != version:
            self.scaled = self.unscaled = False
        self._seen = (weakref.ref(grad), version)
        if PASSES.running:
            self.scaled = True
        else:
            self.unscaled = True
        until_backward_ends(partial(until_backward_ends, self._settle))  # after what others do at its end, as DDP

    def _settle(self) -> None:
        """What was written to the gradient before a backward pass ended belongs to that pass."""
        param = self._param()
        if param is not None and param.grad is not None:
            self._seen = (weakref.ref(param.grad), param.grad._version)


@not_traced
def _told(witness: weakref.ref[Witness], param: Tensor) -> None:
    alive = witness()
    if alive is not None and param.grad is not None:
        alive.note(param.grad)
