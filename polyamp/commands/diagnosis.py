"""``polyamp explain``, ``probe``, ``sweep`` and ``lint``: the verbs of the same names, on a user's own function.

The exit code is 0 if nothing is wrong, `FINDINGS` if something is, 1 for polyamp's own errors, and 2 for a wrong
command line.
"""

from __future__ import annotations

import math
from typing import Annotated

import typer

from polyamp import verbs
from polyamp.commands.show import check_files, printing_elsewhere, show
from polyamp.commands.target import step_of, training_of
from polyamp.diagnosis import lint as linting
from polyamp.diagnosis import sweep as sweeping
from polyamp.diagnosis import verbs as looking
from polyamp.policies import policy as make_policy

FINDINGS = 3
"""The exit code of a command that ran and found something wrong."""

_STEP = (
    "package.module:function; called without arguments, it returns a step, (step, *arguments) or a dict of them, "
    "or it is the step."
)
_FIRST, _LAST = "First scale, as a power of two.", "Last scale, as a power of two."
_TRAIN = (
    "package.module:function: train(scale), which returns the final loss; or a function that returns it, or a dict."
)

StepTarget = Annotated[str, typer.Argument(help=_STEP, metavar="MODULE:FUNCTION", show_default=False)]
TrainTarget = Annotated[str, typer.Argument(help=_TRAIN, metavar="MODULE:FUNCTION", show_default=False)]
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
    plan = step.call(verbs.explain, policy=chosen, backend=backend, engine=engine)
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


def sweep(
    target: TrainTarget,
    policy: Annotated[str | None, typer.Option("--policy", help="The current policy while it trains.")] = None,
    lowest: Annotated[int | None, typer.Option(min=-126, max=127, help=_FIRST, show_default="-4")] = None,
    highest: Annotated[int | None, typer.Option(min=-126, max=127, help=_LAST, show_default="28")] = None,
    every: Annotated[int, typer.Option(min=1, help="Powers of two from one scale to the next.")] = 4,
    json: JsonFile = None,
    plot: PlotFile = None,
) -> None:
    """Train at several static loss scales and report which reach the reference. Exit code 3: none does."""
    scales = None
    if lowest is not None or highest is not None or every != 4:
        first, last = -4 if lowest is None else lowest, 28 if highest is None else highest
        scales = [math.ldexp(1.0, exponent) for exponent in range(first, last + 1, every)]
    check_files(json, plot)
    with make_policy(policy), printing_elsewhere(json):
        swept = training_of(target).call(sweeping.sweep, scales=scales)
    show(swept, json, plot)
    _end(swept.window is None)


def lint(target: StepTarget, policy: PolicyName = None, json: JsonFile = None, backend: Backend = None) -> None:
    """Report what will go wrong in training, without running a step. Exit code 3: an error or a warning."""
    report = step_of(target).call(linting.lint, policy=policy, backend=backend)
    show(report, json)
    _end(bool(report.errors or report.warnings))


def _end(found: bool) -> None:
    if found:
        raise typer.Exit(FINDINGS)
