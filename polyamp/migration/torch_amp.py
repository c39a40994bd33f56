"""``torch.amp`` and ``torch.cuda.amp``: autocast and decorators of autograd functions. `torch_scaler` has scalers."""

from __future__ import annotations

import libcst as cst

from polyamp.migration import torch_scaler
from polyamp.migration.arguments import Arguments, chosen, literal, policy_of_dtype
from polyamp.migration.program import Program, Use, is_in

AUTOCASTS = {
    "torch.autocast": ("device_type", "dtype", "enabled", "cache_enabled"),
    "torch.amp.autocast": ("device_type", "dtype", "enabled", "cache_enabled"),
    "torch.amp.autocast_mode.autocast": ("device_type", "dtype", "enabled", "cache_enabled"),
    "torch.cuda.amp.autocast": ("enabled", "dtype", "cache_enabled"),
    "torch.cuda.amp.autocast_mode.autocast": ("enabled", "dtype", "cache_enabled"),
    "torch.cpu.amp.autocast": ("enabled", "dtype", "cache_enabled"),
}
"""For each name of autocast, its positional parameters."""

ROOTS = ("torch.autocast", "torch.amp", "torch.cuda.amp", "torch.cpu.amp")
WRITE = "polyamp.autocast(policy) and polyamp.wrap_optimizer(opt, policy): docs/migrate/torch_amp.md"

_ON_CPU = "on a CPU torch computes in bfloat16 here, and polyamp in float16; name the policy that you want"
_LATER = "write functools.partial(polyamp.autocast, policy), or call polyamp.autocast(policy) where the region begins"


def convert(program: Program) -> None:
    """Convert the regions, the scalers, and the decorators of autograd functions."""
    for use in program.uses(ROOTS):
        if use.name in AUTOCASTS:
            _autocast(program, use)
        elif use.name.rpartition(".")[2] in ("custom_fwd", "custom_bwd"):
            _custom(program, use)
    torch_scaler.convert(program)


def _autocast(program: Program, use: Use) -> None:
    call = program.call(use)
    names = AUTOCASTS[use.name]
    if call is not None:
        program.replace(call, f"polyamp.autocast({_policy(program, use, Arguments(program, call, names))})")
        return
    above = program.parent(program.parent(use.node) or program.module)
    if isinstance(above, cst.Call) and _is_partial(program, above) and above.args[0].value is use.node:
        given = Arguments(program, above.with_changes(args=above.args[1:]), names)
        program.replace(above, f"{program.code(above.func)}(polyamp.autocast, {_policy(program, use, given)})")
    else:
        program.refuse(use.node, f"{use.name} without a call", _LATER)


def _is_partial(program: Program, call: cst.Call) -> bool:
    return any(use.node is call.func for use in program.uses(("functools.partial",)))


def _policy(program: Program, use: Use, given: Arguments) -> str:
    """Return the source of the policy for a region of torch, and note where it may compute in another format."""
    node = next(iter(given.given.values()), use.node)
    if given.unknown or given.others("device_type", "dtype", "enabled", "cache_enabled"):
        program.refuse(use.node, f"{use.name} with arguments that cannot be told", _LATER)
        return '"mixed_float16"'
    if given.literal("cache_enabled", True) is not True:
        program.note(use.node, "there is no cache_enabled here: weights are cast once in each region")
    enabled = given.code("enabled")
    if enabled is not None and literal(enabled) is False:
        return '"float32"'
    dtype = given.given.get("dtype")
    if dtype is not None and given.literal("dtype") is not None:
        policy = policy_of_dtype(program, dtype)
        conditional = isinstance(dtype, cst.IfExp)
    else:
        policy, conditional = _of_device(program, use, given, node), False
    return chosen(f"({policy})" if conditional and enabled else policy, enabled)


def _of_device(program: Program, use: Use, given: Arguments, node: cst.CSTNode) -> str:
    device = given.literal("device_type", "cpu" if is_in(use.name, ("torch.cpu",)) else "cuda")
    if device is ...:
        program.note(node, _ON_CPU)
    return '"mixed_bfloat16"' if device == "cpu" else '"mixed_float16"'


def _custom(program: Program, use: Use) -> None:
    """Convert ``custom_fwd`` and ``custom_bwd``: a dtype becomes the class of operations that run in it."""
    call = program.call(use)
    name = f"polyamp.backends.torch.{use.name.rpartition('.')[2]}"
    if call is None:
        program.replace(use.node, name)
        return
    given = Arguments(program, call, ("fwd" if name.endswith("fwd") else "bwd",))
    dtype = given.given.get("cast_inputs")
    policy = '""' if dtype is None else policy_of_dtype(program, dtype).strip('"')
    classes = {"mixed_float16": "lower", "mixed_bfloat16": "lower", "float32": "full", '""': None}
    if given.unknown or policy not in classes:
        program.refuse(
            use.node, f"{use.name} with arguments that cannot be told", f'{name}(op_class="lower" or "full")'
        )
        return
    first = given.code("fwd") or given.code("bwd")
    options = [part for part in (first, classes[policy] and f'op_class="{classes[policy]}"') if part]
    program.replace(call, f"{name}({', '.join(options)})" if options else name)
