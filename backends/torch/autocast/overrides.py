"""Registers polyamp's kernels for the operators that a policy's rules change.

A kernel is registered once, at the first region that needs it, and stays in torch's dispatcher for the whole process.
At every call it looks up the region that it runs in, and calls native autocast's kernel if the result is the same. For
example ``rules={"softmax": "lower"}`` registers a kernel for ``aten::softmax.int`` at ``AutocastCPU``. In the region of
that policy the kernel casts its input to 16 bits; in every other region, and in `torch.autocast`, it does what native
autocast does.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from polyamp.backends.torch import unstable
from polyamp.backends.torch.autocast import behaviours, boxed
from polyamp.backends.torch.autocast.behaviours import PROMOTING, behaviour, class_name, registered
from polyamp.backends.torch.autocast.regions import Region, current, number_of
from polyamp.backends.torch.autocast.weights import cast_weight, library
from polyamp.backends.torch.operations import WITH_STATISTICS


def prepare(region: Region, device_type: str) -> None:
    """Register kernels for the operators that a region overrides on a device type."""
    number_of(region)  # if this fails, nothing was registered yet
    for name in PROMOTING & registered(device_type):
        leave_to_operator(name, device_type)
    for name in behaviours.overridden_without_rule(region, device_type):
        override(name, device_type, required=False)
    for name in behaviours.overridden_by_rules(region, device_type):
        override(name, device_type)


_lock = threading.Lock()
_overridden: set[tuple[str, str]] = set()
_left: dict[tuple[str, str], Any] = {}


@contextmanager
def _overriding() -> Iterator[None]:
    """Suppress torch's warning that a kernel is overridden."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Warning only once for all operators")
        yield


def leave_to_operator(name: str, device_type: str) -> None:
    """Make native autocast pass an operator through at no cost, until a rule overrides the operator."""
    with _lock:
        key = (name, device_type)
        if key in _left or key in _overridden:
            return
        _left[key] = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
        with _overriding():
            _left[key].impl(name, torch.library.fallthrough_kernel, unstable.AutocastKey(device_type).name)


def override(name: str, device_type: str, *, required: bool = True) -> None:
    """Register polyamp's kernel for an operator on a device type: compiled if the extension is used."""
    compiled = boxed.kernels(required=required)
    with _lock:
        if (name, device_type) in _overridden:
            return
        left = _left.pop((name, device_type), None)
        if left is not None:
            unstable.withdraw(left)
        if compiled is not None:
            only_the_first = class_name(name) in WITH_STATISTICS
            compiled.override(name, device_type, listed=_is_listed(name, device_type), only_the_first=only_the_first)
        else:
            kernel, key = _kernel(name, device_type), unstable.AutocastKey(device_type).name
            with _overriding():
                library("aten").impl(name, kernel, key, with_keyset=True)
        _overridden.add((name, device_type))


def _is_listed(name: str, device_type: str) -> bool:
    """Return whether native autocast has a kernel to call where no region overrides the operator."""
    return name in registered(device_type) - PROMOTING


def _kernel(name: str, device_type: str) -> Callable[..., Any]:
    op, key = behaviours.overload_named(name), unstable.AutocastKey(device_type)
    native = _native(name, device_type, op, key)
    choices: dict[Region, tuple[Any, bool]] = {}

    def chosen(region: Region) -> tuple[Any, bool]:
        op_class, _, mixed = (behaviour(name, region, device_type) or "").partition(" ")
        call = op_class and call_as(op_class, op, class_name(name), device_type, region.dtype)
        return call or None, bool(mixed)

    @unstable.never_compiled
    def kernel(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        region = current(device_type)
        if region is None:
            return native(keyset, args, kwargs)
        if region not in choices:
            choices[region] = chosen(region)
        call, only_mixed = choices[region]
        if call is None or (only_mixed and len(_dtypes(op, args, kwargs, device_type)) < 2):
            return native(keyset, args, kwargs)
        with key.excluded():
            return call(args, kwargs)

    return kernel


def call_as(op_class: str, op: Any, canonical: str, device_type: str, dtype: torch.dtype) -> Callable[..., Any]:
    """Return a function that calls ``op`` in a class's formats; a ``dtype`` in the call beats ``full``, ``inner``."""
    names = [argument.name for argument in unstable.schema_arguments(op) if not argument.kwarg_only]
    place = names.index("dtype") if "dtype" in names else len(names)
    count = 1 if canonical in WITH_STATISTICS else len(names)
    to = dtype if op_class == "lower" else torch.float32
    if op_class == "norm":
        return _call_norm(op, names, device_type)

    def call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        passes_dtype = kwargs.get("dtype") is not None or (len(args) > place and args[place] is not None)
        if op_class == "keep" or (passes_dtype and op_class in ("full", "inner")):
            return op(*args, **kwargs)
        # Eager code does not know where its inputs came from: what follows them runs in the widest of their types.
        if op_class in ("lower", "full", "inner") or len(_dtypes(op, args, kwargs, device_type)) > 1:
            args = (*_cast(args[:count], to, device_type), *args[count:])
            kwargs = _cast(kwargs, to, device_type)
        out = op(*args, **kwargs)
        return _first_as(out, dtype, device_type) if op_class == "inner" else out

    return call


def _call_norm(op: Any, names: Sequence[str], device_type: str) -> Callable[..., Any]:
    """Return a function that calls a norm, or its backward pass, with formats that its kernels accept."""
    backward = op.__name__.partition(".")[0].endswith("_backward")
    places = [place for place, name in enumerate(names) if backward or place == 0 or name in ("weight", "bias")]

    def call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        dtype = args[0].dtype
        low = dtype is not torch.float32
        if (low or backward) and not (unstable.is_transformed() or unstable.makes_tangents()):
            return op(*args, **kwargs)
        wide = [_cast(one, torch.float32, device_type) if at in places else one for at, one in enumerate(args)]
        out = op(*wide, **kwargs)
        return _first_as(out, dtype, device_type) if low and not backward else out

    return call


def _first_as(out: Any, dtype: torch.dtype, device_type: str) -> Any:
    """Return the results of an operator with the first one in a dtype; the others are statistics."""
    if not isinstance(out, tuple):
        return _cast(out, dtype, device_type)
    results = [_cast(out[0], dtype, device_type), *out[1:]]
    return type(out)(*results) if hasattr(out, "_fields") else type(out)(results)


def _dtypes(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any], device_type: str) -> set[torch.dtype]:
    """Return the dtypes of the tensors that autocast would cast, and that the operator expects to be of one dtype."""
    lists = (value if isinstance(value, list | tuple) else (value,) for value in (*args, *kwargs.values()))
    tensors = (one for values in lists for one in values if isinstance(one, Tensor))
    numbers = op is torch.ops.aten.lerp.Tensor  # its weight may be a tensor without dimensions, of any format
    return {one.dtype for one in tensors if _is_eligible(one, device_type) and (one.dim() or not numbers)}


def _is_eligible(tensor: Tensor, device_type: str) -> bool:
    """Return whether autocast casts a tensor: it has 16 or 32 floating bits, on this device type."""
    return tensor.dtype in _CAST_FROM and tensor.device.type == device_type


_CAST_FROM = frozenset({torch.float32, torch.float16, torch.bfloat16})


def _cast(value: Any, dtype: torch.dtype, device_type: str) -> Any:
    if isinstance(value, Tensor):
        if value.dtype is dtype or not _is_eligible(value, device_type):
            return value
        return cast_weight(value, dtype) if value.requires_grad and value.is_leaf else value.to(dtype)
    if isinstance(value, dict):
        return {key: _cast(one, dtype, device_type) for key, one in value.items()}
    if isinstance(value, list | tuple):
        cast = [_cast(one, dtype, device_type) for one in value]
        return type(value)(*cast) if hasattr(value, "_fields") else type(value)(cast)
    return value


def _native(name: str, device_type: str, op: Any, key: unstable.AutocastKey) -> Callable[..., Any]:
    """Return the kernel that runs without an override: native autocast's, or the next dispatch key's."""
    if _is_listed(name, device_type):
        kernel = torch.library.get_kernel(name, key.name)
        return lambda keyset, args, kwargs: kernel.call_boxed(keyset, *args, **kwargs)
    arguments = unstable.schema_arguments(op)
    others = [index for index, argument in enumerate(arguments) if index and str(argument.type) == "Tensor"]

    def plain(keyset: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with key.excluded():
            return op(*args, **kwargs)

    def composite(keyset: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the operators inside, which autocast themselves; convert numbers to tensors by a plain call."""
        for index in others:
            if index < len(args) and not isinstance(args[index], Tensor):
                return plain(keyset, args, kwargs)
        return op.redispatch(keyset & key.below, *args, **kwargs)

    return composite if unstable.is_composite(name) else plain
