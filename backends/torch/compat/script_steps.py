"""The backward passes and steps of a whole script, which knows nothing of loss scales.

A backward pass of the script becomes this. S is the loss scale, a power of two, so that nothing is rounded:

    gradients that exist are multiplied by S    the new ones are added to them by autograd, DDP and FSDP, as always
    the loss times S is differentiated
    all gradients are tested and divided by S   what the script sees

A step tests the gradients again, since the script may have changed or made them, and is skipped if any test failed.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from polyamp.backends.torch.attached import Attached, attach, detach, wrapper_of
from polyamp.backends.torch.dtypes import SIXTEEN_BIT
from polyamp.backends.torch.steps.closures import evaluates_once
from polyamp.backends.torch.steps.gradients import Gradients
from polyamp.backends.torch.steps.losses import COUNTS
from polyamp.backends.torch.steps.optimizer import ALIVE, LossScaledOptimizer
from polyamp.backends.torch.steps.scaler import LossScaler, is_finite, non_finite
from polyamp.backends.torch.steps.window import State
from polyamp.backends.torch.steps.wrapped import WrappedOptimizer
from polyamp.backends.torch.unstable import backward_runs, note_step
from polyamp.errors import PolyampError
from polyamp.policies import Policy
from polyamp.scripts.session import Session

__polyamp_run__ = True
"""Frames of this file are left out of a script's tracebacks; see `polyamp.scripts.runner`."""


class ScaledSteps:
    """The optimizers of a script, which share one loss scale, and its backward passes.

    Args:
        session: the run.
        policy: its policy; without a loss scale, optimizers and backward passes stay as they are.
    """

    def __init__(self, session: Session, policy: Policy) -> None:
        self._session, self._policy = session, policy
        self._first: LossScaledOptimizer | None = None
        self._optimizers: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._wrapped: weakref.WeakSet[LossScaledOptimizer] = weakref.WeakSet()
        self._unpickled: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._under_construction = _UnderConstruction()
        self._lock = threading.Lock()
        self._loss: Tensor | None = None

    def install(self) -> None:
        """Replace torch's functions until the run ends; attached optimizers are then plain ones again."""
        session = self._session
        session.last_loss = self._last_loss
        self._replace_backward()
        if not self._policy.loss_scale.check:
            return
        session.add(lambda: self._first)
        session.at_end(self._detach_all)
        self._watch_optimizers()
        session.replace(Attached, "step", self._attached_step())

    # Optimizers.

    def _watch_optimizers(self) -> None:
        base = torch.optim.Optimizer
        for kind in [base, *_subclasses(base)]:
            self._watch(kind)
        watch, original = self._watch, base.__init_subclass__
        setstate = base.__setstate__

        def init_subclass(cls: type, /, **kwargs: Any) -> None:
            original(**kwargs)
            watch(cls)

        @functools.wraps(setstate)
        def setting(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
            setstate(optimizer, state)
            self._unpickled.add(optimizer)

        self._session.replace(base, "__init_subclass__", classmethod(init_subclass))
        self._session.replace(base, "__setstate__", setting)

    def _watch(self, kind: type) -> None:
        """Attach the optimizers of a class when their construction ends."""
        original = vars(kind).get("__init__")
        if original is None or issubclass(kind, WrappedOptimizer | Attached):
            return

        @functools.wraps(original)
        def init(optimizer: Any, *args: Any, **kwargs: Any) -> None:
            with self._under_construction.of(optimizer) as is_outermost:
                original(optimizer, *args, **kwargs)
            if is_outermost:
                self._attach(optimizer)

        self._session.replace(kind, "__init__", init)

    def _attach(self, optimizer: torch.optim.Optimizer) -> None:
        self._check(optimizer)
        try:
            wrapper = attach(optimizer, self._policy)
        except PolyampError as error:
            self._session.refuse("an optimizer of the script cannot be wrapped", found=error, fix="leave out --policy")
        if self._first is None:
            self._first = wrapper
        else:
            wrapper.share_scales(self._first)
        self._optimizers.add(optimizer)
        self._wrapped.add(wrapper)

    def _check(self, optimizer: torch.optim.Optimizer) -> None:
        name = type(optimizer).__name__
        held = [one for one in vars(optimizer).values() if isinstance(one, torch.optim.Optimizer)]
        if held:
            self._session.refuse(
                f"{name} steps another optimizer, so that a skipped step cannot be undone as a whole",
                found=f"{name} around {type(held[0]).__name__}",
                fix="use --policy mixed_bfloat16, which needs no loss scale and skips nothing",
            )
        params = [param for group in optimizer.param_groups for param in group["params"]]
        if any(param.dtype in SIXTEEN_BIT for param in params):
            self._session.found("parameters in 16 bits")

    def _wrappers(self) -> list[LossScaledOptimizer]:
        """Return the wrappers of all optimizers, also of those that were unpickled or copied since the last call."""
        for optimizer in list(self._unpickled):
            wrapper = next((one for one in list(ALIVE) if one.inner is optimizer), None)
            if wrapper is not None and self._first is not None:
                wrapper.scalers = self._first.scalers  # a copy has a loss scale of its own
                self._wrapped.add(wrapper)
            elif not isinstance(optimizer, Attached):
                self._attach(optimizer)
        self._unpickled.clear()
        return list(self._wrapped)

    def _detach_all(self) -> None:
        for optimizer in list(self._optimizers):
            if wrapper_of(optimizer) is not None:
                detach(optimizer)

    # Backward passes.

    def _replace_backward(self) -> None:
        original = torch.autograd.backward

        @functools.wraps(original)
        def backward(tensors: Any, grad_tensors: Any = None, *args: Any, **kwargs: Any) -> None:
            keras = self._session.shared.get("keras")  # its adapter, if Keras runs on torch
            # Checkpointing differentiates inside a pass, and Keras' own step a loss: both are scaled already.
            if backward_runs() or (keras is not None and keras.is_inside):
                original(tensors, grad_tensors, *args, **kwargs)
                return
            self._session.check()
            losses = [tensors] if isinstance(tensors, Tensor) else list(tensors)
            if not any(loss.requires_grad for loss in losses):
                original(tensors, grad_tensors, *args, **kwargs)  # torch's own error
                return
            self._loss = losses[0].detach()
            if self._policy.loss_scale.check:
                self._check_options(losses, *args, **kwargs)
                with self._lock:
                    self._scaled(losses, lambda scaled: original(scaled, grad_tensors, *args, **kwargs))
            else:
                original(tensors, grad_tensors, *args, **kwargs)

        self._session.replace(torch.autograd, "backward", backward)

    def _check_options(
        self,
        losses: list[Tensor],
        retain_graph: bool | None = None,
        create_graph: bool = False,
        grad_variables: Any = None,
        inputs: Any = None,
    ) -> None:
        refuse, use = self._session.refuse, "use --policy mixed_bfloat16, which needs no loss scale"
        if create_graph:
            refuse(
                "backward(create_graph=True) keeps scaled gradients in a graph",
                fix="differentiate with torch.autograd.grad(loss, params, create_graph=True)",
            )
        if inputs is not None:
            given = [inputs] if isinstance(inputs, Tensor) else list(inputs)
            if not all(isinstance(one, Tensor) and one.is_leaf for one in given):
                refuse("backward(inputs=) asks for gradients of tensors that are not leaves", fix=use)
        if not self._wrappers():
            refuse(
                "a backward pass before any optimizer exists: the script may update parameters by itself, and nothing "
                "would skip the updates in which float16 overflows",
                found="no torch.optim.Optimizer",
                fix=f"make the optimizer first, or {use}",
            )
        if any(loss.dtype in SIXTEEN_BIT for loss in losses):
            self._session.found("a loss in 16 bits")

    def _scaled(self, losses: list[Tensor], differentiate: Callable[[list[Tensor]], None]) -> None:
        wrappers = self._wrappers()
        scaler = wrappers[0].scaler
        for wrapper in wrappers:
            if not any(param.grad is not None for param in wrapper.model_parameters()):
                wrapper.open_window()  # forget the flags of gradients that were cleared
        suspects = scaler.suspects(losses, alone=wrappers[0].is_alone)
        state, scaled = scaler.state, scaler.scale(losses)
        COUNTS.note(followed=True)
        owned = [[{"params": list(wrapper.model_parameters())}] for wrapper in wrappers]
        known = {id(param) for groups in owned for param in groups[0]["params"]}
        others = [leaf for leaf in leaves_of(losses) if id(leaf) not in known]
        every = [*owned, *([[{"params": others}]] if others else [])]
        factor = _factor(state.scale)
        for groups in every:
            if existing := Gradients(groups):
                existing.unscale(factor)
        differentiate(scaled)
        inverse = scaler.inverse_scale(state)
        flags = [gradients.unscale(inverse) if (gradients := Gradients(groups)) else None for groups in every]
        for wrapper, flag in zip(wrappers, flags, strict=False):
            if flag is not None:
                _note(wrapper, scaler, flag, suspects)

    def _last_loss(self) -> float | None:
        loss = self._loss
        if loss is None:
            return None
        return float(loss) if loss.numel() == 1 else (0.0 if is_finite(loss) else float("nan"))

    # Steps.

    def _attached_step(self) -> Callable[..., Any]:
        original = Attached.step

        @functools.wraps(original)
        def step(optimizer: Any, closure: Callable[[], Any] | None = None, *args: Any, **kwargs: Any) -> Any:
            wrapper = wrapper_of(optimizer)
            if wrapper is None or wrapper.steps_now or args or kwargs:
                return original(optimizer, closure, *args, **kwargs)
            self._session.check()
            try:
                return _step(wrapper, closure)
            finally:
                note_step(wrapper.inner)

        return step


def _step(wrapper: LossScaledOptimizer, closure: Callable[[], Any] | None) -> Any:
    """Make a step from gradients that are unscaled already."""
    if closure is not None:
        if not evaluates_once(wrapper.inner):
            return wrapper.step(closure, scaled=False)
        with torch.enable_grad():
            loss = closure()
        _step(wrapper, None)
        return loss
    if wrapper.is_alone and not wrapper.may_have_gradients:
        return _plain_step(wrapper)
    if wrapper.is_consumed:
        wrapper.open_window()  # a second step from the same gradients, as torch allows
    wrapper.unscale_(scaled=False)
    return wrapper.step()


def _plain_step(wrapper: LossScaledOptimizer) -> Any:
    """Step the optimizer itself: without gradients there is nothing to test, and nothing to update."""
    wrapper.steps_now = True
    try:
        return wrapper.inner.step()
    finally:
        wrapper.steps_now = False


def _note(wrapper: LossScaledOptimizer, scaler: LossScaler, flag: Tensor, suspects: Sequence[Tensor]) -> None:
    if wrapper.window.state is State.STEPPED:
        wrapper.open_window()
    if suspects:
        flag = torch.maximum(flag, non_finite(suspects, flag.device))
    wrapper.window.note(scaler, flag)


def _factor(scale: Any) -> Tensor:
    return scale.float() if isinstance(scale, Tensor) else torch.tensor(scale, dtype=torch.float32, device="cpu")


def leaves_of(losses: Sequence[Tensor]) -> list[Tensor]:
    """Return the leaves that a backward pass of these losses reaches.

    >>> weight = torch.ones(2, requires_grad=True)
    >>> [leaf is weight for leaf in leaves_of([(weight * 2).sum()])]
    [True]
    """
    found = [loss for loss in losses if loss.is_leaf and loss.requires_grad]
    waiting: list[Any] = [loss.grad_fn for loss in losses if loss.grad_fn is not None]
    met = set(waiting)
    while waiting:
        node = waiting.pop()
        leaf = getattr(node, "variable", None)
        if leaf is not None:
            found.append(leaf)
        for after, _ in node.next_functions:
            if after is not None and after not in met:
                met.add(after)
                waiting.append(after)
    return found


class _UnderConstruction(threading.local):
    """The optimizers whose ``__init__`` runs in this thread."""

    def __init__(self) -> None:
        self._objects: list[Any] = []

    @contextmanager
    def of(self, optimizer: Any) -> Iterator[bool]:
        """Yield whether this is the outermost ``__init__`` of an optimizer's class and its bases."""
        is_outermost = not any(one is optimizer for one in self._objects)
        self._objects.append(optimizer)
        try:
            yield is_outermost
        finally:
            self._objects.pop()


def _subclasses(kind: type) -> Iterator[type]:
    one: type
    for one in kind.__subclasses__():
        yield one
        yield from _subclasses(one)
