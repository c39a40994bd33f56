"""The casts of an overridden operation's arguments and results, by its class; casts of weights.

Native autocast keeps the casts of leaf float32 parameters until its outermost region ends, and returns them even after
an update inside the region. `watch` drops them whenever an operator updates such a tensor.
`cast_weight` is the same cache for overridden operations, with the tensor's version in its key.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from polyamp.backends.torch import unstable
from polyamp.backends.torch.autocast import boxed, regions
from polyamp.backends.torch.autocast.behaviours import overload_named
from polyamp.backends.torch.kernels import operators  # noqa: F401 # defines two of those that are watched
from polyamp.backends.torch.unstable import schema_arguments

Call = Callable[..., Any]

# Their kernels take 16-bit inputs with float32 weights, and update statistics in float32 buffers: casting more than the
# input would lose the update.
ONLY_THE_INPUT = {"batch_norm", "instance_norm"}


def call_as(op_class: str, op: Any, canonical: str, device_type: str, dtype: torch.dtype) -> Call:
    """Return a function that calls ``op`` as a class asks; as it is, if the class is about float32 and gets a dtype."""
    takes_dtype = op_class in ("full", "inner")
    passes_dtype = _dtype_test(op)
    count = 1 if canonical in ONLY_THE_INPUT else None

    def call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if takes_dtype and passes_dtype(args, kwargs):
            return op(*args, **kwargs)
        cast, cast_kwargs = cast_all(args, kwargs, op_class, device_type, dtype, first=count)
        out = op(*cast, **cast_kwargs)
        return rounded(out, device_type, dtype) if op_class == "inner" else out

    return call


def rounded(out: Any, device_type: str, dtype: torch.dtype) -> Any:
    """Cast the result of an operation; of a tuple only the first result, of a list all results."""
    if not isinstance(out, tuple):
        return _cast(out, dtype, device_type)
    results = [_cast(out[0], dtype, device_type), *out[1:]]
    return type(out)(*results) if hasattr(out, "_fields") else type(out)(results)


def cast_all(
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    op_class: str,
    device_type: str,
    dtype: torch.dtype,
    *,
    first: int | None = None,
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Cast the arguments of an operation, or the ``first`` so many, as its class requires; containers keep types."""
    # Eager code does not know where its inputs came from: what follows them runs in the widest of their types.
    if op_class == "keep" or (op_class not in ("lower", "full", "inner") and _agree(args, kwargs, device_type)):
        return args, kwargs
    to = dtype if op_class == "lower" else torch.float32
    cast = tuple(_cast(value, to, device_type) for value in args[:first])
    return (*cast, *args[len(cast) :]), _cast(kwargs, to, device_type)


def _eligible(tensor: Tensor, device_type: str) -> bool:
    """Return whether autocast casts a tensor: it has 16 or 32 floating bits, on this device type."""
    return tensor.dtype in _CAST_FROM and tensor.device.type == device_type


_CAST_FROM = frozenset({torch.float32, torch.float16, torch.bfloat16})


def _cast(value: Any, dtype: torch.dtype, device_type: str) -> Any:
    if isinstance(value, Tensor):
        if value.dtype is dtype or not _eligible(value, device_type):
            return value
        return cast_weight(value, dtype) if value.requires_grad and value.is_leaf else value.to(dtype)
    if isinstance(value, dict):
        return {key: _cast(one, dtype, device_type) for key, one in value.items()}
    if isinstance(value, list | tuple):
        cast = [_cast(one, dtype, device_type) for one in value]
        return type(value)(*cast) if hasattr(value, "_fields") else type(value)(cast)
    return value


def _agree(args: tuple[Any, ...], kwargs: dict[str, Any], device_type: str) -> bool:
    """Return whether the tensors that autocast would cast have the same type."""
    common = None
    for value in (*args, *kwargs.values()) if kwargs else args:
        for one in value if isinstance(value, list | tuple) else (value,):
            if isinstance(one, Tensor) and one.dtype is not common and _eligible(one, device_type):
                if common is not None:
                    return False
                common = one.dtype
    return True


def _dtype_test(op: Any) -> Callable[[tuple[Any, ...], dict[str, Any]], bool]:
    """Return a test for calls of an operator that pass a ``dtype=``."""
    names = [argument.name for argument in schema_arguments(op) if not argument.kwarg_only]
    position = names.index("dtype") if "dtype" in names else None

    def passes_dtype(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        placed = position is not None and len(args) > position and args[position] is not None
        return placed or kwargs.get("dtype") is not None

    return passes_dtype


# --- casts of weights: each is cast once in a region, and again after an update ---------------------------------------

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
    """Drop casts from now on when an operator updates weights on a device type."""
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
    """Return whether a tensor may be a weight or a view of one, and not a new result that is being filled."""
    if updated.dtype is not torch.float32 or updated.grad_fn is not None:
        return False
    return updated.requires_grad or not unstable.is_new(updated)
