"""TensorFlow's own mixed-precision passes, by name on a graph, as a reference to compare with."""

from collections.abc import Sequence
from typing import Any

import pytest
import tensorflow as tf
from tensorflow.python.grappler import tf_optimizer

PASSES = {"float16": "auto_mixed_precision_cpu", "bfloat16": "auto_mixed_precision_onednn_bfloat16"}
"""For each format the pass of this processor, whether it has units for the format or not."""


def after_pass(graph_def: Any, fetches: Sequence[str], low: str, *, inline: bool = False) -> Any:
    """Return a graph after TensorFlow's pass for a format, with calls inlined first if asked."""
    config = tf.compat.v1.ConfigProto()
    options = config.graph_options.rewrite_options
    options.optimizers.extend(["function", PASSES[low]] if inline else [PASSES[low]])
    options.meta_optimizer_iterations = options.ONE
    options.min_graph_nodes = -1  # graphs of three nodes too
    metagraph = tf.compat.v1.MetaGraphDef(graph_def=graph_def)
    metagraph.collection_def["train_op"].node_list.value.extend(fetches)
    with pytest.MonkeyPatch.context() as patch:  # otherwise it casts around operations that stay float32
        patch.setenv("TF_AUTO_MIXED_PRECISION_GRAPH_REWRITE_EMULATE_FP16", "0")
        return tf_optimizer.OptimizeGraph(config, metagraph, verbose=False)
