"""Restore averages over batches, such as batch normalisation's statistics, when a step is skipped.

In a step that overflows, the batch's statistics may be inf or NaN. An average that includes them never recovers: the
model trains on, but ``evaluate`` returns NaN. Layers update their averages in the forward pass, before the gradients
are known. So the averages are copied before the step and restored after it.

For example, ``model.compile`` replaces ``train_step`` by a function that copies ``moving_mean``, runs the original
step, and writes the copy back if the optimizer's count of skipped steps has grown.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import keras
from keras import ops

from polyamp.backends.keras.backend import value_of
from polyamp.backends.keras.steps.mismatches import report_mismatch
from polyamp.backends.keras.steps.optimizer import LossScaledOptimizer
from polyamp.backends.keras.steps.scaler import skipped
from polyamp.backends.keras.unstable import added_weights, intercept_compile
from polyamp.errors import LossScaleError, NonFiniteLossError

_GUARDED = "_polyamp_guarded"  # marks a step that restores statistics


@contextmanager
def keep_statistics(model: Any, *optimizers: LossScaledOptimizer) -> Iterator[None]:
    """Restore a model's statistics, bit for bit, if a step inside is skipped; for your own training loops.

    ``fit`` and ``train_on_batch`` do this themselves. On Keras' JAX backend, pure functions select the values with
    `LossScaledOptimizer.stateless_select` instead.

    >>> import numpy as np
    >>> from polyamp import wrap_optimizer
    >>> norm = keras.layers.BatchNormalization()
    >>> model = keras.Sequential([keras.Input((2,)), norm])
    >>> opt = wrap_optimizer(keras.optimizers.SGD(0.1), "mixed_float16")
    >>> opt.build(model.trainable_variables)
    >>> with keep_statistics(model, opt):
    ...     _ = model(np.full((4, 2), np.inf, "float32"), training=True)
    ...     opt.apply([ops.full((2,), np.inf), ops.zeros((2,))])
    >>> float(ops.max(norm.moving_mean)), float(ops.min(norm.moving_mean))
    (0.0, 0.0)

    Args:
        model: a layer or a model.
        *optimizers: the wrapped ones that step inside; if there are none, those of the model.
    """
    kept = _Kept(model, optimizers or _optimizers_of(model))
    try:
        yield
    except (LossScaleError, NonFiniteLossError):
        kept.restore(whatever=True)
        raise
    kept.restore()


def guard_steps(model: Any) -> None:
    """Make a model's ``train_step``, whoever wrote it, restore the statistics of skipped steps."""
    original = model.train_step
    if not hasattr(original, _GUARDED):
        model.train_step = _guarded(model, original)
        setattr(model.train_step, _GUARDED, True)


def guard_anew(model: Any) -> None:
    """Replace the function that restores statistics by a new one, since ``jax.jit`` caches by the function."""
    step: Any = getattr(model, "train_step", None)
    if hasattr(step, _GUARDED):
        model.train_step = step.__wrapped__
        guard_steps(model)


def guard_compiled_models() -> None:
    """Guard the steps of every model that is compiled from now on."""
    intercept_compile(guard_steps)


def _guarded(model: Any, original: Callable[..., Any]) -> Callable[..., Any]:
    # AutoGraph converts the user's own step, which this function calls, only if this is plain code.
    if keras.backend.backend() == "jax":

        @functools.wraps(original)
        def stateless_step(state: Any, *args: Any, **kwargs: Any) -> Any:
            report_mismatch(model, _optimizers_of(model))
            logs, after = original(state, *args, **kwargs)
            return logs, _kept_state(model, state, after)

        return stateless_step

    @functools.wraps(original)
    def train_step(*args: Any, **kwargs: Any) -> Any:
        report_mismatch(model, _optimizers_of(model))
        kept = _Kept(model, _optimizers_of(model))
        try:
            result = original(*args, **kwargs)
        except (LossScaleError, NonFiniteLossError):
            kept.restore(whatever=True)
            raise
        kept.restore()
        return result

    return train_step


class _Kept:
    """A copy of a model's statistics before a step, with its optimizers' counts of skipped steps."""

    def __init__(self, model: Any, optimizers: Sequence[LossScaledOptimizer]) -> None:
        checking = [one for one in optimizers if one.scaler.settings.check]
        self._counts = [one.scaler.variables.skipped for one in checking]
        self._variables = added_weights(model) if checking else []
        self._before = [ops.copy(value_of(one)) for one in (*self._counts, *self._variables)]

    def restore(self, *, whatever: bool = False) -> None:
        """Restore the statistics if a step was skipped since the copy. With ``whatever``, restore them in any case."""
        if not self._variables:
            return
        counts, values = self._before[: len(self._counts)], self._before[len(self._counts) :]
        was_skipped = ops.array(True) if whatever else skipped(counts, list(map(value_of, self._counts)))
        for variable, old in zip(self._variables, values, strict=True):
            variable.assign(ops.where(was_skipped, old, value_of(variable)))


class _State(NamedTuple):
    """The argument and result of a training step of Keras on JAX."""

    trainable: Sequence[Any]
    non_trainable: Sequence[Any]
    optimizer: Sequence[Any]
    metrics: Sequence[Any]


def _kept_state(model: Any, before: Any, after: Any) -> Any:
    optimizer = model.optimizer
    if optimizer not in _optimizers_of(model) or not optimizer.scaler.settings.check:
        return after
    old, new = _State(*before), _State(*after)
    kept = {id(variable) for variable in added_weights(model)}
    places = [place for place, one in enumerate(model.non_trainable_variables) if id(one) in kept]
    moved = [place for place in places if new.non_trainable[place] is not old.non_trainable[place]]
    chosen = optimizer.stateless_select(
        old.optimizer,
        new.optimizer,
        [new.non_trainable[place] for place in moved],
        [old.non_trainable[place] for place in moved],
    )
    values = list(new.non_trainable)
    for place, value in zip(moved, chosen, strict=True):
        values[place] = value
    return tuple(new._replace(non_trainable=values))


def _optimizers_of(model: Any) -> list[LossScaledOptimizer]:
    """Return the wrapped optimizers that are attributes of a model, under any name."""
    found = (value for value in vars(model).values() if isinstance(value, LossScaledOptimizer))
    return list({id(one): one for one in found}.values())
