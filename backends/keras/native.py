"""The framework that Keras runs on, TensorFlow, JAX or torch: only this file imports the framework and its adapter.

A step of Keras is the same on all three, except for what is here: where a value is, what is being traced, what an
update is called in a graph, and how a step is skipped, on TensorFlow by all replicas of a strategy together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import keras
from keras import ops

from polyamp.adapters import AnyAdapter, adapter_named
from polyamp.backends.keras.unstable import in_stateless_scope, jax_trace, marked
from polyamp.errors import InvalidTypeError, UnsupportedError
from polyamp.nesting import check_tree
from polyamp.provenance import ScaledLosses
from polyamp.settings import LossScale

BACKEND: str = keras.backend.backend()
CASTABLE = ("float32", "float16", "bfloat16")
"""The formats between which polyamp casts; data in other formats, such as float64, stay as they are."""

if BACKEND == "tensorflow":
    import tensorflow as tf

    from polyamp.backends.tensorflow import provenance, skipping, unstable
    from polyamp.backends.tensorflow.promotion import REFUSALS, mixed_formats, promoting
elif BACKEND == "jax":
    import jax
else:
    import torch


def framework() -> AnyAdapter:
    """Return the adapter of the framework."""
    return adapter_named(BACKEND)


def describe() -> dict[str, Any]:
    """Return version and backend; the backend's own adapter describes the devices."""
    return {
        "version": keras.__version__,
        "title": f"keras on {BACKEND}",
        "backend": BACKEND,
        "devices": [],
        "notes": [f"runs on {BACKEND}, which has the devices; KERAS_BACKEND chooses another"],
    }


def cast(tree: Any, format_name: str) -> Any:
    """Return ``tree`` with its floating-point variables and tensors in a format; variables become tensors.

    >>> done = cast({"w": keras.Variable([1.0, 2.0]), "steps": ops.array(3), "name": "a"}, "float16")
    >>> *(keras.backend.standardize_dtype(done[key].dtype) for key in ("w", "steps")), done["name"]
    ('float16', 'int32', 'a')

    Args:
        tree: Keras variables, and what the adapter of Keras' backend casts, in nested containers.
        format_name: a format of `polyamp.formats.FORMATS`.

    Raises:
        InvalidValueError: the format is unknown.
        UnsupportedError: the tree contains layers, whose variables keep their dtypes.
    """

    def tensor_of(leaf: Any) -> Any:
        if isinstance(leaf, keras.Layer):
            raise UnsupportedError(
                "a built Keras layer keeps the dtypes of its variables",
                where="policy.cast_to_...(tree)",
                found=f"the layer {leaf.name!r}",
                allowed="Keras variables and tensors",
                fix="polyamp.convert(model, policy) sets the format that a model computes in",
            )
        return value_of(leaf) if isinstance(leaf, keras.Variable) else leaf

    check_tree(tree, "policy.cast_to_...(tree)")
    return framework().cast(keras.tree.map_structure(tensor_of, tree), format_name)


def value_of(variable: Any) -> Any:
    """Return the tensor that a Keras variable, or a native one, holds now."""
    native = variable.value if isinstance(variable, keras.Variable) else variable
    if BACKEND == "tensorflow":  # its variables count as tensors, and are read only when used
        return tf.convert_to_tensor(native)
    return ops.convert_to_tensor(native)


def platform_of(value: Any) -> str | None:
    """Return where a tensor is (``"cpu"``, ``"gpu"``, ...); None inside traced functions, where it has no value yet."""
    tensor = value_of(value)
    if BACKEND == "tensorflow":
        if tf.is_symbolic_tensor(tensor):
            return None
        return str(tf.DeviceSpec.from_string(tensor.device).device_type).lower()
    if BACKEND == "jax":
        return None if isinstance(tensor, jax.core.Tracer) else str(next(iter(tensor.devices())).platform)
    return None if tensor.device.type == "meta" else str(tensor.device.type)


def place_of(tensor: Any) -> Any:
    """Return what is traced around a tensor; in eager code, the replica that runs here, or None."""
    if BACKEND == "tensorflow":
        return next(iter(skipping.places()), None)
    return jax_trace(tensor) if BACKEND == "jax" and isinstance(tensor, jax.core.Tracer) else None


def is_scaled(grads: Sequence[Any], scale: Any) -> bool | None:
    """Return whether gradients are those of a loss times this scale; None if that is not known."""
    return provenance.is_scaled(grads, scale.value) if BACKEND == "tensorflow" else None


def is_recording() -> bool:
    """Return whether values computed here can become part of a loss; unknown, and thus false, on torch."""
    return unstable.is_recording() if BACKEND == "tensorflow" else in_stateless_scope()


def autocasts() -> bool:
    """Return whether an ambient autocast of torch is active here, or TensorFlow's own pass, which lowers graphs."""
    if BACKEND == "tensorflow":
        return bool(tf.config.optimizer.get_experimental_options().get("auto_mixed_precision"))
    return BACKEND == "torch" and (torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"))


@contextmanager
def mixing_formats(name: str) -> Iterator[None]:
    """Promote float32 with 16 bits in a layer's code on TensorFlow, as JAX and torch do; name the layer if that fails.

    Raises:
        InvalidTypeError: TensorFlow refused to mix formats, in an operation that is not promoted.
    """
    with promoting():
        try:
            yield
        except REFUSALS as error:
            if isinstance(error, InvalidTypeError) or (found := mixed_formats(error)) is None:
                raise
            raise marked(
                InvalidTypeError(
                    "a layer's code mixes float32 with 16 bits, which TensorFlow does not promote",
                    where=f"layer {name!r}",
                    found=found,
                    fix=f'polyamp.convert(model, polyamp.policy(..., rules={{"{name}": "inner"}})) computes the layer '
                    'in float32 and returns 16 bits; "full" returns float32. Or cast the tensor in the code: '
                    "ops.cast(tensor, x.dtype)",
                )
            ) from error


def leave_unconverted() -> None:
    """Make TensorFlow's AutoGraph call polyamp's functions as they are."""
    if BACKEND == "tensorflow":
        unstable.leave_unconverted()


def in_strategy() -> bool:
    """Return whether a ``tf.distribute`` strategy runs this code, in one replica or in several."""
    return BACKEND == "tensorflow" and bool(tf.distribute.has_strategy())


def in_all_replicas(finite: Any) -> Any:
    """Return whether ``finite`` is true in every replica; in a graph, under the name by which a rewrite finds it."""
    return skipping.decision(skipping.all_replicas(finite)) if BACKEND == "tensorflow" else finite


def summed(grads: Sequence[Any]) -> list[Any]:
    """Return gradients, each summed over the replicas."""
    return skipping.summed(grads) if BACKEND == "tensorflow" else list(grads)


def update_scope() -> AbstractContextManager[Any]:
    """Return a context whose operations are named as part of the update, if a TensorFlow graph is being built."""
    return skipping.update_scope() if BACKEND == "tensorflow" else nullcontext()


def update_if(
    finite: Any,
    update: Callable[[Sequence[Any]], None],
    grads: Sequence[Any],
    variables: list[Any],
    losses: tuple[ScaledLosses, LossScale, str | None],
) -> None:
    """Run ``update(grads)``, which assigns only to ``variables``, if ``finite``; else change no bit.

    In graphs of TensorFlow, a skipped step also reports a loss that was not finite.
    """
    # The conditional runs on the device in TensorFlow graphs and in JAX programs, and on the host otherwise.
    if BACKEND == "tensorflow":
        skipping.update_if(finite, update, grads, skipping.report_of(*losses))
    elif platform_of(finite) is None:
        _update_functionally(finite, update, grads, variables)
    elif finite:
        update(grads)


def _update_functionally(
    finite: Any, update: Callable[[Sequence[Any]], None], grads: Sequence[Any], variables: list[Any]
) -> None:
    """Update in a JAX conditional without side effects, then assign the new values that it returns."""
    before = [variable.value for variable in variables]

    def updated() -> list[Any]:
        with keras.StatelessScope(state_mapping=zip(variables, before, strict=True)) as scope:
            update(grads)
        return [scope.get_current_value(variable) for variable in variables]

    for variable, value in zip(variables, ops.cond(finite, updated, lambda: before), strict=True):
        variable.assign(value)
