"""flax's ``DynamicScale`` on polyamp's loss-scale rule.

A program needs one other import::

    from polyamp.backends.jax.compat.dynamic_scale import DynamicScale

It differs from flax's where that one loses numbers. A float16 loss is scaled in float32 from the first step on, the
loss comes back as it was before scaling, and the scale stays a power of two at its upper limit, 2**127.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from polyamp.backends.jax.casting import widened
from polyamp.backends.jax.compat.structure import made, replaced
from polyamp.backends.jax.steps.gradients import all_finite, unscaled
from polyamp.formats import FORMATS
from polyamp.loss_scale import LossScale, advance
from polyamp.scripts.session import found

_LEAVES = ("fin_steps", "scale")
_STATIC = ("growth_factor", "backoff_factor", "growth_interval", "minimum_scale")


class DynamicScaleResult(NamedTuple):
    """What the function of `DynamicScale.value_and_grad` returns.

    Attributes:
        dynamic_scale: the scale for the next step.
        finite: whether all gradients are finite; bool[].
        aux: the loss, not scaled, in float32 or wider; ``(loss, aux)`` under ``has_aux``.
        grad: the gradients, not scaled, in float32 or wider.
    """

    dynamic_scale: DynamicScale
    finite: jax.Array
    aux: Any
    grad: Any


@dataclass(frozen=True)
class DynamicScale:
    """A loss scale that grows while gradients stay finite, and backs off when they do not.

    It follows `polyamp.advance` with ``LossScale.like("flax")``, the one loss-scale rule. The scale grows after
    ``growth_interval + 1`` finite steps, as in flax.

    >>> dynamic_scale = DynamicScale(scale=8.0)
    >>> dynamic_scale, finite, loss, grad = dynamic_scale.value_and_grad(lambda w: w**2)(jnp.float32(3))
    >>> bool(finite), float(loss), float(grad), int(dynamic_scale.fin_steps)
    (True, 9.0, 6.0, 1)

    Args:
        growth_factor: factor by which the scale grows, > 1.
        backoff_factor: factor by which the scale backs off, in (0, 1).
        growth_interval: see above; >= 1.
        fin_steps: finite steps since the scale last changed; i32[].
        scale: the scale; f32[].
        minimum_scale: smallest scale; None is the smallest normal float32, and less is used as that.

    Raises:
        InvalidTypeError: a setting has the wrong type.
        InvalidValueError: a setting is outside its range.

    As a pytree its leaves are ``fin_steps`` and ``scale``. States of flax's own class load into it, and the other way
    round, by ``flax.serialization``.
    """

    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    fin_steps: Any = 0
    scale: Any = 65536.0
    minimum_scale: float | None = FORMATS["float32"].smallest_normal

    def __post_init__(self) -> None:
        for name, dtype in (("fin_steps", np.int32), ("scale", np.float32)):  # a Python number would be a weak type
            if isinstance(getattr(self, name), int | float):
                object.__setattr__(self, name, dtype(getattr(self, name)))
        settings = self._settings()
        found("flax.training.dynamic_scale.DynamicScale")
        replaced(
            "flax.training.dynamic_scale.DynamicScale(...)",
            f"tx = polyamp.wrap_optimizer(tx, policy, loss_scale=polyamp.{settings!r}); "
            "loss, grads = polyamp.value_and_grad(loss_fn, policy)(opt_state, params, batch); "
            "updates, opt_state = tx.update(grads, opt_state, params)",
        )
        _serialized()

    def replace(self, **changes: Any) -> DynamicScale:
        """Return the same scale with other fields."""
        return replace(self, **changes)

    def value_and_grad(
        self,
        fun: Callable[..., Any],
        argnums: int | Sequence[int] = 0,
        has_aux: bool = False,
        axis_name: Hashable | None = None,
    ) -> Callable[..., DynamicScaleResult]:
        """Differentiate a loss function with the scaled loss; the results are unscaled.

        Args:
            fun: the loss function; it returns a floating-point scalar, or ``(loss, aux)``.
            argnums: the positions of the arguments to differentiate, as in ``jax.value_and_grad``.
            has_aux: whether ``fun`` returns ``(loss, aux)``.
            axis_name: mapped axis, or axes, over which the gradients are averaged; for ``pmap`` and ``shard_map``.

        Returns:
            A function of the arguments of ``fun`` that returns a `DynamicScaleResult`.
        """
        scale = jnp.asarray(self.scale, jnp.float32)

        @functools.wraps(fun)
        def scaled_loss(*args: Any, **kwargs: Any) -> tuple[jax.Array, Any]:
            result = fun(*args, **kwargs)
            loss = widened(result[0] if has_aux else result)
            return loss * scale, ((loss, result[1]) if has_aux else loss)

        differentiated = jax.value_and_grad(scaled_loss, argnums, has_aux=True)

        def run(*args: Any, **kwargs: Any) -> DynamicScaleResult:
            (_, aux), grads = differentiated(*args, **kwargs)
            grads = unscaled(grads, scale)
            if axis_name is not None:
                grads = jax.lax.pmean(grads, axis_name)  # type: ignore[no-untyped-call]
            finite = all_finite(grads)
            return DynamicScaleResult(self._after(finite), finite, aux, grads)

        return run

    def _after(self, finite: jax.Array) -> DynamicScale:
        """Return the scale after a step."""
        settings = self._settings()
        good = jnp.asarray(self.fin_steps, jnp.int32) - 1  # late growth counts from -1
        before = settings.initial_state()._replace(scale=jnp.asarray(self.scale, jnp.float32), good_steps=good)
        after = advance(settings, before, finite, where=jnp.where)
        own = {name: getattr(self, name) for name in _STATIC}
        return made(DynamicScale, fin_steps=after.good_steps + 1, scale=after.scale, **own)

    def _settings(self) -> LossScale:
        lowest, highest = FORMATS["float32"].smallest_normal, 2.0**127
        least = lowest if self.minimum_scale is None else max(float(self.minimum_scale), lowest)
        return LossScale.like(
            "flax",
            init=max(least, 1.0),
            growth=float(self.growth_factor),
            backoff=float(self.backoff_factor),
            interval=self.growth_interval,
            min=least,
            max=highest,
        )


def _flattened(own: DynamicScale) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    return tuple(getattr(own, name) for name in _LEAVES), tuple(getattr(own, name) for name in _STATIC)


def _flattened_with_keys(own: DynamicScale) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    leaves, static = _flattened(own)
    keys = map(jax.tree_util.GetAttrKey, _LEAVES)
    return tuple(zip(keys, leaves, strict=True)), static


def _unflattened(static: tuple[Any, ...], leaves: Iterable[Any]) -> DynamicScale:
    return made(DynamicScale, **dict(zip((*_STATIC, *_LEAVES), (*static, *leaves), strict=True)))


jax.tree_util.register_pytree_with_keys(DynamicScale, _flattened_with_keys, _unflattened, _flattened)


def _serialized() -> None:
    """Register the class with ``flax.serialization``, in the form of flax's own, if flax is loaded."""
    serialization = sys.modules.get("flax.serialization")
    if serialization is not None:
        serialization.register_serialization_state(DynamicScale, _to_state, _from_state, override=True)


def _to_state(own: DynamicScale) -> dict[str, Any]:
    serialization: Any = sys.modules["flax.serialization"]
    return {name: serialization.to_state_dict(getattr(own, name)) for name in _LEAVES}


def _from_state(own: DynamicScale, state: dict[str, Any]) -> DynamicScale:
    serialization: Any = sys.modules["flax.serialization"]
    leaves = (serialization.from_state_dict(getattr(own, name), state[name], name=name) for name in _LEAVES)
    return _unflattened(_flattened(own)[1], leaves)


_serialized()
