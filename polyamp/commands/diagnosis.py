"""``polyamp explain`` and ``polyamp diagnose``: the verbs of the same names, on a user's own function.

The exit code is 0 if nothing is wrong, `FINDINGS` if something is, 1 for polyamp's own errors, and 2 for a wrong
command line.
"""

from __future__ import annotations

from typing import Annotated

import typer

from polyamp import rewriting
from polyamp.commands.show import show
from polyamp.commands.target import step_of
from polyamp.diagnosis.diagnose import diagnose as diagnose_step
from polyamp.diagnosis.lint import lint
from polyamp.diagnosis.probe import sixteen_bit

FINDINGS = 3
"""The exit code of a command that ran and found something wrong."""

_STEP = (
    "package.module:function; called without arguments, it returns a step, (step, *arguments) or a dict of them, "
    "or it is the step."
)

StepTarget = Annotated[str, typer.Argument(help=_STEP, metavar="MODULE:FUNCTION", show_default=False)]
PolicyName = Annotated[str | None, typer.Option("--policy", help="Policy, by name; mixed_float16 by default.")]
JsonFile = Annotated[str | None, typer.Option("--json", metavar="FILE", help="Write JSON; - is standard output.")]
PlotFile = Annotated[str | None, typer.Option("--plot", metavar="FILE", help="Draw a picture into this image file.")]
Engine = Annotated[str | None, typer.Option("--engine", help="rewrite, or in PyTorch autocast.")]
Scale = Annotated[float | None, typer.Option("--scale", help="Loss scale; by default that of the step or policy.")]
Backend = Annotated[str | None, typer.Option("--backend", help="torch, jax, tensorflow or keras, if it is unclear.")]


def explain(
    target: StepTarget,
    policy: PolicyName = None,
    json: JsonFile = None,
    backend: Backend = None,
    engine: Engine = None,
) -> None:
    """Show the format of every operation of a step, and why. Exit code 3: a rule of the policy matches nothing."""
    step = step_of(target)
    chosen = sixteen_bit(step.options.get("policy") if policy is None else policy)
    plan = step.call(rewriting.explain, policy=chosen, backend=backend, engine=engine)
    show([plan], plan.as_dict(), json)
    _end(bool(plan.unused_rules))


def diagnose(
    target: StepTarget,
    policy: PolicyName = None,
    scale: Scale = None,
    json: JsonFile = None,
    plot: PlotFile = None,
    backend: Backend = None,
) -> None:
    """Report what is wrong with a step in 16 bits, which loss scales are safe, and what to do.

    Exit code 3: something is found before or in the step, or no loss scale is safe.
    """
    step = step_of(target)
    found = step.call(lint, policy=policy, backend=backend)
    verdict = step.call(diagnose_step, policy=policy, backend=backend, scale=scale)
    values = {**verdict.as_dict(), "probe": verdict.probe.as_dict(), "lint": found.as_dict()}
    show([found, verdict.probe, verdict], values, json)
    if plot is not None:
        verdict.probe.plot(plot)
    _end(bool(found.errors or found.warnings or verdict.kind not in ("finite", "scale") or not verdict.probe.is_safe))


def _end(found: bool) -> None:
    if found:
        raise typer.Exit(FINDINGS)
