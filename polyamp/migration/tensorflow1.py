"""TensorFlow 1's graph rewrite: the functions of the old names that polyamp keeps, for every optimizer."""

from __future__ import annotations

from polyamp.migration.program import Program

_PLACES = (
    "tensorflow.train.experimental",
    "tensorflow.compat.v1.train.experimental",
    "tensorflow.compat.v1.mixed_precision",
)
_FUNCTIONS = ("enable_mixed_precision_graph_rewrite", "disable_mixed_precision_graph_rewrite")
_CONVERTED = {f"{place}.{name}": f"polyamp.backends.tensorflow.{name}" for place in _PLACES for name in _FUNCTIONS}

ROOTS = (
    *_CONVERTED,
    "tensorflow.compat.v1.mixed_precision",
    "tensorflow.mixed_precision.experimental",
    "tensorflow.train.experimental.DynamicLossScale",
    "tensorflow.train.experimental.FixedLossScale",
    "tensorflow.train.experimental.MixedPrecisionLossScaleOptimizer",
)
WRITE = "polyamp.wrap_optimizer(opt, policy), with loss_scale=polyamp.LossScale(...): docs/migrate/tensorflow1.md"


def convert(program: Program) -> None:
    """Convert the two functions of the graph rewrite."""
    for use in program.uses(tuple(_CONVERTED)):
        if use.name in _CONVERTED:
            program.replace(use.node, _CONVERTED[use.name])
