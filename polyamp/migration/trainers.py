"""Words in the configurations of trainers. They are only named: the page of the trainer tells what to write."""

from __future__ import annotations

from polyamp.migration.program import Program

_NAMED = {
    "deepspeed.initialize": ((), "deepspeed", "docs/migrate/deepspeed.md"),
    "lightning.Trainer": (("precision",), "Lightning", "docs/migrate/lightning.md"),
    "lightning.Fabric": (("precision",), "Lightning", "docs/migrate/lightning.md"),
    "lightning.pytorch.Trainer": (("precision",), "Lightning", "docs/migrate/lightning.md"),
    "lightning.fabric.Fabric": (("precision",), "Lightning", "docs/migrate/lightning.md"),
    "pytorch_lightning.Trainer": (("precision", "amp_backend", "amp_level"), "Lightning", "docs/migrate/lightning.md"),
    "accelerate.Accelerator": (("mixed_precision", "fp16"), "accelerate", "docs/trainers/accelerate.md"),
    "transformers.TrainingArguments": (
        ("fp16", "bf16", "half_precision_backend"),
        "transformers",
        "docs/trainers/transformers.md",
    ),
}
"""For each call: the arguments that set the precision (none: the call itself does), the trainer, and the page."""


def convert(program: Program) -> None:
    """Name each trainer whose own mixed precision the program sets; nothing is changed."""
    for use in program.uses(tuple(_NAMED)):
        call = program.call(use)
        if call is None or use.name not in _NAMED:
            continue
        words, trainer, page = _NAMED[use.name]
        found = [program.code(arg) for arg in call.args if arg.keyword is not None and arg.keyword.value in words]
        if found or not words:
            program.name(call, f"the mixed precision of {trainer} ({', '.join(found) or use.name})", page)
