"""`polyamp run` for TensorFlow: the removed graph rewrite for scripts that use it, and a policy for others.

Under a policy, products run in 16 bits wherever they are. Keras' own training step scales its loss and skips, by the
keras adapter. Gradients that the script takes itself are refused in float16, and reported as "not checked" in bfloat16.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import tensorflow as tf

from polyamp.backends.tensorflow import graph_rewrite
from polyamp.backends.tensorflow.autocast.context import autocast_everywhere, lowering_of
from polyamp.backends.tensorflow.autocast.lowering import Operation
from polyamp.backends.tensorflow.unstable import scope_path
from polyamp.flow import AS_WRITTEN
from polyamp.policies import Policy
from polyamp.run import Session, script_line

_WRITE = (
    "write opt = polyamp.wrap_optimizer(opt, policy); in the tape, with polyamp.autocast(policy): loss = ...; then "
    "scaled = polyamp.scale_loss(loss, opt) and tape.gradient(scaled, variables), without --policy. Or run it with "
    "--policy mixed_bfloat16, which needs no loss scale"
)
# `from tensorflow.train.experimental import x` loads a second module from the same file as `tf.train.experimental`.
_ROOTS = [f"{root}{version}" for root in ("tensorflow", "tensorflow._api.v2") for version in ("", ".compat.v1")]
_PLACES = [f"{root}.train.experimental" for root in _ROOTS] + [f"{root}.mixed_precision" for root in _ROOTS[1::2]]


def begin(session: Session) -> None:
    """Put the graph rewrite in its old places; with a policy, run the script's products in 16 bits."""

    def enable_mixed_precision_graph_rewrite(opt: Any, loss_scale: Any = "dynamic") -> Any:
        session.note_own_precision("tf.train.experimental.enable_mixed_precision_graph_rewrite")
        wrapped = graph_rewrite.enable_mixed_precision_graph_rewrite(opt, loss_scale)
        if tf.executing_eagerly():
            session.holders.append(wrapped)
        return wrapped

    for module in map(import_module, _PLACES):
        for function in (enable_mixed_precision_graph_rewrite, graph_rewrite.disable_mixed_precision_graph_rewrite):
            session.replace(module, function.__name__, function)
    session.callback(autocast_everywhere, None)
    policy = session.policy
    if policy is None:
        return
    autocast_everywhere(policy)
    _record_products(session, policy)

    def take_gradients(*_: Any, **__: Any) -> None:
        session.leave_unchecked("the script takes gradients itself; polyamp.wrap_optimizer tests them", fix=_WRITE)

    if policy.loss_scale.check:
        session.check_calls(tf.GradientTape, "gradient", take_gradients, by=lambda file: "-packages/keras/" not in file)
        session.check_calls(tf, "gradients", take_gradients)
        session.check_calls(tf.compat.v1.train.Optimizer, "__init__", take_gradients)


def _record_products(session: Session, policy: Policy) -> None:
    """Report the products of the script, each place once, and the formats that they ran in."""
    lowering, seen = lowering_of(policy), set[tuple[str, str, bool]]()

    def note(operation: Operation, lowered: bool) -> None:
        place = (operation.native, scope_path() or script_line(), lowered)
        if place not in seen:  # eager code repeats its products in each step
            seen.add(place)
            session.operations[operation.canonical][policy.compute if lowered else AS_WRITTEN] += 1

    if lowering is not None:
        lowering.observer = note
        session.callback(setattr, lowering, "observer", None)
