"""Find which type attributes of an operation have kernels for 16 bits on a device."""

from __future__ import annotations

import functools
from collections.abc import Iterable

import tensorflow as tf

from polyamp.backends.tensorflow.graphs.graph import FLOAT32, Node
from polyamp.backends.tensorflow.unstable import registered_kernels

_ADDING_IN_16_BITS = {  # on CPUs; other operations add in float32 inside
    "AvgPool": ("bfloat16", "float16"),
    "AvgPool3D": ("bfloat16", "float16"),
    "BiasAddGrad": ("bfloat16",),
}


@functools.cache
def default_device() -> str:
    """Return the type of device on which TensorFlow places an operation that names no device."""
    return "GPU" if tf.config.list_logical_devices("GPU") else "CPU"


def device_of(node: Node) -> str:
    """Return the type of device on which a node runs."""
    return tf.DeviceSpec.from_string(node.definition.device).device_type or default_device()


def lowerable(node: Node, dtype: int) -> tuple[str, ...]:
    """Return the largest set of a node's float32 type attributes for which a kernel of another type exists."""
    types = tuple(
        sorted({(port.attribute, port.dtype) for port in [*node.input_ports, *node.output_ports] if port.attribute})
    )
    return _lowerable(node.op, device_of(node), types, dtype)


@functools.cache
def _lowerable(op: str, device: str, types: tuple[tuple[str, int], ...], dtype: int) -> tuple[str, ...]:
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
