"""``polyamp explain``, ``probe`` and ``lint``: the verbs of the same names, on a user's own function.

The exit code is 0 if nothing is wrong, `FINDINGS` if something is, 1 for polyamp's own errors, and 2 for a wrong
command line.
"""

from __future__ import annotations

from typing import Annotated

import typer

from polyamp import rewriting
from polyamp.commands.show import show
from polyamp.commands.target import step_of
from polyamp.diagnosis import lint as linting
from polyamp.diagnosis import verbs as looking

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
Backend = Annotated[str | None, typer.Option("--backend", help="torch, jax, tensorflow or keras, if it is unclear.")]


def explain(
    target: StepTarget,
    policy: PolicyName = None,
    json: JsonFile = None,
    plot: PlotFile = None,
    backend: Backend = None,
    engine: Engine = None,
) -> None:
    """Show the format of every operation of a step, and why. Exit code 3: a rule of the policy matches nothing."""
    step = step_of(target)
    chosen = looking.sixteen_bit(step.options.get("policy") if policy is None else policy)
    plan = step.call(rewriting.explain, policy=chosen, backend=backend, engine=engine)
    show(plan, json, plot)
    _end(bool(plan.unused_rules))


def probe(
    target: StepTarget,
    policy: PolicyName = None,
    json: JsonFile = None,
    plot: PlotFile = None,
    backend: Backend = None,
) -> None:
    """Examine every tensor of one step and report which loss scales are safe. Exit code 3: none is, or it overflows."""
    probed = step_of(target).call(looking.probe, policy=policy, backend=backend)
    show(probed, json, plot)
    _end(not probed.is_safe)


def lint(target: StepTarget, policy: PolicyName = None, json: JsonFile = None, backend: Backend = None) -> None:
    """Report what will go wrong in training, without running a step. Exit code 3: an error or a warning."""
    report = step_of(target).call(linting.lint, policy=policy, backend=backend)
    show(report, json)
    _end(bool(report.errors or report.warnings))


def _end(found: bool) -> None:
    if found:
        raise typer.Exit(FINDINGS)
