"""``GradScaler``: into the wrapped optimizer where the whole recipe is in sight, else into polyamp's own GradScaler.

The recipe is in sight if the scaler and its one optimizer are local names of the same function or module, and the
program calls only the methods of the recipe. A scaler that is passed on, kept in an attribute, or that drives several
optimizers becomes `polyamp.backends.torch.GradScaler`, which has the arguments, calls and scales of torch's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import libcst as cst
from libcst import matchers as m
from libcst.metadata import Assignment

from polyamp.migration.arguments import Arguments, chosen, is_plain, literal
from polyamp.migration.program import Program, Statement, Use, inside

SETTINGS = ("init_scale", "growth_factor", "backoff_factor", "growth_interval", "enabled")
SCALERS = {
    "torch.amp.GradScaler": ("device", *SETTINGS),
    "torch.amp.grad_scaler.GradScaler": ("device", *SETTINGS),
    "torch.cuda.amp.GradScaler": SETTINGS,
    "torch.cuda.amp.grad_scaler.GradScaler": SETTINGS,
    "torch.cpu.amp.GradScaler": SETTINGS,
}
"""For each name of the scaler, its positional parameters."""

DROP_IN = "polyamp.backends.torch.GradScaler"
CLIP = "torch.nn.utils.clip_grad_norm_"
_LOSS_SCALE = {
    "init_scale": "init",
    "growth_factor": "growth",
    "backoff_factor": "backoff",
    "growth_interval": "interval",
}
_METHODS = {"scale": 1, "unscale_": 1, "step": 1, "update": 0, "get_scale": 0, "state_dict": 0, "load_state_dict": 1}
"""The methods of the recipe, each with its number of arguments."""


def convert(program: Program) -> None:
    """Convert every scaler of the program."""
    recipes = []
    for use in program.uses(tuple(SCALERS)):
        if use.name not in SCALERS:
            continue
        recipe = _recipe(program, use)
        if recipe is None:
            _drop_in(program, use)
        else:
            recipes.append(recipe)
    for recipe in recipes:
        recipe.convert()


def _drop_in(program: Program, use: Use) -> None:
    """Use polyamp's scaler. The call keeps its arguments; the device comes first, as in ``torch.amp``."""
    call = program.call(use)
    if call is None or use.name.startswith("torch.amp"):
        program.replace(use.node, DROP_IN)
        return
    names = SCALERS[use.name]
    given = Arguments(program, call, names)
    if given.unknown:
        parts = [program.code(arg).rstrip(",") for arg in call.args]
        if any(arg.star == "*" for arg in call.args):
            program.refuse(call, f"{use.name}(*arguments)", f"{DROP_IN}(device, *arguments)")
            return
    else:
        parts = [f"{name}={program.code(value)}" for name, value in given.given.items()]
    device = ['"cpu"'] if use.name.startswith("torch.cpu") else []
    program.replace(call, f"{DROP_IN}({', '.join([*device, *parts])})")


@dataclass(frozen=True)
class _Recipe:
    """A scaler and its optimizer, both local names, and every use of the scaler."""

    program: Program
    made: Statement
    settings: Arguments
    calls: list[cst.Call]
    optimizer: str
    bindings: list[Statement]

    def convert(self) -> None:
        """Wrap the optimizer where it or the scaler is made, whichever is later, and convert the calls."""
        wrapping = f"{self.optimizer} = polyamp.wrap_optimizer({self.optimizer}, {self._options()})"
        last = max(self.bindings, key=self.program.line)
        if self.program.line(last) < self.program.line(self.made):
            self.program.replace(self.made, wrapping)
        else:
            self.program.remove(self.made)
            self.program.after.setdefault(last, []).append(wrapping)
        for call in self.calls:
            self._convert_call(call)

    def _options(self) -> str:
        enabled = self.settings.code("enabled")
        options = [chosen('"mixed_float16"', enabled)]
        changed = [
            f"{to}={self.settings.code(name)}" for name, to in _LOSS_SCALE.items() if name in self.settings.given
        ]
        if changed:
            scale = f'polyamp.LossScale.like("torch", {", ".join(changed)})'
            options.append(f"loss_scale={chosen(scale, enabled, 'None')}")
        return ", ".join(options)

    def _convert_call(self, call: cst.Call) -> None:
        program, optimizer = self.program, self.optimizer
        method = _method(call)
        argument = program.code(call.args[0].value) if call.args else ""
        if method == "scale":
            self._convert_scale(call, argument)
        elif method == "unscale_":
            self._convert_unscale(call)
        elif method == "update":
            _remove(program, call)
        else:
            replaced = {
                "step": f"{optimizer}.step()",
                "get_scale": f"{optimizer}.loss_scale",
                "state_dict": f"polyamp.save_loss_scale({optimizer})",
                "load_state_dict": f"polyamp.load_loss_scale({optimizer}, {argument})",
            }
            program.replace(call, replaced[method])

    def _convert_scale(self, call: cst.Call, loss: str) -> None:
        above = self.program.parent(call)
        backward = self.program.parent(above) if above is not None else None
        if isinstance(above, cst.Attribute) and above.attr.value == "backward" and isinstance(backward, cst.Call):
            options = [self.program.code(arg).rstrip(",") for arg in backward.args]
            if backward.args and backward.args[0].keyword is None:
                options[0] = f"gradient={options[0]}"
            self.program.replace(backward, f"{self.optimizer}.backward({', '.join([loss, *options])})")
        else:
            self.program.replace(call, f"{self.optimizer}.scale({loss})")

    def _convert_unscale(self, call: cst.Call) -> None:
        """Unscale by itself, or together with clipping if that follows and clips what the optimizer was made of."""
        program = self.program
        clip = self._clip_after(program.statement(call))
        if clip is None:
            program.replace(call, f"{self.optimizer}.unscale_()")
        else:
            _remove(program, call)
            program.replace(clip, f"{self.optimizer}.clip_grad_norm_({program.code(clip.args[1].value)})")

    def _clip_after(self, statement: Statement) -> cst.Call | None:
        block = list(self.program.block(statement))
        following = block[block.index(statement) + 1 :][:1] if statement in block else []
        uses = {use.node for use in self.program.uses((CLIP,))}
        calls = [call for one in following for call in inside(one, cst.Call) if call.func in uses]
        if len(calls) != 1 or not isinstance(following[0], cst.SimpleStatementLine):
            return None
        (call,) = calls
        plain = len(call.args) == 2 and call.args[0].keyword is None
        plain = plain and (call.args[1].keyword is None or call.args[1].keyword.value == "max_norm")
        return call if plain and self.program.code(call.args[0].value) == self._trained() else None

    def _trained(self) -> str | None:
        """Return the source of what the optimizer was made of, such as ``model.parameters()``."""
        if len(self.bindings) != 1 or not isinstance(self.bindings[0], cst.SimpleStatementLine):
            return None
        made = self.bindings[0].body[0]
        if not isinstance(made, cst.Assign) or not isinstance(made.value, cst.Call) or not made.value.args:
            return None
        trained = self.program.code(made.value.args[0].value)
        return trained if trained.endswith(".parameters()") else None


def _method(call: cst.Call) -> str:
    assert isinstance(call.func, cst.Attribute)
    return call.func.attr.value


def _remove(program: Program, call: cst.Call) -> None:
    expression = program.parent(call)
    assert isinstance(expression, cst.Expr)
    line = program.parent(expression)
    alone = isinstance(line, cst.SimpleStatementLine) and len(line.body) == 1
    program.remove(line if alone and line is not None else expression)


def _recipe(program: Program, use: Use) -> _Recipe | None:
    """Return the recipe of a scaler; None if not all of it is in sight."""
    call = program.call(use)
    made = program.statement(use.node)
    target = _single_target(made)
    if call is None or target is None or not m.matches(made, _ASSIGNS) or made.body[0].value is not call:  # type: ignore
        return None
    settings = Arguments(program, call, SCALERS[use.name])
    if settings.unknown or settings.others("device", *SETTINGS) or not is_plain(settings.code("enabled") or "True"):
        return None
    calls = _recipe_calls(program, target)
    named = {_argument(one) for one in calls or () if _method(one) in ("step", "unscale_")}
    if not calls or len(named) != 1 or not any(_method(one) == "step" for one in calls):
        return None
    loads = any(_method(one) == "load_state_dict" for one in calls)
    if loads and literal(settings.code("enabled") or "True") is not True:
        return None  # the state of a disabled scaler is empty
    bindings = _optimizer_bindings(program, target, calls)
    return bindings and _Recipe(program, made, settings, calls, named.pop(), bindings)  # type: ignore[return-value]


_ASSIGNS = m.SimpleStatementLine(body=[m.Assign(targets=[m.AssignTarget(target=m.Name())])])


def _single_target(statement: Any) -> cst.Name | None:
    found = m.extract(
        statement,
        m.SimpleStatementLine(body=[m.Assign(targets=[m.AssignTarget(target=m.SaveMatchedNode(m.Name(), "target"))])]),
    )
    target = (found or {}).get("target")
    return target if isinstance(target, cst.Name) else None


def _argument(call: cst.Call) -> str:
    value = call.args[0].value
    return value.value if isinstance(value, cst.Name) else ""


def _recipe_calls(program: Program, target: cst.Name) -> list[cst.Call] | None:
    """Return the calls of the scaler's methods; None if it is used in another way."""
    made = program.bindings(target)
    if len(made) != 1:
        return None
    calls = []
    for access in made[0].references:
        attribute = program.parent(access.node)
        call = program.parent(attribute) if isinstance(attribute, cst.Attribute) else None
        if not isinstance(attribute, cst.Attribute) or not isinstance(call, cst.Call) or call.func is not attribute:
            return None
        expected = _METHODS.get(attribute.attr.value)
        if expected is None or len(call.args) != expected or any(arg.star for arg in call.args):
            return None
        alone = isinstance(program.parent(call), cst.Expr)
        if attribute.attr.value in ("unscale_", "step", "update") and not alone:
            return None
        calls.append(call)
    return sorted(calls, key=program.line)


def _optimizer_bindings(program: Program, scaler: cst.Name, calls: list[cst.Call]) -> list[Statement] | None:
    """Return the statements that bind the optimizer, if it lives where the scaler does and only the scaler steps it."""
    name = next(call.args[0].value for call in calls if _method(call) == "step")
    found = program.bindings(name) if isinstance(name, cst.Name) else []
    if not found or not all(isinstance(one, Assignment) for one in found):
        return None
    if any(one.scope is not program.scope(scaler) for one in found) or found[0].name == scaler.value:
        return None
    stepped = [call.args[0].value for call in calls if _method(call) in ("step", "unscale_")]
    same = [isinstance(one, cst.Name) and set(program.bindings(one)) == set(found) for one in stepped]
    if not all(same):
        return None
    statements = [program.statement(one.node) for one in found]
    made = program.statement(scaler)
    earlier = all(program.line(one) < program.line(made) for one in statements)
    assigns = all(isinstance(one, cst.SimpleStatementLine) for one in statements)
    if not assigns or not (earlier or (len(statements) == 1 and program.block(statements[0]) is program.block(made))):
        return None
    if program.block(made) == () or _is_in_loop(program, made):
        return None
    called = {program.code(call.func) for call in program.find(cst.Call)}
    return None if f"{found[0].name}.step" in called else statements


def _is_in_loop(program: Program, statement: Statement) -> bool:
    for above in program.around(statement):
        if isinstance(above, cst.For | cst.While | cst.If | cst.Try):
            return True
        if isinstance(above, cst.FunctionDef):
            return False
    return False
