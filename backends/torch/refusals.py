"""What a wrapped optimizer refuses: arguments, when it is wrapped, and programs whose steps would be wrong."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from polyamp.backends.torch.dtypes import SIXTEEN_BIT
from polyamp.errors import (
    InvalidTypeError,
    InvalidValueError,
    StateError,
    UnsupportedError,
    UsageError,
    is_number,
    shown,
    unscaled_loss,
    wrong_type,
)
from polyamp.settings import LossScale

if TYPE_CHECKING:
    from polyamp.backends.torch.masters import MasterWeights
    from polyamp.backends.torch.optimizer import LossScaledOptimizer

# --- arguments --------------------------------------------------------------------------------------------------------


def not_a(kind: type, found: object, *, where: str, fix: str) -> InvalidTypeError:
    """Return the error for an argument of the wrong type."""
    return InvalidTypeError(f"wrong type, expected {kind.__name__}", where=where, found=shown(found), fix=fix)


def named_tensors(given: Iterable[Any]) -> dict[str, Tensor]:
    """Return parameters by name from pairs as in ``model.named_parameters()``."""
    pairs = list(given) if isinstance(given, Iterable) else [given]
    if all(isinstance(pair, tuple) and list(map(type, pair))[:1] == [str] and len(pair) == 2 for pair in pairs):
        return dict(pairs)
    raise InvalidTypeError(
        "the named parameters must be pairs of a name and a parameter",
        where="wrap_optimizer(named_parameters=)",
        found=f"an iterable of {type(pairs[0]).__name__}",
        allowed="pairs of a str and a tensor",
        fix="give model.named_parameters()",
    )


def check_fused_step(found: object) -> None:
    if not (found is None or isinstance(found, bool)):
        fix = "leave it out for polyamp's kernels on GPUs that have them, or give True or False"
        raise not_a(bool, found, where="wrap_optimizer(fused_step=)", fix=fix)


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


def check_process_group(process_group: Any) -> None:
    """Raise if this is not a process group, when an optimizer is wrapped rather than at its first step."""
    if process_group is None or process_group is False or _is_group(process_group):
        return
    raise InvalidTypeError(
        "process_group must be a process group, None or False",
        where="wrap_optimizer(process_group=)",
        found=shown(process_group),
        allowed="a torch.distributed.ProcessGroup, None for the default group, or False for none",
        fix="leave process_group= out, or give torch.distributed.new_group(...) or device_mesh.get_group(name)",
    )


def check_norm_group(norm_group: Any) -> None:
    """Raise if this is not a process group."""
    if norm_group is None or _is_group(norm_group):
        return
    raise InvalidTypeError(
        "norm_group must be a process group",
        where="wrap_optimizer(norm_group=)",
        found=shown(norm_group),
        allowed="a torch.distributed.ProcessGroup, or None",
        fix='leave norm_group= out, or give device_mesh.get_group("pipe"); where ranks have other parameters only in '
        "part, such as experts, call opt.unscale_() and clip by a norm of your own before opt.step()",
    )


def _is_group(found: object) -> bool:
    return torch.distributed.is_available() and isinstance(found, torch.distributed.ProcessGroup)


def checked_scale(scale: object, settings: LossScale, *, where: str) -> float:
    """Return a scale that a user sets.

    Raises:
        InvalidTypeError: it is not a number.
        InvalidValueError: it is outside the limits of the settings.
    """
    fix = "give a number within LossScale(min=..., max=...)"
    if not is_number(scale):
        raise wrong_type(scale, where=where, allowed="a number", fix=fix, what="the loss scale must be a number")
    if not settings.min <= scale <= settings.max:
        allowed = f"between {settings.min:g} and {settings.max:g}"
        what = "the loss scale is outside its limits"
        raise InvalidValueError(what, where=where, found=scale, allowed=allowed, fix=fix)
    return float(scale)


def check_lists(inner: torch.optim.Optimizer) -> None:
    """Refuse an optimizer that leaves its step to another one with other lists, which would never see the masters."""
    lists = {id(group["params"]) for group in inner.param_groups}
    for held in vars(inner).values():
        if not isinstance(held, torch.optim.Optimizer) or held is inner:
            continue
        if any(
            id(group["params"]) not in lists and any(one.dtype in SIXTEEN_BIT for one in group["params"])
            for group in held.param_groups
        ):
            raise UnsupportedError(
                "master weights cannot replace the parameters of this optimizer",
                where="wrap_optimizer(master_weights=)",
                found=f"{type(inner).__name__} around {type(held).__name__}, with its own lists of 16-bit parameters",
                allowed="float32 parameters, or an optimizer that has its parameters in one list",
                fix="store parameters in float32 (mixed_float16), shard with fully_shard instead, or give "
                "master_weights=False",
            )


def rate_elsewhere(number: int, found: torch.device, device: torch.device) -> InvalidValueError:
    """Return the error for a learning rate of a group that operators on another device would read."""
    return InvalidValueError(
        "a learning rate is on another device than its parameters",
        where=f"param_groups[{number}]['lr'], in step()",
        found=f"a tensor on {found}",
        allowed=f"a number, a tensor on the CPU, or one on {device}",
        fix=f"move it: group['lr'] = group['lr'].to('{device}')",
    )


# --- saved states -----------------------------------------------------------------------------------------------------

KEYS = ("state", "param_groups", "loss_scale", "master_weights")
OURS = ("loss_scale", "loss_scales", "master_weights")
MOMENTS = {"exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer"}
"""The names that running means of gradients have in most optimizers: of the parameter's shape."""

FIX = "load a result of state_dict()"


def is_plain(saved: object) -> bool:
    """Return whether a saved state is that of an optimizer that was not wrapped."""
    return isinstance(saved, Mapping) and not any(key in saved for key in OURS)


def check_state(optimizer: LossScaledOptimizer, saved: Mapping[str, Any]) -> None:
    """Raise if a saved state is not one of this optimizer."""
    if not isinstance(saved, Mapping) or not {"state", "param_groups"} <= set(saved):
        found = f"keys {', '.join(map(str, saved))}" if isinstance(saved, Mapping) else type(saved).__name__
        raise bad_state("the saved state is not an optimizer's", found, f"keys {', '.join(KEYS)}", FIX)
    _check_groups(optimizer.param_groups, saved)
    if is_plain(saved):
        return
    missing = [key for key in KEYS if key not in saved]
    if missing:
        fix = f"{FIX}; without any of {', '.join(OURS)} it is taken as a plain optimizer's"
        raise bad_state(
            "the saved state is incomplete", f"no {' and no '.join(missing)}", f"keys {', '.join(KEYS)}", fix
        )
    if optimizer.masters is not None:
        _check_masters(optimizer.masters, saved["master_weights"])
    elif saved["master_weights"] is not None:
        raise bad_state(
            "the saved state has master weights, and this optimizer has none",
            'something under "master_weights"',
            "None",
            "convert the model to the policy that it was saved under before its optimizer is wrapped",
        )


def _check_masters(masters: MasterWeights, saved: object) -> None:
    own, found = _layouts(masters.masters), None
    if isinstance(saved, Mapping) and all(isinstance(master, Tensor) for master in saved.values()):
        found = _layouts(saved.values())
    if found != own:
        raise bad_state(
            "the saved master weights are not those of this optimizer",
            'no float32 tensors under "master_weights"' if found is None else f"{len(found)} tensors of shapes {found}",
            f"{len(own)} tensors of shapes {own}",
            "convert the model, and wrap its optimizer, as they were when the state was saved; of a state without "
            'masters, load {"state": saved["state"], "param_groups": saved["param_groups"]} after the model',
        )


def _check_groups(groups: Sequence[Mapping[str, Any]], saved: Mapping[str, Any]) -> None:
    sizes, found = _sizes(groups), _sizes(saved["param_groups"])
    states = saved["state"]
    if found is None or not (isinstance(states, Mapping) and all(isinstance(s, Mapping) for s in states.values())):
        raise bad_state(
            "the saved state is not an optimizer's",
            f"param_groups: {type(saved['param_groups']).__name__}, state: {type(states).__name__}",
            "a list of groups, and a mapping from numbers of parameters to their states",
            FIX,
        )
    if sizes != found:
        raise bad_state(
            "the parameter groups differ",
            f"groups of {found} parameters",
            f"groups of {sizes} parameters",
            "build the same model and optimizer as when the state was saved",
        )


def _sizes(groups: object) -> list[int] | None:
    """Return the number of parameters in each group; None if these are not groups."""
    if not isinstance(groups, list | tuple):
        return None
    params = [group.get("params") if isinstance(group, Mapping) else None for group in groups]
    sizes = [len(each) for each in params if isinstance(each, list | tuple)]
    return sizes if len(sizes) == len(groups) else None


def _layouts(tensors: Iterable[Tensor]) -> list[Any]:
    """Return shapes, and for distributed tensors also their placements over ranks."""
    return [
        (tuple(tensor.shape), tensor.placements) if hasattr(tensor, "placements") else tuple(tensor.shape)
        for tensor in tensors
    ]


def check_moments(inner: torch.optim.Optimizer) -> None:
    """Refuse running means that do not have their parameter's shape; the next step would fail in the middle."""
    for param, state in inner.state.items():
        for key in MOMENTS & (state or {}).keys():  # another rank may have the state
            value = state[key]
            if key != "momentum_buffer" or value is not None:  # SGD's is None before the first step
                found = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else shown(value)
                if found != f"shape {tuple(param.shape)}":
                    allowed = f"a tensor of the parameter's shape {tuple(param.shape)}"
                    raise bad_state(f"the saved {key} does not fit its parameter", found, allowed, FIX)


def bad_state(what: str, found: str, allowed: str, fix: str) -> StateError:
    """Return the error for a saved state that cannot be loaded."""
    return StateError(what, where="load_state_dict(saved)", found=found, allowed=allowed, fix=fix)


# --- losses -----------------------------------------------------------------------------------------------------------


def scaled_loss() -> UsageError:
    """Return the error for a loss that would be scaled twice."""
    return UsageError(
        "the loss is scaled already",
        where="scale(loss), backward(loss), or a trainer's backward that scales the loss itself",
        found="a result of scale(loss)",
        allowed="the loss that the model computed",
        fix="scale it once: pass the loss itself to backward(loss), also to manual_backward and accelerator.backward",
    )


def not_cleared(*, where: str) -> UsageError:
    """Return the error for gradients of the last step to which a backward pass adds, or was about to."""
    return UsageError(
        "the unscaled gradients of the last step are still there, and a scaled backward pass would add to them",
        where=where,
        fix="call zero_grad() after step(); to accumulate, call backward several times before step()",
    )


def mixed() -> UsageError:
    """Return the error for gradients that no factor is right for."""
    return UsageError(
        "gradients of different scales were added up",
        where="step(), unscale_(), clip_grad_norm_()",
        found="losses with different loss scales in one backward pass",
        allowed="losses with one loss scale in one backward pass",
        fix="call zero_grad(), and backward() once for each of the losses",
    )


def loss_not_scaled(*, partly: bool) -> UsageError:
    """Return the error for gradients of a loss that nobody scaled, or beside those of one that was."""
    how = "; one loss was scaled and another was not" if partly else ""
    return unscaled_loss(
        where=f"step(), unscale_(), clip_grad_norm_(){how}",
        fix="call zero_grad(), then opt.backward(loss) or opt.scale(loss).backward() in place of loss.backward(); if "
        "gradients were set by hand, declare them: opt.step(scaled=True) if they are multiplied by opt.loss_scale, "
        "opt.step(scaled=False) if not",
    )


# --- steps ------------------------------------------------------------------------------------------------------------


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
    """Return the error for 16-bit parameters without masters, which nobody asked for."""
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


def stepped_by_scaler(optimizer: LossScaledOptimizer) -> UsageError:
    """Return the error for a step by `torch.amp.GradScaler`, which sets its scale as attributes of an optimizer."""
    vars(optimizer).pop("found_inf", None)
    vars(optimizer).pop("grad_scale", None)
    return scaled_twice(optimizer.inner, where="torch.amp.GradScaler.step(optimizer)")


def shared_parameter(inner: torch.optim.Optimizer, other: torch.optim.Optimizer) -> UsageError:
    """Return the error for a gradient that two optimizers would unscale."""
    return UsageError(
        "a parameter is in two wrapped optimizers, and the other one has unscaled its gradient",
        where="step(), unscale_(), clip_grad_norm_()",
        found=f"optimizers around {type(inner).__name__} and {type(other).__name__}",
        allowed="each parameter in one optimizer",
        fix="leave shared (tied) parameters out of one of them; delete an optimizer that is not used any more",
    )


def inner_stepped(inner: torch.optim.Optimizer) -> UsageError:
    """Return the error for a step that passes the wrapper by."""
    return UsageError(
        "the inner optimizer was stepped while its gradients are scaled",
        where=f"{type(inner).__name__}.step()",
        found="gradients multiplied by the loss scale",
        allowed="a step by the wrapped optimizer, which unscales and tests them first",
        fix="call step() of the optimizer that polyamp.wrap_optimizer returned",
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


# --- clipping ---------------------------------------------------------------------------------------------------------


def clipped_too_early() -> UsageError:
    """Return the error for gradients that torch clips while they are scaled."""
    return UsageError(
        "gradients were clipped while they were scaled",
        where="torch.nn.utils.clip_grad_norm_, clip_grad_value_ or a trainer that calls them",
        found="gradients that were changed between the backward pass and unscaling",
        allowed="clipping of unscaled gradients",
        fix="give polyamp.wrap_optimizer(..., max_grad_norm=) and leave this clipping out (max_grad_norm=0 in a "
        "Hugging Face Trainer), or call opt.clip_grad_norm_(max_norm), or opt.unscale_() before it",
    )


def clipped_by_another_norm() -> UsageError:
    """Return the error for masters whose gradients would be clipped by the norm of the model's."""
    return UsageError(
        "the 16-bit gradients of the model are not the unscaled ones",
        where="clipping by a norm that was computed before",
        found="parameters of the model that have master weights",
        allowed="the parameters in opt.param_groups, which have the unscaled gradients",
        fix="call opt.clip_grad_norm_(max_norm), or clip the parameters in opt.param_groups",
    )


# --- GradScaler -------------------------------------------------------------------------------------------------------


def unscaled_by_scaler(optimizer: torch.optim.Optimizer) -> UsageError:
    """Return the error for gradients that the scaler would unscale twice."""
    return UsageError(
        "unscale_() was called for this optimizer already since the last update(), or its step() was",
        where="GradScaler.unscale_(optimizer)",
        found=shown(optimizer),
        fix="call it once, after the last backward() and before step(); call update() after the steps",
    )


def closure_for_scaler(closure: object) -> UsageError:
    """Return the error for a closure, as torch's scaler has it."""
    return UsageError(
        "Closure use is not currently supported if GradScaler is enabled: its loss would not be scaled",
        where="GradScaler.step(optimizer, closure)",
        found=shown(closure),
        fix="wrap the optimizer instead: polyamp.wrap_optimizer(optimizer).step(closure), where the closure calls its "
        "backward(loss)",
    )


def stepped_before_update() -> UsageError:
    """Return the error for a second step in one window."""
    return UsageError(
        "step() was called for this optimizer already since the last update()",
        where="GradScaler.step(optimizer)",
        fix="call scaler.update() after the steps of a window",
    )


def nothing_tested() -> UsageError:
    """Return the error for an update of the scale without a step."""
    return UsageError(
        "no gradients were tested since the last update()",
        where="GradScaler.update()",
        fix="call scaler.step(optimizer) before it",
    )


def empty_state() -> UsageError:
    """Return the error for the state of a disabled scaler."""
    return UsageError(
        "the saved state is empty: it may be that of a disabled scaler",
        where="GradScaler.load_state_dict(saved)",
        fix="leave the loading out, or load a result of state_dict() of an enabled scaler",
    )


def float16_parameter(name: str) -> InvalidValueError:
    """Return the error for gradients in float16, which torch's scaler refuses too."""
    return InvalidValueError(
        "Attempting to unscale FP16 gradients.",
        where="GradScaler.unscale_(optimizer), which step(optimizer) calls",
        found=f"{name} and its gradient of torch.float16",
        allowed="float32 parameters, run in 16 bits by autocast",
        fix="keep the model in float32, without .half(); or wrap the optimizer, which then trains float32 master "
        "weights: polyamp.wrap_optimizer(optimizer, policy)",
    )


def not_of_scaler(optimizer: object, *, where: str) -> UsageError:
    """Return the error for an optimizer that the scaler does not drive."""
    return UsageError(
        "this is not an optimizer of the scaler",
        where=where,
        found=shown(optimizer),
        allowed="a wrapped optimizer that the scaler was made with",
        fix="pass what polyamp.wrap_optimizer returned; use the plain optimizer nowhere else",
    )
