"""Lower products that a graph of TensorFlow 1 has already: a script often builds its loss before its optimizer.

For example, the graph has ``loss = mean(matmul(x, w))``. A second product is made next to the first, with both inputs
cast to float16 and its result cast to float32, and ``mean`` reads that. What the script holds, here ``loss``, stays.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from polyamp.backends.tensorflow.graphs.graph import Node
from polyamp.backends.tensorflow.graphs.kernels import lowerable
from polyamp.backends.tensorflow.operations import OPERATIONS
from polyamp.backends.tensorflow.unstable import is_in_control_flow, replace_input
from polyamp.markers import UPDATE_SCOPE
from polyamp.operations import OPERATIONS as TABLE


def lower_products(graph: tf.Graph, dtype: tf.DType) -> list[str]:
    """Run the float32 products of a graph that did not run yet in 16 bits, and return the names of those that stay.

    Products inside loops and conditionals of TensorFlow 1 stay, and those without a kernel for the type.

    >>> with tf.Graph().as_default() as graph:
    ...     total = tf.reduce_sum(tf.ones((2, 2)) @ tf.ones((2, 2)))
    >>> lower_products(graph, tf.float16), total.op.inputs[0].op.inputs[0].dtype
    ([], tf.float16)

    Args:
        graph: a graph of a ``Session``.
        dtype: tf.float16 or tf.bfloat16.
    """
    staying = []
    for operation in graph.get_operations():
        if not is_full_product(operation):
            continue
        low = () if is_in_control_flow(operation) else lowerable(_node(operation), dtype.as_datatype_enum)
        if low:
            _lower(graph, operation, low, dtype)
        else:
            staying.append(operation.name)
    return staying


def is_full_product(operation: tf.Operation) -> bool:
    """Return whether an operation is of class ``lower``, computes in float32, and is not part of an update.

    >>> with tf.Graph().as_default():
    ...     is_full_product((tf.ones((2, 2)) @ tf.ones((2, 2))).op)
    True
    """
    name = OPERATIONS.get(operation.type)
    is_product = name is not None and TABLE[name].op_class == "lower" and UPDATE_SCOPE not in operation.name
    return is_product and any(output.dtype.base_dtype == tf.float32 for output in operation.outputs)


def _lower(graph: tf.Graph, operation: tf.Operation, low: tuple[str, ...], dtype: tf.DType) -> None:
    node, attributes = _node(operation), dict(operation.node_def.attr)
    for name in low:
        attributes[name] = tf.compat.v1.AttrValue(type=dtype.as_datatype_enum)
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
            tf.cast(value, dtype) if port.attribute in low else value
            for value, port in zip(operation.inputs, node.input_ports, strict=True)
        ]
        made = graph.create_op(
            operation.type, inputs, attrs=attributes, op_def=operation.op_def, name=f"{operation.name}_{dtype.name}"
        )
        results = [
            tf.cast(value, tf.float32) if port.attribute in low else value
            for value, port in zip(made.outputs, node.output_ports, strict=True)
        ]
    for result, places in zip(results, readers, strict=True):
        for reader, place in places:
            replace_input(reader, place, result)


def _node(operation: Any) -> Node:
    return Node(operation.node_def, operation.op_def, in_function=False)
