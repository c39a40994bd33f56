"""`polyamp run` for TensorFlow: the removed graph rewrite for scripts that use it, and a policy for others.

A script without mixed precision clips and sums gradients as if there were no loss scale. So they are unscaled where
they are taken. If one is not finite, all become NaN, which survives clipping; the update finds it and is skipped.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from importlib import import_module
from typing import Any

import tensorflow as tf

from polyamp.backends.tensorflow import graph_rewrite
from polyamp.backends.tensorflow.autocast.context import autocast_everywhere, lowering_of
from polyamp.backends.tensorflow.autocast.lowering import Operation
from polyamp.backends.tensorflow.steps.gradients import all_finite, multiplied
from polyamp.backends.tensorflow.steps.scaler import LossScaler
from polyamp.backends.tensorflow.unstable import scope_path
from polyamp.flow import AS_WRITTEN
from polyamp.plan import PlannedOperation
from polyamp.policies import Policy
from polyamp.run import Session, script_line

_MOST_CALLS = 4096
_WRAP = "write opt = polyamp.wrap_optimizer(opt, policy) in the script, without --policy; or --policy mixed_bfloat16"
# `from tensorflow.train.experimental import x` loads a second module from the same file as `tf.train.experimental`.
_ROOTS = [f"{root}{version}" for root in ("tensorflow", "tensorflow._api.v2") for version in ("", ".compat.v1")]
_PLACES = [f"{root}.train.experimental" for root in _ROOTS] + [f"{root}.mixed_precision" for root in _ROOTS[1::2]]


def begin(session: Session) -> None:
    """Put the graph rewrite in its old places; with a policy, run the script's products in 16 bits."""

    def enable_mixed_precision_graph_rewrite(opt: Any, loss_scale: Any = "dynamic") -> Any:
        session.found("tf.train.experimental.enable_mixed_precision_graph_rewrite")
        wrapped = graph_rewrite.enable_mixed_precision_graph_rewrite(opt, loss_scale)
        session.at_end(lambda: autocast_everywhere(None))
        if tf.executing_eagerly():
            session.holders.append(wrapped)
        return wrapped

    for module in map(import_module, _PLACES):
        for function in (enable_mixed_precision_graph_rewrite, graph_rewrite.disable_mixed_precision_graph_rewrite):
            session.replace(module, function.__name__, function)
    policy = session.policy
    if policy is None:
        return
    autocast_everywhere(policy)
    session.at_end(lambda: autocast_everywhere(None))
    _record_products(session, policy)
    if not policy.loss_scale.scales:
        return
    loops = Loops(session, policy)
    session.replace(Loops, "current", loops)
    session.replace(tf.GradientTape, "gradient", loops.gradient(tf.GradientTape.gradient))
    what = "optimizers of TensorFlow 1 cannot be given a loss scale from outside"
    session.check_calls(tf.compat.v1.train.Optimizer, "__init__", lambda *_, **__: session.refuse(what, fix=_WRAP))


def _record_products(session: Session, policy: Policy) -> None:
    """Report the products of the script, each place once, and the formats that they ran in."""
    lowering, seen, calls = lowering_of(policy), set[tuple[str, str, bool]](), iter(range(_MOST_CALLS))

    def note(operation: Operation, lowered: bool) -> None:
        if next(calls, None) is None:  # eager code repeats its products in each step
            return
        where = scope_path() or script_line()
        if (operation.native, where, lowered) not in seen:
            seen.add((operation.native, where, lowered))
            decided = policy.decide(operation.canonical, where)
            ran_in = policy.compute if lowered else AS_WRITTEN
            session.operations.append(
                PlannedOperation(operation.canonical, operation.native, where, decided.op_class, ran_in, decided.reason)
            )

    if lowering is not None:
        lowering.observer = note
        session.at_end(lambda: setattr(lowering, "observer", None))


class Loops:
    """The loops of a script: scales the gradients that tapes take, and steps the optimizers of Keras or skips."""

    current: Loops | None = None

    def __init__(self, session: Session, policy: Policy) -> None:
        self._session, self._policy = session, policy
        self._scaler: LossScaler | None = None
        self.has_optimizer = False

    def gradient(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Return ``GradientTape.gradient`` that scales and unscales; all are NaN if one or the target is not finite."""

        @functools.wraps(original)
        def gradient(
            tape: Any, target: Any, sources: Any, output_gradients: Any = None, *args: Any, **kwargs: Any
        ) -> Any:
            flat = tf.nest.flatten(target)
            is_wide = all(tf.is_tensor(one) and one.dtype in (tf.float32, tf.float64) for one in flat)
            if SCALED.get() or not is_wide:
                return original(tape, target, sources, output_gradients, *args, **kwargs)
            scaler = self._checked_scaler()
            factor = scaler.scale(tf.where(all_finite(flat), 1.0, float("inf")))
            seeds = [tf.ones_like(one) for one in flat] if output_gradients is None else output_gradients
            larger = tf.nest.pack_sequence_as(target, multiplied(tf.nest.flatten(seeds), factor))
            result = original(tape, target, sources, larger, *args, **kwargs)
            grads, finite = scaler.unscale(tf.nest.flatten(result))
            return tf.nest.pack_sequence_as(result, multiplied(grads, tf.where(finite, 1.0, float("nan"))))

        return tf.autograph.experimental.do_not_convert(gradient)

    def step(self, optimizer: Any, pairs: Sequence[tuple[Any, Any]]) -> None:
        """Update or skip, and advance the scale."""
        with as_written():
            self._checked_scaler().step(optimizer, pairs, unscaled=tf.constant(True))

    def _checked_scaler(self) -> LossScaler:
        self._session.check()
        if tf.distribute.has_strategy():
            self._session.refuse("a loss scale for replicas has to be part of the script's step", fix=_WRAP)
        if not self.has_optimizer:
            self._session.refuse(
                "a gradient before any optimizer exists: the script may update variables by itself, and nothing would "
                "skip the updates in which float16 overflows",
                found="no optimizer of Keras",
                fix="make an optimizer of Keras first, which can skip a step; or --policy mixed_bfloat16",
            )
        if self._scaler is None:
            with tf.init_scope():
                self._scaler = LossScaler(self._policy)
            self._session.holders.append(self._scaler)
        return self._scaler


SCALED: ContextVar[bool] = ContextVar("scaled", default=False)


@contextmanager
def as_written(answer: bool = True) -> Iterator[None]:
    """Leave gradients that are taken and applied in this block alone: their loss is scaled already."""
    token = SCALED.set(answer)
    try:
        yield
    finally:
        SCALED.reset(token)
