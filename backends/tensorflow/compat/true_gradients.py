"""Scale losses where a script takes gradients, and return unscaled gradients, so that its own code sees true ones.

A script without mixed precision clips, sums and applies gradients as if there were no loss scale. So the loss is scaled
and the gradients are unscaled in one place: where they are taken. If one of them is not finite, all are returned as
NaN, which survives clipping; the optimizer's update then finds it, skips the step and advances the scale.

For example, ``tape.gradient(loss, weights)`` starts its backward pass from 65536 instead of 1, and divides the results
by 65536 in float32. ``optimizer.apply_gradients`` then updates or skips.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from polyamp.backends.tensorflow.steps.gradients import SIXTEEN_BIT, all_finite, multiplied, unscaled
from polyamp.backends.tensorflow.steps.scaler import LossScaler
from polyamp.loss_scale import LossScale
from polyamp.scripts.as_written import AsWritten
from polyamp.scripts.session import Session


class TrueGradients(AsWritten):
    """The loss scale of a script: one for its eager code and functions, and one for each graph of TensorFlow 1.

    >>> from polyamp.scripts.session import Session
    >>> weight, scaling = tf.Variable([1.0, 2.0]), TrueGradients(LossScale(init=8.0), Session())
    >>> with tf.GradientTape() as tape:
    ...     loss = tf.reduce_sum(weight * weight)
    >>> (grad,) = scaling.take(lambda seeds: tape.gradient(loss, [weight], seeds), loss, [weight], None)
    >>> sgd = tf.compat.v1.train.GradientDescentOptimizer(0.5)
    >>> _ = scaling.step(sgd, [(grad, weight)])
    >>> weight.numpy()
    array([0., 0.], dtype=float32)

    Args:
        settings: of the loss scale.
        session: the run, which reports the scale and refuses what is unsafe.
    """

    def __init__(self, settings: LossScale, session: Session) -> None:
        super().__init__()
        self._settings, self._session = settings, session
        self._eager: LossScaler | None = None
        self._of_graph: weakref.WeakKeyDictionary[tf.Graph, LossScaler] = weakref.WeakKeyDictionary()
        self._taken: dict[int, weakref.ref[Any]] = {}

    def take(self, take: Callable[[Any], Any], target: Any, sources: Any, seeds: Any) -> Any:
        """Return ``take(seeds)`` for larger seeds, unscaled; all NaN if a gradient or the target is not finite.

        Args:
            take: takes the gradients from seeds, the gradients of the target.
            target: what is differentiated.
            sources: what it is differentiated by.
            seeds: the script's own seeds; None means ones.
        """
        flat = tf.nest.flatten(target)
        if self.is_inside or not all(tf.is_tensor(one) and one.dtype in (tf.float32, tf.float64) for one in flat):
            return take(seeds)
        self._check_sources(tf.nest.flatten(sources))
        with self.as_written():
            scale = tf.convert_to_tensor(self.scaler.scalars[0])
            factor = tf.where(all_finite(flat), scale, float("inf"))
            ones = [tf.ones_like(one) for one in flat] if seeds is None else tf.nest.flatten(seeds)
            larger = [None if one is None else one * tf.cast(factor, one.dtype) for one in ones]
            result = take(tf.nest.pack_sequence_as(target, larger))
            grads = tf.nest.flatten(result)
            poison = tf.where(all_finite(grads), 1.0, float("nan"))
            plain = multiplied(unscaled(grads, scale, self._settings.max), poison)
            return tf.nest.pack_sequence_as(result, plain)

    def step(self, optimizer: Any, pairs: Sequence[tuple[Any, Any]], **options: Any) -> Any:
        """Update or skip, and advance the scale; return what the step did, as `LossScaler.step` does.

        Args:
            optimizer: an object with ``apply_gradients(pairs, **options)``.
            pairs: unscaled gradients and their variables.
            **options: of its ``apply_gradients``.
        """
        for _, variable in pairs:
            self._taken.pop(id(_native(variable)), None)
        with self.as_written():
            return self.scaler.step(optimizer, pairs, unscaled=tf.constant(True), **options)

    @property
    def scaler(self) -> LossScaler:
        """The scaler for the code that is running, made at its first use."""
        with tf.init_scope():
            if tf.executing_eagerly():
                if self._eager is None:
                    self._eager = LossScaler(self._settings)
                    self._session.add(self._eager)
                return self._eager
            graph = tf.compat.v1.get_default_graph()
            if graph not in self._of_graph:
                self._of_graph[graph] = LossScaler(self._settings)
                self._session.note(
                    "The loss scale of a Session is a variable of its graph, named loss_scale, and ends with it."
                )
            return self._of_graph[graph]

    def check_assignment(self, variable: Any) -> None:
        """Refuse an update by hand: it would apply gradients that should be skipped.

        Raises:
            UsageError: a gradient of this variable was taken, and no optimizer has applied it.
        """
        taken = self._taken.get(id(variable), lambda: None)()
        if self.is_inside or taken is None or taken is not variable:
            return
        self._session.refuse(
            "the script updates a variable itself, without an optimizer",
            found=f"an assignment to {taken.name} after its gradient was taken",
            fix="use an optimizer of Keras or tf.compat.v1.train, which can skip a step; or --policy mixed_bfloat16, "
            "which needs no loss scale",
        )

    def _check_sources(self, sources: Sequence[Any]) -> None:
        if tf.distribute.has_strategy():
            strategy = type(tf.distribute.get_strategy()).__name__
            self._session.refuse(
                "a loss scale for replicas has to be part of the script's step",
                found=f"gradients under a {strategy}",
                fix="wrap the optimizer in the script: polyamp.wrap_optimizer; or --policy mixed_bfloat16, which needs "
                "no loss scale",
            )
        for one in filter(lambda source: hasattr(source, "assign"), sources):
            variable = _native(one)
            if variable.dtype.base_dtype in SIXTEEN_BIT:
                self._session.found(f"a variable in {variable.dtype.base_dtype.name}")
            self._taken[id(variable)] = weakref.ref(variable)


def _native(variable: Any) -> Any:
    """Return the ``tf.Variable``, which a Keras variable holds in its ``value``."""
    value = getattr(variable, "value", None)
    return variable if value is None or callable(value) else value
