"""``polyamp parity``: the verb of the same name, on a user's own training function."""

from __future__ import annotations

import sys
from typing import Annotated, Literal

import typer

from polyamp.commands.diagnosis import JsonFile, PlotFile
from polyamp.commands.show import check_files, printing_elsewhere, show
from polyamp.commands.target import training_of
from polyamp.comparison import FIRST_LOOK
from polyamp.equivalence import parity as train_over_seeds

CODES = {"equivalent": 0, "better": 0, "worse": 3, "not yet known": 4, "cannot tell": 5}
INTERRUPTED = 130  # as in shells

_TRAIN = (
    "package.module:function: train(policy, seed), which returns the metric; or a function that returns it, or a dict."
)
_MARGIN = "The largest difference that would not matter: a number, or a share of float32's mean."


def parity(
    target: Annotated[str, typer.Argument(help=_TRAIN, metavar="MODULE:FUNCTION", show_default=False)],
    policy: Annotated[list[str] | None, typer.Option(help="Policy, by name; may be repeated.  [mixed_float16]")] = None,
    seeds: Annotated[
        int | None, typer.Option(min=FIRST_LOOK, help="Seeds, unless the answer is clear before.  [10]")
    ] = None,
    margin: Annotated[str | None, typer.Option(help=f"{_MARGIN}  [0.5%]")] = None,
    metric: Annotated[
        str | None, typer.Option(help="Which metric, if there are several; by default the first.")
    ] = None,
    better: Annotated[
        Literal["higher", "lower"] | None, typer.Option(help="Which is better; by default as the metric's name tells.")
    ] = None,
    alpha: Annotated[float | None, typer.Option(help="Chance of a wrong verdict.  [0.05]")] = None,
    controls: Annotated[bool | None, typer.Option(help="Train the negative controls too.  [yes]")] = None,
    stop_early: Annotated[bool | None, typer.Option(help="Stop as soon as the answer is clear.  [yes]")] = None,
    first_seed: Annotated[int | None, typer.Option(help="The first seed.  [0]")] = None,
    keep: Annotated[
        str | None, typer.Option(metavar="FILE", help="Add every run to this file, and take those it has from there.")
    ] = None,
    json: JsonFile = None,
    plot: PlotFile = None,
) -> None:
    """Train over seeds in float32 and under policies, and report whether the results are equivalent.

    Exit code 3: a policy is worse. 4: not yet known, more seeds are needed. 5: the task cannot tell.
    """
    check_files(json, plot)
    options = {"policy": policy, "seeds": seeds, "margin": margin, "metric": metric, "better": better, "alpha": alpha}
    options |= {"controls": controls, "stop_early": stop_early, "first_seed": first_seed, "keep": keep}
    try:
        with printing_elsewhere(json):
            found = training_of(target).call(train_over_seeds, **options)
    except KeyboardInterrupt:
        kept = f"finished runs are in {keep}: the same command goes on" if keep else "--keep FILE would keep the runs"
        print(f"\ninterrupted: {kept}", file=sys.stderr)
        raise typer.Exit(INTERRUPTED) from None
    show([found], found.as_dict(), json)
    if plot is not None:
        found.plot(plot)
    if code := CODES[found.verdict]:
        raise typer.Exit(code)
