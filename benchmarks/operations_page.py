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


def as_markdown() -> str:
    """Return the table as Markdown."""
    pages = [HEAD]
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
