"""``enable_mixed_precision_graph_rewrite``: a function that TensorFlow 2 removed.

It enables TensorFlow's own pass, which runs products of graphs in float16 on GPUs with Tensor Cores, as the function of
that name in ``tf.compat.v1`` does. The optimizer gets the whole step of polyamp: skipped updates, masters, reports.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from polyamp.backends.tensorflow.devices import devices
from polyamp.backends.tensorflow.optimizer import LossScaledOptimizer, wrap_optimizer
from polyamp.errors import InvalidTypeError, is_number, no_optimizer, shown, warn_once
from polyamp.libraries import LIBRARIES
from polyamp.policies import policy
from polyamp.settings import LossScale

# They are looked up here, once: `polyamp run` puts the functions below in their place.
_switch_on = tf.compat.v1.mixed_precision.enable_mixed_precision_graph_rewrite
_switch_off = tf.compat.v1.mixed_precision.disable_mixed_precision_graph_rewrite


def enable_mixed_precision_graph_rewrite(opt: Any, loss_scale: Any = "dynamic") -> LossScaledOptimizer:
    """Run products of graphs in float16 on GPUs from now on, by TensorFlow's own pass, and wrap an optimizer.

    The pass works on graphs of each ``Session`` made after the call, and on each ``tf.function`` that XLA does not
    compile. It does nothing for eager code and on CPUs. In new code, `polyamp.rewrite` with `polyamp.wrap_optimizer`
    works everywhere, by polyamp's own rules.

    >>> sgd = tf.compat.v1.train.GradientDescentOptimizer(0.1)
    >>> import warnings
    >>> with warnings.catch_warnings(action="ignore"):  # that there is no GPU
    ...     opt = enable_mixed_precision_graph_rewrite(sgd)
    >>> opt.loss_scale
    32768.0
    >>> disable_mixed_precision_graph_rewrite()

    Args:
        opt: an optimizer of ``tf.compat.v1.train``.
        loss_scale: ``"dynamic"`` for the rule of TensorFlow 1 (``LossScale.like("tensorflow")``: it starts at 2**15 and
            doubles after 2000 steps); a number for a fixed scale; a `polyamp.LossScale`; or a ``FixedLossScale`` or
            ``DynamicLossScale`` of ``tf.compat.v1.mixed_precision``.

    Returns:
        The wrapped optimizer.

    Raises:
        InvalidTypeError: not such an optimizer, or not a loss scale. No error leaves anything enabled.
        InvalidValueError: the loss scale is outside what `LossScale` allows.
        UsageError: the optimizer is wrapped already.

    Warns:
        PolyampWarning: no GPU here has Tensor Cores, so the pass does nothing.
    """
    if not isinstance(opt, tf.compat.v1.train.Optimizer):
        raise no_optimizer(
            opt,
            allowed="an instance of tf.compat.v1.train.Optimizer; a Keras 3 optimizer goes to polyamp.wrap_optimizer, "
            'and its model to polyamp.convert(model, "mixed_float16")',
        )
    mixed, settings = policy("mixed_float16"), _loss_scale_of(loss_scale)
    wrapped = wrap_optimizer(opt, mixed, loss_scale=settings, max_grad_norm=None)
    _switch_on(tf.compat.v1.train.GradientDescentOptimizer(0.0))  # it wraps the optimizer that it is given
    if not any("float16" in device["fast"] for device in devices()[:-1]):
        warn_once(
            "TensorFlow's graph rewrite does nothing here: it needs a GPU with Tensor Cores. What to do: "
            'polyamp.rewrite(step, policy="mixed_float16") rewrites a step on any device.'
        )
    return wrapped


def disable_mixed_precision_graph_rewrite() -> None:
    """Undo `enable_mixed_precision_graph_rewrite` for each ``Session`` and ``tf.function`` made from now on.

    Optimizers stay wrapped.
    """
    _switch_off()


def _loss_scale_of(given: Any) -> LossScale:
    """Return the settings that ``loss_scale`` means, with the limits of TensorFlow's rule."""
    if isinstance(given, LossScale):
        return given
    rule = LossScale.like("tensorflow")
    if isinstance(given, str) and given == "dynamic":
        return rule
    if is_number(given):
        return LossScale.fixed(given)
    config = given.get_config() if hasattr(given, "get_config") else {}
    if "loss_scale_value" in config:
        return LossScale.fixed(config["loss_scale_value"])
    if "initial_loss_scale" in config:
        theirs = {ours: config[name] for name, ours in LIBRARIES["tensorflow"].options.items()}
        low, high = min(rule.min, theirs["init"]), max(rule.max, theirs["init"])
        return LossScale.like("tensorflow", **theirs, backoff=1 / theirs["growth"], min=low, max=high)
    raise InvalidTypeError(
        "this is not a loss scale",
        where="enable_mixed_precision_graph_rewrite(loss_scale=)",
        found=shown(given),
        allowed='"dynamic", a number, a polyamp.LossScale, or a FixedLossScale or DynamicLossScale of '
        "tf.compat.v1.mixed_precision",
        fix='leave it out, which is "dynamic"',
    )
