"""``enable_mixed_precision_graph_rewrite``: a function that TensorFlow 2 removed, for optimizers of both versions.

In ``tf.compat.v1`` it still enables TensorFlow's own pass, which does nothing on a CPU or under XLA and refuses the
optimizers of Keras 3. Here it enables the float16 autocast of `polyamp.autocast` on every device, and lowers products
that a graph of TensorFlow 1 has already, since a script often builds its loss before its optimizer:

    loss = mean(matmul(x, w))    ->    loss = mean(cast(matmul(cast(x, float16), cast(w, float16)), float32))

What the script holds, here ``loss``, stays.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from polyamp.backends.tensorflow.autocast.context import autocast_everywhere
from polyamp.backends.tensorflow.autocast.lowering import everywhere
from polyamp.backends.tensorflow.devices import lowerable
from polyamp.backends.tensorflow.graphs.graph import UPDATE_SCOPE, Node
from polyamp.backends.tensorflow.operations import OPERATIONS
from polyamp.backends.tensorflow.unstable import is_in_control_flow, replace_input
from polyamp.errors import InvalidTypeError, is_number, shown, warn_once
from polyamp.libraries import LIBRARIES
from polyamp.operations import OPERATIONS as TABLE
from polyamp.policies import policy
from polyamp.settings import LossScale
from polyamp.verbs import wrap_optimizer


def enable_mixed_precision_graph_rewrite(opt: Any, loss_scale: Any = "dynamic") -> Any:
    """Run products in float16 from now on, in the whole process, and wrap an optimizer with a loss scale.

    It affects everything that runs eagerly, is traced or is built later, in every thread, and what the default graph of
    a ``Session`` has already; a ``tf.function`` that was traced before is traced again. A ``polyamp.autocast`` region
    inside it uses its own policy. Call it again to wrap another optimizer. In new code, `polyamp.wrap_optimizer` and
    `polyamp.autocast` have more options.

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
        PolyampWarning: products in the default graph of a ``Session`` stay float32: in a loop, for example.
    """
    mixed = policy("mixed_float16")
    settings = _loss_scale_of(loss_scale)
    wrapped = wrap_optimizer(opt, mixed, loss_scale=settings)
    autocast_everywhere(mixed)
    if not tf.executing_eagerly():
        _lower_products(tf.compat.v1.get_default_graph())
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
    if everywhere() is None:
        warn_once("disable_mixed_precision_graph_rewrite() changed nothing: it was not enabled")
    autocast_everywhere(None)


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


def _lower_products(graph: tf.Graph) -> None:
    """Run the float32 products of a graph that did not run yet in float16, and report those that stay."""
    staying = []
    for operation in filter(_is_full_product, graph.get_operations()):
        node = Node(operation.node_def, operation.op_def, in_function=False)
        if low := () if is_in_control_flow(operation) else lowerable(node, tf.float16.as_datatype_enum):
            _lower(graph, operation, node, low)
        else:
            staying.append(operation.name)
    if staying:
        warn_once(
            f"{len(staying)} products of the default graph, {staying[0]} the first, stay float32: they are in a "
            "loop or conditional of TensorFlow 1 that was built before enable_mixed_precision_graph_rewrite, or have "
            "no float16 kernel. Call it before the model is built, or rewrite the graph: "
            "polyamp.rewrite(graph.as_graph_def(), policy=...).",
        )


def _is_full_product(operation: tf.Operation) -> bool:
    """Return whether an operation is of class ``lower``, computes in float32, and is not part of an update."""
    name = OPERATIONS.get(operation.type)
    is_product = name is not None and TABLE[name].op_class == "lower" and UPDATE_SCOPE not in operation.name
    return is_product and any(output.dtype.base_dtype == tf.float32 for output in operation.outputs)


def _lower(graph: tf.Graph, operation: tf.Operation, node: Node, low: tuple[str, ...]) -> None:
    attributes = dict(operation.node_def.attr)
    for name in low:
        attributes[name] = tf.compat.v1.AttrValue(type=tf.float16.as_datatype_enum)
    readers = [
        [(reader, place) for reader in output.consumers() for place, read in enumerate(reader.inputs) if read is output]
        for output in operation.outputs
    ]
    with (
        graph.as_default(),
        graph.control_dependencies(None),
        graph.control_dependencies(operation.control_inputs),
        graph.name_scope(None),
        graph.device(operation.device or None),
    ):
        inputs = [
            tf.cast(value, tf.float16) if port.attribute in low else value
            for value, port in zip(operation.inputs, node.input_ports, strict=True)
        ]
        made = graph.create_op(
            operation.type, inputs, attrs=attributes, op_def=operation.op_def, name=f"{operation.name}_float16"
        )
        results = [
            tf.cast(value, tf.float32) if port.attribute in low else value
            for value, port in zip(made.outputs, node.output_ports, strict=True)
        ]
    for result, places in zip(results, readers, strict=True):
        for reader, place in places:
            replace_input(reader, place, result)
