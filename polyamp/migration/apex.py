"""``apex.amp``: its calls. `apex_initialize` converts ``initialize``; `apex_scale_loss` converts ``scale_loss``."""

from __future__ import annotations

import libcst as cst

from polyamp.migration.apex_clipping import clips_master_params, unscale_before_clips
from polyamp.migration.apex_initialize import Initialize, initialize_of
from polyamp.migration.apex_scale_loss import ScaleLoss, scale_loss_of
from polyamp.migration.arguments import literal
from polyamp.migration.program import Program, Use

ROOTS = ("apex.amp",)
WRITE = (
    "the lines of docs/migrate/apex.md, or, to keep the program as it is, "
    "`from polyamp.backends.torch.compat.apex import amp`"
)

_OWN_FUNCTIONS = (
    'a rule of the policy, such as rules={"nms": "full"}; or `with polyamp.autocast("float32"):` in the function'
)
_WRITE = {
    "apex.amp.init": "polyamp.policy and polyamp.autocast: the handle interface has no replacement",
    "apex.amp.master_params": 'opt.unscale_(), then [p for group in opt.param_groups for p in group["params"]]',
    **{
        f"apex.amp.{prefix}{kind}_function": _OWN_FUNCTIONS
        for prefix in ("", "register_")
        for kind in ("half", "float", "promote", "bfloat16")
    },
}
"""What to write where a use cannot be converted."""

_MODELS = "the forward pass that this loss comes from cannot be told"
_WRITE_REGION = "with polyamp.autocast(policy): around the model's call and the loss, and opt.backward(loss)"


def convert(program: Program) -> None:
    """Convert the whole recipe of a file; refuse each place that has no equivalent."""
    uses = program.uses(ROOTS)
    made = [initialize_of(program, use) for use in uses if use.name == "apex.amp.initialize"]
    initialized = [one for one in made if one is not None]
    scaled = [scale_loss_of(program, use) for use in uses if use.name == "apex.amp.scale_loss"]
    losses = [one for one in scaled if one is not None]
    if uses and not program.refused:
        _regions(program, initialized, losses)
        unscale_before_clips(program, losses)
    for loss in losses:
        loss.convert()
    for one in initialized:
        one.convert()
    optimizers = {code for one in losses for code in one.optimizers[:1]} | {
        code for one in initialized for code in one.optimizers
    }
    for use in uses:
        if use.node not in program.claimed:
            _other(program, use, optimizers)


def _regions(program: Program, made: list[Initialize], losses: list[ScaleLoss]) -> None:
    """Put autocast around the forward pass of each loss, if the level is O1 or is known when the program runs."""
    levels = {one.level for one in made}
    if made and all(literal(level) in ("O0", "O2", "O3") for level in levels):
        return
    if len(levels) > 1:
        program.refuse(made[1].call, "a second amp.initialize with another level", _WRITE_REGION)
        return
    for loss in losses:
        _region(program, made, loss)
    if made and not losses and made[0].optimizers:
        program.refuse(made[0].call, "the forward pass of this model is in another file", _WRITE_REGION)


def _region(program: Program, made: list[Initialize], loss: ScaleLoss) -> None:
    models = {code for one in made for code in one.models}
    forward = loss.forward(models)
    if forward is None and made:
        program.refuse(loss.statement, _MODELS, _WRITE_REGION)
    elif forward is None or not made:
        program.note(
            loss.statement, "wrap the optimizer where it is made, and run the forward pass in polyamp.autocast(policy)"
        )
    else:
        loss.autocast(forward, made[0])


def _other(program: Program, use: Use, optimizers: set[str]) -> None:
    call = program.call(use)
    name = use.name
    if name == "apex.amp.master_params" and clips_master_params(program, use):
        return
    if call is not None and name == "apex.amp.disable_casts":
        program.replace(call, 'polyamp.autocast("float32")')
        return
    if call is not None and name in ("apex.amp.state_dict", "apex.amp.load_state_dict"):
        optimizer = _optimizer_here(program, use, optimizers)
        if optimizer is not None:
            _state(program, call, name, optimizer)
            return
        program.refuse(call, f"{name.removeprefix('apex.')} where no optimizer is in sight", _STATE)
        return
    program.refuse(use.node, name.removeprefix("apex."), _WRITE.get(name, WRITE))


_STATE = "polyamp.save_loss_scale(opt) and polyamp.load_loss_scale(opt, saved); opt.state_dict() has the loss scale too"


def _state(program: Program, call: cst.Call, name: str, optimizer: str) -> None:
    if name == "apex.amp.state_dict":
        program.replace(call, f"polyamp.save_loss_scale({optimizer})")
    else:
        saved = program.code(call.args[0].value)
        program.replace(call, f"polyamp.load_loss_scale({optimizer}, {saved})")


def _optimizer_here(program: Program, use: Use, optimizers: set[str]) -> str | None:
    """Return the one optimizer of the file, if its name is bound where it is needed."""
    if len(optimizers) != 1:
        return None
    (optimizer,) = optimizers
    scope = program.scope(use.node)
    return optimizer if scope is not None and optimizer.partition(".")[0] in scope else None
