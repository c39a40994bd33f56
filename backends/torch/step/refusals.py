"""What `LossScaledOptimizer` refuses before it changes anything: arguments, and gradients that a step would misread."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from polyamp.errors import (
    InvalidTypeError,
    InvalidValueError,
    UsageError,
    is_number,
    shown,
    unscaled_loss,
    wrong_type,
)
from polyamp.settings import LossScaleState

# --- arguments --------------------------------------------------------------------------------------------------------


def named_tensors(pairs: Any) -> dict[str, Tensor]:
    """Return parameters by name from pairs as in ``model.named_parameters()``."""
    pairs = list(pairs) if isinstance(pairs, Iterable) else [pairs]
    if all(isinstance(pair, tuple) and list(map(type, pair))[:1] == [str] and len(pair) == 2 for pair in pairs):
        return dict(pairs)
    raise InvalidTypeError(
        "the named parameters must be pairs of a name and a parameter",
        where="wrap_optimizer(named_parameters=)",
        found=f"an iterable of {type(pairs[0]).__name__}",
        allowed="pairs of a str and a tensor",
        fix="give model.named_parameters()",
    )


def check_wrapping(fused_step: object, process_group: Any, norm_group: Any) -> None:
    """Raise if these options of `wrap_optimizer` have wrong types, when it is called rather than at the first step."""
    if not (fused_step is None or isinstance(fused_step, bool)):
        fix = "leave it out for polyamp's kernels on GPUs that have them, or give True or False"
        raise wrong_type(fused_step, where="wrap_optimizer(fused_step=)", allowed="a bool, or None", fix=fix)
    if not (process_group is False or _is_group(process_group)):
        raise wrong_type(
            process_group,
            where="wrap_optimizer(process_group=)",
            allowed="a torch.distributed.ProcessGroup, None for the default group, or False for none",
            fix="leave process_group= out, or give torch.distributed.new_group(...) or device_mesh.get_group(name)",
            what="process_group must be a process group, None or False",
        )
    if not _is_group(norm_group):
        raise wrong_type(
            norm_group,
            where="wrap_optimizer(norm_group=)",
            allowed="a torch.distributed.ProcessGroup, or None",
            fix='leave norm_group= out, or give device_mesh.get_group("pipe"); where ranks have other parameters only '
            "in part, such as experts, call opt.unscale_() and clip by a norm of your own before opt.step()",
            what="norm_group must be a process group",
        )


# --- ranks ------------------------------------------------------------------------------------------------------------


def refused_elsewhere(ranks: str) -> UsageError:
    """Return the error for a step that other ranks refuse, on a rank that would take it."""
    return UsageError(
        "another rank has refused this step, so no rank takes it",
        where=f"step(), unscale_() or clip_grad_norm_() on {ranks}",
        allowed="a step that all ranks take",
        fix=f"read the error of {ranks}, which has the reason; call zero_grad() on all ranks to go on",
    )


def unlike_scales(state: LossScaleState) -> UsageError:
    """Return the error for ranks whose loss scales are not in the same state."""
    return UsageError(
        "the ranks have different loss scales",
        where="step(), before anything was changed",
        found=f"here {state.scale:g} after {state.good_steps} finite steps, and another state on another rank",
        allowed="the same state of the loss scale on every rank",
        fix="load the state on every rank: opt.load_state_dict(saved), with the same saved state; and give every rank "
        "the same LossScale",
    )


def _is_group(found: object) -> bool:
    is_given = torch.distributed.is_available() and isinstance(found, torch.distributed.ProcessGroup)
    return found is None or is_given


def check_norm(max_norm: object) -> None:
    """Raise unless this is a number from 0 to inf, as torch accepts."""
    where, allowed = "clip_grad_norm_(max_norm)", "a number of at least 0"
    fix = "give the largest global L2 norm that gradients may have"
    if not is_number(max_norm):
        what = "the gradient-norm limit must be a number"
        raise wrong_type(max_norm, where=where, allowed=allowed, fix=fix, what=what)
    if not max_norm >= 0:
        what = "the gradient-norm limit must be at least 0"
        raise InvalidValueError(what, where=where, found=max_norm, allowed=allowed, fix=fix)


# --- gradients --------------------------------------------------------------------------------------------------------

_READS_GRADIENTS = "step(), unscale_(), clip_grad_norm_()"


def not_cleared(*, where: str = _READS_GRADIENTS) -> UsageError:
    """Return the error for a backward pass that adds, or would add, to gradients of the last step."""
    return UsageError(
        "the unscaled gradients of the last step are still there, and a scaled backward pass would add to them",
        where=where,
        fix="call zero_grad() after step(); to accumulate, call backward several times before step()",
    )


def mixed() -> UsageError:
    """Return the error for a sum of gradients of different scales."""
    return UsageError(
        "gradients of different scales were added up",
        where=_READS_GRADIENTS,
        found="losses with different loss scales in one backward pass",
        allowed="losses with one loss scale in one backward pass",
        fix="call zero_grad(), and backward() once for each of the losses",
    )


def mixed_by_hand() -> UsageError:
    """Return the error for results of `torch.autograd.grad` added to gradients of another scale."""
    return UsageError(
        "gradients of different scales were added up",
        where=_READS_GRADIENTS,
        found="gradients of a scaled loss from torch.autograd.grad, and a write to the parameters' grad, which has "
        "another scale, such as that of unscaled gradients",
        allowed="gradients of one scale",
        fix="use opt.unscaled_grad(loss, inputs) and add its results after opt.unscale_(); if what was written is "
        "unscaled already, call opt.step(scaled=False)",
    )


def torn() -> UsageError:
    """Return the error for changes of the model's gradients after those of its masters were clipped."""
    return UsageError(
        "the model's gradients were changed after those of its master weights were clipped",
        where=_READS_GRADIENTS,
        found="unscaled gradients that were clipped, and 16-bit ones of the model that were changed and not clipped",
        allowed="changes of the model's gradients before they are clipped",
        fix="change them before clipping, or change those of the parameters in opt.param_groups",
    )


def unscaled_elsewhere(inner: torch.optim.Optimizer, other: torch.optim.Optimizer) -> UsageError:
    """Return the error for gradients that another optimizer of the same parameters has unscaled."""
    return UsageError(
        "a parameter is in two wrapped optimizers, and the other one has unscaled its gradient",
        where=_READS_GRADIENTS,
        found=f"optimizers around {type(inner).__name__} and {type(other).__name__}",
        allowed="each parameter in one optimizer",
        fix="leave shared (tied) parameters out of one of them; delete an optimizer that is not used any more",
    )


def loss_not_scaled(*, partly: bool) -> UsageError:
    """Return the error for gradients of an unscaled loss, alone or added to those of a scaled one."""
    how = "; one loss was scaled and another was not" if partly else ""
    return unscaled_loss(
        where=f"{_READS_GRADIENTS}{how}",
        fix="call zero_grad(), then opt.backward(loss) or opt.scale(loss).backward() in place of loss.backward(); if "
        "gradients were set by hand, declare them: opt.step(scaled=True) if they are multiplied by opt.loss_scale, "
        "opt.step(scaled=False) if not",
    )


def no_backward(found: str) -> UsageError:
    """Return the error for a step without gradients of its own."""
    return UsageError(
        "a step without a backward pass",
        where="step(), unscale_()",
        found=found,
        allowed="gradients that a backward pass left since the last step",
        fix="call backward(loss), or scale(loss).backward(), before step(), and zero_grad() after it",
    )


def unscaled_already(*, where: str, fix: str) -> UsageError:
    """Return the error for gradients that would be unscaled twice."""
    return UsageError("the gradients of this window are unscaled already", where=where, fix=fix)


def converted_later(dtype: torch.dtype) -> UsageError:
    """Return the error for parameters converted to 16 bits after wrapping."""
    return UsageError(
        "the parameters were converted to 16 bits after their optimizer was wrapped",
        where="step()",
        found=f"gradients of {dtype}",
        fix="convert the model before its optimizer is wrapped, or wrap with master_weights=False",
    )


def scaled_twice(inner: torch.optim.Optimizer, *, where: str = "GradScaler.step(optimizer)") -> UsageError:
    """Return the error for a wrapped optimizer, which has its own loss scale, passed to a scaler."""
    return UsageError(
        "the optimizer is wrapped already and scales its loss itself",
        where=where,
        found=f"a LossScaledOptimizer around {type(inner).__name__}",
        allowed="one loss scale",
        fix="leave the scaler out: call the optimizer's own backward(loss) and step(); or give the plain optimizer to "
        "the scaler",
    )


# --- scalers, and the optimizers they drive ---------------------------------------------------------------------------


def different_loss_scales(*, where: str, fix: str) -> UsageError:
    """Return the error for optimizers of one loss that were wrapped one by one."""
    return UsageError(
        "the optimizers have different loss scales, and a loss is multiplied by only one",
        where=where,
        found="optimizers that were wrapped one by one",
        allowed="optimizers that share a loss scale",
        fix=fix,
    )


def of_another_scaler(found: object, *, where: str) -> UsageError:
    """Return the error for an optimizer that is not among a scaler's wrapped optimizers."""
    return UsageError(
        "this is not an optimizer of the scaler",
        where=where,
        found=shown(found),
        allowed="a wrapped optimizer that the scaler was made with",
        fix="pass what polyamp.wrap_optimizer returned; use the plain optimizer nowhere else",
    )


def closure_with_scaler() -> UsageError:
    """Return the error for a closure that a scaler of plain optimizers would have to call."""
    return UsageError(
        "Closure use is not currently supported if GradScaler is enabled: its loss would not be scaled",
        where="GradScaler.step(optimizer, closure)",
        fix="wrap the optimizer instead: polyamp.wrap_optimizer(optimizer).step(closure), where the closure calls its "
        "backward(loss)",
    )


def half_gradients(name: str) -> InvalidValueError:
    """Return the error for float16 parameters of a plain optimizer, which has no masters."""
    return InvalidValueError(
        "Attempting to unscale FP16 gradients.",  # as torch's own scaler words it
        where="GradScaler.unscale_(optimizer), which step(optimizer) calls",
        found=f"{name} and its gradient of torch.float16",
        allowed="float32 parameters, run in 16 bits by autocast",
        fix="keep the model in float32, without .half(); or wrap the optimizer, which then trains float32 master "
        "weights: polyamp.wrap_optimizer(optimizer, policy)",
    )


# --- steps of other optimizers ----------------------------------------------------------------------------------------


def inner_stepped(*, where: str) -> UsageError:
    """Return the error for a direct step of a wrapped optimizer's inner one."""
    return UsageError(
        "the inner optimizer was stepped while its gradients are scaled",
        where=where,
        found="gradients multiplied by the loss scale",
        allowed="a step by the wrapped optimizer, which unscales and tests them first",
        fix="call step() of the optimizer that polyamp.wrap_optimizer returned",
    )


def not_wrapped(*, where: str) -> UsageError:
    """Return the error for a step of an unwrapped optimizer on gradients of a scaled loss."""
    return UsageError(
        "an optimizer that was not wrapped was stepped on gradients of a scaled loss",
        where=where,
        found="gradients multiplied by the loss scale",
        allowed="steps of wrapped optimizers, which unscale and test them first",
        fix="wrap all optimizers of the loss together, and step each: "
        "first, second = polyamp.wrap_optimizer([first, second], policy)",
    )


def steps_in_backward(*, where: str) -> UsageError:
    """Return the error for a step inside the backward pass of a scaled loss."""
    return UsageError(
        "an optimizer was stepped inside the backward pass of a scaled loss",
        where=where,
        found="gradients multiplied by the loss scale, of a pass that may still overflow",
        allowed="a step after the backward pass",
        fix="step after the backward pass, by the optimizer that polyamp.wrap_optimizer returned; an optimizer in the "
        'backward pass needs no scale in bfloat16: polyamp.autocast("mixed_bfloat16"), loss.backward() and no wrapper',
    )
