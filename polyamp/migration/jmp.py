"""``jmp``: its policies become polyamp's, which have the same methods. Its loss scales are for a person to convert."""

from __future__ import annotations

import libcst as cst

from polyamp.migration.arguments import Arguments, literal
from polyamp.migration.program import Program, Use

ROOTS = ("jmp",)
WRITE = (
    "the lines of docs/migrate/jmp.md, or, to keep the program as it is, `from polyamp.backends.jax.compat import jmp`"
)

_WORDS = {"bf16": "bfloat16", "f16": "float16", "f32": "float32", "f64": "float64"}
"""Words that jmp reads as pure policies, and trainers as mixed ones."""

_CASTS = {"jmp.cast_to_half": "float16", "jmp.cast_to_full": "float32"}
_LOSS_SCALE = "polyamp.wrap_optimizer(tx, policy), then polyamp.value_and_grad(loss_fn, policy)(opt_state, params, ...)"
_STEP = "tx.update(grads, opt_state, params) of the wrapped optimizer: it unscales, tests, skips and adjusts"
_WRITE = {
    "jmp.DynamicLossScale": f'{_LOSS_SCALE}; loss_scale=polyamp.LossScale.like("jmp")',
    "jmp.StaticLossScale": f"{_LOSS_SCALE}; loss_scale=128.0",
    "jmp.NoOpLossScale": f"{_LOSS_SCALE}; loss_scale=polyamp.LossScale.none()",
    "jmp.all_finite": _STEP,
    "jmp.select_tree": _STEP,
    "jmp.half_dtype": "the dtype that you want: jnp.float16 or jnp.bfloat16",
}


def convert(program: Program) -> None:
    """Convert the policies; name what to write for the loss scales."""
    for use in program.uses(ROOTS):
        call = program.call(use)
        if use.name == "jmp.get_policy" and call is not None and len(call.args) == 1:
            program.replace(call, f"polyamp.policy({_word(program.code(call.args[0].value))})")
        elif use.name == "jmp.Policy":
            _policy(program, use)
        elif use.name != "jmp":
            program.refuse(use.node, use.name, _WRITE.get(use.name, WRITE))
    for method in program.find(cst.Attribute) if program.uses(ROOTS) else ():
        if method.attr.value == "with_output_dtype":
            program.refuse(method, "policy.with_output_dtype", "polyamp.policy(policy, output=dtype)")


def _word(code: str) -> str:
    return f'"{_WORDS[word]}"' if (word := literal(code)) in _WORDS else code


def _policy(program: Program, use: Use) -> None:
    call = program.call(use)
    if call is None:
        program.replace(use.node, "polyamp.policy")
        return
    given = Arguments(program, call, ("param_dtype", "compute_dtype", "output_dtype"))
    if given.unknown or len(given.given) != 3:
        program.refuse(
            call, "jmp.Policy with arguments that cannot be told", "polyamp.policy(param=, compute=, output=)"
        )
        return
    parts = [f"{name.removesuffix('_dtype')}={given.code(name)}" for name in given.given]
    program.replace(call, f"polyamp.policy({', '.join(parts)})")
