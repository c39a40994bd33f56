"""Ambient autocast: inside a region, products of TensorFlow's own functions run in 16 bits.

When a product is made, in eager code or in a trace, its float32 inputs are cast down and its outputs are cast back up.
So Python code sees only float32, and code that depends on types (``tf.cond``, loops, ``py_function``, custom gradients)
works unchanged. In a graph TensorFlow removes pairs of casts that cancel.

For example, in a region for mixed_bfloat16, ``x @ w`` calls the generated function ``gen_math_ops.mat_mul``. The first
region replaced this function by one that asks for the current `Lowering` and calls the original with ``x`` and ``w`` in
bfloat16; the result is cast to float32. Outside regions it calls the original directly.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import tensorflow as tf

from polyamp.backends.tensorflow import unstable
from polyamp.backends.tensorflow.autocast.lowering import (
    Lowering,
    current,
    entered,
    lowering_for,
    set_everywhere,
)
from polyamp.backends.tensorflow.graphs.capture import check_format
from polyamp.policies import Policy
from polyamp.policies import policy as make_policy


@contextmanager
def autocast_context(policy: Policy | str) -> Iterator[None]:
    """Run operations of class ``lower`` in the policy's ``compute`` format; a float32 policy disables this.

    It applies to eager code and to functions that are traced inside. A ``tf.function`` keeps one trace for each policy,
    and one for calls outside. The backward pass has the formats of its forward pass, even if it is taken outside; code
    of ``tf.recompute_grad`` and custom gradients runs under the policy of the forward call. Regions can be nested and
    entered again. Threads and async tasks do not see each other's regions.

    >>> from polyamp import policy
    >>> third = tf.constant([[1 / 3]])
    >>> with autocast_context(policy("mixed_bfloat16")):
    ...     product = third @ tf.ones((1, 1))
    >>> product.dtype, float(product[0, 0])
    (tf.float32, 0.333984375)

    Code that it cannot see runs as it is written: replica threads of a ``tf.distribute.MirroredStrategy`` and
    ``tf.py_function`` (enter the region inside the function that they run), a ``ConcreteFunction`` or SavedModel that
    was traced before, operations that are not in `OPERATIONS`, such as your own, and references into
    ``tensorflow.python.ops.gen_*`` that another package imported before the first region. ``polyamp.rewrite`` sees the
    whole graph instead.

    Args:
        policy: a policy or its name. Its ``compute`` format and its rules are used, by operation and by name scope
            (each Keras layer opens one). An operation without a kernel for the format on its device runs in float32.
            Inputs of other types stay as the user wrote them.

    Raises:
        UnsupportedError: the format is not float32 or a 16-bit float, nor tensorfloat32 while TensorFlow has it
            enabled.

    Warns:
        PolyampWarning: TensorFlow ran inside, and nothing was ever lowered under this policy; or the path of a rule
            matched nothing.
    """
    lowering = lowering_of(make_policy(policy))
    before = unstable.newest_tensor()
    with entered(lowering):
        yield
    if lowering is not None and unstable.newest_tensor() > before + 1:
        lowering.report()


def lowering_of(policy: Policy) -> Lowering | None:
    """Return the lowering of a policy; None if the policy lowers nothing."""
    # TensorFlow itself multiplies float32 numbers in this format, unless that is disabled.
    is_native = policy.compute == "tensorfloat32" and tf.config.experimental.tensor_float_32_execution_enabled()
    if not is_native:
        check_format(policy.compute)
    return None if is_native or policy.compute == "float32" else lowering_for(policy.compute, policy.rules)


def autocast_everywhere(policy: Policy | None) -> None:
    """Autocast outside regions too, in every thread, from now on; None ends this."""
    set_everywhere(None if policy is None else lowering_of(policy))


def is_lowering() -> bool:
    """Return whether autocast of polyamp, or TensorFlow's own pass, lowers operations that run now."""
    return current() is not None or bool(tf.config.optimizer.get_experimental_options().get("auto_mixed_precision"))
