"""jmp's loss scales: pytrees that scale a loss, unscale its gradients, and return the scale of the next step."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from polyamp.backends.jax import casting
from polyamp.backends.jax.compat.structure import hashable, is_static, made, replaced
from polyamp.backends.jax.graphs.refusals import users_level
from polyamp.backends.jax.steps import gradients
from polyamp.errors import InvalidTypeError, warn_once
from polyamp.formats import FORMATS, format_of, in_single
from polyamp.loss_scale import LossScale as Settings
from polyamp.loss_scale import advance
from polyamp.scripts.session import found


class NotAScalarError(InvalidTypeError, AssertionError):
    """Raised for an array where a boolean scalar is needed; jmp asserts the same."""


@dataclass(frozen=True)
class NoOpLossScale:
    """A loss scale of 1, for programs that need none, as under bfloat16.

    >>> NoOpLossScale().scale(jnp.float32(3)), NoOpLossScale().loss_scale
    (Array(3., dtype=float32), 1)
    """

    def __post_init__(self) -> None:
        replaced("jmp.NoOpLossScale()", 'polyamp.wrap_optimizer(tx, policy), with the policy "mixed_bfloat16"')

    @property
    def loss_scale(self) -> int:
        """The scale, which is 1."""
        return 1

    def scale(self, tree: Any) -> Any:
        """Return the pytree itself."""
        return tree

    def unscale(self, tree: Any) -> Any:
        """Return the pytree itself."""
        return tree

    def adjust(self, grads_finite: Any) -> NoOpLossScale:
        """Return this loss scale."""
        return self


@dataclass(frozen=True)
class StaticLossScale:
    """A loss scale that never changes.

    >>> StaticLossScale(4.0).unscale(StaticLossScale(4.0).scale(jnp.float32(3)))
    Array(3., dtype=float32)

    Args:
        loss_scale: a number, or an array of shape ().
    """

    loss_scale: Any
    _has_leaf: ClassVar[bool]  # of an object: whether the scale was traced when it was made

    def __post_init__(self) -> None:
        object.__setattr__(self, "_has_leaf", not is_static(self.loss_scale))
        found("jmp.StaticLossScale")
        replaced(
            "jmp.StaticLossScale(loss_scale)",
            "polyamp.wrap_optimizer(tx, policy, loss_scale=polyamp.LossScale.fixed(loss_scale))",
        )

    def scale(self, tree: Any) -> Any:
        """Return a pytree with its leaves times the scale, in float32 or wider."""
        return _scaled(tree, self.loss_scale)

    def unscale(self, tree: Any) -> Any:
        """Return a pytree with its leaves divided by the scale, in float32 or wider."""
        return _unscaled(tree, self.loss_scale)

    def adjust(self, grads_finite: Any) -> StaticLossScale:
        """Return this loss scale."""
        return self

    def _flattened(self) -> tuple[tuple[Any, ...], Any]:
        return ((self.loss_scale,), None) if self._has_leaf else ((), hashable(self.loss_scale))

    @classmethod
    def _unflattened(cls, static: Any, leaves: tuple[Any, ...]) -> StaticLossScale:
        return made(cls, loss_scale=leaves[0] if leaves else static, _has_leaf=bool(leaves))


@dataclass(frozen=True)
class DynamicLossScale:
    """A loss scale that grows while gradients stay finite, and backs off when they do not.

    It follows `polyamp.advance` with ``LossScale.like("jmp")``, the one loss-scale rule.

    >>> loss_scale = DynamicLossScale(jnp.float32(8), period=2)
    >>> for finite in (True, True, False):
    ...     loss_scale = loss_scale.adjust(jnp.bool_(finite))
    ...     print(loss_scale.loss_scale, loss_scale.counter)
    8.0 1
    16.0 0
    8.0 0

    Args:
        loss_scale: the scale; a floating-point array of shape (), whose dtype it keeps, or a Python float.
        counter: finite steps since the scale last changed; i32[].
        period: finite steps between growths.
        factor: factor by which the scale grows and backs off, > 1. The backoff multiplies by the float32 reciprocal,
            which is exact for powers of two.
        min_loss_scale: smallest scale; a number, or an array of shape (). At least the smallest normal number of the
            scale's dtype is kept, so that the scale never becomes 0.

    As a pytree its leaves are the scale and the counter. ``min_loss_scale`` is a leaf only if it was traced when the
    object was made.
    """

    loss_scale: Any
    counter: Any = field(default_factory=lambda: np.zeros([], np.int32))
    period: int = 2000
    factor: float = 2
    min_loss_scale: Any = field(default_factory=lambda: np.ones([], np.float32))
    _has_leaf: ClassVar[bool]  # of an object: whether the minimum was traced when it was made

    def __post_init__(self) -> None:
        object.__setattr__(self, "_has_leaf", not is_static(self.min_loss_scale))
        for name in ("loss_scale", "min_loss_scale"):
            _report_integer(name, getattr(self, name))
        found("jmp.DynamicLossScale")
        replaced(
            "jmp.DynamicLossScale(loss_scale, period=, factor=, min_loss_scale=)",
            "polyamp.wrap_optimizer(tx, policy, loss_scale=polyamp.LossScale(init=, interval=, growth=, min=)); "
            "polyamp.value_and_grad scales, and tx.update unscales, tests, skips and adjusts",
        )

    def scale(self, tree: Any) -> Any:
        """Return a pytree with its leaves times the scale, in float32 or wider."""
        return _scaled(tree, self.loss_scale)

    def unscale(self, tree: Any) -> Any:
        """Return a pytree with its leaves divided by the scale, in float32 or wider."""
        return _unscaled(tree, self.loss_scale)

    def adjust(self, grads_finite: Any) -> DynamicLossScale:
        """Return the loss scale after a step.

        Args:
            grads_finite: whether all gradients of the step were finite; bool[].

        Raises:
            InvalidTypeError: ``grads_finite`` is not a scalar.
            InvalidValueError: ``period`` is less than 1, or ``factor`` is not greater than 1.
        """
        check_scalar(grads_finite, where="loss_scale.adjust(grads_finite)", is_boolean=False)
        dtype, finite, floor = _dtype(self.loss_scale), jnp.asarray(grads_finite, bool), self.min_loss_scale
        settings = self._settings(float(floor) if is_static(floor) else 0.0, dtype)
        counter, now = jnp.asarray(self.counter), jnp.asarray(self.loss_scale, dtype)
        before = settings.initial_state()._replace(scale=_wide(now), good_steps=counter % int(self.period))
        after = advance(settings, before, finite, where=jnp.where)
        scale = after.scale if is_static(floor) else jnp.where(finite, after.scale, jnp.maximum(after.scale, floor))
        scale = scale.astype(dtype)
        return made(
            DynamicLossScale,
            loss_scale=jnp.where(jnp.isfinite(scale), scale, now),  # growth beyond the dtype's range is refused
            counter=jnp.asarray(after.good_steps, counter.dtype),
            period=self.period,
            factor=self.factor,
            min_loss_scale=floor,
            _has_leaf=self._has_leaf,
        )

    def _settings(self, floor: float, dtype: Any) -> Settings:
        least = max(in_single(floor), _smallest_normal(dtype))
        growth = float(self.factor)
        return Settings.like(
            "jmp", init=least, interval=_whole(self.period), growth=growth, backoff=_reciprocal(growth), min=least
        )

    def _flattened(self) -> tuple[tuple[Any, ...], Any]:
        own, floor = (self.loss_scale, self.counter), self.min_loss_scale
        if self._has_leaf:
            return (*own, floor), (self.period, self.factor, None)
        return own, (self.period, self.factor, hashable(floor))

    @classmethod
    def _unflattened(cls, static: Any, leaves: tuple[Any, ...]) -> DynamicLossScale:
        (period, factor, known), (scale, counter, *rest) = static, leaves
        floor = rest[0] if rest else known
        fields = {"loss_scale": scale, "counter": counter, "period": period, "factor": factor, "min_loss_scale": floor}
        return made(cls, **fields, _has_leaf=bool(rest))


jax.tree_util.register_pytree_node(NoOpLossScale, lambda own: ((), None), lambda _, leaves: made(NoOpLossScale))
jax.tree_util.register_pytree_node(StaticLossScale, StaticLossScale._flattened, StaticLossScale._unflattened)
jax.tree_util.register_pytree_node(DynamicLossScale, DynamicLossScale._flattened, DynamicLossScale._unflattened)


def check_scalar(value: Any, *, where: str, is_boolean: bool) -> None:
    """Raise unless a value is a scalar, and of bool if ``is_boolean``.

    Raises:
        InvalidTypeError: it is an array with dimensions, or has another dtype.
    """
    dtype = getattr(value, "dtype", type(value))
    if np.ndim(value) == 0 and (dtype in (bool, np.dtype(bool)) or not is_boolean):
        return
    raise NotAScalarError(
        "expected boolean scalar",
        where=where,
        found=f"{dtype}{list(np.shape(value))}",
        allowed="an array of bool with shape ()",
        fix="pass the result of jmp.all_finite(grads)",
    )


def _scaled(tree: Any, scale: Any) -> Any:
    factor = _wide(jnp.asarray(scale, _dtype(scale)))
    return jax.tree.map(lambda leaf: leaf * factor, casting.widened(tree))


def _unscaled(tree: Any, scale: Any) -> Any:
    return gradients.unscaled(tree, _wide(jnp.asarray(scale, _dtype(scale))))


def _wide(scale: jax.Array) -> jax.Array:
    """Return a scale in float32, or in float64 if it is: a product with it does not overflow in 16 bits."""
    wide: jax.Array = casting.widened(scale)
    return wide


def _smallest_normal(dtype: Any) -> float:
    """Return the smallest scale of a dtype that float32 can divide by."""
    return max(format_of(np.dtype(dtype).name).smallest_normal, FORMATS["float32"].smallest_normal)


def _dtype(scale: Any) -> Any:
    """Return the dtype that a scale is kept in; float32 for Python numbers and integers."""
    dtype = getattr(scale, "dtype", None)
    return dtype if dtype is not None and jnp.issubdtype(dtype, jnp.floating) else jnp.float32


def _report_integer(name: str, value: Any) -> None:
    dtype = getattr(value, "dtype", np.dtype(np.float32))
    if isinstance(dtype, np.dtype) and not jnp.issubdtype(dtype, jnp.floating):
        warn_once(f"Expected floating type for {name}, got {dtype}: it is used in float32", stacklevel=users_level())


def _whole(period: Any) -> int:
    return int(period) if isinstance(period, float) and period.is_integer() else period


def _reciprocal(factor: float) -> float:
    return 1 / factor if math.isfinite(factor) and factor > 0 else math.nan
