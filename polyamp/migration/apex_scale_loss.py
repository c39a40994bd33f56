"""``with amp.scale_loss(loss, opt)``: the wrapped optimizer scales the loss, and autocast runs the forward pass."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import libcst as cst
from libcst import matchers as m

from polyamp.migration.apex_initialize import Initialize
from polyamp.migration.arguments import Arguments, bracketed, is_plain, literal
from polyamp.migration.forward import Forward, forward_of
from polyamp.migration.program import FUNCTIONS, Program, Region, Use

PARAMETERS = ("loss", "optimizers", "loss_id", "model", "delay_unscale", "delay_overflow_check")
_FORM = "opt.backward(loss)"


@dataclass(frozen=True)
class ScaleLoss:
    """One ``with amp.scale_loss(...)`` block.

    Attributes:
        optimizers: the source of each optimizer; the first scales the loss.
        scaled: the name of the scaled loss.
    """

    program: Program
    statement: cst.With
    given: Arguments
    optimizers: list[str]
    scaled: str

    def convert(self) -> None:
        """Write ``opt.backward(loss)``, or the body of the block below ``scaled = opt.scale(loss)``."""
        loss, options = self.given.code("loss") or "", self._loss_id()
        backward = self._only_backward()
        if backward is not None:
            passed = [self.program.code(arg).rstrip(",") for arg in backward.args]
            if backward.args and backward.args[0].keyword is None:
                passed[0] = f"gradient={passed[0]}"
            arguments = ", ".join([loss, *options, *passed])
            self.program.replace(self.statement, f"{self.optimizers[0]}.backward({arguments})")
            return
        line = f"{self.scaled} = {self.optimizers[0]}.scale({', '.join([loss, *options])})"
        self.program.edit(self.statement, lambda updated: self._opened(line, updated))
        self.program.claimed -= {use.node for use in self.program.uses(("apex.amp",)) if self._is_in_body(use.node)}

    def _opened(self, line: str, updated: cst.With) -> cst.FlattenSentinel[cst.CSTNode]:
        first = self.program.statements(line, updated)
        body = updated.body.body
        if isinstance(updated.body, cst.SimpleStatementSuite):
            return cst.FlattenSentinel([*first, cst.SimpleStatementLine(body=updated.body.body)])
        return cst.FlattenSentinel([*first, *body])

    def _is_in_body(self, node: cst.CSTNode) -> bool:
        return self.statement.body in self.program.around(node)

    def _loss_id(self) -> list[str]:
        code = self.given.code("loss_id")
        return [] if code is None or literal(code) == 0 else [f"loss_id={code}"]

    def _only_backward(self) -> cst.Call | None:
        """Return the call of ``scaled.backward`` if the block has nothing else."""
        body = self.statement.body
        line = body.body[0] if len(body.body) == 1 else None
        small = line.body if isinstance(line, cst.SimpleStatementLine) else [line]
        call = m.Call(func=m.Attribute(value=m.Name(self.scaled), attr=m.Name("backward")))
        (only,) = small if isinstance(small, tuple | list) and len(small) == 1 else (None,)
        if isinstance(only, cst.Expr) and m.matches(only.value, call) and isinstance(only.value, cst.Call):
            return only.value
        return None

    def forward(self, models: Iterable[str]) -> Forward | None:
        """Return the forward pass that the loss comes from; None if it cannot be told."""
        return forward_of(self.program, self.statement, self.given.given["loss"], models)

    def autocast(self, forward: Forward, made: Initialize) -> None:
        """Put the forward pass into a region of the level that ``amp.initialize`` has."""
        policy = self._policy(forward, made)
        region = Region(forward.first, forward.last, f"polyamp.autocast({policy})")
        if region in self.program.regions:
            return
        if any({one.first, one.last} & {region.first, region.last} for one in self.program.regions):
            known = next(one for one in self.program.regions if {one.first, one.last} & {region.first, region.last})
            self.program.regions.remove(known)
            block = list(self.program.block(forward.first))
            first = min(known.first, region.first, key=block.index)
            region = Region(first, max(known.last, region.last, key=block.index), known.header)
        self.program.regions.append(region)

    def _policy(self, forward: Forward, made: Initialize) -> str:
        if literal(made.level) is ... and not self._knows_level(made):
            made.uses_current = True
            return ""
        if forward.condition is None:
            return made.policy
        return f'{bracketed(made.policy)} if {forward.condition} else "float32"'

    def _knows_level(self, made: Initialize) -> bool:
        """Return whether the level has the same name and value here as in ``amp.initialize``."""
        here, there = (self.program.function(node) for node in (self.statement, made.call))
        return here is there or (not isinstance(there, FUNCTIONS) and is_plain(made.level))


def scale_loss_of(program: Program, use: Use) -> ScaleLoss | None:
    """Return a ``with amp.scale_loss(...)`` block; None, after refusing it, if its form is unknown."""
    call = program.call(use)
    item = program.parent(call) if call is not None else None
    block = program.parent(item) if item is not None else None
    if call is None or not isinstance(item, cst.WithItem) or not isinstance(block, cst.With) or len(block.items) != 1:
        program.refuse(use.node, "amp.scale_loss in another form than `with amp.scale_loss(...) as scaled:`", _FORM)
        return None
    given = Arguments(program, call, PARAMETERS)
    name = item.asname.name if item.asname is not None else None
    if given.unknown or {"loss", "optimizers"} - given.given.keys() or not isinstance(name, cst.Name):
        program.refuse(call, "amp.scale_loss with arguments that cannot be told", _FORM)
        return None
    node = given.given["optimizers"]
    many = node.elements if isinstance(node, cst.List | cst.Tuple) else ()
    optimizers = [program.code(one.value) for one in many] or [program.code(node)]
    return ScaleLoss(program, block, given, optimizers, name.value)
