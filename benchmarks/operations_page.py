"""Write docs/operations.md: the table of operations, with its sources.

python benchmarks/operations_page.py
"""

from __future__ import annotations

from pathlib import Path

from polyamp.operations import CLASSES, OPERATIONS, RULE_VERSION, SOURCES

PAGE = Path(__file__).parents[1] / "docs" / "operations.md"
HEAD = f"""# The operations

This is version {RULE_VERSION} of the flow rule and of its default table: the class of each operation, in every
framework. A policy's own rules come first: `polyamp.policy("mixed_float16", rules={{"softmax": "lower"}})`. This page
is written by `benchmarks/operations_page.py`, from `polyamp/operations.py`.

If a source puts an operation into another class, that class is in brackets.
"""

EAGER = """
## In PyTorch's eager regions

`polyamp.autocast` runs PyTorch's operations by PyTorch's own lists, the sources `cuda` and `cpu`, wherever no rule of
yours decides; what its list does not have runs in the format of its inputs. The list for GPUs alone has these, in
float32. A CPU runs them so in float16; **in bfloat16 a CPU runs them in the format of their inputs**, as
`torch.autocast` does: {names}.

Operands of different formats are promoted on every device where PyTorch would refuse them, except in place and in
`out=`. `rewrite` follows the classes below on every device.
"""


def _on_gpus_alone() -> list[str]:
    """Return the operations that autocast runs in float32 on a GPU, and in bfloat16 on a CPU in bfloat16."""
    return [
        name for name, entry in OPERATIONS.items() if entry.sources.get("cuda") == "full" and "cpu" not in entry.sources
    ]


def as_markdown() -> str:
    """Return the table as Markdown."""
    pages = [HEAD, EAGER.format(names=", ".join(f"`{name}`" for name in _on_gpus_alone()))]
    for op_class, meaning in CLASSES.items():
        pages.append(f"\n## {op_class}: {meaning}\n\n| operation | sources | why |\n|---|---|---|\n")
        for name, entry in OPERATIONS.items():
            if entry.op_class == op_class:
                votes = (key if vote == op_class else f"{key} ({vote})" for key, vote in entry.sources.items())
                pages.append(f"| `{name}` | {', '.join(votes)} | {entry.why.replace('**', '^')} |\n")
    pages.append("\n## Sources\n\n")
    pages.extend(f"- **{key}**: {source}\n" for key, source in SOURCES.items())
    return "".join(pages)


if __name__ == "__main__":
    PAGE.write_text(as_markdown())
