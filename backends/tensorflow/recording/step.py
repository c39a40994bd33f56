"""The traced step of a recording, with the gradients that it takes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from polyamp.arrays import widened
from polyamp.backends.tensorflow import unstable
from polyamp.backends.tensorflow.graphs.capture import concrete_of, walking
from polyamp.errors import no_loss


class Taken(NamedTuple):
    """Gradients with respect to variables, as a graph takes them."""

    loss: Any  # the differentiated tensor, which is symbolic
    names: tuple[str, ...]  # names of the variables
    grads: tuple[Any, ...]  # for each a symbolic tensor: the gradient, or the stored rows of a sparse one
    seeds: tuple[Any, ...]  # the gradients of the loss from which the backward pass starts, symbolic tensors


def traced(
    step: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[Any, bool, tuple[Taken, ...]]:
    """Return the traced step, whether the step takes gradients itself, and all gradients taken, in order."""
    # If it returns only a loss, a step that takes its gradients is traced, with the loss scale as its first argument.
    plain = plain_function(step)
    concrete, taken = _watched(plain, args, kwargs)
    if taken:
        return concrete, True, taken
    _loss_of(concrete.structured_outputs)
    concrete, taken = _watched(_differentiated(plain), (tf.constant(1.0), args, dict(kwargs)), {})
    return concrete, False, taken


def plain_function(step: Any) -> Any:
    """Return the function that a step was made from, to trace it again without a rewrite."""
    while isinstance(getattr(type(step), "plain", None), property):  # a rewritten function
        step = step.plain
    return getattr(step, "python_function", step)


def _watched(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, tuple[Taken, ...]]:
    taken: list[Taken] = []

    def take(loss: Any, sources: Any, grads: Any, seeds: Any) -> None:
        found = _taken(loss, sources, grads, seeds)
        if found is not None:
            taken.append(found)

    with unstable.watched_gradients(take), walking(function, args, kwargs):
        concrete = concrete_of(function, args, kwargs)
    return concrete, tuple(taken)


def _taken(loss: Any, sources: Any, grads: Any, seeds: Any) -> Taken | None:
    loss = next((one for one in tf.nest.flatten(loss) if tf.is_symbolic_tensor(one)), None)
    pairs = [
        (name_of(source), grad.values if isinstance(grad, tf.IndexedSlices) else tf.convert_to_tensor(grad))
        for source, grad in zip(_flat(sources), _flat(grads), strict=True)
        if grad is not None and _is_variable(source)
    ]
    if loss is None or not pairs:
        return None
    names, values = zip(*pairs, strict=True)
    return Taken(loss, names, values, tuple(one for one in _flat(seeds) if tf.is_symbolic_tensor(one)))


def _flat(tree: Any) -> list[Any]:
    return list(tf.nest.flatten(tree))  # IndexedSlices are leaves


def _is_variable(source: Any) -> bool:
    return hasattr(source, "assign") and hasattr(source, "dtype") and source.dtype != tf.resource


def name_of(variable: Any) -> str:
    """Return a variable's name: Keras' path if it has one, else TensorFlow's name."""
    return str(getattr(variable, "path", None) or variable.name.partition(":")[0])


def _differentiated(step: Any) -> Callable[..., None]:
    def gradients(scale: tf.Tensor, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        with tf.GradientTape() as tape:
            loss = _loss_of(step(*args, **kwargs))
            wide = widened(tf, loss)
        tape.gradient(wide, tape.watched_variables(), tf.cast(scale, wide.dtype))

    return gradients


def _loss_of(result: Any) -> tf.Tensor:
    """Return the loss that a step returns, alone or before something else."""
    loss = result[0] if isinstance(result, tuple | list) and result else result
    if tf.is_tensor(loss) and loss.dtype.is_floating and loss.shape.rank in (0, None):
        return loss
    raise no_loss(loss, allowed="a floating scalar, or a tuple that starts with it; or a step that takes gradients")
