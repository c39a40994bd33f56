"""`polyamp run` for TensorFlow: the removed graph rewrite for scripts that use it, and a policy for others.

A script without mixed precision clips, sums and applies gradients as if there were no loss scale. So the loss is scaled
and the gradients are unscaled in one place: where they are taken. If one of them is not finite, all are returned as
NaN, which survives clipping; the optimizer's update then finds it, skips the step and advances the scale:

    tape.gradient(loss, weights)     begins its backward pass with 65536 instead of 1, and divides the results by 65536
    optimizer.apply_gradients(...)   updates or skips
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
from polyamp.backends.tensorflow.steps.optimizer import LossScaledOptimizer
from polyamp.backends.tensorflow.steps.scaler import LossScaler
from polyamp.backends.tensorflow.unstable import replace_functions, scope_path
from polyamp.flow import AS_WRITTEN
from polyamp.plan import PlannedOperation
from polyamp.policies import Policy
from polyamp.run import Session, script_line

v1 = tf.compat.v1

_PRODUCTS = "the products of TensorFlow"
_MOST_CALLS = 4096
_FIX = "or --policy mixed_bfloat16, which needs no loss scale"
_ASSIGNMENTS = ("assign", "assign_add", "assign_sub", "scatter_sub", "scatter_add", "scatter_nd_sub", "scatter_nd_add")
# `from tensorflow.train.experimental import x` loads a second module from the same file as `tf.train.experimental`.
_ROOTS = [f"{root}{version}" for root in ("tensorflow", "tensorflow._api.v2") for version in ("", ".compat.v1")]
_PLACES = [f"{root}.train.experimental" for root in _ROOTS] + [f"{root}.mixed_precision" for root in _ROOTS[1::2]]


def begin(session: Session) -> None:
    """Put the graph rewrite in its old places; with a policy, run the script's products in 16 bits."""
    _supply_graph_rewrite(session)
    policy = session.policy
    if policy is None:
        return
    autocast_everywhere(policy)
    session.at_end(lambda: autocast_everywhere(None))
    _record_products(session, policy)
    options = tf.config.optimizer.set_experimental_options

    def set_experimental_options(given: Any) -> None:
        if any(is_on for name, is_on in given.items() if name.startswith("auto_mixed_precision")):
            session.found("tf.config.optimizer.set_experimental_options")
        options(given)

    session.replace(tf.config.optimizer, "set_experimental_options", set_experimental_options)
    if policy.loss_scale.check:
        _scale_losses(session, policy)


def _supply_graph_rewrite(session: Session) -> None:
    def enable_mixed_precision_graph_rewrite(opt: Any, loss_scale: Any = "dynamic") -> Any:
        session.found("tf.train.experimental.enable_mixed_precision_graph_rewrite")
        wrapped = graph_rewrite.enable_mixed_precision_graph_rewrite(opt, loss_scale)
        session.at_end(lambda: autocast_everywhere(None))
        if tf.executing_eagerly():
            session.add(wrapped)
        return wrapped

    for module in map(import_module, _PLACES):
        session.replace(module, enable_mixed_precision_graph_rewrite.__name__, enable_mixed_precision_graph_rewrite)
        disable = graph_rewrite.disable_mixed_precision_graph_rewrite
        session.replace(module, disable.__name__, disable)


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
            session.operations.setdefault(_PRODUCTS, []).append(
                PlannedOperation(operation.canonical, operation.native, where, decided.op_class, ran_in, decided.reason)
            )

    if lowering is not None:
        lowering.observer = note
        session.at_end(lambda: setattr(lowering, "observer", None))


def _scale_losses(session: Session, policy: Policy) -> None:
    """Scale losses where gradients are taken, and skip steps where they are applied, until the session ends."""
    scaling = ScaledGradients(session, policy)
    session.shared["tensorflow"] = scaling
    of_tape = tf.GradientTape.gradient

    @functools.wraps(of_tape)
    def gradient(self: Any, target: Any, sources: Any, output_gradients: Any = None, *args: Any, **options: Any) -> Any:
        def take(seeds: Any) -> Any:
            return of_tape(self, target, sources, seeds, *args, **options)

        return scaling.take(take, target, sources, output_gradients)

    def in_graph(of_graph: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(of_graph)
        def gradients(ys: Any, xs: Any, grad_ys: Any = None, *args: Any, **options: Any) -> Any:
            return scaling.take(lambda seeds: of_graph(ys, xs, seeds, *args, **options), ys, xs, grad_ys)

        return gradients

    def checked(assign: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(assign)
        def check(variable: Any, *args: Any, **kwargs: Any) -> Any:
            scaling.check_assignment(variable)
            return assign(variable, *args, **kwargs)

        return check

    session.replace(tf.GradientTape, "gradient", tf.autograph.experimental.do_not_convert(gradient))
    with tf.Graph().as_default():
        kinds = [type(v1.Variable(0.0, use_resource=resource)) for resource in (True, False)]
    for kind in kinds:
        for name in _ASSIGNMENTS:
            if owner := next((one for one in kind.__mro__ if name in vars(one)), None):
                session.replace(owner, name, checked(vars(owner)[name]))
    replaced = {function: in_graph(function) for function in (tf.gradients, v1.gradients)}
    replaced |= {function: checked(function) for function in (getattr(v1, name) for name in _ASSIGNMENTS)}
    replace_functions(replaced)
    session.at_end(lambda: replace_functions({ours: original for original, ours in replaced.items()}))
    _skip_steps(session, scaling)


def _skip_steps(session: Session, scaling: ScaledGradients) -> None:
    """Skip steps of optimizers of TensorFlow 1, including those whose class has its own ``apply_gradients``."""
    made, skipping = v1.train.Optimizer.__init__, set[type]()

    @functools.wraps(made)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        if isinstance(self, LossScaledOptimizer):
            session.found("polyamp.wrap_optimizer")
        for kind in type(self).__mro__:
            if "apply_gradients" in vars(kind) and kind not in skipping:
                skipping.add(kind)
                session.replace(kind, "apply_gradients", skipped(vars(kind)["apply_gradients"]))
        made(self, *args, **kwargs)

    def skipped(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def apply_gradients(self: Any, grads_and_vars: Any, global_step: Any = None, name: str | None = None) -> Any:
            if session.is_as_written:
                return original(self, grads_and_vars, global_step=global_step, name=name)
            result = scaling.step(self, list(grads_and_vars), global_step=global_step, name=name)
            return None if tf.executing_eagerly() else tf.group(result.scale, name=name)

        return apply_gradients

    session.replace(v1.train.Optimizer, "__init__", __init__)


class ScaledGradients:
    """The loss scale of a script: one for its eager code and functions, and one for each graph of TensorFlow 1."""

    def __init__(self, session: Session, policy: Policy) -> None:
        self._session, self._settings = session, policy.loss_scale
        self._eager: LossScaler | None = None
        self._of_graph: weakref.WeakKeyDictionary[tf.Graph, LossScaler] = weakref.WeakKeyDictionary()
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

    def step(self, optimizer: Any, pairs: Sequence[tuple[Any, Any]], **options: Any) -> Any:
        """Update or skip, and advance the scale; return what the step did, as `LossScaler.step` does."""
        for _, variable in pairs:
            self._taken.pop(id(_native(variable)), None)
        with self._session.as_written():
            return self._scaler().step(optimizer, pairs, unscaled=tf.constant(True), **options)

    def _scaler(self) -> LossScaler:
        with tf.init_scope():
            if not tf.executing_eagerly():
                self._session.note("The loss scale of a Session is a variable of its graph, named loss_scale.")
                graph = v1.get_default_graph()
                if graph not in self._of_graph:
                    self._of_graph[graph] = LossScaler(self._settings)
                return self._of_graph[graph]
            if self._eager is None:
                self._eager = LossScaler(self._settings)
                self._session.add(self._eager)
            return self._eager

    def check_assignment(self, variable: Any) -> None:
        """Refuse an update by hand: it would apply gradients that should be skipped."""
        taken = self._taken.get(id(variable), lambda: None)()
        if not self._session.is_as_written and taken is not None and taken is variable:
            self._session.refuse(
                "the script updates a variable itself, without an optimizer",
                found=f"an assignment to {taken.name} after its gradient was taken",
                fix=f"use an optimizer of Keras or tf.compat.v1.train, which can skip a step; {_FIX}",
            )

    def _check_sources(self, sources: Sequence[Any]) -> None:
        if tf.distribute.has_strategy():
            self._session.refuse(
                "a loss scale for replicas has to be part of the script's step",
                found=f"gradients under a {type(tf.distribute.get_strategy()).__name__}",
                fix=f"wrap the optimizer in the script: polyamp.wrap_optimizer; {_FIX}",
            )
        for variable in (_native(source) for source in sources if hasattr(source, "assign")):
            if variable.dtype.base_dtype in SIXTEEN_BIT:
                self._session.found(f"a variable in {variable.dtype.base_dtype.name}")
            self._taken[id(variable)] = weakref.ref(variable)


def _native(variable: Any) -> Any:
    """Return the ``tf.Variable``, which a Keras variable holds in its ``value``."""
    value = getattr(variable, "value", None)
    return variable if value is None or callable(value) else value
