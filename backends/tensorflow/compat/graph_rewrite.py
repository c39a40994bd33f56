"""``enable_mixed_precision_graph_rewrite``: a function that TensorFlow 2 removed, for optimizers of both versions.

In ``tf.compat.v1`` it still enables TensorFlow's own pass, which does nothing on a CPU or under XLA and refuses the
optimizers of Keras 3. Here it enables the float16 autocast of `polyamp.autocast` on every device.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from polyamp.backends.tensorflow.autocast.context import autocast_everywhere, is_everywhere
from polyamp.backends.tensorflow.compat.built_before import lower_products
from polyamp.errors import warn_once
from polyamp.given_scales import loss_scale_of
from polyamp.policies import policy
from polyamp.verbs import wrap_optimizer


def enable_mixed_precision_graph_rewrite(opt: Any, loss_scale: Any = "dynamic") -> Any:
    """Run products in float16 from now on, in the whole process, and wrap an optimizer with a loss scale.

    It affects everything that runs eagerly, is traced or is built later, in every thread, and what the default graph of
    a ``Session`` has already; a ``tf.function`` that was traced before is traced again. A ``polyamp.autocast`` region
    inside it uses its own policy. Call it again to wrap
    another optimizer. In new code, `polyamp.wrap_optimizer` and `polyamp.autocast` have more options.

    >>> sgd = tf.compat.v1.train.GradientDescentOptimizer(0.1)
    >>> opt = enable_mixed_precision_graph_rewrite(sgd)
    >>> float(tf.tensordot([1 / 3], [1.0], 1)), opt.loss_scale
    (0.333251953125, 32768.0)
    >>> disable_mixed_precision_graph_rewrite()

    Args:
        opt: an optimizer of ``tf.compat.v1.train`` or of Keras 3.
        loss_scale: ``"dynamic"`` for the rule of TensorFlow 1 (``LossScale.like("tensorflow")``: it starts at 2**15 and
            doubles after 2000 steps); a number for a fixed scale; a `polyamp.LossScale`; or a ``FixedLossScale`` or
            ``DynamicLossScale`` of ``tf.compat.v1.mixed_precision``.

    Returns:
        The wrapped optimizer.

    Raises:
        InvalidTypeError: not an optimizer, or not a loss scale. No error leaves anything enabled.
        InvalidValueError: the loss scale is outside what `LossScale` allows.
        UsageError: the optimizer is wrapped already.

    Warns:
        PolyampWarning: products in the default graph of a ``Session`` stay float32; see `built_before`.
    """
    mixed = policy("mixed_float16")
    settings = loss_scale_of(loss_scale, where="enable_mixed_precision_graph_rewrite(loss_scale=)")
    wrapped = wrap_optimizer(opt, mixed, loss_scale=settings)
    autocast_everywhere(mixed)
    _lower_products_before()
    return wrapped


def disable_mixed_precision_graph_rewrite() -> None:
    """Undo `enable_mixed_precision_graph_rewrite` for everything that runs, is traced or is built from now on.

    A ``tf.function`` returns to its float32 trace. Optimizers stay wrapped, and graphs of a ``Session`` that were built
    meanwhile stay float16.

    >>> _ = enable_mixed_precision_graph_rewrite(tf.compat.v1.train.GradientDescentOptimizer(0.1))
    >>> disable_mixed_precision_graph_rewrite()
    >>> float(tf.tensordot([1 / 3], [1.0], 1))
    0.3333333432674408

    Warns:
        PolyampWarning: it was not enabled.
    """
    if not is_everywhere():
        warn_once("disable_mixed_precision_graph_rewrite() changed nothing: it was not enabled")
    autocast_everywhere(None)


def _lower_products_before() -> None:
    graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
    staying = lower_products(graph, tf.float16) if graph is not None else []
    if staying:
        warn_once(
            f"{len(staying)} products of the default graph, {staying[0]} the first, stay float32: they are in a "
            "loop or conditional of TensorFlow 1 that was built before enable_mixed_precision_graph_rewrite, or have "
            "no float16 kernel. Call it before the model is built, or rewrite the graph: "
            "polyamp.rewrite(graph.as_graph_def(), policy=...).",
            stacklevel=4,
        )
