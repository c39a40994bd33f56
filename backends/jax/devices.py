"""The devices that JAX sees, and the formats that each supports or computes fast."""

from __future__ import annotations

import os
from collections.abc import Sequence
from importlib import metadata
from typing import Any

import jax
import numpy as np

from polyamp.errors import check_compute
from polyamp.formats import fast_on_gpu, report_slow_format

_PRECISION = "jax_default_matmul_precision"


def describe() -> dict[str, Any]:
    """Return JAX's version, its devices with the formats that each computes fast, and notes on other packages."""
    devices = [described(device) for device in jax.local_devices()]
    notes = [_package_note(package) for package in ("optax", "flax", "equinox")]
    if not any(device["fast"] for device in devices):
        notes.append("no device here is fast in 16 bits: good for checking results, not for speed")
    return {"version": jax.__version__, "devices": devices, "settings": settings(), "notes": notes}


def settings() -> dict[str, str]:
    """Return the settings that decide how precise float32 products are."""
    return {_PRECISION: str(getattr(jax.config, _PRECISION)), "XLA_FLAGS": os.environ.get("XLA_FLAGS", "")}


def least_over_ranks(numbers: Sequence[float]) -> list[float]:
    """Return the least of each number over all processes, each of which has to call this."""
    if jax.process_count() == 1:
        return list(numbers)
    from jax.experimental import multihost_utils  # half a second that one process does not need

    least: list[float] = multihost_utils.process_allgather(np.asarray(numbers, np.float32)).min(0).tolist()
    return least


def _package_note(package: str) -> str:
    try:
        return f"{package} {metadata.version(package)}"
    except metadata.PackageNotFoundError:
        return f"{package} is not installed" + (': pip install "polyamp[jax]"' if package == "optax" else "")


def described(device: jax.Device) -> dict[str, Any]:
    """Return what ``polyamp doctor`` prints for a device, as JSON: name, platform, compute capability, fast formats."""
    capability = getattr(device, "compute_capability", None)
    return {
        "name": f"{device.platform}:{device.id} {device.device_kind}",
        "platform": device.platform,
        "capability": capability,
        # the formats that have matrix units (source: `polyamp.formats`; for TPUs, TPU system architecture)
        "fast": {"gpu": fast_on_gpu(device.device_kind, capability), "tpu": ["bfloat16"]}.get(device.platform, []),
    }


def check_format(compute: str) -> None:
    """Raise if JAX has no operations in a compute format; warn once if the device has no matrix units for it."""
    check_compute(compute, framework="JAX", where="autocast of a JAX function", instead=_INSTEAD)
    device = jax.local_devices()[0]
    if compute == "float32" or device.platform == "cpu":  # CPUs are for checking results
        return
    report_slow_format({**described(device), "name": device.device_kind}, compute)


_INSTEAD = {
    "tensorfloat32": 'it is a way to multiply float32: call jax.default_matmul_precision("tensorfloat32")',
    "float64": 'use policy("float32"), which leaves float64 arrays in float64; they exist after '
    'jax.config.update("jax_enable_x64", True)',
}
