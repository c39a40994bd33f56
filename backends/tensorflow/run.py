"""`polyamp run` for TensorFlow: the removed graph rewrite for scripts that use it; under a policy they are refused."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import tensorflow as tf

from polyamp.backends.tensorflow import graph_rewrite
from polyamp.run import Session

# `from tensorflow.train.experimental import x` loads a second module from the same file as `tf.train.experimental`.
_ROOTS = [f"{root}{version}" for root in ("tensorflow", "tensorflow._api.v2") for version in ("", ".compat.v1")]
_PLACES = [f"{root}.train.experimental" for root in _ROOTS] + [f"{root}.mixed_precision" for root in _ROOTS[1::2]]


def begin(session: Session) -> None:
    """Put the graph rewrite in its old places; with a policy, refuse a script that takes gradients of TensorFlow."""

    def enable_mixed_precision_graph_rewrite(opt: Any, loss_scale: Any = "dynamic") -> Any:
        session.note_own_precision("tf.train.experimental.enable_mixed_precision_graph_rewrite")
        wrapped = graph_rewrite.enable_mixed_precision_graph_rewrite(opt, loss_scale)
        session.callback(graph_rewrite.disable_mixed_precision_graph_rewrite)
        if tf.executing_eagerly():
            session.holders.append(wrapped)
        return wrapped

    for module in map(import_module, _PLACES):
        for function in (enable_mixed_precision_graph_rewrite, graph_rewrite.disable_mixed_precision_graph_rewrite):
            session.replace(module, function.__name__, function)
    if session.policy is not None:
        optimizer = tf.compat.v1.train.Optimizer
        for owner, name in ((tf.GradientTape, "gradient"), (tf, "gradients"), (optimizer, "__init__")):
            session.refuse_calls(
                owner,
                name,
                what="a TensorFlow script cannot be given a policy from outside: only its own code can rewrite a step",
                fix="write opt = polyamp.wrap_optimizer(opt, policy); in the step, take the gradients of "
                "polyamp.scale_loss(loss, opt); and step = polyamp.rewrite(step, policy=policy)",
            )
