"""TensorFlow's devices: what each computes fast, which types its kernels have, and a warning where one is slow."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterable, Sequence
from typing import Any

import tensorflow as tf

from polyamp.backends.tensorflow.graphs.graph import FLOAT32, Node
from polyamp.backends.tensorflow.unstable import registered_kernels
from polyamp.formats import cpu_flags, fast_on_cpu, fast_on_gpu, report_slow_format, why_not_fast

_CONVOLUTIONS = "its bfloat16 convolutions were measured to take up to 14 times float32's time on such a CPU"


def describe() -> dict[str, Any]:
    """Return TensorFlow's version, its devices with the formats that each computes fast, and notes."""
    *gpus, cpu = map(dict, devices())
    notes = [] if gpus else ["no GPU: no Tensor Cores"]
    notes += [why_not_fast(gpu["name"], gpu["capability"]) for gpu in gpus if not gpu["fast"]]
    return {"version": tf.__version__, "devices": [*gpus, cpu], "settings": settings(), "notes": notes}


def settings() -> dict[str, str]:
    """Return the settings that decide how precise float32 products are."""
    named = ("XLA_FLAGS", "TF_ENABLE_ONEDNN_OPTS")
    tensorfloat32 = str(tf.config.experimental.tensor_float_32_execution_enabled())
    return {"tensor_float_32_execution": tensorfloat32, **{name: os.environ.get(name, "") for name in named}}


def least_over_ranks(numbers: Sequence[float]) -> list[float]:
    """Return the least of each number over the workers of the current strategy, each of which has to call this."""
    if not (tf.distribute.has_strategy() and tf.distribute.in_cross_replica_context()):
        return list(numbers)
    strategy = tf.distribute.get_strategy()
    gathered = strategy.gather(strategy.run(lambda: tf.constant([numbers])), axis=0)
    return gathered.numpy().min(0).tolist()


@functools.cache
def devices() -> tuple[dict[str, Any], ...]:
    """Return the GPUs, then the CPU, each with its ``name`` and the formats that are ``fast`` there."""
    gpus = map(_gpu, tf.config.list_physical_devices("GPU"))
    return (*gpus, {"name": "cpu", "fast": fast_on_cpu(cpu_flags())})


def report_slow(operation: str, compute: str, device_type: str) -> None:
    """Warn once if an operation was lowered to a format for which its device has no units."""
    # On a CPU only convolutions are reported: other products are as fast as in float32, or nearly.
    if device_type == "CPU" and operation == "conv":
        report_slow_format(devices()[-1], compute, cost=_CONVOLUTIONS)
    elif device_type == "GPU":
        for gpu in devices()[:-1]:
            report_slow_format(gpu, compute)


def _gpu(gpu: Any) -> dict[str, Any]:
    details = tf.config.experimental.get_device_details(gpu)
    capability, kind = details.get("compute_capability", (0, 0)), details.get("device_name", "")
    return {
        "name": f"{gpu.name.removeprefix('/physical_device:')} {kind}".strip(),
        "capability": ".".join(map(str, capability)),
        "fast": fast_on_gpu(kind, capability),
    }


_ADDING_IN_16_BITS = {  # on CPUs; other operations add in float32 inside
    "AvgPool": ("bfloat16", "float16"),
    "AvgPool3D": ("bfloat16", "float16"),
    "BiasAddGrad": ("bfloat16",),
}


@functools.cache
def default_device() -> str:
    """Return the type of device on which TensorFlow places an operation that names no device."""
    return "GPU" if tf.config.list_logical_devices("GPU") else "CPU"


@functools.cache
def device_type(device: str) -> str:
    """Return the type of a device, by its name; an empty name is the default device."""
    return tf.DeviceSpec.from_string(device).device_type or default_device()


def device_of(node: Node) -> str:
    """Return the type of device on which a node runs."""
    return device_type(node.definition.device)


def lowerable(node: Node, dtype: int) -> tuple[str, ...]:
    """Return the largest set of a node's float32 type attributes for which a kernel of another type exists."""
    types = tuple(
        sorted({(port.attribute, port.dtype) for port in [*node.input_ports, *node.output_ports] if port.attribute})
    )
    return lowerable_types(node.op, device_of(node), types, dtype)


@functools.cache
def lowerable_types(op: str, device: str, types: tuple[tuple[str, int], ...], dtype: int) -> tuple[str, ...]:
    """Return the largest set of these type attributes of an operation that can change from float32 to another type."""
    if device not in {kernel.device_type for kernel in registered_kernels(op)}:
        device = "CPU"  # TensorFlow places it there
    if device == "CPU" and tf.as_dtype(dtype).name in _ADDING_IN_16_BITS.get(op, ()):
        return ()
    floating = [name for name, now in types if now == FLOAT32]
    alternatives = [tuple(floating), *((name,) for name in floating)]
    return next((names for names in alternatives if names and _has_kernel(op, device, types, names, dtype)), ())


def _has_kernel(op: str, device: str, types: Iterable[tuple[str, int]], names: Iterable[str], dtype: int) -> bool:
    wanted = {**dict(types), **dict.fromkeys(names, dtype)}
    return any(
        kernel.device_type in (device, "DEFAULT")
        and all(
            wanted.get(constraint.name, 0) in (0, *constraint.allowed_values.list.type)
            for constraint in kernel.constraint
        )
        for kernel in registered_kernels(op)
    )
