"""Update or skip: the conditional around an optimizer's update, in every replica or in none.

Optimizers sum gradients over replicas inside their update, so each replica tests gradients that the others have not
seen.

The update is marked in a graph that is being built, so that a later rewrite of the graph leaves it unchanged. Eager
code has no graph, and no cost here.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import tensorflow as tf

from polyamp.backends.tensorflow.graphs.graph import FINITE, UPDATE_SCOPE
from polyamp.backends.tensorflow.unstable import compiles_by_xla, graphs_around
from polyamp.errors import PolyampWarning, UnsupportedError, UsageError
from polyamp.provenance import ScaledLosses
from polyamp.settings import LossScale
from polyamp.skips import report_nonfinite_loss

# Their workers step at different times, or their replicas share one copy of the variables, or it was never tested.
_WITHOUT_COMMON_STEP = ("ParameterServerStrategy", "CentralStorageStrategy", "TPUStrategy")


def all_replicas(finite: tf.Tensor) -> tf.Tensor:
    """Return whether ``finite``, a scalar bool, is true in every replica."""
    if not tf.distribute.has_strategy():
        return finite
    names = [kind.__name__ for kind in type(tf.distribute.get_strategy()).__mro__]
    if any(name.startswith(_WITHOUT_COMMON_STEP) for name in names):  # those of versions end with V1 and V2
        raise UnsupportedError(
            "loss scaling does not work under this strategy: its replicas cannot decide together about a step",
            where="a step in the strategy's replicas",
            found=names[0],
            allowed="MirroredStrategy, MultiWorkerMirroredStrategy, OneDeviceStrategy",
            fix="use one of these, or bfloat16 with loss_scale=polyamp.LossScale.none(), which checks nothing",
        )
    bad = tf.cast(tf.logical_not(finite), tf.float32)
    return tf.equal(_sum(bad), 0.0)


def summed(grads: Sequence[Any]) -> list[Any]:
    """Return the gradients that are not None, each summed over the replicas."""
    present = [grad for grad in grads if grad is not None]
    return list(_sum(present)) if tf.distribute.has_strategy() else present


def _sum(value: Any) -> Any:
    return replica_context().all_reduce(tf.distribute.ReduceOp.SUM, value)


def replica_context() -> tf.distribute.ReplicaContext:
    """Return the context of the replica that runs this code."""
    context = tf.distribute.get_replica_context()
    if context is None:
        raise UsageError(
            "the step must run inside the strategy's replicas",
            where=f"the scope of a {type(tf.distribute.get_strategy()).__name__}",
            allowed="a function that every replica runs",
            fix="put the gradients and the step into one function, and call strategy.run(function)",
        )
    return context


def places() -> list[Any]:
    """Return the graphs that are built here, innermost first; in eager code, the replica that runs here, if any."""
    if not tf.executing_eagerly():
        return graphs_around()
    return [tf.distribute.get_replica_context()] if tf.distribute.has_strategy() else []


def update_if(
    finite: tf.Tensor,
    update: Callable[[Sequence[Any]], Any],
    grads: Sequence[Any],
    report: Callable[[], Any] = lambda: None,
) -> tf.Tensor:
    """Run ``update(grads)``, which returns an operation or None, if ``finite``: in every replica or in none.

    A skipped step without a strategy runs ``report()``, which also returns an operation or None.
    """
    if not tf.distribute.has_strategy():
        return _run_if(finite, lambda: update(grads), report)

    # An optimizer's update merges replicas, even a single one, and TensorFlow forbids that inside a conditional of a
    # replica. So the conditional is put around the replicas.
    def across(strategy: tf.distribute.Strategy, decided: Any, per_replica: Any) -> tf.Tensor:
        def run() -> Any:
            return strategy.group(strategy.extended.call_for_each_replica(update, args=(per_replica,)))

        return _run_if(strategy.experimental_local_results(decided)[0], run, lambda: None)

    return replica_context().merge_call(across, args=(finite, list(grads)))


def _run_if(finite: tf.Tensor, run: Callable[[], Any], report: Callable[[], Any]) -> tf.Tensor:
    def done(action: Callable[[], Any], result: bool) -> tf.Tensor:
        with after([action()]):
            return tf.constant(result)

    return tf.cond(finite, lambda: done(run, True), lambda: done(report, False))


def graph_here() -> Any:
    """Return the graph that is being built; None in eager code."""
    return None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()


def report_of(losses: ScaledLosses, settings: LossScale, compute: str | None) -> Callable[[], Any]:
    """Return the ``report`` for `update_if`, which makes an operation that reports a loss which was not finite."""
    graph = graph_here()
    if graph is None or compiles_by_xla(graph) or not losses.are_here(graph):
        return lambda: None  # XLA has no such operation; in eager code the loss was reported when it was scaled

    def report(finite: Any) -> None:
        try:
            if not finite:
                report_nonfinite_loss(settings, compute=compute)
        except PolyampWarning as warning:  # warnings are errors here, and an error in a graph leaves half a step
            logging.getLogger("polyamp").warning("%s", warning)

    return lambda: tf.numpy_function(report, [losses.finite], [])


def after(operations: Sequence[Any]) -> AbstractContextManager[Any]:
    """Return a context whose operations run after these; other objects than operations and tensors are ignored."""
    # Inside a ``tf.function`` TensorFlow keeps the order itself; in a graph of a ``Session`` only this does.
    return tf.control_dependencies([one for one in operations if isinstance(one, tf.Operation | tf.Tensor)])


def update_scope() -> AbstractContextManager[Any]:
    """Return a context that names its operations as part of the update. It can be reused and nested."""
    scopes = _scopes()
    return nullcontext() if tf.executing_eagerly() or UPDATE_SCOPE in scopes else _absolute([*scopes, UPDATE_SCOPE])


def outside_update_scope() -> AbstractContextManager[Any]:
    """Return a context that leaves `update_scope`, since a variable's name in a checkpoint comes from its scope."""
    scopes = _scopes()
    if tf.executing_eagerly() or UPDATE_SCOPE not in scopes:
        return nullcontext()
    return _absolute([scope for scope in scopes if scope != UPDATE_SCOPE])


def decision(finite: tf.Tensor) -> tf.Tensor:
    """Return ``finite``, the scalar bool that decides whether a step is applied, under its marked name."""
    return finite if tf.executing_eagerly() else tf.identity(finite, name=FINITE)


def apply_gradients(optimizer: Any, pairs: Sequence[tuple[Any, Any]], options: Mapping[str, Any]) -> Any:
    """Run ``optimizer.apply_gradients(pairs, **options)``, marked as update, without renaming its slots."""
    is_v1 = isinstance(optimizer, tf.compat.v1.train.Optimizer)  # these take no name where replicas merge
    if tf.executing_eagerly() or not is_v1 or tf.distribute.has_strategy():
        return optimizer.apply_gradients(pairs, **options)
    # These make some of their variables before they enter the scope whose name they get.
    name = f"{UPDATE_SCOPE}/{options.get('name') or optimizer.get_name()}"
    with outside_update_scope():
        return optimizer.apply_gradients(pairs, **{**options, "name": name})


def _scopes() -> list[str]:
    return [scope for scope in tf.get_current_name_scope().split("/") if scope]


def _absolute(scopes: Sequence[str]) -> AbstractContextManager[Any]:
    """Return a context of an absolute name scope, by default the root: a name that ends in "/" stays unchanged."""
    return tf.name_scope("".join(f"{scope}/" for scope in scopes))
