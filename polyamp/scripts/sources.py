"""The source of a script and of the local modules that it imports: which functions they call, and where.

Nothing is imported or run. For example, of these lines

    from torch.cuda.amp import autocast as region
    with region(enabled=flag): model.half()

the calls are ``torch.cuda.amp.autocast``, with a keyword argument, and ``.half``, of an object that is not known.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

_MOST_FILES = 500


class Call(NamedTuple):
    """One call in a source file.

    Attributes:
        name: the dotted name of the function; with a leading dot if only the attribute is known.
        where: the file and line, as ``/home/me/train.py:12``.
        node: the call.
        names: the dotted names that this file's names stand for, to look up arguments with `dotted`.
    """

    name: str
    where: str
    node: ast.Call
    names: dict[str, str]

    def arguments(self) -> Iterator[tuple[str | None, ast.expr]]:
        """Yield the arguments: keywords with their names, others with None."""
        yield from ((None, argument) for argument in self.node.args)
        yield from ((keyword.arg, keyword.value) for keyword in self.node.keywords)


def sources_of(target: str, *, is_module: bool) -> tuple[Path, ...]:
    """Return the files of a script and of its local imports; nothing is imported to find them.

    >>> [file.name for file in sources_of("nothing.py", is_module=False)]
    []

    Args:
        target: a file, a folder with ``__main__.py``, or a module's name.
        is_module: whether it is a module's name.
    """
    if is_module:
        return _files_of_module(target.split("."))
    file = Path(target, "__main__.py") if Path(target).is_dir() else Path(target)
    return local_files(file, file.resolve().parent) if file.is_file() else ()


def _files_of_module(parts: list[str]) -> tuple[Path, ...]:
    for folder in map(Path, [".", *sys.path]):
        base = folder.joinpath(*parts)
        for file in (base.with_suffix(".py"), base / "__main__.py"):
            if file.is_file():
                return local_files(file, folder)
    return ()


def local_files(script: Path, folder: Path) -> tuple[Path, ...]:
    """Return a script and the files of local modules that it imports, directly or through others.

    Args:
        script: the script's file.
        folder: where its imports are looked up.
    """
    found: dict[Path, None] = {script.resolve(): None}
    waiting = [script.resolve()]
    while waiting and len(found) < _MOST_FILES:
        file = waiting.pop()
        for module in _imports_of(_tree(file), file, folder.resolve()):
            if module not in found:
                found[module] = None
                waiting.append(module)
    return tuple(found)


def calls_in(file: Path) -> Iterator[Call]:
    """Yield the calls of a source file, in the order of `ast.walk`."""
    tree = _tree(file)
    names = _names_in(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            name = dotted(node.func, names)
            if name:
                yield Call(name, f"{file}:{node.lineno}", node, names)


def imported_in(file: Path) -> Iterator[tuple[str, str]]:
    """Yield the names that a file imports from other modules, dotted, each with its place."""
    for node in ast.walk(_tree(file)):
        if isinstance(node, ast.Import):
            yield from ((alias.name, f"{file}:{node.lineno}") for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield from ((f"{node.module}.{alias.name}", f"{file}:{node.lineno}") for alias in node.names)


def dotted(node: ast.expr, names: dict[str, str]) -> str:
    """Return the dotted name of an expression: full if its root was imported, ``.name`` for other attributes.

    >>> dotted(ast.parse("amp.scale(x)", mode="eval").body.func, {"amp": "apex.amp"})
    'apex.amp.scale'
    >>> dotted(ast.parse("model().half()", mode="eval").body.func, {})
    '.half'
    """
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.insert(0, node.attr)
        node = node.value
    if isinstance(node, ast.Name):
        if node.id in names:
            return ".".join([names[node.id], *parts])
        return f".{parts[-1]}" if parts else node.id
    return f".{parts[-1]}" if parts else ""


def _tree(file: Path) -> ast.Module:
    try:
        return ast.parse(file.read_bytes(), str(file))
    except (SyntaxError, ValueError, OSError):  # Python reports it when it runs the file
        return ast.Module([], [])


def _names_in(tree: ast.Module) -> dict[str, str]:
    """Return what names stand for: imported ones, and those assigned from imported ones, as in ``amp = torch.amp``."""
    names: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                names[alias.asname or alias.name.partition(".")[0]] = (
                    alias.name if alias.asname else alias.name.partition(".")[0]
                )
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Attribute):
            value = dotted(node.value, names)
            if not value.startswith("."):
                names |= {target.id: value for target in node.targets if isinstance(target, ast.Name)}
    return names


def _imports_of(tree: ast.Module, file: Path, folder: Path) -> Iterator[Path]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield from _files_of(folder, alias.name.split("."))
        elif isinstance(node, ast.ImportFrom):
            base = folder if not node.level else file.parents[node.level - 1]
            parts = node.module.split(".") if node.module else []
            yield from _files_of(base, parts)
            for alias in node.names:
                yield from _files_of(base, [*parts, alias.name])


def _files_of(base: Path, parts: list[str]) -> Iterator[Path]:
    """Yield the files of a local module and of the packages around it."""
    for count in range(1, len(parts) + 1):
        place = base.joinpath(*parts[:count])
        for file in (place.with_suffix(".py"), place / "__init__.py"):
            if file.is_file():
                yield file.resolve()
