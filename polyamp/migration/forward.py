"""Find the forward pass that a loss comes from: the statements, of one block, from the model's call to the loss."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import libcst as cst
from libcst import matchers as m

from polyamp.migration.program import Program, Statement, dotted_name, inside

_ENDS = m.Call(func=m.Attribute(attr=m.Name("backward") | m.Name("scale_loss") | m.Name("initialize")))


class Forward(NamedTuple):
    """The first and last statement of a forward pass, and the condition under which its loss is scaled."""

    first: Statement
    last: Statement
    condition: str | None


def forward_of(program: Program, scaling: Statement, loss: cst.BaseExpression, models: Iterable[str]) -> Forward | None:
    """Return the forward pass of a loss; None if it cannot be told.

    The statements above the one that scales the loss are followed backwards through the names that they bind. The pass
    begins where one of the models is used, or else where the loss itself is computed.

    Args:
        program: the program.
        scaling: the statement that scales the loss.
        loss: the loss, as the statement has it.
        models: the source of the models, if they are known.
    """
    needed, known = _names(loss), {*models, "model"}
    statement: Any = scaling
    conditions: list[str] = []
    while True:
        found = _above(program, statement, needed, known)
        if found is not None:
            return Forward(*found, " and ".join(conditions) or None)
        above = _branch(program, statement)
        if above is None:
            return None
        statement, condition = above
        if condition:
            conditions.insert(0, condition)


def _above(program: Program, statement: Any, needed: set[str], models: set[str]) -> tuple[Any, Any] | None:
    block = list(program.block(statement))
    if statement not in block:
        return None
    wanted, slice_, direct = set(needed), [], []
    for one in reversed(block[: block.index(statement)]):
        if any(m.matches(call, _ENDS) for call in inside(one, cst.Call)):
            break
        bound = _bound(one)
        if bound & wanted:
            slice_.append(one)
            direct += [one] if bound & needed else []
            wanted = (wanted - bound if isinstance(one, cst.SimpleStatementLine) else wanted) | (_names(one) - models)
    with_model = [one for one in slice_ if _read(one) & models]
    computed = with_model or [one for one in direct if inside(one, cst.Call)]
    return (computed[-1], slice_[0]) if computed else None


def _branch(program: Program, statement: Any) -> tuple[Any, str] | None:
    """Return the statement around a branch or a ``with`` block, and the condition of the branch."""
    chain = list(program.around(statement))[:2]
    if len(chain) < 2 or not isinstance(chain[0], cst.IndentedBlock):
        return None
    above: Any = chain[1]
    if isinstance(above, cst.With):
        return above, ""
    if isinstance(above, cst.If):
        return (above, _plain(program, above.test)) if _is_first(program, above) else None
    if isinstance(above, cst.Else):
        choice = program.parent(above)
        if isinstance(choice, cst.If) and _is_first(program, choice):
            return choice, f"not {_bracketed(program, choice.test)}"
    return None


def _is_first(program: Program, choice: cst.If) -> bool:
    return not isinstance(program.parent(choice), cst.If)


def _plain(program: Program, test: cst.BaseExpression) -> str:
    code = program.code(test)
    return f"({code})" if isinstance(test, cst.BooleanOperation | cst.IfExp) else code


def _bracketed(program: Program, test: cst.BaseExpression) -> str:
    code = program.code(test)
    return code if isinstance(test, cst.Name | cst.Attribute | cst.Call) else f"({code})"


def _names(node: cst.CSTNode) -> set[str]:
    """Return the names and dotted names that a node reads."""
    found = {dotted_name(one) for one in inside(node, cst.Name, cst.Attribute)}
    return {name for name in found if name is not None}


def _read(statement: cst.CSTNode) -> set[str]:
    values = [one.value for one in inside(statement, cst.Assign, cst.AugAssign)]
    return {name for value in values for name in _names(value)}


def _bound(statement: cst.CSTNode) -> set[str]:
    """Return the names that a statement binds or changes, also in its branches."""
    targets = [one.target for one in inside(statement, cst.AssignTarget, cst.AugAssign, cst.AnnAssign, cst.For)]
    return {name for target in targets for name in _targets(target)}


def _targets(target: cst.CSTNode) -> set[str]:
    if isinstance(target, cst.Tuple | cst.List):
        return {name for element in target.elements for name in _targets(element.value)}
    if isinstance(target, cst.StarredElement):
        return _targets(target.value)
    name = dotted_name(target.value if isinstance(target, cst.Subscript) else target)
    return set() if name is None else {name}
