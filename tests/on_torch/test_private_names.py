"""The private names of PyTorch that polyamp uses: they are in ``unstable`` alone, and few."""

import ast
from pathlib import Path

from polyamp.backends import torch as adapter

FOLDER = Path(adapter.__file__).parent
MOST = 71  # a new one has to replace an old one


def is_private(name: str) -> bool:
    return any(part.startswith("_") and not part.startswith("__") for part in name.split("."))


def dotted(node: ast.expr) -> str:
    """The longest chain of names that ends here, as ``torch._C._functorch.peek_interpreter_stack``."""
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def private_names(source: str) -> set[str]:
    """Names of PyTorch in a source: private attributes, and what is imported from private modules."""
    tree = ast.parse(source)
    attributes = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
    own = {node.attr for node in attributes if dotted(node.value) in ("self", "cls")}
    inner = {id(node.value) for node in attributes}
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and id(node) not in inner:
            name = dotted(node)
            if is_private(name.partition(".")[2]) and name.split(".")[0] not in ("self", "cls", "sys"):
                found.add(name if name.startswith("torch.") else name[name.index("._") + 1 :])
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch"):
            found |= {f"{node.module}.{one.name}" for one in node.names if is_private(f"{node.module}.{one.name}")}
        elif isinstance(node, ast.Import):
            found |= {one.name for one in node.names if one.name.startswith("torch.") and is_private(one.name)}
        elif (
            isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and node.value.startswith(("torch._", "_checkpoint"))
        ):
            found |= {node.value} if " " not in node.value else set()
    return found - own


def test_few_private_names_of_pytorch_are_used() -> None:
    found = sorted({name for file in (FOLDER / "unstable").glob("*.py") for name in private_names(file.read_text())})
    print(f"{len(found)} private names of PyTorch:", *found, sep="\n  ")
    assert len(found) <= MOST
