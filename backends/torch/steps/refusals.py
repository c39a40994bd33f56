"""Errors of the PyTorch adapter's optimizers and scalers. Checks raise them; other functions return them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from polyamp.errors import (
    InvalidTypeError,
    InvalidValueError,
    StateError,
    UsageError,
    clipped_scaled,
    is_number,
    shown,
    unscaled_loss,
    wrong_type,
)
from polyamp.formats import in_single
from polyamp.scale import LossScale


def check_norm(max_norm: object) -> None:
    """Raise if this is not a limit for a norm; torch accepts 0 and inf."""
    where, allowed = "clip_grad_norm_(max_norm)", "a number of at least 0"
    fix = "give the largest global L2 norm that gradients may have"
    if not is_number(max_norm):
        what = "the gradient-norm limit must be a number"
        raise wrong_type(max_norm, where=where, allowed=allowed, fix=fix, what=what)
    if not max_norm >= 0:
        raise InvalidValueError(
            "the gradient-norm limit must be at least 0", where=where, found=max_norm, allowed=allowed, fix=fix
        )


def named_tensors(given: Iterable[Any]) -> dict[str, Tensor]:
    """Return parameters by name from pairs as in ``model.named_parameters()``."""
    pairs = list(given)
    if all(isinstance(pair, tuple) and list(map(type, pair))[:1] == [str] and len(pair) == 2 for pair in pairs):
        return dict(pairs)
    raise InvalidTypeError(
        "the named parameters must be pairs of a name and a parameter",
        where="wrap_optimizer(named_parameters=)",
        found=f"an iterable of {type(pairs[0]).__name__}",
        allowed="pairs of a str and a tensor",
        fix="give model.named_parameters()",
    )


def not_a(kind: type, found: object, *, where: str, fix: str) -> InvalidTypeError:
    """Return the error for an argument of the wrong type."""
    return InvalidTypeError(f"wrong type, expected {kind.__name__}", where=where, found=shown(found), fix=fix)


def check_fused_step(wanted: object) -> None:
    """Raise if this is not a valid ``fused_step``."""
    if not (wanted is None or isinstance(wanted, bool)):
        fix = "leave it out for polyamp's kernels on GPUs that have them, or give True or False"
        raise not_a(bool, wanted, where="wrap_optimizer(fused_step=)", fix=fix)


def check_first_use(*, captured: bool) -> None:
    """Raise if buffers of all later steps would be created while a CUDA graph is captured, which runs nothing."""
    if captured:
        raise UsageError(
            "the first step was called during the capture of a CUDA graph, so each replay would create its state again",
            where="step()",
            found="a stream that is captured, and no state of an earlier step",
            allowed="captures of later steps",
            fix="take a few steps before the capture, on a side stream, as torch.cuda.graph asks for anyway",
        )


def check_rate(lr: Tensor, group: int, device: torch.device) -> None:
    """Raise if the kernels cannot read a learning rate."""
    if lr.device.type != "cpu" and lr.device != device:
        raise InvalidValueError(
            "a learning rate is on another device than its parameters",
            where=f"param_groups[{group}]['lr'], in step()",
            found=f"a tensor on {lr.device}",
            allowed=f"a number, a tensor on the CPU, or one on {device}",
            fix=f"move it: group['lr'] = group['lr'].to('{device}')",
        )


def no_backward(found: str) -> UsageError:
    """Return the error for a step without gradients from a backward pass."""
    return UsageError(
        "a step without a backward pass",
        where="step(), unscale_()",
        found=found,
        allowed="gradients that a backward pass left since the last step",
        fix="call backward(loss), or scale(loss).backward(), before step(), and zero_grad() after it",
    )


def not_cleared() -> UsageError:
    """Return the error for a backward pass that would add to the gradients of the last step."""
    return UsageError(
        "the unscaled gradients of the last step are still there, and a scaled backward pass would add to them",
        where="backward(loss)",
        fix="call zero_grad() after step(); to accumulate, call backward several times before step()",
    )


def unscaled_already(*, where: str, fix: str) -> UsageError:
    """Return the error for a call that would spoil gradients that are unscaled already."""
    return UsageError("the gradients of this window are unscaled already", where=where, fix=fix)


def converted_too_late(dtype: torch.dtype) -> UsageError:
    """Return the error for 16-bit gradients of a model that was converted after its optimizer was wrapped."""
    return UsageError(
        "the parameters were converted to 16 bits after their optimizer was wrapped",
        where="step()",
        found=f"gradients of {dtype}",
        fix="convert the model before its optimizer is wrapped, or wrap with master_weights=False",
    )


def closure_refused(found: object) -> UsageError:
    """Return the error for a closure with a scaler, which only scales the optimizer's part of a step."""
    return UsageError(
        "Closure use is not currently supported if GradScaler is enabled: its loss would not be scaled",
        where="GradScaler.step(optimizer, closure)",
        found=repr(found),
        fix="wrap the optimizer instead: polyamp.wrap_optimizer(optimizer).step(closure), where the closure calls "
        "its backward(loss)",
    )


def half_gradients(name: str, dtype: torch.dtype) -> InvalidValueError:
    """Return the error for 16-bit gradients with a scaler, which has no master weights."""
    return InvalidValueError(
        "Attempting to unscale FP16 gradients.",
        where="GradScaler.unscale_(optimizer), which step(optimizer) calls",
        found=f"{name} and its gradient of {dtype}",
        allowed="float32 parameters, run in 16 bits by autocast",
        fix="keep the model in float32, without .half(); or wrap the optimizer, which then trains float32 master "
        "weights: polyamp.wrap_optimizer(optimizer, policy)",
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


def different_loss_scales(*, where: str, fix: str) -> UsageError:
    """Return the error for optimizers of one loss that were wrapped one by one."""
    return UsageError(
        "the optimizers have different loss scales, and a loss is multiplied by only one",
        where=where,
        found="optimizers that were wrapped one by one",
        allowed="optimizers that share a loss scale",
        fix=fix,
    )


def loss_scaled_twice() -> UsageError:
    """Return the error for a loss that `scale` returned, and that is to be scaled again."""
    return UsageError(
        "the loss is scaled already",
        where="scale(loss), backward(loss), or a trainer's backward that scales the loss itself",
        found="a result of scale(loss)",
        allowed="the loss that the model computed",
        fix="scale it once: pass the loss itself to backward(loss), also to manual_backward and accelerator.backward",
    )


def loss_not_scaled(*, partly: bool = False) -> UsageError:
    """Return the error for a step on gradients of an unscaled loss, or, partly, of such a loss and a scaled one."""
    how = "; one loss was scaled and another was not" if partly else ""
    return unscaled_loss(
        where=f"step(), unscale_(), clip_grad_norm_(){how}",
        fix="call zero_grad(), then opt.backward(loss) or opt.scale(loss).backward() in place of loss.backward(); if "
        "gradients were set by hand, declare them: opt.step(scaled=True) if they are multiplied by opt.loss_scale, "
        "opt.step(scaled=False) if not",
    )


def inner_stepped(inner: torch.optim.Optimizer) -> UsageError:
    """Return the error for a direct step of the inner optimizer on gradients that are still scaled."""
    return UsageError(
        "the inner optimizer was stepped while its gradients are scaled",
        where=f"{type(inner).__name__}.step()",
        found="gradients multiplied by the loss scale",
        allowed="a step by the wrapped optimizer, which unscales and tests them first",
        fix="call step() of the optimizer that polyamp.wrap_optimizer returned",
    )


def clipped_before_unscaling() -> UsageError:
    """Return the error for clipping by other code before `step` or `unscale_`."""
    return clipped_scaled(
        where="torch.nn.utils.clip_grad_norm_, clip_grad_value_ or a trainer that calls them",
        fix="give polyamp.wrap_optimizer(..., max_grad_norm=) and leave this clipping out (max_grad_norm=0 in a "
        "Hugging Face Trainer), or call opt.clip_grad_norm_(max_norm), or opt.unscale_() before it",
    )


def set_aside_before_reduction() -> UsageError:
    """Return the error for gradients that would be set aside, and so would never be reduced over the ranks."""
    return UsageError(
        "these gradients are not reduced over the ranks yet, and this loss would set them aside",
        where="backward(loss) after a backward pass in model.no_sync()",
        allowed="losses of one scale, until a backward pass outside of no_sync() has reduced their gradients",
        fix="call unscale_() after the last backward pass of a window (delay_unscale=True in apex.amp)",
    )


def clipped_without_masters() -> UsageError:
    """Return the error for clipping by a norm of the model's own 16-bit gradients, which are still scaled."""
    return UsageError(
        "the 16-bit gradients of the model are not the unscaled ones",
        where="clipping by a norm that was computed before",
        found="parameters of the model that have master weights",
        allowed="the parameters in opt.param_groups, which have the unscaled gradients",
        fix="call opt.clip_grad_norm_(max_norm), or clip the parameters in opt.param_groups",
    )


def wrong_declaration(scaled: object) -> InvalidTypeError:
    """Return the error for a ``scaled=`` that is not a bool."""
    fix = "True: multiplied by the loss scale; False: not; leave it out if opt.backward(loss) made them"
    return not_a(bool, scaled, where="step(scaled=), unscale_(scaled=), clip_grad_norm_(scaled=)", fix=fix)


def no_scale(found: object) -> InvalidValueError:
    """Return the error for a loss scale with which the next step would write NaN."""
    return InvalidValueError(
        "the loss scale must be finite and greater than 0",
        where="GradScaler.update(new_scale), GradScaler.load_state_dict(saved)",
        found=found,
        allowed="a finite number greater than 0",
        fix="give such a number; a saved scale of 0 comes from a run whose gradients were never finite",
    )


def checked_scale(settings: LossScale, scale: object, *, where: str) -> float:
    """Return a loss scale that the user sets, rounded to float32."""
    fix = "give a number within LossScale(min=..., max=...)"
    if not is_number(scale):
        raise wrong_type(scale, where=where, allowed="a number", fix=fix, what="the loss scale must be a number")
    limits = f"between {settings.min:g} and {settings.max:g}"
    if not settings.min <= scale <= settings.max:
        raise InvalidValueError(
            "the loss scale is outside its limits", where=where, found=scale, allowed=limits, fix=fix
        )
    return in_single(float(scale))  # type: ignore[no-any-return]


def bad_state(what: str, found: str, allowed: str, fix: str) -> StateError:
    """Return the error for a saved state that cannot be loaded."""
    return StateError(what, where="load_state_dict(saved)", found=found, allowed=allowed, fix=fix)
