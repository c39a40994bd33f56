"""Tensors that have a 16-bit dtype but are computed in float32.

Autocast, autograd and the user's code see the dtype of a real run, and so does everything that depends on it: which
casts are made, forward and backward, the promoted dtype of a product's result, the result of ``torch.finfo(x.dtype)``.
Only the values are those of a float32 run: nothing overflows, and nothing is lost. For example, 1e30 in a "float16"
`Widened` tensor times 0.5 is 5e29, still in "float16", where a real float16 tensor has inf.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from polyamp.backends.torch import unstable
from polyamp.backends.torch.dtypes import SIXTEEN_BIT
from polyamp.backends.torch.step.gradients import local


class Widened(Tensor):
    """A 16-bit tensor with float32 values."""

    value: Tensor  # float32; not copied

    __torch_function__ = unstable.no_torch_function
    __slots__: ClassVar = ("value",)

    @staticmethod
    def __new__(cls, value: Tensor, dtype: torch.dtype) -> Widened:
        made: Widened = unstable.wrapper_like(cls, value, dtype)
        made.value = value
        return made

    def __init__(self, value: Tensor, dtype: torch.dtype) -> None:
        pass

    @classmethod
    @unstable.never_compiled
    def __torch_dispatch__(cls, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        return run(op, args, kwargs or {})

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Widened({self.value!r}, dtype={self.dtype})"


def run(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Run an aten operator with all 16-bit work in float32, and return `Widened` results if they would be 16-bit."""
    values = [*args, *kwargs.values()]
    given = list(tensors(values))
    if not any(one.dtype in SIXTEEN_BIT for one in given) and not any(map(_is_low, values)):
        return op(*args, **kwargs)
    if op.is_view and not any(isinstance(one, Widened) for one in given):
        return op(*args, **kwargs)  # a view of a 16-bit parameter, which shares its memory
    return _run(op, args, kwargs, wide=_can_widen(op, given))


def run_as_it_is(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Run an aten operator with the dtypes of its arguments."""
    # oneDNN's recurrent layers run in float32 and are rounded: few CPUs have them in float16, and in either format
    # their gradients would be float32, unlike on any other device.
    if not op.name().startswith("aten::mkldnn_rnn_layer"):
        return op(*args, **kwargs)
    return _mapped(_in_sixteen_bits, run(op, args, kwargs))


def _in_float32(value: Any) -> Any:
    """Return the replacement for a 16-bit tensor or ``dtype`` argument; return any other argument unchanged."""
    if isinstance(value, Widened):
        return value.value
    if isinstance(value, Tensor) and value.dtype in SIXTEEN_BIT:
        return value.float()
    return torch.float32 if _is_low(value) else value


def _in_sixteen_bits(value: Any) -> Any:
    return value.value.to(value.dtype) if isinstance(value, Widened) else value


def _run(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any], *, wide: bool) -> Any:
    """Run an operator in float32 if ``wide``, else in 16 bits; write the changes back, and wrap the results."""
    replaced: dict[int, tuple[Tensor, Tensor]] = {}  # each 16-bit argument and its replacement, by the latter's id

    def replace(value: Any) -> Any:
        other = _in_float32(value) if wide else _in_sixteen_bits(value)
        if isinstance(value, Tensor) and other is not value:
            replaced[id(other)] = (value, other)
        return other

    out = op(*(_mapped(replace, one) for one in args), **{name: _mapped(replace, one) for name, one in kwargs.items()})
    changed = _write_back(replaced, list(written(op, args, kwargs)))
    if torch.Tag.inplace_view in op.tags:  # transpose_ and the like
        unstable.change_shape_alone(op, args, kwargs)
    results = [one for one in tensors([out]) if one.is_floating_point()]
    dtypes = iter(declared(op, args, kwargs, len(results)) if wide and results else [one.dtype for one in results])

    def wrap(value: Any) -> Any:
        if not (isinstance(value, Tensor) and value.is_floating_point()):
            return value
        dtype = next(dtypes)
        if id(value) in changed:
            return changed[id(value)]
        low = dtype in SIXTEEN_BIT and value.layout is torch.strided and type(value) is Tensor
        return Widened(value.float(), dtype) if low else value

    return _mapped(wrap, out)


def _write_back(replaced: Mapping[int, tuple[Tensor, Tensor]], written: Sequence[Tensor]) -> dict[int, Tensor]:
    """Copy an operator's changes from the replacements to its own arguments, and return the changed arguments."""
    changed = {key: own for key, (own, _) in replaced.items() if any(own is one for one in written)}
    for key, own in changed.items():
        target, other = own.value if isinstance(own, Widened) else own, replaced[key][1]
        if target is not other:
            target.copy_(other)
    return changed


def declared(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any], count: int) -> list[torch.dtype]:
    """Return the dtypes of an operator's floating-point results for these arguments, by PyTorch's type promotion."""
    # Kernels for meta tensors have them too, but many are written in Python, and importing them takes seconds.
    named = [one for one in (*args, *kwargs.values()) if isinstance(one, torch.dtype)]
    if named:
        return named[-1:] * count
    native = op.name().removeprefix("aten::").partition(".")[0]
    if native in ("_softmax", "_log_softmax") and args[2]:  # half_to_float
        return [torch.float32]
    if "_norm" in native and native not in _PLAIN_NORMS:
        return _of_normalisation(native, args, count)
    return [_promoted(args[:1] if op.is_view else args)] * count


_PLAIN_NORMS = {"linalg_vector_norm", "_weight_norm_interface", "_weight_norm_interface_backward", "native_norm"}


def _of_normalisation(native: str, args: Sequence[Any], count: int) -> list[torch.dtype]:
    """Return the dtypes of a norm's results for 16-bit data and float32 weights; statistics are float32."""
    # Each gradient has the dtype of the tensor that it belongs to.
    others = torch.float32
    if "backward" in native:
        weights = [one.dtype for one in tensors(args) if one.is_floating_point() and one.dim() <= 1]
        others = weights[-1] if weights else args[0].dtype
    return [args[0].dtype, *[others] * (count - 1)]


def _promoted(args: Sequence[Any]) -> torch.dtype:
    floating = [one for one in tensors(args) if one.is_floating_point()]
    deciding = [one for one in floating if one.dim()] or floating  # scalars follow the others
    return functools.reduce(torch.promote_types, (one.dtype for one in deciding))


# Kernels that only exist for 16 bits, and one that reads bits.
_ONLY_LOW = {
    "aten::_scaled_dot_product_flash_attention",
    "aten::_scaled_dot_product_flash_attention_backward",
    "aten::_scaled_dot_product_cudnn_attention",
    "aten::_scaled_dot_product_cudnn_attention_backward",
    "aten::_flash_attention_forward",
    "aten::_flash_attention_backward",
    "aten::view.dtype",
}


def _can_widen(op: Any, given: Iterable[Tensor]) -> bool:
    """Return whether an operator can run in float32 in place of 16 bits."""
    # It does not for operators of other libraries, whose kernels may only support 16 bits, nor for tensors that contain
    # others, which have their own dtype.
    name = op.name()
    known = all(type(one) in (Tensor, nn.Parameter, nn.Buffer, Widened) for one in given)
    return known and name.startswith(("aten::", "prims::")) and name not in _ONLY_LOW


def _is_low(value: Any) -> bool:
    return isinstance(value, torch.dtype) and value in SIXTEEN_BIT


def written(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[Tensor]:
    """Yield the tensors among an operator's arguments that it changes."""
    for index, name in _written_arguments(op):
        yield from tensors([args[index] if index < len(args) else kwargs.get(name)])


_written_arguments = functools.cache(unstable.written_arguments)


def values_of(tensor: Tensor) -> Tensor:
    """Return the tensor with the values: float32 for a widened tensor, this rank's part for a distributed one."""
    own = local(tensor)
    return own.value if isinstance(own, Widened) else own


def tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    """Yield the tensors among an operator's arguments or results, which are nested at most once."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from (one for one in value if isinstance(one, Tensor))


def crosses_16_bits(before: Any, after: Any) -> bool:
    """Return whether a tensor was cast from a floating dtype to another, one of which has 16 bits."""
    if not (isinstance(before, Tensor) and isinstance(after, Tensor)):
        return False
    floating = before.is_floating_point() and after.is_floating_point()
    return floating and before.dtype != after.dtype and not SIXTEEN_BIT.isdisjoint((before.dtype, after.dtype))


def _mapped(fn: Callable[[Any], Any], value: Any) -> Any:
    if isinstance(value, list | tuple):
        return type(value)(fn(one) for one in value)
    return fn(value)
