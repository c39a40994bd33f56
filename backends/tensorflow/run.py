"""`polyamp run` for TensorFlow: the removed graph rewrite for scripts that use it, and a policy for others.

A script without mixed precision clips and sums gradients as if there were no loss scale. So they are unscaled where
they are taken. If one is not finite, all become NaN, which survives clipping; the update finds it and is skipped.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

import tensorflow as tf

from polyamp.backends.tensorflow import graph_rewrite
from polyamp.backends.tensorflow.autocast.context import autocast_everywhere, lowering_of
from polyamp.backends.tensorflow.autocast.lowering import Operation
from polyamp.backends.tensorflow.steps.gradients import SIXTEEN_BIT, all_finite, multiplied, unscaled
from polyamp.backends.tensorflow.steps.scaler import LossScaler
from polyamp.backends.tensorflow.unstable import scope_path
from polyamp.flow import AS_WRITTEN
from polyamp.plan import PlannedOperation
from polyamp.policies import Policy
from polyamp.run import Session, script_line

v1 = tf.compat.v1

_MOST_CALLS = 4096
_ASSIGNMENTS = ("assign", "assign_add", "assign_sub", "scatter_sub", "scatter_add", "scatter_nd_sub", "scatter_nd_add")
_WRAP = "opt = polyamp.wrap_optimizer(opt, policy) in the script, without --policy; or --policy mixed_bfloat16"
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
            session.add(wrapped)
        return wrapped

    for module in map(import_module, _PLACES):
        for function in (enable_mixed_precision_graph_rewrite, graph_rewrite.disable_mixed_precision_graph_rewrite):
            session.replace(module, function.__name__, function)
    policy, options = session.policy, tf.config.optimizer.set_experimental_options
    if policy is None:
        return

    def set_experimental_options(given: Any) -> None:
        if any(is_on for name, is_on in given.items() if name.startswith("auto_mixed_precision")):
            session.found("tf.config.optimizer.set_experimental_options")
        options(given)

    session.replace(tf.config.optimizer, "set_experimental_options", set_experimental_options)
    autocast_everywhere(policy)
    session.at_end(lambda: autocast_everywhere(None))
    _record_products(session, policy)
    if policy.loss_scale.scales:
        _scale_losses(session, policy)


def _record_products(session: Session, policy: Policy) -> None:
    """Report the products of the script, each place once, and the formats that they ran in."""
    lowering, seen, calls = lowering_of(policy), set[tuple[str, str, bool]](), iter(range(_MOST_CALLS))

    def note(operation: Operation, lowered: bool) -> None:
        session.has_low |= lowered
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
        session.looked_at = "the products of TensorFlow"
        lowering.observer = note
        session.at_end(lambda: setattr(lowering, "observer", None))


def _scale_losses(session: Session, policy: Policy) -> None:
    """Scale losses where tapes take gradients, and refuse the updates that nothing could skip."""
    session.own_loops = scaling = ScaledGradients(session, policy)
    of_tape = tf.GradientTape.gradient

    @functools.wraps(of_tape)
    def gradient(self: Any, target: Any, sources: Any, output_gradients: Any = None, *args: Any, **options: Any) -> Any:
        def take(seeds: Any) -> Any:
            return of_tape(self, target, sources, seeds, *args, **options)

        return scaling.take(take, target, sources, output_gradients)

    def checked(original: Callable[..., Any], check: Callable[[Any], None]) -> Callable[..., Any]:
        @functools.wraps(original)
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            check(self)
            return original(self, *args, **kwargs)

        return call

    def refuse(what: Any) -> None:
        session.refuse(
            "the optimizers and sessions of TensorFlow 1 cannot be given a loss scale from outside",
            found=f"tf.compat.v1: {type(what).__name__}",
            fix=f"write {_WRAP}",
        )

    session.replace(tf.GradientTape, "gradient", tf.autograph.experimental.do_not_convert(gradient))
    of_sessions = v1.Session.__mro__[1]  # monitored and interactive ones too
    refused: list[tuple[Any, str, Callable[[Any], None]]]
    refused = [(v1.train.Optimizer, "__init__", refuse), (of_sessions, "run", refuse)]
    kind = type(tf.Variable(0.0))
    owners = {name: next((one for one in kind.__mro__ if name in vars(one)), None) for name in _ASSIGNMENTS}
    refused += [(owner, name, scaling.check_assignment) for name, owner in owners.items() if owner is not None]
    for owner, name, check in refused:
        session.replace(owner, name, checked(vars(owner)[name], check))


class ScaledGradients:
    """The loss scale of the loops of a script, for the optimizers of Keras."""

    def __init__(self, session: Session, policy: Policy) -> None:
        self._session, self._settings = session, policy.loss_scale
        self._made: LossScaler | None = None
        self._taken: dict[int, weakref.ref[Any]] = {}  # variables whose gradients no optimizer has applied yet

    def take(self, take: Callable[[Any], Any], target: Any, sources: Any, seeds: Any) -> Any:
        """Return ``take(seeds)`` for larger seeds, unscaled; all NaN if a gradient or the target is not finite."""
        flat = tf.nest.flatten(target)
        if self._session.is_as_written or not all(
            tf.is_tensor(one) and one.dtype in (tf.float32, tf.float64) for one in flat
        ):
            return take(seeds)
        self._check_sources(tf.nest.flatten(sources))
        with self._session.as_written():
            scale = tf.convert_to_tensor(self._scaler().scalars[0])
            factor = tf.where(all_finite(flat), scale, float("inf"))
            ones = [tf.ones_like(one) for one in flat] if seeds is None else tf.nest.flatten(seeds)
            larger = [None if one is None else one * tf.cast(factor, one.dtype) for one in ones]
            result = take(tf.nest.pack_sequence_as(target, larger))
            grads = tf.nest.flatten(result)
            poison = tf.where(all_finite(grads), 1.0, float("nan"))
            plain = multiplied(unscaled(grads, scale, self._settings.max), poison)
            return tf.nest.pack_sequence_as(result, plain)

    def step(self, optimizer: Any, pairs: Sequence[tuple[Any, Any]]) -> Any:
        """Update or skip, and advance the scale; return what the step did, as `LossScaler.step` does."""
        for _, variable in pairs:
            self._taken.pop(id(_native(variable)), None)
        with self._session.as_written():
            return self._scaler().step(optimizer, pairs, unscaled=tf.constant(True))

    def _scaler(self) -> LossScaler:
        if self._made is None:
            with tf.init_scope():
                self._made = LossScaler(self._settings)
            self._session.add(self._made)
        return self._made

    def check_assignment(self, variable: Any) -> None:
        """Refuse an update by hand: it would apply gradients that should be skipped."""
        taken = self._taken.get(id(variable), lambda: None)()
        if not self._session.is_as_written and taken is not None and taken is variable:
            self._session.refuse(
                "the script updates a variable itself, without an optimizer",
                found=f"an assignment to {taken.name} after its gradient was taken",
                fix="use an optimizer of Keras, which can skip a step; or --policy mixed_bfloat16",
            )

    def _check_sources(self, sources: Sequence[Any]) -> None:
        if tf.distribute.has_strategy():
            self._session.refuse(
                "a loss scale for replicas has to be part of the script's step",
                found=f"gradients under a {type(tf.distribute.get_strategy()).__name__}",
                fix=f"write {_WRAP}",
            )
        for variable in (_native(source) for source in sources if hasattr(source, "assign")):
            if variable.dtype.base_dtype in SIXTEEN_BIT:
                self._session.found(f"a variable in {variable.dtype.base_dtype.name}")
            self._taken[id(variable)] = weakref.ref(variable)


def _native(variable: Any) -> Any:
    """Return the ``tf.Variable``, which a Keras variable holds in its ``value``."""
    value = getattr(variable, "value", None)
    return variable if value is None or callable(value) else value
