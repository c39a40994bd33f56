"""TensorFlow's devices: what each computes fast, and a warning at first use if one is slow in a policy's format."""

from __future__ import annotations

import functools
from typing import Any

import tensorflow as tf

from polyamp.formats import cpu_flags, fast_on_cpu, fast_on_gpu, report_slow_format, why_not_fast

_CONVOLUTIONS = "its bfloat16 convolutions were measured to take up to 14 times float32's time on such a CPU"


def describe() -> dict[str, Any]:
    """Return version, devices with the formats that are fast there, and notes."""
    *gpus, cpu = map(dict, devices())
    notes = [] if gpus else ["no GPU: no Tensor Cores"]
    notes += [why_not_fast(gpu["name"], gpu["capability"]) for gpu in gpus if not gpu["fast"]]
    return {"version": tf.__version__, "devices": [*gpus, cpu], "notes": notes}


@functools.cache
def devices() -> tuple[dict[str, Any], ...]:
    """Return the GPUs, then the CPU, each with its ``name`` and the formats that are ``fast`` there."""
    gpus = map(_gpu, tf.config.list_physical_devices("GPU"))
    return (*gpus, {"name": "cpu", "fast": fast_on_cpu(cpu_flags())})


def report_slow(operation: str, compute: str, device_type: str) -> None:
    """Warn once if an operation was lowered to a format for which its device has no units."""
    # On a CPU only convolutions are reported: other products are as fast as in float32, or nearly.
    if device_type == "CPU" and operation == "conv":
        report_slow_format(devices()[-1], compute, cost=_CONVOLUTIONS, stacklevel=4)
    elif device_type == "GPU":
        for gpu in devices()[:-1]:
            report_slow_format(gpu, compute, stacklevel=4)


def _gpu(gpu: Any) -> dict[str, Any]:
    details = tf.config.experimental.get_device_details(gpu)
    capability, kind = details.get("compute_capability", (0, 0)), details.get("device_name", "")
    return {
        "name": f"{gpu.name.removeprefix('/physical_device:')} {kind}".strip(),
        "capability": ".".join(map(str, capability)),
        "fast": fast_on_gpu(kind, capability),
    }
