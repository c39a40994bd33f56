"""The arguments of a call in the source, by parameter name, and the policies that they amount to, as source text."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from typing import Any

import libcst as cst

from polyamp.migration.program import Program

POLICIES = {"float16": "mixed_float16", "half": "mixed_float16", "bfloat16": "mixed_bfloat16"}
POLICIES |= {"float32": "float32", "float": "float32"}
"""For each dtype of torch, the policy whose autocast computes in it."""


class Arguments:
    """A call's arguments by name.

    Args:
        program: the program that the call is in.
        call: the call.
        names: names of the positional parameters, in order.

    Attributes:
        given: the expressions by parameter name.
        unknown: whether there are arguments whose name cannot be told, as in ``**options``.
    """

    def __init__(self, program: Program, call: cst.Call, names: Sequence[str]) -> None:
        self.program = program
        self.given: dict[str, cst.BaseExpression] = {}
        self.unknown = False
        for place, arg in enumerate(call.args):
            if arg.keyword is not None:
                self.given[arg.keyword.value] = arg.value
            elif arg.star or place >= len(names):
                self.unknown = True
            else:
                self.given[names[place]] = arg.value

    def others(self, *known: str) -> list[str]:
        """Return the names of the arguments that are not among these."""
        return [name for name in self.given if name not in known]

    def code(self, name: str) -> str | None:
        """Return the source text of an argument; None if it is not there."""
        found = self.given.get(name)
        return None if found is None else self.program.code(found)

    def literal(self, name: str, default: Any = None) -> Any:
        """Return the value of an argument that is a literal, ``default`` if it is absent, and ... if it is computed."""
        code = self.code(name)
        return default if code is None else literal(code)


def literal(code: str) -> Any:
    """Return the value of a literal, and ... for any other expression.

    >>> literal("2.0 ** 10"), literal("'O1'"), literal("level")
    (1024.0, 'O1', Ellipsis)
    """
    try:
        tree = ast.parse(code.strip(), mode="eval").body
    except SyntaxError:
        return ...
    if isinstance(tree, ast.BinOp) and isinstance(tree.op, ast.Pow):
        base, power = (_value(side) for side in (tree.left, tree.right))
        return base**power if isinstance(base, int | float) and isinstance(power, int) and abs(power) < 200 else ...
    return _value(tree)


def _value(tree: ast.expr) -> Any:
    try:
        return ast.literal_eval(tree)
    except ValueError:
        return ...


def is_plain(code: str) -> bool:
    """Return whether an expression may be written twice: names, attributes, literals, and comparisons of them.

    >>> is_plain("args.fp16 == 'yes'"), is_plain("next(batches)")
    (True, False)
    """
    allowed = (ast.Name, ast.Attribute, ast.Constant, ast.Compare, ast.BoolOp, ast.UnaryOp, ast.Subscript)
    small = (ast.expr_context, ast.cmpop, ast.boolop, ast.unaryop)
    return all(isinstance(node, (*allowed, *small)) for node in ast.walk(ast.parse(code.strip(), mode="eval").body))


def bracketed(code: str) -> str:
    """Return an expression that may stand before a dot or between operators.

    >>> bracketed("a or b"), bracketed("args.fp16")
    ('(a or b)', 'args.fp16')
    """
    node = cst.parse_expression(code.strip())
    simple = isinstance(node, cst.Name | cst.Attribute | cst.Call | cst.Subscript | cst.SimpleString | cst.Integer)
    return code if simple or node.lpar else f"({code})"


def chosen(policy: str, condition: str | None, otherwise: str = '"float32"') -> str:
    """Return the source of a policy that holds under a condition.

    >>> chosen('"O1"', "args.fp16"), chosen('"O1"', "False"), chosen('"O1"', None)
    ('"O1" if args.fp16 else "float32"', '"float32"', '"O1"')
    """
    if condition is None or literal(condition) is True:
        return policy
    if literal(condition) is False:
        return otherwise
    test = bracketed(condition) if isinstance(cst.parse_expression(condition), cst.IfExp | cst.Lambda) else condition
    return policy if policy == otherwise else f"{policy} if {test} else {otherwise}"


def policy_of_dtype(program: Program, node: cst.BaseExpression) -> str:
    """Return the source of the policy whose autocast computes in a dtype of torch."""
    if isinstance(node, cst.IfExp):
        body, orelse = (policy_of_dtype(program, side) for side in (node.body, node.orelse))
        return f"{body} if {program.code(node.test)} else {orelse}"
    name = next((use.name for use in program.uses(("torch",)) if use.node is node), "")
    known = POLICIES.get(name.removeprefix("torch."))
    if known is not None:
        return f'"{known}"'
    return f'polyamp.policy(param="float32", compute={program.code(node)}, output="float32")'
