"""Gradients as Keras passes them (dense, sparse rows of an embedding, None), and the float32 masters they train.

In 16 bits, an update that is small compared to its weight is lost in rounding; in float32 it accumulates (Micikevicius
et al., "Mixed Precision Training", ICLR 2018, section 3.1).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from keras import ops

from polyamp.backends.keras.backend import value_of
from polyamp.backends.keras.casting import is_sixteen_bit
from polyamp.backends.keras.unstable import layout_of


def map_values(function: Callable[[Any], Any], grad: Any) -> Any:
    """Apply ``function`` to a gradient's values: all of a dense one, the stored rows of a sparse one; None stays None.

    >>> map_values(lambda values: values * 2, ops.ones(2)).shape == (2,)
    True
    """
    if grad is None:
        return None
    if type(grad).__name__ == "IndexedSlices":  # by name, since TensorFlow may not be installed
        return type(grad)(function(grad.values), grad.indices, grad.dense_shape)
    return function(grad)


def all_finite(grads: Sequence[Any]) -> Any:
    """Return whether all gradients are finite; scalar bool."""
    return ops.all(ops.stack([ops.all(ops.isfinite(values)) for values in _values(grads)]))


def unscaled(grads: Sequence[Any], scale: Any, largest_scale: float) -> list[Any]:
    """Return gradients divided by the loss scale, in float32 or wider."""
    factors = [1.0 / scale]
    if largest_scale > 2.0**126:  # the inverse can be a subnormal number, which XLA and TensorFlow flush to zero
        first = ops.where(scale > 1.0, ops.full_like(scale, 0.25), ops.ones_like(scale))
        factors = [first, 1.0 / (scale * first)]

    def unscale(values: Any) -> Any:
        wide = _widened(values)
        for factor in factors:
            wide = wide * ops.cast(factor, wide.dtype)
        return wide

    return [map_values(unscale, grad) for grad in grads]


def clip_factor(grads: Sequence[Any], limit: float) -> Any:
    """Return the factor that limits the gradients' global L2 norm to ``limit``; float32 scalar, at most 1."""
    squares = [ops.sum(ops.square(ops.cast(values, "float32"))) for values in _values(grads)]
    norm = ops.sqrt(ops.sum(ops.stack(squares)))
    return limit / ops.maximum(norm, limit)


def multiplied(grads: Sequence[Any], factor: Any) -> list[Any]:
    """Return every gradient in float32 or wider, times a scalar."""

    def multiply(values: Any) -> Any:
        wide = _widened(values)
        return wide * ops.cast(factor, wide.dtype)

    return [map_values(multiply, grad) for grad in grads]


def _widened(values: Any) -> Any:
    return ops.cast(values, "float32") if is_sixteen_bit(values) else values


def _values(grads: Sequence[Any]) -> list[Any]:
    found: list[Any] = []
    for grad in grads:
        map_values(found.append, grad)
    return found


class MasterWeights:
    """The variables of a model, with a float32 master weight for each 16-bit one."""

    def __init__(self, variables: Sequence[Any], add_variable: Callable[..., Any]) -> None:
        self._masters = {
            index: _master(variable, add_variable)
            for index, variable in enumerate(variables)
            if is_sixteen_bit(variable)
        }

    @property
    def variables(self) -> list[Any]:
        """The master weights."""
        return list(self._masters.values())

    def trained(self, variables: Sequence[Any], indices: Sequence[int] | None = None) -> list[Any]:
        """Return the variables that the inner optimizer trains in place of ``variables``."""
        places = range(len(variables)) if indices is None else indices
        return [self._masters.get(place, variable) for place, variable in zip(places, variables, strict=True)]

    @staticmethod
    def follow(variables: Sequence[Any], trained: Sequence[Any]) -> None:
        """Copy a value assigned to a model's variable since the last rounding into its master weight."""
        for variable, master in _pairs(variables, trained):
            value = value_of(variable)
            rounded = ops.cast(value_of(master), value.dtype)
            master.assign(ops.where(rounded == value, value_of(master), ops.cast(value, "float32")))

    @staticmethod
    def round_into(variables: Sequence[Any], trained: Sequence[Any]) -> None:
        """Round the master weights into the model's variables."""
        for variable, master in _pairs(variables, trained):
            variable.assign(ops.cast(value_of(master), variable.dtype))


def _master(variable: Any, add_variable: Callable[..., Any]) -> Any:
    master = add_variable(
        shape=variable.shape,
        dtype="float32",
        initializer=lambda shape, dtype: ops.cast(value_of(variable), dtype),
        layout=layout_of(variable),
        name=f"{variable.name.replace(':', '_')}_master",
    )
    master.constraint = getattr(variable, "constraint", None)
    return master


def _pairs(variables: Sequence[Any], trained: Sequence[Any]) -> list[tuple[Any, Any]]:
    return [(one, other) for one, other in zip(variables, trained, strict=True) if one is not other]
