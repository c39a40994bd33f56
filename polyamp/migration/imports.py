"""Imports after a conversion: those that nothing uses any more go, and ``import polyamp`` comes once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import libcst as cst
from libcst import matchers as m

from polyamp.migration.program import Program, dotted_name, is_in

ADDED = "import polyamp"
_IMPORT_ERRORS = ("ImportError", "ModuleNotFoundError", "Exception")


def mended(before: Program, after: Program, roots: tuple[str, ...]) -> cst.Module:
    """Return the converted module without the imports that it no longer uses, and with ``import polyamp``.

    Args:
        before: the program before the conversion; an import that it did not use either stays.
        after: the converted program.
        roots: modules of the old interfaces, whose unused imports go in any case.
    """
    unused_before = {name for _, name in _unused(before)}
    gone = {alias for alias, name in _unused(after) if name not in unused_before or is_in(name, roots)}
    change = _Without(gone)
    added = _names(after) - _names(before)
    change.polyamp = "polyamp" in added and not _binds(before.module, "polyamp")
    module = after.module.visit(change)
    assert isinstance(module, cst.Module)
    for name in ("torch", "polyamp"):
        if name in added and not _binds(module, name):
            module = _with_import(module, name)
    for name in sorted(_submodules(after) - {full for _, full in _bound(after)}):
        module = _with_import(module, name)
    return module


def _submodules(program: Program) -> set[str]:
    """Return the modules of ``compat`` that the program names in full; ``import polyamp`` does not import them."""
    nodes = {program.whole(access.node) for scope in program.all_scopes() for access in scope.accesses}
    names = {dotted_name(node) or "" for node in nodes}
    return {name.rpartition(".")[0] for name in names if name.startswith("polyamp.backends.torch.compat.")}


def _bound(program: Program) -> list[tuple[cst.Import, str]]:
    """Return the modules that the program imports by ``import module``, with the statements."""
    return [(one, dotted_name(alias.name) or "") for one in program.find(cst.Import) for alias in one.names]


def _unused(program: Program) -> list[tuple[cst.ImportAlias, str]]:
    """Return the names of imports that nothing in the program refers to, with their full names."""
    used: dict[cst.CSTNode, bool] = {}
    for one in program.imported():
        used[one.as_name] = used.get(one.as_name, False) or bool(one.references)
    found = []
    statements: list[cst.Import | cst.ImportFrom] = [*program.find(cst.Import), *program.find(cst.ImportFrom)]
    for statement in statements:
        for alias in statement.names if isinstance(statement.names, Sequence) else ():
            bound = alias.asname.name if alias.asname else alias.name
            if not used.get(bound, True) and not _is_future(statement):
                found.append((alias, _full_name(statement, alias)))
    return found


def _is_future(statement: cst.CSTNode) -> bool:
    return isinstance(statement, cst.ImportFrom) and m.matches(statement, m.ImportFrom(module=m.Name("__future__")))


def _full_name(statement: cst.Import | cst.ImportFrom, alias: cst.ImportAlias) -> str:
    name = dotted_name(alias.name) or ""
    if isinstance(statement, cst.Import):
        return name
    module = dotted_name(statement.module) if statement.module else ""
    return f"{'.' * len(statement.relative)}{module}.{name}"


class _Without(cst.CSTTransformer):
    """Removes import aliases. The first statement of the module that only they fill becomes ``import polyamp``."""

    def __init__(self, gone: set[cst.ImportAlias]) -> None:
        self.gone = gone
        self.depth = 0
        self.added = False
        self.polyamp = True

    def leave_Import(self, original_node: cst.Import, updated_node: cst.Import) -> Any:
        return self._left(original_node, updated_node)

    def leave_ImportFrom(self, original_node: cst.ImportFrom, updated_node: cst.ImportFrom) -> Any:
        return self._left(original_node, updated_node)

    def _left(self, original: Any, updated: Any) -> Any:
        names = original.names
        if not isinstance(names, Sequence) or not self.gone.intersection(names):
            return updated
        kept = [alias for alias in names if alias not in self.gone]
        if kept:
            kept[-1] = kept[-1].with_changes(comma=names[-1].comma)
            return updated.with_changes(names=kept)
        if self._is_in_place:
            self.added = True
            return cst.Import(names=[cst.ImportAlias(name=cst.Name("polyamp"))])
        return cst.RemovalSentinel.REMOVE

    @property
    def _is_in_place(self) -> bool:
        return self.depth == 0 and not self.added and self.polyamp

    def visit_IndentedBlock(self, node: cst.IndentedBlock) -> None:
        self.depth += 1

    def leave_IndentedBlock(self, original_node: cst.IndentedBlock, updated_node: cst.IndentedBlock) -> Any:
        self.depth -= 1
        return updated_node

    def visit_Try(self, node: cst.Try) -> bool:
        return True

    def leave_Try(self, original_node: cst.Try, updated_node: cst.Try) -> Any:
        emptied = original_node.body.body and not updated_node.body.body
        if not emptied or not all(_only_refuses(handler) for handler in original_node.handlers):
            return updated_node
        if original_node.orelse or original_node.finalbody:
            return updated_node
        if self._is_in_place:
            self.added = True
            return cst.parse_statement(ADDED).with_changes(leading_lines=original_node.leading_lines)
        return cst.RemovalSentinel.REMOVE


def _only_refuses(handler: cst.ExceptHandler) -> bool:
    """Return whether a handler ends the program, prints or passes, so that nothing depends on it without the import."""
    allowed = m.Raise() | m.Pass() | m.Expr(m.Call())
    return all(
        isinstance(line, cst.SimpleStatementLine) and all(m.matches(one, allowed) for one in line.body)
        for line in handler.body.body
    )


def _names(program: Program) -> set[str]:
    """Return the names that the program reads and that are not a part of a dotted name; without those in imports."""
    found = {access.node for scope in program.all_scopes() for access in scope.accesses}
    return {(dotted_name(node) or "").partition(".")[0] for node in found}


def _binds(module: cst.Module, name: str) -> bool:
    """Return whether a statement ``import name`` is at the top of the module."""
    top = [one for line in module.body if isinstance(line, cst.SimpleStatementLine) for one in line.body]
    names = [alias for one in top if isinstance(one, cst.Import) for alias in one.names if alias.asname is None]
    return any((dotted_name(alias.name) or "").partition(".")[0] == name for alias in names)


def _with_import(module: cst.Module, name: str) -> cst.Module:
    """Put the import below the imports that the module begins with, or below its docstring."""
    body = list(module.body)
    place = 0
    for number, statement in enumerate(body):
        if m.matches(statement, m.SimpleStatementLine(body=[m.Import() | m.ImportFrom()])):
            place = number + 1
        elif not (number == 0 and m.matches(statement, m.SimpleStatementLine(body=[m.Expr(m.SimpleString())]))):
            break
        else:
            place = 1
    line: Any = cst.parse_statement(f"import {name}")
    if place == 0 and body:  # nothing above: comments of the first statement stay with it
        body[0] = body[0].with_changes(leading_lines=[cst.EmptyLine(indent=False), *body[0].leading_lines])
    elif place == 1 and m.matches(body[0], m.SimpleStatementLine(body=[m.Expr()])):
        line = line.with_changes(leading_lines=[cst.EmptyLine(indent=False)])
    body.insert(place, line)
    return module.with_changes(body=body)
