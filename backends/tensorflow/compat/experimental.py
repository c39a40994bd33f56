"""``tf.train.experimental`` and ``tf.mixed_precision.experimental``: what TensorFlow 2 removed of mixed precision.

Import from here, or let `polyamp run` or `polyamp.backends.tensorflow.compat.names.install` put the names in their old
places in TensorFlow.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from polyamp.backends.tensorflow.compat import graph_rewrite
from polyamp.backends.tensorflow.compat.loss_scales import DynamicLossScale, FixedLossScale, LossScale
from polyamp.backends.tensorflow.steps.optimizer import LossScaledOptimizer
from polyamp.errors import warn_deprecated
from polyamp.given_scales import loss_scale_of
from polyamp.scripts.session import current, found

__all__ = [
    "DynamicLossScale",
    "FixedLossScale",
    "LossScale",
    "MixedPrecisionLossScaleOptimizer",
    "disable_mixed_precision_graph_rewrite",
    "enable_mixed_precision_graph_rewrite",
]

_ENABLE = "enable_mixed_precision_graph_rewrite"


def enable_mixed_precision_graph_rewrite(opt: Any, loss_scale: Any = "dynamic") -> Any:
    """Run products in float16 from now on, and wrap an optimizer with a loss scale, as TensorFlow 1.14 to 2.3 did.

    >>> opt = enable_mixed_precision_graph_rewrite(tf.compat.v1.train.GradientDescentOptimizer(0.1))
    >>> opt.loss_scale
    32768.0
    >>> disable_mixed_precision_graph_rewrite()

    Arguments, result and errors are those of `graph_rewrite.enable_mixed_precision_graph_rewrite`.
    """
    warn_deprecated(
        f"tf.train.experimental.{_ENABLE}(opt)",
        'opt = polyamp.wrap_optimizer(opt, "mixed_float16"), and polyamp.rewrite(train_step, policy="mixed_float16")',
    )
    found(f"tf.train.experimental.{_ENABLE}")
    if isinstance(loss_scale, LossScale):
        wrapped = graph_rewrite.enable_mixed_precision_graph_rewrite(opt, loss_scale.settings)
        loss_scale.scaler = wrapped.scaler
    else:
        wrapped = graph_rewrite.enable_mixed_precision_graph_rewrite(opt, loss_scale)
    report(wrapped)
    return wrapped


def disable_mixed_precision_graph_rewrite() -> None:
    """Undo `enable_mixed_precision_graph_rewrite`; optimizers stay wrapped.

    >>> _ = enable_mixed_precision_graph_rewrite(tf.compat.v1.train.GradientDescentOptimizer(0.1))
    >>> disable_mixed_precision_graph_rewrite()

    Warns:
        PolyampWarning: it was not enabled.
    """
    warn_deprecated(
        "tf.train.experimental.disable_mixed_precision_graph_rewrite()",
        'with polyamp.autocast("mixed_float16"): ... around what shall run in float16',
    )
    graph_rewrite.disable_mixed_precision_graph_rewrite()


class MixedPrecisionLossScaleOptimizer(LossScaledOptimizer):
    """The loss-scaling optimizer of TensorFlow 1: `polyamp.wrap_optimizer` under its old name.

    >>> sgd = tf.compat.v1.train.GradientDescentOptimizer(0.1)
    >>> MixedPrecisionLossScaleOptimizer(sgd, 128).loss_scale
    128.0

    Args:
        opt: any ``tf.compat.v1.train.Optimizer``.
        loss_scale: ``"dynamic"``, a number, a `polyamp.LossScale`, or a `FixedLossScale` or `DynamicLossScale`, which
            then returns this optimizer's scale when it is called.

    Raises:
        InvalidTypeError: ``opt`` is not such an optimizer, or ``loss_scale`` is not a loss scale.
        InvalidValueError: a number is outside what `polyamp.LossScale` allows.
        UsageError: ``opt`` is wrapped already.
    """

    def __init__(self, opt: tf.compat.v1.train.Optimizer, loss_scale: Any) -> None:
        warn_deprecated(
            "tf.train.experimental.MixedPrecisionLossScaleOptimizer(opt, loss_scale)",
            'polyamp.wrap_optimizer(opt, "mixed_float16", loss_scale=...)',
        )
        found("tf.train.experimental.MixedPrecisionLossScaleOptimizer")
        where = "MixedPrecisionLossScaleOptimizer(loss_scale=)"
        own = isinstance(loss_scale, LossScale)
        super().__init__(opt, loss_scale.settings if own else loss_scale_of(loss_scale, where=where))
        if own:
            loss_scale.scaler = self.scaler
        report(self)


def report(wrapped: Any) -> None:
    """Let `polyamp run` report the health of an optimizer at its end, if its state can be read there."""
    session = current()
    if session is None:
        return
    if tf.executing_eagerly():
        session.add(wrapped)
    else:
        session.note(
            f"The loss scale of {type(wrapped).__name__} is a variable in a graph of a Session, and ends with it: run "
            "optimizer.scaler.scalars in the script to read it."
        )
