"""`record`: records one training step, tensor by tensor, and then restores everything."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from polyamp.backends.torch import unstable
from polyamp.backends.torch.recording.mode import Recorder, Row
from polyamp.backends.torch.recording.reach import names_of
from polyamp.backends.torch.recording.running import Run
from polyamp.diagnosis.recording import ACTIVATION, PARAMETER, Observation, Recording
from polyamp.diagnosis.spread import Spread
from polyamp.errors import InvalidTypeError, UnsupportedError
from polyamp.policies import Policy
from polyamp.validation import shown


def record(
    step: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    policy: Policy,
    *,
    widened: bool,
    scale: float | None = None,
) -> Recording:
    """Run one step and record every tensor that it computes; see `polyamp.adapter.Record`."""
    run = Run(step, args, kwargs, policy, widened)
    _check_sharding(run.reach.all_of(nn.Module), widened)
    recorder = Recorder(policy, run.tracker, widened, run.changes)
    with run.undone(), recorder.hooked():
        result = run.forward(recorder, recorder.took)
        differentiates = run.differentiates or any(row is not None for row in recorder.leaves.values())
        if differentiates:
            used = run.scale() if scale is None else scale
            loss = None if run.loss is None else float(run.loss) / used
        else:
            used = 1.0 if scale is None else scale
            loss = float(_backward(recorder, _loss_of(step, result), used))
        observations = tuple(_observations(run, recorder))
    return Recording("torch", str(policy), loss, used, widened, observations, differentiates)


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
    rows, spreads = recorder.rows, recorder.counts.spreads()
    last = max((place for place, row in enumerate(rows) if row.kind != ACTIVATION), default=len(rows))
    for place, row in enumerate(rows[: last + 1]):
        if place not in recorder.replaced:
            yield _observation(row, spreads)
    for leaf, name in names_of([*run.reach.modules(), *run.tracker.roots], list(recorder.leaves)).items():
        at = recorder.leaves[leaf]
        if at is not None:
            shape = tuple(leaf.shape)
            yield _observation(rows[at], spreads)._replace(kind=PARAMETER, name=name, where="", shape=shape)


def _observation(row: Row, spreads: list[Spread]) -> Observation:
    format_name = str(row.dtype).removeprefix("torch.")
    return Observation(*row[:5], format_name, row.shape, spreads[row.counted])


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
    loss = result[0] if isinstance(result, tuple) and result else result
    if isinstance(loss, Tensor) and loss.is_floating_point() and loss.numel() == 1 and loss.requires_grad:
        return loss
    raise _no_loss(step, loss)


def _no_loss(step: Any, found: Any) -> InvalidTypeError:
    fix = "return the loss, or call loss.backward() in it"
    if isinstance(step, nn.Module):
        fix = "pass a function that returns the loss: polyamp.probe(lambda x, y: loss_fn(model(x), y), x, y)"
    return InvalidTypeError(
        "the step neither returns a loss nor runs a backward pass",
        where=getattr(step, "__name__", type(step).__name__),
        found=_shown(found),
        allowed="one floating number that depends on parameters, alone or first in a tuple",
        fix=fix,
    )


def _shown(found: Any) -> str:
    if not isinstance(found, Tensor):
        return shown(found)
    gradient = "" if found.requires_grad else ", which does not require gradients"
    return f"a tensor of {str(found.dtype).removeprefix('torch.')} and shape {tuple(found.shape)}{gradient}"
