"""flax ``DynamicScale``: its state is passed through the program, so a person converts it. The places are named."""

from __future__ import annotations

from polyamp.migration.program import Program

ROOTS = (
    "flax.training.dynamic_scale.DynamicScale",
    "flax.optim.DynamicScale",
    "flax.optim.dynamic_scale.DynamicScale",
    "flax.training.dynamic_scale.DynamicScaleResult",
)
WRITE = (
    "tx = polyamp.wrap_optimizer(tx, policy), then polyamp.value_and_grad(loss_fn, policy)(opt_state, params), which "
    "needs no select: docs/migrate/flax.md"
)


def convert(program: Program) -> None:
    """Refuse every use, with what to write."""
    for use in program.uses(ROOTS):
        program.refuse(use.node, "flax DynamicScale", WRITE)
