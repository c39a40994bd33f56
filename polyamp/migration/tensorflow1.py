"""TensorFlow 1's graph rewrite: the functions of the old names that polyamp keeps, for every optimizer."""

from __future__ import annotations

import libcst as cst

from polyamp.migration.arguments import Arguments
from polyamp.migration.program import Program, Use

_PLACES = (
    "tensorflow.train.experimental",
    "tensorflow.compat.v1.train.experimental",
    "tensorflow.compat.v1.mixed_precision",
    "tensorflow.mixed_precision.experimental",
)
_ENABLE = "enable_mixed_precision_graph_rewrite"
_FUNCTIONS = (_ENABLE, "disable_mixed_precision_graph_rewrite")
_CONVERTED = {f"{place}.{name}": f"polyamp.backends.tensorflow.{name}" for place in _PLACES for name in _FUNCTIONS}
_SCALES = {
    f"{place}.{name}": parameters
    for place in _PLACES
    for name, parameters in {
        "FixedLossScale": ("loss_scale_value",),
        "DynamicLossScale": ("initial_loss_scale", "increment_period", "multiplier"),
    }.items()
}
_SETTINGS = {"initial_loss_scale": "init", "increment_period": "interval", "multiplier": "growth"}

ROOTS: tuple[str, ...] = (
    *_CONVERTED,
    *_SCALES,
    *(f"{place}.MixedPrecisionLossScaleOptimizer" for place in _PLACES),
    "tensorflow.compat.v1.mixed_precision",
    "tensorflow.mixed_precision.experimental",
)
WRITE = "polyamp.wrap_optimizer(opt, policy), with loss_scale=polyamp.LossScale(...): docs/migrate/tensorflow1.md"


def convert(program: Program) -> None:
    """Convert the two functions of the graph rewrite, and the loss scales that are passed to them."""
    for use in program.uses(ROOTS):
        if use.name in _CONVERTED:
            program.replace(use.node, _CONVERTED[use.name])
        elif use.name in _SCALES:
            _loss_scale(program, use)


def _loss_scale(program: Program, use: Use) -> None:
    """Convert a loss scale whose only use is the graph rewrite; others are refused, as what is not converted."""
    call = program.call(use)
    if call is None or not _only_enables(program, call):
        return
    given = Arguments(program, call, _SCALES[use.name])
    if given.unknown or given.others(*_SCALES[use.name]):
        return
    if use.name.endswith("FixedLossScale"):
        program.replace(call, f"polyamp.LossScale.fixed({given.code('loss_scale_value')})")
        return
    changed = "".join(f", {to}={given.code(name)}" for name, to in _SETTINGS.items() if name in given.given)
    program.replace(call, f'polyamp.LossScale.like("tensorflow"{changed})')


def _only_enables(program: Program, call: cst.Call) -> bool:
    above = program.parent(call)
    if isinstance(above, cst.Arg):
        return _enables(program, above)
    target = above.targets[0].target if isinstance(above, cst.Assign) and len(above.targets) == 1 else None
    bound = program.bindings(target) if isinstance(target, cst.Name) else []
    reads = [program.parent(access.node) for one in bound for access in one.references]
    return bool(reads) and all(isinstance(read, cst.Arg) and _enables(program, read) for read in reads)


def _enables(program: Program, argument: cst.Arg) -> bool:
    """Return whether an argument is one of a call that enables the graph rewrite."""
    call = program.parent(argument)
    uses = [use.node for use in program.uses(tuple(_CONVERTED)) if use.name.endswith(_ENABLE)]
    return isinstance(call, cst.Call) and call.func in uses
