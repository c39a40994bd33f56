"""What Keras' three backends do differently: where a value is, and how one step in several is skipped."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import keras
from keras import ops

from polyamp.markers import FINITE, UPDATE_SCOPE


def value_of(variable: Any) -> Any:
    """The tensor that a Keras variable, or a native one, holds now.

    >>> float(value_of(keras.Variable(2.0)))
    2.0
    """
    native = variable.value if isinstance(variable, keras.Variable) else variable
    if keras.backend.backend() == "tensorflow":  # there a variable passes for a tensor, until somebody reads it
        import tensorflow as tf

        return tf.convert_to_tensor(native)
    return ops.convert_to_tensor(native)


def platform_of(value: Any) -> str | None:
    """Where a tensor is (``"cpu"``, ``"gpu"``, ...); None while a function is being traced and it has no number yet.

    >>> platform_of(ops.ones(2))
    'cpu'
    """
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


def update_if(finite: Any, update: Callable[[Sequence[Any]], None], grads: Sequence[Any], variables: list[Any]) -> None:
    """Run ``update(grads)``, which assigns to ``variables`` alone, where ``finite`` holds; else change no bit.

    One conditional: on the device in TensorFlow graphs and in JAX programs, by the host on torch and outside of them.

    >>> total = keras.Variable(1.0)
    >>> update_if(ops.array(True), lambda grads: total.assign(total + grads[0]), [ops.array(2.0)], [total])
    >>> float(total)
    3.0
    """
    if in_strategy():
        from polyamp.backends.keras.steps.replicas import update_replicas_if

        update_replicas_if(finite, update, grads)
    elif platform_of(finite) is not None:
        if finite:
            update(grads)
    elif keras.backend.backend() == "jax":
        _update_functionally(finite, update, grads, variables)
    else:
        ops.cond(finite, lambda: update(grads), lambda: None)


def _update_functionally(
    finite: Any, update: Callable[[Sequence[Any]], None], grads: Sequence[Any], variables: list[Any]
) -> None:
    """JAX's conditionals have no side effects: the branches give the variables' values."""
    before = [variable.value for variable in variables]

    def updated() -> list[Any]:
        with keras.StatelessScope(state_mapping=zip(variables, before, strict=True)) as scope:
            update(grads)
        return [scope.get_current_value(variable) for variable in variables]

    for variable, value in zip(variables, ops.cond(finite, updated, lambda: before), strict=True):
        variable.assign(value)


def in_strategy() -> bool:
    """Whether a ``tf.distribute`` strategy runs this code, in one replica or in several.

    >>> in_strategy()
    False
    """
    if keras.backend.backend() != "tensorflow":
        return False
    import tensorflow as tf

    return bool(tf.distribute.has_strategy())


def update_scope() -> AbstractContextManager[Any]:
    """A context whose operations are named as part of the update, in a TensorFlow graph that is being built.

    >>> with update_scope():
    ...     float(ops.ones(()))
    1.0
    """
    if not _builds_graph():
        return nullcontext()
    import tensorflow as tf

    # With a slash at its end TensorFlow takes a name as it is, without a prefix, and without a number the second time.
    above = tf.get_current_name_scope()
    return tf.name_scope(f"{above}/{UPDATE_SCOPE}/" if above else f"{UPDATE_SCOPE}/")


def decision(finite: Any) -> Any:
    """``finite``, the scalar bool that says whether a step is applied, under its name in a TensorFlow graph.

    >>> bool(decision(ops.array(True)))
    True
    """
    if not _builds_graph():
        return finite
    import tensorflow as tf

    return tf.identity(finite, name=FINITE)


def _builds_graph() -> bool:
    if keras.backend.backend() != "tensorflow":
        return False
    import tensorflow as tf

    return not tf.executing_eagerly()


def traces_around(tensors: Sequence[Any]) -> list[int]:
    """Which function is being traced here, and those around it; 0 is none, as in eager code.

    >>> traces_around([ops.ones(2)])
    [0]
    """
    if keras.backend.backend() == "jax":
        import jax

        # No public name tells one trace from another.
        traced = (id(tensor._trace) for tensor in tensors if isinstance(tensor, jax.core.Tracer))
        return [next(traced, 0)]
    return _graphs_around() if _builds_graph() else [0]


def _graphs_around() -> list[int]:
    import tensorflow as tf

    graph, found = tf.compat.v1.get_default_graph(), []
    while graph is not None:
        found.append(id(graph))
        graph = getattr(graph, "outer_graph", None)  # a function's
    return found
