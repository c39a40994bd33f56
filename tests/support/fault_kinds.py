"""The faults that can be planted in a source: one text in the place of another."""

import ast
from collections.abc import Iterator
from typing import NamedTuple

COMPARISONS = {
    ast.Eq: "!=",
    ast.NotEq: "==",
    ast.Lt: "<=",
    ast.LtE: "<",
    ast.Gt: ">=",
    ast.GtE: ">",
    ast.Is: "is not",
    ast.IsNot: "is",
    ast.In: "not in",
    ast.NotIn: "in",
}
ARITHMETIC = {ast.Add: "-", ast.Sub: "+", ast.Mult: "/", ast.Div: "*", ast.BitAnd: "|", ast.BitOr: "&"}
OPPOSITES = {"any": "all", "all": "any", "min": "max", "max": "min"}
NO_ANNOTATIONS = ("annotation", "returns", "decorator_list")


class Fault(NamedTuple):
    """What stands in a line, and what is put there."""

    line: int
    was: str
    now: str
    start: int
    end: int

    def planted(self, source: str) -> str:
        raw = source.encode()
        return (raw[: self.start] + self.now.encode() + raw[self.end :]).decode()


def faults(source: str) -> list[Fault]:
    """Every fault of a source, in its order.

    Annotations, decorators, texts, what is raised, and ``__repr__`` have none.
    """
    starts = [0]
    for line in source.encode().splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    found = set()
    for node, now in _replacements(ast.parse(source)):
        start, end = (
            starts[line - 1] + column
            for line, column in ((node.lineno, node.col_offset), (node.end_lineno or 0, node.end_col_offset or 0))
        )
        was = source.encode()[start:end].decode()
        found.add(Fault(node.lineno, " ".join(was.split()), now, start, end))
    return sorted(found, key=lambda one: (one.start, one.end, one.now))


def _replacements(node: ast.AST) -> Iterator[tuple[ast.expr | ast.stmt, str]]:
    """Each expression and statement that is replaced, and by what."""
    if (isinstance(node, ast.FunctionDef) and node.name == "__repr__") or _is_for_types(node):
        return
    if isinstance(node, ast.expr):
        yield from ((node, f"({now})") for now in _of_expression(node))
    if isinstance(node, ast.If | ast.IfExp):
        yield from ((node.test, now) for now in ("True", "False"))
    if isinstance(node, ast.comprehension):
        yield from ((test, "True") for test in node.ifs)
    if _is_removed(node):
        yield node, "pass"  # type: ignore[misc]
    if isinstance(node, ast.Raise | ast.JoinedStr):
        return
    for name, value in ast.iter_fields(node):
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST) and name not in NO_ANNOTATIONS:
                yield from _replacements(child)


def _is_for_types(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")


def _is_removed(node: ast.AST) -> bool:
    """Whether a statement can be left out, and the program still has all its names."""
    if isinstance(node, ast.Assign):
        return not any(isinstance(target, ast.Name | ast.Tuple) for target in node.targets)
    if isinstance(node, ast.Expr):
        return isinstance(node.value, ast.Call)
    return isinstance(node, ast.AugAssign | ast.Raise | ast.Continue | ast.Break | ast.Delete)


def _of_expression(node: ast.expr) -> Iterator[str]:
    match node:
        case ast.BoolOp():
            swapped = ast.Or() if isinstance(node.op, ast.And) else ast.And()
            yield ast.unparse(ast.BoolOp(swapped, node.values))
            for index in range(len(node.values)):
                left = [*node.values[:index], *node.values[index + 1 :]]
                yield ast.unparse(ast.BoolOp(node.op, left) if len(left) > 1 else left[0])
        case ast.Compare(left=left, ops=[op], comparators=[right]) if type(op) in COMPARISONS:
            yield f"{ast.unparse(left)} {COMPARISONS[type(op)]} {ast.unparse(right)}"
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            yield ast.unparse(operand)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in ARITHMETIC:
            yield f"({ast.unparse(left)}) {ARITHMETIC[type(op)]} ({ast.unparse(right)})"
        case ast.Call(func=ast.Name(id=name), args=[_, *_]) if name in OPPOSITES:
            arguments = [*map(ast.unparse, node.args), *map(ast.unparse, node.keywords)]
            yield f"{OPPOSITES[name]}({', '.join(arguments)})"
        case ast.Constant(value=bool() as value):
            yield str(not value)
        case ast.Constant(value=int() | float() as value):
            yield repr(value + 1)
