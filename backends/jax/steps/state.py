"""The state of a wrapped optimizer: a pytree of arrays, whose type holds the settings of the loss scale."""

from __future__ import annotations

import functools
from typing import Any, ClassVar, NamedTuple, TypeGuard

import jax
import jax.numpy as jnp

from polyamp.loss_scale import TYPES, LossScale, LossScaleState
from polyamp.result import StepResult

SCALARS = len(LossScaleState._fields)
_DTYPES = {float: jnp.float32, int: jnp.int32}


class _Fields(NamedTuple):
    loss_scale: Any
    good_steps: Any
    hysteresis: Any
    skipped_in_a_row: Any
    skipped: Any
    steps: Any
    growths: Any
    calibrating: Any
    grown_at: Any
    overflow_scale: Any
    inner_state: Any
    master_weights: Any


class LossScaleOptState(_Fields):
    """The state that ``wrap_optimizer(tx).init(params)`` returns: a NamedTuple, and therefore a pytree.

    >>> import optax, polyamp
    >>> opt_state = polyamp.wrap_optimizer(optax.sgd(0.1), "mixed_float16").init({"w": jnp.ones(2)})
    >>> float(opt_state.loss_scale), opt_state.last_step
    (65536.0, StepResult(applied=True, scale=65536.0, skipped_in_a_row=0))

    Attributes:
        loss_scale: the scale of the next loss; f32[]. ``optax.tree.get(opt_state, "loss_scale")`` reads it from any
            larger state.
        good_steps, hysteresis, skipped_in_a_row, skipped, steps, growths, calibrating, grown_at: i32[]; see
            `polyamp.LossScaleState`.
        overflow_scale: f32[]; see there.
        inner_state: the state of the optimizer that was wrapped.
        master_weights: pytree of float32 copies of the 16-bit parameters, with None for the others; None if no
            parameter has 16 bits.
    """

    __slots__ = ()
    settings: ClassVar[LossScale]
    unscaled: ClassVar[bool]

    @property
    def scalars(self) -> LossScaleState:
        """Return the scalars in the form that `polyamp.advance` takes."""
        return LossScaleState(*(jax.tree.leaves(field)[0] for field in self[:SCALARS]))  # flax.nnx wraps them

    @property
    def compute(self) -> str | None:
        """The compute format that the optimizer was wrapped for, as far as the settings show it; else None."""
        if self.settings.dynamic or self.unscaled:
            return "float16"
        return None if self.settings.check else "float32"

    @property
    def last_step(self) -> StepResult:
        """Return what the last step did.

        Inside ``jit`` the values are traced, and ``last_step.applied`` can be passed to `select`. Outside they are
        numbers, and reading one waits for the device.
        """
        return StepResult(self.scalars)

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (self.settings, tuple(self), self.unscaled)


@functools.cache
def state_type(settings: LossScale, unscaled: bool) -> type[LossScaleOptState]:
    """Return `LossScaleOptState` with these settings. They belong to the type, so that all leaves are arrays."""
    own = {"__slots__": (), "__module__": __name__, "settings": settings, "unscaled": unscaled}
    return type("LossScaleOptState", (LossScaleOptState,), own)


def _rebuild(settings: LossScale, fields: tuple[Any, ...], unscaled: bool = False) -> LossScaleOptState:
    *scalars, inner_state, masters = fields
    missing = initial_scalars(settings)[len(scalars) :]  # the fields that did not exist yet when the state was pickled
    return state_type(settings, unscaled)._make((*scalars, *missing, inner_state, masters))


def initial_scalars(settings: LossScale) -> LossScaleState:
    """Return the state before the first step as arrays, f32[] and i32[], each in its own buffer."""
    values = zip(settings.initial_state(), TYPES, strict=True)
    return LossScaleState(*(jnp.array(value, _DTYPES[kind]) for value, kind in values))


def is_state(leaf: object) -> TypeGuard[LossScaleOptState]:
    """Return whether a node of a pytree is the state of a wrapped optimizer."""
    return isinstance(leaf, LossScaleOptState)


def holds_state(tree: Any) -> bool:
    """Return whether a pytree holds the state of a wrapped optimizer."""
    return any(map(is_state, jax.tree.leaves(tree, is_leaf=is_state)))
