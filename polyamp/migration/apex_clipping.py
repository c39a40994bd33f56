"""Clipping after ``amp.scale_loss``: of master parameters, and of the model's own, which Apex had unscaled by then."""

from __future__ import annotations

import libcst as cst

from polyamp.migration.apex_scale_loss import ScaleLoss
from polyamp.migration.arguments import Arguments
from polyamp.migration.program import Program, Use, dotted_name, inside, is_in

_NORMS = ("clip_grad_norm_", "clip_grad_norm")
_CLIPS = (*_NORMS, "clip_grad_value_")
_WRITE = "opt.unscale_() above it, where the optimizer is wrapped; or opt.clip_grad_norm_(limit) in its place"


def clips_master_params(program: Program, use: Use) -> bool:
    """Convert ``clip_grad_norm_(amp.master_params(opt), limit)``; return whether the use is that."""
    call = program.call(use)
    argument = program.parent(call) if call is not None else None
    clip = program.parent(argument) if isinstance(argument, cst.Arg) else None
    if call is None or not isinstance(clip, cst.Call) or not call.args or _name(clip) not in _NORMS:
        return False
    given = Arguments(program, clip, ("parameters", "max_norm"))
    limit = given.code("max_norm")
    if given.unknown or limit is None or given.others("parameters", "max_norm"):
        return False
    program.replace(clip, f"{program.code(call.args[0].value)}.clip_grad_norm_({limit})")
    return True


def unscale_before_clips(program: Program, losses: list[ScaleLoss]) -> None:
    """Unscale before each clipping of the model's own gradients, which follows ``scale_loss`` in the same function."""
    for loss in losses:
        for clip in inside(program.function(loss.statement), cst.Call):
            later = program.line(clip) > program.line(loss.statement)
            if later and _name(clip) in _CLIPS and not _is_of_masters(program, clip):
                _unscale_before(program, loss, clip)


def _unscale_before(program: Program, loss: ScaleLoss, clip: cst.Call) -> None:
    if _is_alternative(program, clip):
        return
    if not set(_branches(program, loss.statement)) <= set(_branches(program, clip)):
        program.refuse(clip, "clipping of gradients that are scaled in one branch of the program", _WRITE)
        return
    line = f"{loss.optimizers[0]}.unscale_()"
    before = program.before.setdefault(program.statement(clip), [])
    if line not in before:
        before.append(line)


def _is_alternative(program: Program, clip: cst.Call) -> bool:
    """Return whether the clipping is in the ``else`` of a branch that clips master parameters or scales the loss."""
    for above in program.around(clip):
        choice = program.parent(above)
        if isinstance(above, cst.Else) and isinstance(choice, cst.If):
            nodes = set(inside(choice.body, cst.Name, cst.Attribute))
            if any(use.node in nodes for use in program.uses(("apex.amp",))):
                return True
    return False


def _branches(program: Program, node: cst.CSTNode) -> list[cst.CSTNode]:
    """Return the branches around a node, up to its function."""
    found: list[cst.CSTNode] = []
    for above in program.around(node):
        if isinstance(above, cst.FunctionDef):
            break
        if isinstance(above, cst.IndentedBlock) and isinstance(program.parent(above), cst.If | cst.Else):
            found.append(above)
    return found


def _is_of_masters(program: Program, clip: cst.Call) -> bool:
    nodes = set(inside(clip, cst.Name, cst.Attribute))
    return any(use.node in nodes and is_in(use.name, ("apex.amp",)) for use in program.uses(("apex.amp",)))


def _name(call: cst.Call) -> str:
    return (dotted_name(call.func) or "").rpartition(".")[2]
