"""Runs a step up to its optimizer's update, and undoes all its changes."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.overrides import TorchFunctionMode

from polyamp.backends.torch import unstable
from polyamp.backends.torch.autocast.context import autocast
from polyamp.backends.torch.autocast.frames import nesting
from polyamp.backends.torch.autocast.regions import ACCELERATOR
from polyamp.backends.torch.autocast.weights import forget_casts
from polyamp.backends.torch.recording.changes import Changes
from polyamp.backends.torch.recording.hooks import keep, told
from polyamp.backends.torch.recording.mode import UpdateBegins
from polyamp.backends.torch.recording.reach import Reach
from polyamp.backends.torch.steps.losses import COUNTS, LATEST
from polyamp.backends.torch.steps.optimizer import ALIVE
from polyamp.backends.torch.tracking import ModuleHooks, Tracker
from polyamp.errors import NonFiniteLossError
from polyamp.policies import Policy
from polyamp.policies import policy as make_policy


class Run:
    """One step that is run once."""

    def __init__(
        self, step: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], policy: Policy, wide: bool
    ) -> None:
        self._step, self._args, self._kwargs, self._policy, self._wide = step, args, kwargs, policy, wide
        self.reach = Reach(step, args, dict(kwargs))
        self.changes = Changes()
        self.tracker = Tracker(self.changes.keep_module)
        self.differentiates = False
        self.loss: Tensor | None = None
        self._scalings = LATEST.count
        self._scale: float | None = None

    @contextmanager
    def undone(self) -> Iterator[None]:
        """Undo, on exit, all changes that are made while this context is active."""
        windows = [holder for optimizer in list(ALIVE) for holder in optimizer.holders()]
        restore = keep([*windows, LATEST, COUNTS, *self.reach.all_of(torch.amp.GradScaler)])
        for module in self.reach.modules():
            self.changes.keep_module(module)
        for param in self.reach.parameters():
            self.changes.take_gradient(param)
        try:
            kernels = _float32_kernels() if self._wide else nullcontext()
            with _random_state_kept(), _eagerly(), self.tracker.followed(), kernels:
                yield
        finally:
            self.changes.undo()
            restore()

    def forward(self, mode: AbstractContextManager[Any], took: Callable[[Tensor, Tensor], None]) -> Any:
        """Run the step in a mode, up to its optimizer's update, and return its result."""
        hook = register_optimizer_step_pre_hook(self._before_step)
        region = autocast(self._policy)
        try:
            with told(self._update_begins), torch.enable_grad(), mode, _casts_forgotten(), region:
                return _Backward(self, took).of(self._step, *self._args, **self._kwargs)
        except UpdateBegins as end:
            self._scale = end.scale
        except NonFiniteLossError:  # the recording shows where it came from
            pass
        finally:
            hook.remove()
        self.differentiates = True
        return None

    def scale(self) -> float:
        """Return the step's own loss scale, as far as it is visible: polyamp's scale, or that of torch's scaler."""
        if self._scale is not None:
            return self._scale
        if LATEST.count > self._scalings and LATEST.scaling is not None:
            return float(LATEST.scaling.state.scale)
        scalers = [one for one in self.reach.all_of(torch.amp.GradScaler) if one.is_enabled()]
        return float(scalers[0].get_scale()) if len(scalers) == 1 else 1.0

    def _before_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self._update_begins(kwargs.get("closure", args[1] if len(args) > 1 else None))

    def _update_begins(self, closure: Callable[[], Any] | None, scale: float | None = None) -> None:
        if closure is not None:
            with torch.enable_grad():
                closure()
        raise UpdateBegins(scale)


class _Backward(TorchFunctionMode):
    """Observes a step's own backward passes, which run outside the policy's region unless the step enters one."""

    def __init__(self, run: Run, took: Callable[[Tensor, Tensor], None]) -> None:
        super().__init__()
        self._run, self._took, self._depth = run, took, nesting()

    def of(self, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run a step while it is observed."""
        with self:
            return step(*args, **kwargs)

    @unstable.never_compiled
    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function not in (Tensor.backward, torch.autograd.grad):
            return function(*args, **kwargs)
        with autocast(_OFF) if nesting() == self._depth else nullcontext():
            out = function(*args, **kwargs)
        if function is Tensor.backward:
            self._note(args[0])
        elif not kwargs.get("create_graph"):
            self._note_gradients(out, *args, **kwargs)
        return out

    def _note(self, loss: Tensor) -> None:
        self._run.differentiates = True
        self._run.loss = loss.detach()

    def _note_gradients(self, grads: Any, outputs: Any, inputs: Any, *_: Any, **__: Any) -> None:
        """Record gradients that the step computes itself, if they are gradients of leaves."""
        leaves = [inputs] if isinstance(inputs, Tensor) else list(inputs)
        if all(leaf.is_leaf for leaf in leaves):
            self._note(outputs if isinstance(outputs, Tensor) else outputs[0])
            for leaf, grad in zip(leaves, grads, strict=True):
                if grad is not None:
                    self._took(leaf, grad)


_OFF = make_policy("float32")


@contextmanager
def _casts_forgotten() -> Iterator[None]:
    """Clear cached casts of weights: earlier ones are not widened, and new ones are useless afterwards."""
    forget_casts()
    try:
        yield
    finally:
        forget_casts()


@contextmanager
def _float32_kernels() -> Iterator[None]:
    """Avoid kernels for recurrent layers and attention on accelerators that require 16-bit memory."""
    entered: list[ExitStack] = []

    def without_cudnn(module: nn.Module, inputs: Any) -> None:
        if isinstance(module, nn.RNNBase):
            entered.append(ExitStack())
            entered[-1].enter_context(torch.backends.cudnn.flags(enabled=False))

    def with_cudnn(module: nn.Module, inputs: Any, output: Any) -> None:
        if isinstance(module, nn.RNNBase):
            entered.pop().close()

    attention = nullcontext() if ACCELERATOR is None else sdpa_kernel(_ATTENTION)
    with ModuleHooks(without_cudnn, with_cudnn), attention:
        yield


_ATTENTION = [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


def _eagerly() -> AbstractContextManager[Any]:
    """Return a context in which functions under `torch.compile` run eagerly, operation by operation."""
    if "torch._dynamo" not in sys.modules:  # then nothing is compiled, and setting the stance would import it
        return nullcontext()
    eager: AbstractContextManager[Any] = torch.compiler.set_stance("force_eager")
    return eager


@contextmanager
def _random_state_kept() -> Iterator[None]:
    count, before = 0 if ACCELERATOR is None else torch.accelerator.device_count(), random.getstate()
    numpy = sys.modules.get("numpy.random")
    numpys = None if numpy is None else numpy.get_state()
    try:
        with torch.random.fork_rng(range(count), device_type=ACCELERATOR or "cuda"):
            yield
    finally:
        random.setstate(before)
        if numpy is not None:
            numpy.set_state(numpys)
