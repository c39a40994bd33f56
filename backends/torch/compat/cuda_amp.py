"""`torch.cuda.amp`, which PyTorch has deprecated, on polyamp.

With a CUDA device, a region is the native one, and the scaler is polyamp's. Without one, native `torch.cuda.amp`
disables itself, so that a script trains in float32; here the script gets the precision that it asks for, on the devices
there are. Regions and scalers with ``enabled=False`` do what the native ones do.

Under `polyamp run`, `install` puts the names of this module into the real modules.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch.amp.grad_scaler import OptState

from polyamp.backends.torch.autocast.regions import ACCELERATOR, DEVICE_TYPES
from polyamp.backends.torch.compat.grad_scaler import GradScaler as PolyampGradScaler
from polyamp.backends.torch.unstable import constant_when_compiled
from polyamp.errors import warn_deprecated, warn_once
from polyamp.policies import policy
from polyamp.regions import autocast as polyamp_autocast
from polyamp.run import Session, current, note_own_precision

__all__ = ["GradScaler", "OptState", "autocast", "custom_bwd", "custom_fwd", "install"]

_HAS_CUDA = "cuda" in DEVICE_TYPES
_DEVICE = "cuda" if _HAS_CUDA else ACCELERATOR or "cpu"
_POLICIES = {torch.float16: policy("mixed_float16"), torch.bfloat16: policy("mixed_bfloat16")}


def autocast(enabled: bool = True, dtype: torch.dtype = torch.float16, cache_enabled: bool = True) -> Any:
    """Return a region of autocast, as ``torch.cuda.amp.autocast`` does: a context manager and a decorator.

    >>> x = torch.ones(2, 2, device="cuda" if torch.cuda.is_available() else "cpu")
    >>> with autocast(dtype=torch.bfloat16):
    ...     print((x @ x).dtype)
    torch.bfloat16

    Args:
        enabled: False turns autocast off in the region.
        dtype: float16 or bfloat16. Native autocast decides about other types.
        cache_enabled: whether the casts of weights are kept until the region ends. A region that does not keep them is
            a native one.

    Warns:
        PolyampDeprecationWarning: at the first use; its message has the line to write instead.
        PolyampWarning: at the first use without a CUDA device: the region holds on the devices there are.
    """
    _report_region(bool(enabled), str(dtype))
    low = _POLICIES.get(dtype)
    if _HAS_CUDA or not enabled or low is None or not cache_enabled:
        return torch.autocast(_DEVICE, dtype=dtype, enabled=bool(enabled), cache_enabled=cache_enabled)
    return polyamp_autocast(low, backend="torch")


class GradScaler(PolyampGradScaler):
    """Scale losses as ``torch.cuda.amp.GradScaler`` does, with what `polyamp.backends.torch.GradScaler` adds.

    >>> scaler = GradScaler(init_scale=8.0)
    >>> float(scaler.scale(torch.tensor(2.0)))
    16.0

    Args:
        init_scale, growth_factor, backoff_factor, growth_interval, enabled: as in torch. Without a CUDA device the
            scaler stays enabled; the native one disables itself.

    Warns:
        PolyampDeprecationWarning: at the first use; its message has the line to write instead.
        PolyampWarning: at the first use without a CUDA device.
    """

    def __init__(
        self,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
    ) -> None:
        instead = 'opt = polyamp.wrap_optimizer(opt, "mixed_float16"), opt.backward(loss), opt.step()'
        instead += ". Or keep the scaler: polyamp.backends.torch.GradScaler()"
        warn_deprecated("torch.cuda.amp.GradScaler()", instead)
        if enabled:
            _report_use("torch.cuda.amp.GradScaler", "float16")
        super().__init__(_DEVICE, init_scale, growth_factor, backoff_factor, growth_interval, enabled)
        if enabled and (session := current()) is not None:
            session.holders.append(self)


def custom_fwd(fwd: Any = None, *, cast_inputs: torch.dtype | None = None) -> Any:
    """Decorate the ``forward`` of a `torch.autograd.Function`, as ``torch.cuda.amp.custom_fwd`` does.

    Args:
        fwd: the function, with the context as its first argument.
        cast_inputs: cast floating inputs to this type inside a region, and run without autocast. None runs the function
            and its backward pass in the region of its call.
    """
    warn_deprecated("torch.cuda.amp.custom_fwd", f'@torch.amp.custom_fwd(device_type="{_DEVICE}")')
    return torch.amp.custom_fwd(fwd, device_type=_DEVICE, cast_inputs=cast_inputs)


def custom_bwd(bwd: Callable[..., Any]) -> Any:
    """Decorate the ``backward`` of a function with `custom_fwd`, to run under its ``forward``'s autocast."""
    warn_deprecated("torch.cuda.amp.custom_bwd", f'@torch.amp.custom_bwd(device_type="{_DEVICE}")')
    return torch.amp.custom_bwd(bwd, device_type=_DEVICE)


@constant_when_compiled
def _report_region(enabled: bool, dtype: str) -> None:
    """Warn at the first use. Arguments are plain values, so that Dynamo can compare them."""
    form = dtype.removeprefix("torch.")
    named = f"mixed_{form}" if enabled and form in ("float16", "bfloat16") else "float32"
    warn_deprecated("torch.cuda.amp.autocast()", f'polyamp.autocast("{named}")')
    if enabled:
        _report_use("torch.cuda.amp.autocast", form)


def _report_use(interface: str, form: str) -> None:
    note_own_precision(interface)
    if not _HAS_CUDA:
        warn_once(
            "torch.cuda.amp without a CUDA device: native autocast and scaler disable themselves; polyamp's run in "
            f"{form} on {' and '.join(DEVICE_TYPES)}. Pass enabled=False to train in float32.",
        )


# Dynamo takes the objects with these names in `autocast_mode` for native regions, so they are not the functions.
_CUSTOM = {"custom_fwd": custom_fwd, "custom_bwd": custom_bwd}
_NAMES: dict[str, dict[str, Any]] = {
    "torch.cuda.amp": {"autocast": autocast, "GradScaler": GradScaler, **_CUSTOM},
    "torch.cuda.amp.autocast_mode": {"autocast": functools.partial(autocast), **_CUSTOM},
    "torch.cuda.amp.grad_scaler": {"GradScaler": GradScaler, "OptState": OptState},
}


def install(session: Session) -> None:
    """Put the names of this module into ``torch.cuda.amp`` until a run ends."""
    for name, values in _NAMES.items():
        module = sys.modules.get(name)
        if module is None:  # a later PyTorch lacks it
            module = sys.modules[name] = ModuleType(name, f"The names of `{name}`, on polyamp.")
            module.__path__ = []
            session.callback(sys.modules.pop, name, None)
            parent, _, last = name.rpartition(".")
            session.replace(sys.modules[parent], last, module)
        for key, value in values.items():
            session.replace(module, key, value)
