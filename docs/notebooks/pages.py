"""Hook of the site: show each notebook as a page, with the outputs that are stored in it."""

from __future__ import annotations

import json
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Replace each notebook by a page of the same address."""
    for file in [file for file in files if file.src_uri.endswith(".ipynb")]:
        notebook = json.loads(Path(str(file.abs_src_path)).read_text())
        page = File.generated(
            config,
            file.src_uri.replace(".ipynb", ".md"),
            content=as_markdown(notebook),
        )
        files.remove(file)
        files.append(page)
    return files


def as_markdown(notebook: dict) -> str:
    """Return the cells one after another: text as it is, code and what it printed in fences."""
    return (
        "\n\n".join(
            block for cell in notebook["cells"] for block in _blocks(cell)
        )
        + "\n"
    )


def _blocks(cell: dict) -> list[str]:
    source = "".join(cell["source"])
    if cell["cell_type"] == "markdown":
        return [source]
    printed = ["".join(output["text"]) for output in cell["outputs"]]
    return [
        f"```python\n{source}\n```",
        *(f"```\n{text.rstrip()}\n```" for text in printed),
    ]
