"""`record`: runs one training step up to its optimizer's update, tensor by tensor, and then restores everything."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.overrides import TorchFunctionMode

from polyamp.backends.torch import unstable
from polyamp.backends.torch.autocast.context import autocast
from polyamp.backends.torch.autocast.regions import ACCELERATOR, nesting
from polyamp.backends.torch.autocast.weights import forget_casts
from polyamp.backends.torch.compat.grad_scaler import GradScaler
from polyamp.backends.torch.dtypes import name_of
from polyamp.backends.torch.recording.changes import Changes
from polyamp.backends.torch.recording.mode import Recorder, UpdateBegins
from polyamp.backends.torch.recording.reach import Reach, names_of
from polyamp.backends.torch.step.passes import PASSES, observed
from polyamp.backends.torch.step.provenance import ALIVE
from polyamp.backends.torch.tracking import Tracker
from polyamp.diagnosis.recording import ACTIVATION, PARAMETER, Observation, Recording
from polyamp.errors import InvalidTypeError, NonFiniteLossError, UnsupportedError, shown
from polyamp.policies import Policy
from polyamp.policies import policy as make_policy


def record(
    step: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    policy: Policy,
    *,
    widened: bool,
    scale: float | None = None,
) -> Recording:
    """Run one step and record every tensor that it computes; see `polyamp.interface.Adapter.record`."""
    run = Run(step, args, kwargs, policy, widened)
    _check_sharding(run.reach.all_of(nn.Module), widened)
    recorder = Recorder(policy, run.tracker, widened, run.changes)
    with run.undone(), recorder.hooks:
        result = run.forward(recorder, recorder.took)
        differentiates = run.differentiates or any(row is not None for row in recorder.leaves.values())
        if differentiates:
            used = run.scale() if scale is None else scale
            loss = None if run.loss is None else float(run.loss) / used
        else:
            used = 1.0 if scale is None else scale
            loss = float(_backward(recorder, _loss_of(step, result), used))
        observations = tuple(_observations(run, recorder))
    return Recording("torch", str(policy), loss, used, observations, differentiates)


def _backward(recorder: Recorder, loss: Tensor, scale: float) -> Tensor:
    """Differentiate a loss times ``scale``, in float32 or wider, and return the loss."""
    with recorder:
        wide = loss if loss.dtype is torch.float64 else loss.float()
        first = torch.full_like(wide, scale)
        # A hook instead of ``gradient=`` of backward, whose import takes a second.
        hook = wide.register_hook(lambda _: first)  # type: ignore[no-untyped-call]
        try:
            torch.autograd.backward(wide)
        finally:
            hook.remove()
        return wide.detach()


def _observations(run: Run, recorder: Recorder) -> Iterator[Observation]:
    """Yield observations up to the end of the last backward pass, then parameters' gradients."""
    rows = recorder.rows
    last = max((place for place, row in enumerate(rows) if row.kind != ACTIVATION), default=len(rows))
    for place, row in enumerate(rows[: last + 1]):
        if place not in recorder.replaced:
            yield row
    for leaf, name in names_of([*run.reach.modules(), *run.tracker.roots], list(recorder.leaves)).items():
        at = recorder.leaves[leaf]
        if at is not None:
            yield rows[at]._replace(kind=PARAMETER, name=name, where="", shape=tuple(leaf.shape))


def _check_sharding(modules: Iterable[nn.Module], widened: bool) -> None:
    parts = (part for module in modules for part in module.modules()) if widened else ()
    if any(map(unstable.gathers_16_bits, parts)):
        raise UnsupportedError(
            "parameters that fully_shard gathers in 16 bits cannot be computed in float32",
            where="the step's model",
            found="fully_shard(mp_policy=MixedPrecisionPolicy(param_dtype=...)) with a 16-bit format",
            allowed="parameters in float32, with polyamp.autocast",
            fix="probe the model before fully_shard, or with an mp_policy that has no param_dtype",
        )


def _loss_of(step: Any, result: Any) -> Tensor:
    loss = result[0] if isinstance(result, tuple) and result else getattr(result, "loss", result)
    if isinstance(loss, Tensor) and loss.is_floating_point() and loss.numel() == 1 and loss.requires_grad:
        return loss
    found = shown(loss)
    if isinstance(loss, Tensor):
        gradient = "" if loss.requires_grad else ", which does not require gradients"
        found = f"a tensor of {name_of(loss.dtype)} and shape {tuple(loss.shape)}{gradient}"
    raise InvalidTypeError(
        "the step neither returns a loss nor runs a backward pass",
        where=getattr(step, "__name__", type(step).__name__),
        found=found,
        allowed="one floating number that depends on parameters, alone, first in a tuple or as .loss",
        fix="return the loss, as in polyamp.probe(lambda x, y: loss_fn(model(x), y), x, y), or call loss.backward()",
    )


class Run:
    """One run of a step."""

    def __init__(
        self, step: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], policy: Policy, wide: bool
    ) -> None:
        self._step, self._args, self._kwargs, self._policy, self._wide = step, args, kwargs, policy, wide
        self.reach = Reach(step, args, dict(kwargs))
        self.changes = Changes()
        self.tracker = Tracker(self.changes.keep_module)
        self.differentiates = False
        self.loss: Tensor | None = None
        self._passes = PASSES.count
        self._scale: float | None = None

    @contextmanager
    def undone(self) -> Iterator[None]:
        """Undo, on exit, all changes that are made while this context is active."""
        windows = [part for one in list(ALIVE) for part in (one, one.witness, *one.scaler.all())]
        scalers = [
            part
            for one in self.reach.all_of(torch.amp.GradScaler)
            for part in ((one, one.scaler) if isinstance(one, GradScaler) else (one,))
        ]
        self.changes.keep_objects([*windows, PASSES, *scalers])
        for module in self.reach.modules():
            self.changes.keep_module(module)
        for param in self.reach.parameters():
            self.changes.take_gradient(param)
        forget_casts()  # earlier casts of weights are not widened, and new ones are useless afterwards
        try:
            kernels = _float32_kernels() if self._wide else nullcontext()
            with _random_state_kept(), _eagerly(), self.tracker.followed(), kernels:
                yield
        finally:
            forget_casts()
            self.changes.undo()

    def forward(
        self, mode: AbstractContextManager[Any], took: Callable[[Tensor, Tensor], None] = lambda leaf, grad: None
    ) -> Any:
        """Run the step in a mode, up to its optimizer's update, and return its result."""
        hook = register_optimizer_step_pre_hook(self._before_step)
        try:
            with (
                observed(self._update_begins),
                torch.enable_grad(),
                mode,
                autocast(self._policy),
                _Backward(self, took),
            ):
                return self._step(*self._args, **self._kwargs)
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
        if scaled := PASSES.scalings_since(self._passes):
            return float(scaled[-1].factor)
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
    """Observes a step's own backward passes, which run outside an autocast region unless the step enters one."""

    def __init__(self, run: Run, took: Callable[[Tensor, Tensor], None]) -> None:
        super().__init__()
        self._run, self._took, self._depth = run, took, nesting()

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
        """Record gradients that the step itself computed by `autograd.grad`, if all of them are of leaves."""
        leaves = [inputs] if isinstance(inputs, Tensor) else list(inputs)
        if all(leaf.is_leaf for leaf in leaves):
            self._note(outputs if isinstance(outputs, Tensor) else outputs[0])
            for leaf, grad in zip(leaves, grads, strict=True):
                if grad is not None:
                    self._took(leaf, grad)


_OFF = make_policy("float32")


def _float32_kernels() -> AbstractContextManager[Any]:
    """Return a context without the kernels for recurrent layers and attention that require 16-bit memory."""
    contexts = ExitStack()
    contexts.enter_context(torch.backends.cudnn.flags(enabled=False))
    if ACCELERATOR is not None:
        contexts.enter_context(sdpa_kernel(_ATTENTION))
    return contexts


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
