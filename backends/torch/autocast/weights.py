"""Casts of weights: each is cast once in a region, and again after an update.

Native autocast keeps the casts of leaf float32 parameters until its outermost region ends, and returns them even after
an update inside the region. `watch` drops them whenever an operator updates such a tensor.
`cast_weight` is the same cache for overridden operations, with the tensor's version in its key.
"""

from __future__ import annotations

import weakref
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from polyamp.backends.torch import unstable
from polyamp.backends.torch.autocast import boxed, regions
from polyamp.backends.torch.autocast.behaviours import overload_named
from polyamp.backends.torch.kernels import operators  # noqa: F401 # defines two of those that are watched

# Operators that update their first argument. Activation functions in place (relu_, sigmoid_, dropout_) are left out:
# nobody applies them to weights.
_UPDATES = """
add_ sub_ mul_ div_ pow_ fmod_ remainder_ copy_ fill_ zero_ clamp_ clamp_min_ clamp_max_ lerp_ addcmul_ addcdiv_
addmm_ addmv_ addr_ addbmm_ baddbmm_ neg_ abs_ sign_ sqrt_ round_ nan_to_num_ tril_ triu_ fill_diagonal_ normal_
uniform_ bernoulli_ exponential_ cauchy_ log_normal_ geometric_ random_ erfinv_ renorm_ embedding_renorm_
index_add_ index_copy_ index_fill_ index_put_ index_reduce_ scatter_ scatter_add_ scatter_reduce_ masked_fill_
masked_scatter_ put_ set_ _foreach_add_ _foreach_sub_ _foreach_mul_ _foreach_div_ _foreach_lerp_ _foreach_copy_
_foreach_zero_ _foreach_addcmul_ _foreach_addcdiv_ _foreach_clamp_min_ _foreach_clamp_max_
_fused_adam_ _fused_adamw_ _fused_sgd_ _fused_adagrad_
"""


class _Cast(NamedTuple):
    weight: weakref.ref[Tensor]
    version: tuple[int, int]
    value: Tensor


def cast_weight(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Cast a leaf that requires gradients; return the earlier cast if nothing changed the leaf in this region."""
    casts = None if torch.compiler.is_compiling() else regions.casts_here()
    if casts is None or type(weight) not in (Tensor, nn.Parameter):
        return weight.to(dtype)
    if unstable.is_transformed() or not torch.is_autocast_cache_enabled():
        return weight.to(dtype)
    key = id(weight), dtype, torch.is_grad_enabled()
    kept: _Cast | None = casts.get(key)
    version = weight._version, boxed.forgotten()
    if kept is None or kept.weight() is not weight or kept.version != version:
        kept = casts[key] = _Cast(weakref.ref(weight), version, weight.to(dtype))
    return kept.value


def forget_casts() -> None:
    """Drop this thread's casts and native autocast's."""
    casts = regions.casts_here()
    if casts:
        casts.clear()
    torch.clear_autocast_cache()
    boxed.forget_casts()


@cache
def watch(device_type: str) -> None:
    """Drop casts, from now on, when an operator updates weights on a device type."""
    key = unstable.AutocastKey(device_type)
    compiled = boxed.kernels(required=False)  # policies without overrides work without them
    updates = {*(f"aten::{name}" for name in _UPDATES.split()), "polyamp::adam_step_", "polyamp::sgd_step_"}
    for name in unstable.all_operators():
        if name.partition(".")[0] not in updates:
            continue
        if compiled is not None:
            compiled.watch(name, device_type)
        else:
            op = overload_named(name)
            library(op.namespace).impl(name, _forgetting(op, key), key.name)


@cache
def library(namespace: str) -> Any:
    """Return the registrations for a namespace of operators, which stay as long as the process."""
    return torch.library.Library(namespace, "IMPL")  # type: ignore[no-untyped-call]


def _forgetting(op: Any, key: unstable.AutocastKey) -> Any:
    @unstable.never_compiled
    def kernel(updated: Any, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(updated, Tensor) or _may_be_weight(updated):
            forget_casts()
        with key.excluded():
            return op(updated, *args, **kwargs)

    return kernel


def _may_be_weight(updated: Tensor) -> bool:
    """Return whether a tensor can be a weight or a view of a weight, not a new result that is being filled."""
    if updated.dtype is not torch.float32 or updated.grad_fn is not None:
        return False
    return updated.requires_grad or not unstable.is_new(updated)
