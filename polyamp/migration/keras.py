"""``tf.keras.mixed_precision``: names of its experimental form, and loss-scaled optimizers.

What layers compute in stays Keras' own setting, the global policy. The optimizer becomes polyamp's.
"""

from __future__ import annotations

from typing import Any

import libcst as cst
from libcst import matchers as m

from polyamp.migration.arguments import Arguments
from polyamp.migration.program import Program, Use, dotted_name, inside

_OLD = ("tensorflow.keras.mixed_precision", "tensorflow.python.keras.mixed_precision", "keras.mixed_precision")
_EXPERIMENTAL = tuple(f"{place}.experimental" for place in _OLD)
_SCALED = tuple(
    f"{place}.LossScaleOptimizer"
    for place in (*_OLD, *_EXPERIMENTAL, *(f"{old}.loss_scale_optimizer" for old in (*_OLD, *_EXPERIMENTAL)))
)

ROOTS = (*_EXPERIMENTAL, *_SCALED)
WRITE = "polyamp.wrap_optimizer(optimizer, policy), and optimizer.scale_loss(loss) in a loop: docs/migrate/keras.md"

_METHODS = ("get_scaled_loss", "get_unscaled_gradients")
_PLACES = (("tensorflow", "keras.mixed_precision"), ("keras", "mixed_precision"))
_RENAMED = {"set_policy": "set_global_policy", "global_policy": "global_policy", "Policy": "Policy"}
_CLIPPED = "wrap_optimizer(optimizer, policy, max_grad_norm=...), which clips unscaled gradients"


def convert(program: Program) -> None:
    """Convert the experimental names, the optimizers and the loops that scale a loss."""
    for use in program.uses(ROOTS):
        if use.name.endswith(".LossScaleOptimizer"):
            _optimizer(program, use)
        else:
            _experimental(program, use)
    if program.uses(("tensorflow", "keras")):
        _loops(program)


def _experimental(program: Program, use: Use) -> None:
    place, _, name = use.name.rpartition(".")
    call = program.call(use)
    root = _spelled(program, use)
    if place not in _EXPERIMENTAL or name not in _RENAMED or root is None:
        return  # refused, as every use that is not converted
    given = Arguments(program, call, ("name", "loss_scale")) if call is not None else None
    if call is None or given is None or (not given.unknown and "loss_scale" not in given.given):
        program.replace(use.node, f"{root}.{_RENAMED[name]}")
    elif given.literal("loss_scale") == "dynamic" and "name" in given.given:  # the default of mixed_float16
        program.replace(call, f"{root}.{_RENAMED[name]}({given.code('name')})")


def _spelled(program: Program, use: Use) -> str | None:
    """Return how this program can write ``tf.keras.mixed_precision``; None if it imports neither tf nor keras."""
    dotted = dotted_name(use.node) or ""
    if ".experimental." in dotted:
        return dotted.partition(".experimental.")[0]
    for name, place in _PLACES:
        for one in program.uses((name,)):
            written, suffix = dotted_name(one.node) or "", one.name.removeprefix(name)
            if written.endswith(suffix):
                return f"{written.removesuffix(suffix)}.{place}"
    return None


def _optimizer(program: Program, use: Use) -> None:
    call = program.call(use)
    if call is None:
        above = program.parent(program.parent(use.node) or use.node)
        if isinstance(above, cst.Call) and m.matches(above.func, m.Name("isinstance")):
            program.replace(use.node, "polyamp.backends.keras.LossScaledOptimizer")
        return
    given = Arguments(program, call, ("optimizer", *(("loss_scale",) if "experimental" in use.name else ())))
    given.given.setdefault("optimizer", given.given.get("inner_optimizer"))  # type: ignore[arg-type]
    scale = _loss_scale(given)
    if given.unknown or given.given["optimizer"] is None or scale is None:
        program.refuse(call, "LossScaleOptimizer with arguments that cannot be told", WRITE)
        return
    program.replace(call, f'polyamp.wrap_optimizer({given.code("optimizer")}, "mixed_float16"{scale})')


def _loss_scale(given: Arguments) -> str | None:
    """Return the option for the loss scale, with the settings that Keras has; None if it cannot be told."""
    if given.others("optimizer", "inner_optimizer", "loss_scale", "dynamic", "initial_scale", "dynamic_growth_steps"):
        return None
    value, dynamic = given.literal("loss_scale"), given.literal("dynamic", True)
    if isinstance(value, int | float) and not isinstance(value, bool):
        return f", loss_scale={float(value)}"
    if value not in (None, "dynamic") or dynamic is ...:
        return None
    if dynamic is False:
        fixed: Any = given.code("initial_scale")
        return None if fixed is None else f", loss_scale=float({fixed})"
    settings = (("initial_scale", "init"), ("dynamic_growth_steps", "interval"))
    changed = "".join(f", {to}={given.code(name)}" for name, to in settings if name in given.given)
    return f', loss_scale=polyamp.LossScale.like("keras"{changed})'


def _loops(program: Program) -> None:
    """Convert ``get_scaled_loss``; drop ``get_unscaled_gradients``, which the optimizer does by itself."""
    for call in program.find(cst.Call):
        if not isinstance(call.func, cst.Attribute) or call.func.attr.value not in _METHODS:
            continue
        optimizer, argument = program.code(call.func.value), program.code(call.args[0].value) if call.args else ""
        if call.func.attr.value == "get_scaled_loss":
            program.replace(call, f"{optimizer}.scale_loss({argument})")
        elif _only_applied(program, call):
            program.replace(call, argument)
        else:
            program.refuse(call, "gradients that are used after get_unscaled_gradients", _CLIPPED)


def _only_applied(program: Program, call: cst.Call) -> bool:
    """Return whether the unscaled gradients go into ``apply_gradients`` and nowhere else."""
    assign = program.parent(call)
    target = assign.targets[0].target if isinstance(assign, cst.Assign) and len(assign.targets) == 1 else None
    if not isinstance(target, cst.Name):
        return False
    function = program.function(call)
    argument = program.code(call.args[0].value)
    later = [
        one
        for one in inside(function, cst.Name)
        if one.value == target.value and program.line(one) > program.line(call)
    ]
    applied = m.Call(func=m.Attribute(attr=m.Name("apply_gradients")))
    return (
        all(any(m.matches(above, applied) for above in program.around(one)) for one in later)
        and argument.isidentifier()
    )
