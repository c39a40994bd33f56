"""The differences between Keras' three backends: where a value is, and what is being traced."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
from keras import ops

from polyamp.backends.keras.unstable import jax_trace


def value_of(variable: Any) -> Any:
    """Return the tensor that a Keras variable, or a native one, holds now."""
    native = variable.value if isinstance(variable, keras.Variable) else variable
    if keras.backend.backend() == "tensorflow":  # its variables count as tensors, and are read only when used
        import tensorflow as tf

        return tf.convert_to_tensor(native)
    return ops.convert_to_tensor(native)


def platform_of(value: Any) -> str | None:
    """Return where a tensor is (``"cpu"``, ``"gpu"``, ...); None inside traced functions, where it has no value yet."""
    return _PLATFORM_OF[keras.backend.backend()](value_of(value))


def _on_tensorflow(tensor: Any) -> str | None:
    import tensorflow as tf

    if tf.is_symbolic_tensor(tensor):
        return None
    return str(tf.DeviceSpec.from_string(tensor.device).device_type).lower()


def _on_jax(array: Any) -> str | None:
    import jax

    if isinstance(array, jax.core.Tracer):
        return None
    return str(next(iter(array.devices())).platform)


def _on_torch(tensor: Any) -> str | None:
    return None if tensor.device.type == "meta" else str(tensor.device.type)


_PLATFORM_OF = {"tensorflow": _on_tensorflow, "jax": _on_jax, "torch": _on_torch}


def in_strategy() -> bool:
    """Return whether a ``tf.distribute`` strategy runs this code, in one replica or in several."""
    if keras.backend.backend() != "tensorflow":
        return False
    import tensorflow as tf

    return bool(tf.distribute.has_strategy())


def builds_graph() -> bool:
    """Return whether this code is building a TensorFlow graph."""
    if keras.backend.backend() != "tensorflow":
        return False
    import tensorflow as tf

    return not tf.executing_eagerly()


def places(tensors: Sequence[Any]) -> list[Any]:
    """Return what is being traced around these tensors, innermost first. In eager code, the replica, if any."""
    if keras.backend.backend() == "tensorflow":
        from polyamp.backends.tensorflow.steps.skipping import places

        return places()
    if keras.backend.backend() == "jax":
        import jax

        return [jax_trace(tensor) for tensor in tensors if isinstance(tensor, jax.core.Tracer)][:1]
    return []


def describe() -> dict[str, Any]:
    """Return version and backend; the backend's own adapter describes the devices."""
    backend = keras.backend.backend()
    return {
        "version": keras.__version__,
        "title": f"keras on {backend}",
        "backend": backend,
        "devices": [],
        "notes": [f"runs on {backend}, which has the devices; KERAS_BACKEND chooses another"],
    }
