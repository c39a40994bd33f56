"""The backward passes of scaled losses: the loss scale of each, and who is told of them.

A scaled loss marks the node of its graph. When autograd comes to that node, a pass has begun:

    opt.backward(loss)                        one pass, marked with 1024
    (opt.scale(loss) + penalty).backward()    one pass of two losses; its graph shows what `penalty` reaches alone

Observers are told when a pass begins and when it has ended: each wrapped optimizer's `Witness`, and `OUTSIDE`. The
listeners of recordings are told when an update begins.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import contextmanager
from functools import partial, reduce
from typing import Any, Protocol

import torch
from torch import Tensor

from polyamp.backends.torch.casting import leaves, map_leaves
from polyamp.backends.torch.kernels.control import both
from polyamp.backends.torch.step.scale import LossScaler, Scaling, losses_in
from polyamp.backends.torch.unstable import (
    BackwardCall,
    is_transformed,
    not_traced,
    running_backward,
    running_task,
    until_backward_ends,
)
from polyamp.errors import UsageError
from polyamp.skips import non_finite_loss

Closure = Callable[[], Any]
Listener = Callable[[Closure | None, float | None], None]

LISTENERS: list[Listener] = []
"""Functions of recordings, which are called where an update begins; while there are some, steps are only observed."""


def update_begins(closure: Closure | None = None, scale: Callable[[], float] | None = None) -> None:
    """Call the listeners before an optimizer reads or changes anything. If a listener raises, the update ends."""
    for listener in LISTENERS:
        listener(closure, None if scale is None else scale())


@contextmanager
def observed(listener: Listener) -> Iterator[None]:
    """Call a function at every update while this context is active."""
    LISTENERS.append(listener)
    try:
        yield
    finally:
        LISTENERS.remove(listener)


_SCALED = "polyamp_scaling"


def scale(scaler: LossScaler, loss: Any, *, process_group: Any = False, by: object = None) -> Any:
    """Return losses, also in containers, in float32 (float64 stays) times the loss scale, or times inf if not finite.

    The losses' backward passes are marked when they begin.

    Raises:
        InvalidTypeError: this is not a loss.
        UsageError: it is scaled already.
        NonFiniteLossError: ``nonfinite_loss="raise"``, and the host knows that the loss is inf or NaN.
    """
    losses = losses_in(loss)
    if any(map(is_scaled, losses)):
        raise UsageError(
            "the loss is scaled already",
            where="scale(loss), backward(loss), or a trainer's backward that scales the loss itself",
            found="a result of scale(loss)",
            allowed="the loss that the model computed",
            fix="scale it once: pass the loss itself to backward(loss), also to manual_backward and "
            "accelerator.backward",
        )
    scaled: Any = loss
    are_finite: bool | Tensor = True
    if scaler.settings.check:
        finite = scaler.note_losses(losses)
        are_finite = reduce(both, finite.values()) if finite else True
        bad = None if are_finite is True else next((one for one in losses if finite[id(one)] is False), None)
        if bad is not None and LISTENERS:  # a step that is only observed ends here
            raise non_finite_loss(bad.detach())
        if bad is not None:
            scaler.report_loss(bad.detach(), process_group=process_group, where="scaling the loss")
        if isinstance(loss, Tensor):
            scaled = scaler.multiply(loss, finite=finite.get(id(loss)) is True)
        else:
            scaled = map_leaves(lambda one: scaler.multiply(one, finite=finite.get(id(one)) is True), loss)
    owner = None if by is None or torch.compiler.is_compiling() else id(by)
    scaling = Scaling(scaler, scaler.state.scale, owner, are_finite)
    if torch.compiler.is_compiling() or is_transformed():
        PASSES.note_unmarked(scaling)
        return scaled
    for tensor in [scaled] if isinstance(loss, Tensor) else leaves(scaled):
        node: Any = tensor.grad_fn
        if tensor.requires_grad and node is not None:
            node.metadata[_SCALED] = scaling
            tensor.register_hook(partial(_pass_begins, scaling))
        else:
            PASSES.note(scaling)  # no pass can start from it, so its gradients come in another way
    return scaled


def is_scaled(loss: Tensor) -> bool:
    """Return whether a loss is itself the result of scaling, as far as this is known."""
    node: Any = loss.grad_fn if isinstance(loss, Tensor) else None
    if torch.compiler.is_compiling() or node is None:
        return False
    scaling = node.metadata.get(_SCALED)
    return scaling is not None and scaling.scaler.settings.check


class Entry:
    """An entry for a backward pass among the latest."""

    def __init__(self, number: int, scaling: Scaling) -> None:
        self.number, self.scaling = number, scaling
        self.has_arrived = False  # whether it reached a parameter that is observed


class Pass:
    """One backward pass of scaled losses. autograd holds this object until the pass ends, even if the pass fails."""

    def __init__(self, task: int, scaling: Scaling | None, entry: Entry, call: BackwardCall) -> None:
        self.task = task  # autograd's number
        self.entry, self.call = entry, call
        self.scaling = scaling  # None: losses of different scales, or also a loss that nobody scaled
        self.handles: list[Any] = []  # of the hooks that bring what arrives to another scale
        self.onto_left: list[Observer] = []  # those whose gradients are what the last step left

    def __call__(self) -> None:
        """Remove the hooks, and call `end` after the callbacks of DDP and FSDP, which are part of the pass."""
        if self.handles:
            self.__del__()
        until_backward_ends(self.end)

    def end(self) -> None:
        """Let all observers look at what the pass has left."""
        for _, observer in list(OBSERVERS.items()):
            observer.end_of(self)

    def __del__(self) -> None:
        while self.handles:
            self.handles.pop().remove()


class Passes:
    """The backward passes of scaled losses in this process: those that run, and the latest."""

    def __init__(self) -> None:
        self.count = 0
        self.seen = 0  # the number of all passes, also of losses that nobody scaled, that reached a wrapped optimizer
        self.running: weakref.WeakValueDictionary[int, Pass] = weakref.WeakValueDictionary()  # by autograd's task
        self.latest: list[Entry] = []
        self._unmarked: tuple[int, Scaling] | None = None

    def note(self, scaling: Scaling) -> Entry:
        """Count a pass that begins, and return its entry."""
        self.count, self.seen = self.count + 1, self.seen + 1
        self.latest = [*self.latest[-63:], Entry(self.count, scaling)]
        return self.latest[-1]

    def note_unmarked(self, scaling: Scaling) -> None:
        """Note a loss whose pass cannot be marked: scaled in compiled code, or inside of a function transform."""
        self.count, self.seen = self.count + 1, self.seen + 1
        self._unmarked = (self.count, scaling)

    def current(self) -> Pass | None:
        """Return the pass that the caller is in; None outside of passes, and in the pass of an unscaled loss."""
        # Passes inside another pass, as in reentrant checkpointing, have a task of their own.
        found = self.running.get(running_task())
        return found if found is not None else next(iter(list(self.running.values())), None)

    def arriving(self) -> Pass | None:
        """Note that the caller's pass reached a parameter, and return it; see `current`."""
        self.seen += 1
        found = self.current()
        if found is not None:
            found.entry.has_arrived = True
        return found

    def since(self, count: int) -> list[Entry]:
        """Return the latest passes after the ``count``-th."""
        return [one for one in self.latest if one.number > count]

    def scalings_since(self, count: int, *, unobserved: bool = False) -> list[Scaling]:
        """Return the scalings of passes after the ``count``-th; if ``unobserved``, of those that no parameter noted."""
        found = [one.scaling for one in self.since(count) if not (unobserved and one.has_arrived)]
        return found or [*filter(None, [self.unmarked_since(count)])]

    def unmarked_since(self, count: int) -> Scaling | None:
        """Return the latest scaling after the ``count``-th whose pass was not marked."""
        return None if self._unmarked is None or self._unmarked[0] <= count else self._unmarked[1]


PASSES = Passes()


class Observer(Protocol):
    """An object that is told of passes."""

    def prepare_for(self, begun: Pass, unscaled: Set[int], /) -> None:
        """Prepare for a pass; ``unscaled`` has ids of leaves reached without a scale."""

    def end_of(self, ended: Pass, /) -> None:
        """Look at the gradients after a pass."""


OBSERVERS: weakref.WeakKeyDictionary[object, Observer] = weakref.WeakKeyDictionary()
"""All observers, each by the object that it observes for, which lives while it is told."""


@not_traced
def _pass_begins(scaling: Scaling, grad: Tensor) -> None:
    found, task = running_backward(), running_task()
    known = PASSES.running.get(task)
    if known is not None:  # another loss of the same pass
        if found is None and known.scaling is not None:
            known.scaling = known.scaling.with_finite(scaling) if known.scaling.is_like(scaling) else None
        return
    call = BackwardCall() if found is None else found
    is_one = len(call.roots) == 1 and is_scaled(call.roots[0])  # the usual pass, which starts from this loss alone
    scalings, leaves = ((), {}) if is_one else parts_of(call.roots)
    scaling = reduce(Scaling.with_finite, scalings, scaling)
    entry = PASSES.note(scaling)
    is_alike = not leaves and all(map(scaling.is_like, scalings))
    begun = PASSES.running[task] = Pass(task, scaling if is_alike else None, entry, call)
    until_backward_ends(begun)
    reached = leaves.keys() & map(id, call.inputs) if call.inputs else leaves.keys()
    for _, observer in list(OBSERVERS.items()):
        observer.prepare_for(begun, reached)


def parts_of(roots: Sequence[Any], *, whole: bool = False) -> tuple[list[Scaling], dict[int, Tensor]]:
    """Return the scalings of the losses of a pass, and by id the leaves that the pass reaches without a scaling.

    If ``whole``, return all leaves, and no scalings.
    """
    waiting: list[Any] = [root.grad_fn if isinstance(root, Tensor) else root.node for root in roots]
    seen, scalings, leaves = set[Any](), list[Scaling](), dict[int, Tensor]()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if not whole and (scaling := node.metadata.get(_SCALED)) is not None:
            scalings.append(scaling)
        elif hasattr(node, "variable"):
            leaves[id(node.variable)] = node.variable
        else:
            waiting += [child for child, _ in node.next_functions]
    return scalings, leaves
