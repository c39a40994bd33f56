"""``amp.initialize``: the model is converted under O2 and O3, and the optimizer is wrapped."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import libcst as cst

from polyamp.migration.arguments import Arguments, bracketed, chosen, is_plain, literal
from polyamp.migration.program import Program, Use

PARAMETERS = (
    "models",
    "optimizers",
    "enabled",
    "opt_level",
    "cast_model_type",
    "patch_torch_functions",
    "keep_batchnorm_fp32",
    "master_weights",
    "loss_scale",
    "cast_model_outputs",
    "num_losses",
    "verbosity",
    "min_loss_scale",
    "max_loss_scale",
)
"""The parameters of ``amp.initialize``, in order (apex/amp/frontend.py at b82c6bd)."""

_WITHOUT_EFFECT = ("num_losses", "verbosity")
_SAME_AS_LEVEL: dict[str, dict[str, bool | None]] = {
    "patch_torch_functions": {"O1": True, "O2": False, "O3": False, "O0": False},
    "master_weights": {"O1": None, "O2": True, "O3": False, "O0": False},
}
_FORM = "model, optimizer = amp.initialize(model, optimizer, opt_level=...), each side by name"


@dataclass
class Initialize:
    """One call of ``amp.initialize`` as a statement, and what it becomes.

    Attributes:
        level: the source of the level, a literal or an expression.
        models: the source of each model.
        optimizers: the source of each optimizer.
    """

    program: Program
    call: cst.Call
    statement: cst.SimpleStatementLine
    given: Arguments
    level: str
    model_targets: list[str]
    optimizer_targets: list[str]
    models: list[str]
    optimizers: list[str]
    is_list: bool
    uses_current: bool = False
    options: list[str] = field(default_factory=list)
    rules: str = ""

    @property
    def condition(self) -> str | None:
        """The source of ``enabled=``; None if it is always enabled."""
        code = self.given.code("enabled")
        return None if code is None or literal(code) is True else code

    @property
    def policy(self) -> str:
        """The source of the policy."""
        level = chosen(self.level, self.condition, '"O0"')
        return f"polyamp.policy({level}, {self.rules})" if self.rules else level

    def convert(self) -> None:
        """Write the lines that take the place of the call."""
        lines = [f"polyamp.set_global_policy({self.policy})"] if self.uses_current else []
        lines += self._model_lines()
        if self.optimizers:
            lines.append(self._optimizer_line())
        self.program.replace(self.statement, "\n".join(lines) or "pass")

    def _model_lines(self) -> list[str]:
        level = literal(self.level)
        pairs = list(zip(self.model_targets, self.models, strict=True))
        renamed = [f"{target} = {model}" for target, model in pairs if target != model]
        if level in ("O0", "O1"):
            return renamed
        names = "each" if self.is_list and len(pairs) == 1 and not self._is_one_model else ""
        lines = []
        for target, model in pairs:
            if names:
                lines.append(f"{target} = [polyamp.convert(each, {self.policy}) for each in {model}]")
            else:
                lines.append(f"{target} = polyamp.convert({model}, {self.policy})")
        if level is ... or self.condition:
            wanted = bracketed(chosen(self.level, self.condition, '"O0"'))
            indent = self.program.module.default_indent
            return [*renamed, f'if {wanted} in ("O2", "O3"):', *(indent + line for line in lines)]
        return lines

    @property
    def _is_one_model(self) -> bool:
        return not self.is_list

    def _optimizer_line(self) -> str:
        options = "".join(f", {option}" for option in self.options)
        if len(self.optimizers) == 1:
            wrapped = f"polyamp.wrap_optimizer({self.optimizers[0]}, {self.policy}{options})"
        else:
            wrapped = f"polyamp.wrap_optimizer([{', '.join(self.optimizers)}], {self.policy}{options})"
        return f"{', '.join(self.optimizer_targets)} = {wrapped}"


def initialize_of(program: Program, use: Use) -> Initialize | None:
    """Return a call of ``amp.initialize``; None, after refusing it, if its form is unknown."""
    call = program.call(use)
    statement = program.statement(use.node)
    assign = statement.body[0] if isinstance(statement, cst.SimpleStatementLine) and len(statement.body) == 1 else None
    if call is None or not isinstance(assign, cst.Assign) or assign.value is not call or len(assign.targets) != 1:
        program.refuse(use.node, "amp.initialize in a form that is not an assignment of its results", _FORM)
        return None
    given = Arguments(program, call, PARAMETERS)
    if given.unknown or "models" not in given.given:
        program.refuse(call, "amp.initialize with arguments that cannot be told", _FORM)
        return None
    found = _sides(program, assign.targets[0].target, given)
    if found is None:
        program.refuse(call, "amp.initialize whose two sides differ in form", _FORM)
        return None
    level = given.code("opt_level") or '"O1"'
    if not is_plain(level):
        program.refuse(call, f"opt_level={level}", "the level in a name, first")
        return None
    assert isinstance(statement, cst.SimpleStatementLine)
    made = Initialize(program, call, statement, given, level, *found)
    return made if _take_options(made) else None


def _sides(program: Program, target: cst.BaseExpression, given: Arguments) -> Any:
    """Return targets and sources of the models and the optimizers, each as a list of source texts."""
    models, is_list = _parts(program, given.given["models"])
    if "optimizers" not in given.given or given.literal("optimizers", ...) is None:
        targets, _ = _parts(program, target)
        return (targets, [], models, [], is_list) if len(targets) == len(models) else None
    if not isinstance(target, cst.Tuple) or len(target.elements) != 2:
        return None
    model_targets, _ = _parts(program, target.elements[0].value)
    optimizer_targets, _ = _parts(program, target.elements[1].value)
    optimizers, _ = _parts(program, given.given["optimizers"])
    same = len(model_targets) == len(models) and len(optimizer_targets) == len(optimizers)
    plural = is_list or program.code(given.given["models"]).endswith("models")
    return (model_targets, optimizer_targets, models, optimizers, plural) if same else None


def _parts(program: Program, node: cst.BaseExpression) -> tuple[list[str], bool]:
    if isinstance(node, cst.List | cst.Tuple):
        return [program.code(element.value) for element in node.elements], False
    return [program.code(node)], False


def _take_options(made: Initialize) -> bool:
    """Record the options of ``amp.initialize``; return whether each has an equivalent."""
    given = made.given
    known = (*_WITHOUT_EFFECT, *_SAME_AS_LEVEL, "models", "optimizers", "enabled", "opt_level", "loss_scale")
    for name in given.others(*known, "keep_batchnorm_fp32", "min_loss_scale", "max_loss_scale"):
        if given.literal(name) is not None:
            made.program.refuse(made.call, f"amp.initialize({name}=)", _OTHERS.get(name, _FORM))
            return False
    _take_loss_scale(made)
    return _take_batch_norm(made) and all(_take_level_option(made, name) for name in _SAME_AS_LEVEL)


_OTHERS = {
    "cast_model_type": "polyamp.policy(level, param=..., compute=...)",
    "cast_model_outputs": "polyamp.policy(level, output=...)",
}


def _take_level_option(made: Initialize, name: str) -> bool:
    value, level = made.given.literal(name), literal(made.level)
    usual = ... if level is ... else _SAME_AS_LEVEL[name].get(level)
    if value is None or value == usual:
        return True
    if name == "master_weights" and value is False:
        made.options.append("master_weights=False")
        return True
    made.program.refuse(
        made.call, f"amp.initialize({name}={made.given.code(name)})", f"a level for which {name} is the default"
    )
    return False


def _take_batch_norm(made: Initialize) -> bool:
    value = made.given.literal("keep_batchnorm_fp32")
    level = literal(made.level)
    if value in (None, True, "True"):
        return True
    if value in (False, "False") and level == "O2":
        made.rules = 'rules={"batch_norm": "lower"}'
        return True
    if value in (False, "False") and level == "O3":
        return True
    if value is ...:
        made.program.note(
            made.call, "norms stay in float32 under O2; see docs/migrate/apex.md for keep_batchnorm_fp32=False"
        )
        return True
    made.program.refuse(made.call, "keep_batchnorm_fp32=False", 'polyamp.policy(level, rules={"batch_norm": "lower"})')
    return False


def _take_loss_scale(made: Initialize) -> None:
    given, value = made.given, made.given.literal("loss_scale")
    limits = [
        f"{to}={given.code(name)}"
        for name, to in (("min_loss_scale", "min"), ("max_loss_scale", "max"))
        if given.literal(name) is not None
    ]
    if value is ...:
        made.options.append(f"loss_scale={given.code('loss_scale')}")
        made.program.note(made.call, 'loss_scale is a number, "dynamic" or None; texts such as "128.0" need float()')
    elif value not in (None, "dynamic"):
        made.options.append(f"loss_scale={float(value)}")
    elif limits:
        made.options.append(f'loss_scale=polyamp.LossScale.like("apex", {", ".join(limits)})')
    elif value == "dynamic" and literal(made.level) not in ("O1", "O2"):
        made.options.append('loss_scale=polyamp.LossScale.like("apex")')
