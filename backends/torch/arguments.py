"""The arguments of a wrapped optimizer, checked when it is wrapped rather than at its first step."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from polyamp.errors import InvalidTypeError, InvalidValueError, is_number, shown, wrong_type


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
