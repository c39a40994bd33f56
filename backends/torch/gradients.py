"""Unscales, tests and clips many gradients with few calls, whatever their devices, dtypes and layouts."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from polyamp.backends.torch.dtypes import SIXTEEN_BIT

Buckets = list[list[Tensor]]
"""Dense real tensors that share the gradients' memory, in lists of one type, device and dtype."""


def collect(param_groups: Iterable[dict[str, Any]]) -> Buckets:
    """The gradients of an optimizer's parameters. Parameters without one are left out.

    >>> weight = torch.ones(2, requires_grad=True)
    >>> weight.sum().backward()
    >>> collect([{"params": [weight, torch.ones(3, requires_grad=True)]}])
    [[tensor([1., 1.])]]
    """
    params = [param for group in param_groups for param in group["params"]]
    grads = [grad for param in params if (grad := param.grad) is not None]
    return [grads] if _are_alike(grads) else _sorted_by_kind(params)


def _sorted_by_kind(params: list[Tensor]) -> Buckets:
    buckets: dict[Any, list[Tensor]] = {}
    for param in params:
        if param.grad is not None:
            grad = _dense(param, param.grad)
            buckets.setdefault((type(grad), grad.device, grad.dtype), []).append(grad)
    return list(buckets.values())


def _are_alike(grads: list[Tensor]) -> bool:
    """Whether one kernel call takes them all. One pass for each property is the cheapest way to know."""
    return (
        {*map(type, grads)} == {Tensor}
        and {grad.layout for grad in grads} == {torch.strided}
        and len({grad.dtype for grad in grads}) == 1
        and not grads[0].is_complex()
        and (not _several_devices() or len({grad.device for grad in grads}) == 1)
    )


def _several_devices() -> bool:
    return torch.accelerator.device_count() > 0


def _dense(param: Tensor, grad: Tensor) -> Tensor:
    """A dense real view of a gradient. A sparse one is coalesced first, since the sum of duplicates can overflow."""
    if grad.layout == torch.sparse_coo:
        param.grad = grad = grad.coalesce()
    if grad.layout != torch.strided:
        grad = grad.values()
    return torch.view_as_real(grad) if grad.is_complex() else grad


@torch.no_grad()
def unscale(buckets: Buckets, inverse_scale: Tensor) -> Tensor:
    """Multiply every gradient in place, in float32 arithmetic, and test what it was before for inf and NaN.

    >>> grads = [torch.tensor([4.0, float("inf")]), torch.tensor([8.0])]
    >>> unscale([grads], torch.tensor(0.5)), grads[1]
    (tensor(1.), tensor([4.]))

    Args:
        buckets: what `collect` gave.
        inverse_scale: float32 scalar.

    Returns:
        Float32 scalar on the first gradient's device: exactly 1.0 if any gradient was not finite, else 0.0. Fused
        optimizers compare it with 1, so flags of several devices must not be added up.
    """
    flags = [_unscale_bucket(bucket, inverse_scale) for bucket in buckets]
    found = flags[0]
    for flag in flags[1:]:
        found = torch.maximum(found, flag.to(found.device, non_blocking=True))
    return found


def _unscale_bucket(bucket: list[Tensor], inverse_scale: Tensor) -> Tensor:
    device = bucket[0].device
    flag = torch.zeros((), device=device)
    # Private in torch, without a public equivalent: torch.amp.GradScaler's own kernel, which reads each gradient once.
    torch._amp_foreach_non_finite_check_and_unscale_(bucket, flag, inverse_scale.to(device, non_blocking=True))
    return flag


@torch.no_grad()
def clip(buckets: Buckets, max_norm: float) -> Tensor:
    """Scale gradients in place so that their global L2 norm is at most ``max_norm``, as ``clip_grad_norm_`` does.

    >>> grads = [torch.tensor([3.0]), torch.tensor([4.0])]
    >>> clip([grads], 1.0), grads[0]
    (tensor(5.), tensor([0.6000]))

    Returns:
        The norm before clipping; float32 scalar (float64 for such gradients) on the first gradient's device.

    The 1e-6 in the divisor is that of ``torch.nn.utils.clip_grad_norm_``, whose results these are bit for bit.
    """
    device = buckets[0][0].device
    norms = [_whole(norm).to(device) for bucket in buckets for norm in _norms(bucket)]
    total = torch.linalg.vector_norm(torch.stack(norms))
    factor = torch.clamp(max_norm / (total + 1e-6), max=1.0)
    for bucket in buckets:
        torch._foreach_mul_(bucket, factor.to(bucket[0].device))
    return total


def _norms(bucket: list[Tensor]) -> Iterable[Tensor]:
    # The norm of 16-bit gradients can leave float16 although no gradient does.
    wide = torch.float32 if bucket[0].dtype in SIXTEEN_BIT else None
    return torch._foreach_norm(bucket, 2.0, dtype=wide)


def _whole(norm: Any) -> Tensor:
    """The norm of a distributed tensor over all its shards."""
    return norm.full_tensor() if hasattr(norm, "full_tensor") else norm  # type: ignore[no-any-return]
