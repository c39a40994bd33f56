"""Apply the recorded edits of a `Program` to its tree, in one pass."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import libcst as cst

from polyamp.migration.program import Program, Region, with_comments


class _Apply(cst.CSTTransformer):
    """Replaces nodes as recorded. Blocks are built statement by statement, so that regions keep their ends."""

    def __init__(self, program: Program) -> None:
        self.program = program

    def on_visit(self, node: cst.CSTNode) -> bool:
        return not isinstance(node, cst.IndentedBlock | cst.Module)

    def on_leave(self, original_node: Any, updated_node: Any) -> Any:
        if isinstance(original_node, cst.IndentedBlock | cst.Module):
            return updated_node.with_changes(body=self._body(original_node.body))
        if isinstance(original_node, cst.SimpleStatementLine) and len(updated_node.body) < len(original_node.body) > 1:
            last = updated_node.body[-1].with_changes(semicolon=cst.MaybeSentinel.DEFAULT)
            updated_node = updated_node.with_changes(body=[*updated_node.body[:-1], last])
        change = self.program.edits.get(original_node)
        return updated_node if change is None else change(updated_node)

    def _body(self, statements: Sequence[cst.CSTNode]) -> list[Any]:
        body: list[Any] = []
        inside: list[Any] = []
        region: Region | None = None
        for statement in statements:
            region = region or next((one for one in self.program.regions if one.first is statement), None)
            (body if region is None else inside).extend(self._statement(statement))
            if region is not None and region.last is statement:
                body.append(self._with(region, inside))
                region, inside = None, []
        return body

    def _statement(self, statement: cst.CSTNode) -> list[Any]:
        changed = _nodes(statement.visit(self))
        before = self._parsed(self.program.before.get(statement, []))
        if before and changed:
            first = before[0]
            above = getattr(changed[0], "leading_lines", ())
            before[0] = first.with_changes(leading_lines=[*above, *first.leading_lines])
            changed[0] = changed[0].with_changes(leading_lines=[])
        comments = [line for line in self.program.before.get(statement, []) if line.startswith("#")]
        changed = [*before, *changed]
        if comments and changed:
            lines = [cst.EmptyLine(comment=cst.Comment(text)) for text in comments]
            changed[0] = changed[0].with_changes(leading_lines=[*changed[0].leading_lines, *lines])
        return [*changed, *self._parsed(self.program.after.get(statement, []))]

    def _parsed(self, lines: Iterable[str]) -> list[Any]:
        code = "".join(f"{line}\n" for line in lines if not line.startswith("#"))
        return list(cst.parse_module(code, self.program.module.config_for_parsing).body) if code else []

    def _with(self, region: Region, inside: list[Any]) -> Any:
        code = f"with {region.header}:\n{self.program.module.default_indent}pass\n"
        block = cst.parse_module(code, self.program.module.config_for_parsing).body[0]
        assert isinstance(block, cst.With)
        block = with_comments(block, inside[0])
        inside[0] = inside[0].with_changes(leading_lines=[])
        return block.with_changes(body=cst.IndentedBlock(body=inside))


def _nodes(found: Any) -> list[Any]:
    if found is cst.RemovalSentinel.REMOVE:
        return []
    return list(found) if isinstance(found, cst.FlattenSentinel) else [found]


def applied(program: Program) -> cst.Module:
    """Return the module with all recorded edits."""
    changed = program.module.visit(_Apply(program))
    assert isinstance(changed, cst.Module)
    return changed
