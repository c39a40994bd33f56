"""Where the gradients of a step come from: whether their loss was scaled, and whether they were clipped before.

Both are read in the graph that is being built, when a step unscales gradients. A gradient of a scaled loss is made from
a read of the loss scale. For example, in ``tape.gradient(scaler.scale(loss), weights)`` the backward pass starts at the
product of the loss and the scale; in ``tape.gradient(loss, weights)`` nothing leads back to the scale.

Clipping is found between a backward pass and the step: ``clip_by_global_norm(grads)`` compares scaled gradients
with a limit for unscaled ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from polyamp.agreement import is_rewritten
from polyamp.arrays import values_of
from polyamp.backends.tensorflow.graphs.graph import Places, closure, is_gradient
from polyamp.errors import unscaled_loss, warn_once

_CLIPPING = ("ClipByValue", "Maximum", "Minimum", "L2Loss", "EuclideanNorm")


def is_scaled(grads: Sequence[Any], scale: Any) -> bool | None:
    """Return whether gradients are those of a loss times this scale; None if that is not known, as in eager code.

    Raises:
        UsageError: they are not, in a step that is traced to be rewritten.

    Warns:
        PolyampWarning: they are clipped.
    """
    if tf.executing_eagerly() or tf.distribute.has_strategy() or not isinstance(scale, tf.Variable):
        return None
    last = [tf.convert_to_tensor(values).op for values in values_of(grads)]
    made = closure(last, _makers)
    if not any(map(_is_gradient, made)):
        return True if is_rewritten() else None  # they are arguments of the step
    graph = last[0].graph
    handle = graph.capture(scale.handle).op if hasattr(graph, "capture") else scale.op
    if handle in made:
        _report_clipped(last)
        return True
    if is_rewritten():
        fix = "take the gradients of the result of opt.scale_loss(loss) or scaler.scale(loss)"
        raise unscaled_loss(where=_place(last[0]), fix=fix)
    return False


def _report_clipped(last: Sequence[Any]) -> None:
    """Report the first operation between the backward pass and these that clips."""
    late = closure(last, lambda one: [] if _is_gradient(one) else _makers(one))
    gradients = set(filter(_is_gradient, late))
    after = closure(gradients, lambda one: [op for value in one.outputs for op in value.consumers() if op in late])
    for place in [_place(one) for one in after - gradients if _clips(one)][:1]:
        warn_once(
            f"gradients are clipped while they are scaled ({place}): the limit does not include the loss scale. "
            "Pass max_grad_norm= to polyamp.wrap_optimizer or LossScaler, or clip the result of scaler.unscale(grads)."
        )


def _makers(operation: tf.Operation) -> list[tf.Operation]:
    return [value.op for value in operation.inputs]


def _is_gradient(operation: tf.Operation) -> bool:
    return is_gradient(operation.name)


def _clips(operation: tf.Operation) -> bool:
    scopes = operation.name.split("/")[:-1]
    return operation.type in _CLIPPING or any(scope.startswith("clip_by_") for scope in scopes)


def _place(operation: tf.Operation) -> str:
    return Places(operation.graph).line(operation.name) or str(operation.name)
