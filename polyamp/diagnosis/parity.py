"""The verb `parity`: train over seeds in float32 and under policies, and tell whether the results are equivalent."""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import json
import math
import re
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from os import SEEK_END, PathLike
from pathlib import Path
from typing import Any

from polyamp import adapters
from polyamp.diagnosis.comparison import Better, Comparison, Parity, Question, Run
from polyamp.diagnosis.equivalence import FIRST_LOOK, student
from polyamp.diagnosis.health import health
from polyamp.diagnosis.probe import sixteen_bit
from polyamp.errors import (
    InvalidTypeError,
    InvalidValueError,
    LossScaleError,
    NonFiniteLossError,
    PolyampError,
    PolyampWarning,
    UsageError,
    check_arguments,
    check_count,
    check_range,
    is_integer,
    is_number,
    kind_of,
    refuses_unreadable,
    shown,
    warn_once,
)
from polyamp.formats import format_of
from polyamp.policies import Policy
from polyamp.policies import policy as make_policy
from polyamp.report import finite
from polyamp.settings import LossScale

FLOAT32 = make_policy("float32")
Key = tuple[str, str, int]  # of a kept run: the training function, the policy and the seed

CONTROLS: Mapping[str, Mapping[str, Any]] = {
    "no loss scaling": {"loss_scale": LossScale.fixed(1)},  # of policies that compute in float16
    "all in 16 bits": {"rules": {"*": "lower"}},
}
"""The negative controls: what makes a policy worse on purpose."""

# fmt: off
HIGHER = frozenset((
    "accuracy", "acc", "auc", "auprc", "auroc", "bleu", "chrf", "dice", "f1", "iou", "kappa", "map", "mcc",
    "miou", "ndcg", "precision", "psnr", "r2", "recall", "reward", "rouge", "score", "ssim", "top1", "top5",
))
LOWER = frozenset((
    "bpb", "bpc", "brier", "cer", "crossentropy", "entropy", "error", "fid", "logloss", "loss", "mae", "mape",
    "mse", "nll", "perplexity", "ppl", "rate", "rmse", "value", "wer",
))
# fmt: on
_FORMS = 'a number; {"accuracy": number, ...}; or one of the two and the wrapped optimizer (JAX: its state) in a tuple'


@refuses_unreadable
def parity(
    train: Callable[..., Any],
    policy: Policy | str | Sequence[Policy | str] | None = None,
    *,
    seeds: int = 10,
    margin: float | str = "0.5%",
    metric: str | None = None,
    better: Better | None = None,
    alpha: float = 0.05,
    controls: bool = True,
    stop_early: bool = True,
    first_seed: int = 0,
    keep: str | PathLike[str] | None = None,
    progress: Progress = True,
) -> Parity:
    """Train over seeds in float32 and under policies, and report whether the results are equivalent.

    Every seed is trained in float32 and under each policy, with the same weights and the same order of the data, so the
    results are compared in pairs. The verdict comes from two one-sided t-tests (TOST): the means are equivalent if the
    whole confidence interval of their difference lies within the margin; a difference that is merely not significant is
    not evidence of equality.

    Negative controls show that the task could fail: the same policy with every operation in 16 bits, and in float16
    without loss scaling. If none of them fails, equivalence on this task shows nothing.

    >>> def train(policy, seed):  # in place of a training that takes minutes
    ...     noise = (seed * 7919 % 13 - 6) * 1e-4
    ...     return {"loss": 2.0 + noise + (policy.compute == "float16") * (0.001 + noise / 2)}
    >>> found = parity(train, "mixed_float16", controls=False, progress=False)
    >>> found.comparisons[0].verdict, found.comparisons[0].seeds
    ('equivalent', 5)

    Args:
        train: ``train(policy, seed)``, or ``train(seed)`` for code that uses the current policy. It makes a fresh model
            from the seed, trains it with `polyamp.wrap_optimizer`, and returns the metric: a number (a loss), a
            mapping such as ``{"accuracy": 0.97}``, or one of the two and the wrapped optimizer (in JAX its state), from
            which skipped steps are counted.
        policy: one policy, or several; None is the current policy if it computes in 16 bits, else ``mixed_float16``.
        seeds: number of seeds, at least 3. Fewer are trained if the answer is clear.
        margin: the largest difference of means that would not matter, in the metric's unit; or, as in "0.5%", a share
            of float32's mean. State it before looking at results.
        metric: which metric to compare, if ``train`` returns several; None is the first.
        better: "higher" or "lower"; None is decided by the metric's name.
        alpha: chance of a wrong verdict for each comparison, all looks together (> 0, < 0.5).
        controls: whether to train the negative controls.
        stop_early: whether to stop a comparison as soon as it is clear.
        first_seed: the seeds are this one and those that follow it.
        keep: a file to which every finished run is added, one line of JSON each. Runs that it has of this function,
            policy and seed are not trained again, so an interrupted call can simply be repeated.
        progress: True writes a line for each run to standard error, False nothing; or a function that is called with
            ``(runs done, runs in all, text)``.

    Returns:
        A `Parity`. It prints as a table, and has `as_dict`, `save` and `plot`.

    Raises:
        InvalidTypeError: ``train`` is not such a function, or returns no metric.
        InvalidValueError: an argument is out of range, or a policy computes in float32.
        MissingFrameworkError: scipy is not installed (the extra ``parity``).

    Errors of ``train`` propagate. A loss scale that gives up, or a loss that is not finite, is a run that failed.

    Sources: the tests are Schuirmann's (1987), in the form of confidence intervals; negative and positive controls as
    in any assay (Lipsitch and others 2010).
    """
    given = list(policy) if isinstance(policy, Sequence) and not isinstance(policy, str) else [policy]
    policies = list(dict.fromkeys(map(sixteen_bit, given)))
    are_low = bool(policies) and all(format_of(one.compute).is_low for one in policies)
    is_direction = better is None or (isinstance(better, str) and better in ("higher", "lower"))
    checks = [
        ("policy", list(map(str, policies)), are_low, "policies of 16 bits; float32 is trained in any case"),
        ("metric", metric, isinstance(metric, str | None), "the name of a metric, or None"),
        ("better", better, is_direction, '"higher", "lower" or None'),
        ("controls", controls, isinstance(controls, bool), "True or False"),
        ("stop_early", stop_early, isinstance(stop_early, bool), "True or False"),
        ("first_seed", first_seed, is_integer(first_seed) and abs(first_seed) < 2**63, "an integer of 64 bits"),
        ("keep", keep, isinstance(keep, str | PathLike | None), "the path of a file, or None"),
        ("progress", progress, isinstance(progress, bool) or callable(progress), "True, False or a function"),
    ]
    check_arguments("parity", checks)
    check_count("seeds", seeds, where="parity(seeds=)")
    check_range("seeds", seeds, FIRST_LOOK, 10_000, where="parity(seeds=)")
    check_range("alpha", alpha, 1e-6, 0.49, where="parity(alpha=)")
    student()  # if scipy is missing, this fails now and not after hours of training
    amount, is_share = _margin(margin)
    question = Question(amount, is_share, metric or "", better or "lower", seeds, alpha, stop_early)
    study = _Study(_caller(train), _name(train), question, better, None if keep is None else Path(keep))
    ways = {(one, name): made for one in policies for name, made in _variants(one, controls).items()}
    study.train(ways, range(first_seed, first_seed + seeds), progress)
    return study.report()


Progress = bool | Callable[[int, int, str], object]


@dataclass
class _Study:
    """The runs of a `parity` call so far."""

    call: Callable[[Policy, int], Any]
    name: str  # of the training function
    question: Question
    better: Better | None
    path: Path | None  # where runs are kept

    def __post_init__(self) -> None:
        self.kept: dict[Key, Run] = {} if self.path is None else read_runs(self.path)
        self.float32: list[Run] = []
        self.runs: dict[tuple[Policy, str], list[Run]] = {}  # by policy and name of the control
        if self.question.metric:
            self.question = self._named(self.question.metric)

    def train(self, ways: Mapping[tuple[Policy, str], Policy], seeds: range, progress: Progress) -> None:
        """Train seed after seed under every policy with an open verdict."""
        self.runs = {way: [] for way in ways}
        parts, total = itertools.count(1), len(seeds) * (len(ways) + 1)

        def done(text: str) -> None:
            if callable(progress):
                progress(next(parts), total, text)
            elif progress:
                print(f"{next(parts)}/{total} {text}", file=sys.stderr, flush=True)

        for seed in seeds:
            unclear = [way for way in ways if self._is_open(way)]
            if unclear:
                self.float32.append(self._run(FLOAT32, "float32", seed, done))
            for policy, control in unclear:
                title = self.compare((policy, "")).name + (f", {control}" if control else "")
                with warnings.catch_warnings():
                    if control:  # broken on purpose, of which the user need not be warned
                        warnings.simplefilter("ignore", PolyampWarning)
                    self.runs[policy, control].append(self._run(ways[policy, control], title, seed, done))

    def _is_open(self, way: tuple[Policy, str]) -> bool:
        """Return whether more runs would help: a control's only while its policy can still be equivalent."""
        policy, control = way
        if not self.runs[way]:
            return True
        if self.question.diverged(self.float32) or self.compare(way).verdict != "not yet known":
            return False
        return not control or self.compare((policy, "")).verdict in ("equivalent", "not yet known")

    def _run(self, policy: Policy, title: str, seed: int, done: Callable[[str], None]) -> Run:
        """Train once, or take the run from the file."""
        key, which = (self.name, str(policy), seed), f"seed {seed}, {title}"
        if is_new := key not in self.kept:
            try:
                self.kept[key] = self._trained(policy, seed)
            except Exception as error:
                advice = "" if isinstance(error, PolyampError) else "; if training diverged, return NaN as the metric"
                error.add_note(f"in polyamp.parity, {which}{advice}")
                raise
            if self.path is not None:
                add_run(self.path, key, self.kept[key])
        run = self.kept[key]
        if run.metrics and not self.question.metric:
            self.question = self._named(next(iter(run.metrics)))
        metric, known = self.question.metric, run.metrics
        checks = [("metric", metric, not known or metric in known, f"one of {', '.join(known)}, in every run")]
        check_arguments("parity", checks, what="train returned no such metric")
        done(f"{which}: {run.value(metric):.6g}{'' if is_new else ' (kept)'}")
        return run

    def _trained(self, policy: Policy, seed: int) -> Run:
        try:
            with policy, contextlib.chdir("."):  # back to the current directory, if train leaves it
                made = self.call(policy, seed)
        except SystemExit as error:  # its exit code would be taken for a verdict
            raise UsageError(
                "train ended the program",
                where="parity(train)",
                found=f"sys.exit({error.code!r})",
                allowed=f"a function that returns {_FORMS}",
                fix="return the metric; options come from arguments with defaults, not from the command line",
            ) from error
        except (LossScaleError, NonFiniteLossError, FloatingPointError) as error:
            if policy == FLOAT32:
                raise
            return Run(seed, {}, failure=str(error).splitlines()[0])
        metrics, holder = _parts(made)
        return Run(seed, metrics, None if holder is None else health(holder).skipped)

    def _named(self, metric: str) -> Question:
        return replace(self.question, metric=metric, better=self.better or better_of(metric))

    def compare(self, way: tuple[Policy, str]) -> Comparison:
        """Return the comparison of a policy's or control's runs so far."""
        policy, control = way
        runs, reference = tuple(self.runs[way]), tuple(self.float32[: len(self.runs[way])])
        return Comparison(str(policy), runs, reference, self.question, control)

    def report(self) -> Parity:
        """Return the report of all runs."""
        return Parity(self.name, self.question, tuple(self.float32), tuple(map(self.compare, self.runs)))


def _margin(given: float | str) -> tuple[float, bool]:
    """Return the margin, and whether it is a share of float32's mean."""
    is_share = isinstance(given, str) and given.strip().endswith("%")
    try:
        amount = float(given.strip().rstrip("%")) if isinstance(given, str) else given
    except ValueError:
        amount = math.nan
    fits = is_number(amount) and 0 < amount <= sys.float_info.max
    allowed = "a number greater than 0 in the metric's unit, or a share of float32's mean, as in '0.5%'"
    check_arguments("parity", [("margin", given, fits, allowed)])
    return (amount / 100 if is_share else float(amount)), is_share


def _variants(policy: Policy, controls: bool) -> dict[str, Policy]:
    """Return the policy and its negative controls by name. The policy's own name is empty."""
    wanted = {name: one for name, one in CONTROLS.items() if policy.compute == "float16" or "rules" in one}
    changed = {name: make_policy(policy, **one) for name, one in wanted.items() if controls}
    return {"": policy} | {name: variant for name, variant in changed.items() if variant != policy}


def better_of(metric: str) -> Better:
    """Return whether a higher or a lower value of a metric is better, by the last known word of its name."""
    words = [word for word in re.split(r"[^a-z0-9]+", metric.lower()) if word in HIGHER | LOWER]
    allowed = f'better="higher" or better="lower"; or a name with one of {", ".join(sorted(HIGHER | LOWER))}'
    what = "it is not known whether a higher or a lower value of this metric is better"
    check_arguments("parity", [("metric", metric, words, allowed)], what=what)
    return "higher" if words[-1] in HIGHER else "lower"


def _name(train: Any) -> str:
    """Return the module and the name of a function; for a partial one also the arguments that it has."""
    if isinstance(train, functools.partial):
        arguments = [*map(repr, train.args), *(f"{name}={value!r}" for name, value in train.keywords.items())]
        return f"{_name(train.func)}({', '.join(arguments)})"
    return f"{getattr(train, '__module__', '')}:{getattr(train, '__qualname__', type(train).__name__)}"


def _caller(train: Callable[..., Any]) -> Callable[[Policy, int], Any]:
    """Return a function of policy and seed that calls ``train``: by keyword if it has these names, else by position."""
    found = shown(train)
    if callable(train):
        try:
            signature = inspect.signature(train)
        except ValueError:  # builtins
            return train
        named = {"policy", "seed"} & {one.name for one in signature.parameters.values() if one.kind != 0}
        found = f"{getattr(train, '__name__', found)}{signature}"
        with contextlib.suppress(TypeError):
            if "seed" in named:
                signature.bind(**dict.fromkeys(named))
                return lambda policy, seed: train(**{"seed": seed, **({"policy": policy} if "policy" in named else {})})
            if not named:
                signature.bind(None, None)
                return train
    raise InvalidTypeError(
        "this is not a training function that parity can call",
        where="parity(train)",
        found=found,
        allowed="train(policy, seed), or train(seed) that trains under the current policy",
        fix="write a function that makes a fresh model from the seed, trains it, and returns the metric",
    )


def _parts(made: Any) -> tuple[dict[str, float], Any]:
    """Return the metrics by name, and the optimizer if there is one."""
    found, holder = made, None
    if isinstance(made, tuple) and len(made) == 2 and _number(made[1]) is None and adapters.adapter_within(made[1]):
        found, holder = made
    named = found if isinstance(found, Mapping) else {"value": found}
    metrics = {str(name): number for name, value in named.items() if (number := _number(value)) is not None}
    if named and len(metrics) == len(named):
        return metrics, holder
    wrong = ", ".join(str(name) for name in named if str(name) not in metrics)
    raise InvalidTypeError(
        f"train returned what is not a number: {wrong}" if metrics else "train returned no metric",
        where="parity(train)",
        found=shown(found),
        allowed=_FORMS,
        fix="return the metric on data that it did not train on, by its name, and nothing else",
    )


def _number(value: object) -> float | None:
    try:
        return as_number(value)
    except (TypeError, ValueError, OverflowError):
        return None


def as_number(value: Any) -> float:
    """Return a number, or a scalar array of any framework, as a float."""
    if isinstance(value, str | bool):
        raise TypeError(f"{kind_of(value)} is not a number")
    return float(value.item() if hasattr(value, "item") else value)  # float() of a tensor that has a gradient warns


def read_runs(path: Path) -> dict[Key, Run]:
    """Return the runs in a file; a warning names the lines that are damaged, and they are skipped."""
    runs, damaged = {}, []
    try:
        if path.exists() and not path.is_file():
            raise OSError(f"{path} is not a file")
        with path.open("a+", errors="replace") as file:
            file.seek(0)
            lines = file.readlines()
    except (OSError, ValueError) as error:
        raise _bad_file("the file of runs cannot be written", str(error), "a file in a folder that exists") from error
    for number, line in enumerate(lines, 1):
        try:
            kept = json.loads(line)
            metrics = {name: math.nan if value is None else as_number(value) for name, value in kept["metrics"].items()}
            run = Run(kept["seed"], metrics, kept["skipped"], kept["failure"])
            runs[kept["train"], kept["policy"], run.seed] = run
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
            damaged.append(str(number))
    if damaged and not runs:
        raise _bad_file("this is not a file of runs", f"{path}: no line is one", "a new file, or one that parity wrote")
    if damaged:
        warn_once(f"{path}: skipped what is not a whole run, in line {', '.join(damaged)}; it is trained again")
    return runs


def add_run(path: Path, key: Key, run: Run) -> None:
    """Append a run to a file as one line, in one write; if the last line there was cut, start a new line."""
    metrics = {name: finite(value) for name, value in run.metrics.items()}
    line = json.dumps({"train": key[0], "policy": key[1], **run._asdict(), "metrics": metrics})
    with path.open("ab+", buffering=0) as file:
        file.seek(max(file.seek(0, SEEK_END) - 1, 0))
        is_cut = file.read(1) not in (b"", b"\n")
        written = b"\n" * is_cut + f"{line}\n".encode()
        if file.write(written) < len(written):
            raise _bad_file("the file of runs cannot be written", "the disk is full", "a disk with room")


def _bad_file(what: str, found: str, allowed: str) -> InvalidValueError:
    return InvalidValueError(what, where="parity(keep=)", found=found, allowed=allowed, fix="name another file")
