"""One training run of `polyamp.parity`: the call of the user's function, and the metric that it returns.

The function may have any of these forms; the policy is also the current one while it runs::

    train(policy, seed)    # in any order, by these names
    train(seed)            # for code that asks for the current policy
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import inspect
import linecache
import math
import re
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

from polyamp import registry
from polyamp.diagnosis.health import health
from polyamp.errors import InvalidTypeError, InvalidValueError, LossScaleError, NonFiniteLossError, UsageError
from polyamp.policies import Policy
from polyamp.validation import as_number, shown

Better = Literal["higher", "lower"]

# fmt: off
HIGHER = frozenset((
    "accuracy", "acc", "auc", "auprc", "auroc", "bleu", "chrf", "dice", "f1", "iou", "kappa", "map", "mcc",
    "miou", "ndcg", "precision", "psnr", "r2", "recall", "reward", "rouge", "score", "ssim", "top1", "top5",
))
LOWER = frozenset((
    "bpb", "bpc", "brier", "cer", "crossentropy", "entropy", "error", "fid", "logloss", "loss", "mae", "mape",
    "mse", "nll", "perplexity", "ppl", "rate", "rmse", "wer",
))
# fmt: on
_FORMS = 'a number; {"accuracy": number, ...}; or one of the two and the wrapped optimizer (JAX: its state) in a tuple'


class Metric(NamedTuple):
    """What is compared."""

    name: str  # as ``train`` calls it; "value" if it returns a number without a name
    better: Better  # whether a higher or a lower value is better

    def __str__(self) -> str:
        return f"{self.name}, {self.better} is better"


class Run(NamedTuple):
    """One finished training."""

    seed: int  # its seed
    value: float  # the metric; inf or NaN if training diverged
    metrics: Mapping[str, float]  # all that ``train`` returned, by name
    skipped: int | None = None  # number of skipped steps; None if ``train`` did not return its optimizer
    failure: str = ""  # text of the error that ended it: the loss scale gave up, or a loss was not finite; else empty

    @property
    def is_finite(self) -> bool:
        """Return whether the run ended with a finite value of the metric."""
        return math.isfinite(self.value)


class Trainer:
    """The user's function, called in the form that it has, and read in the form that it returns."""

    def __init__(self, train: Callable[..., Any], metric: str | None = None, better: Better | None = None) -> None:
        self._call = _call_of(train)
        self.name, self.source = name_of(train), source_of(train)
        self._name, self._better = metric, better or (None if metric is None else better_of(metric))
        self.metric: Metric | None = None

    def __call__(self, policy: Policy, seed: int, *, may_fail: bool = False) -> Run:
        """Train once. The run has no value until `read` has looked for the metric."""
        try:
            with policy, contextlib.chdir("."):  # back to the current directory, if train leaves it
                made = self._call(policy, seed)
        except SystemExit as error:  # its exit code would be taken for a verdict
            raise UsageError(
                "train ended the program",
                where="parity(train)",
                found=f"sys.exit({error.code!r})",
                allowed=f"a function that returns {_FORMS}",
                fix="return the metric; options come from arguments with defaults, not from the command line",
            ) from error
        except (LossScaleError, NonFiniteLossError, FloatingPointError) as error:
            if not may_fail:
                raise
            return Run(seed, math.nan, {}, failure=str(error).splitlines()[0])
        metrics, holder = _parts(made)
        skipped = None if holder is None else health(holder).skipped
        return Run(seed, math.nan, metrics, skipped)

    def read(self, run: Run) -> Run:
        """Return a run with the value of the metric that is compared."""
        return run if run.failure else run._replace(value=run.metrics[self._metric_of(run.metrics).name])

    def _metric_of(self, metrics: Mapping[str, float]) -> Metric:
        if self.metric is None:
            name = self._name or next(iter(metrics))
            _check_known(name, metrics)
            self.metric = Metric(name, self._better or better_of(name))
        _check_known(self.metric.name, metrics)
        return self.metric


def name_of(train: Any) -> str:
    """Return the module and the name of a function; for a partial one also the arguments that it has."""
    if isinstance(train, functools.partial):
        arguments = [*map(repr, train.args), *(f"{name}={value!r}" for name, value in train.keywords.items())]
        return f"{name_of(train.func)}({', '.join(arguments)})"
    return f"{getattr(train, '__module__', '')}:{getattr(train, '__qualname__', type(train).__name__)}"


def source_of(train: Any) -> str:
    """Return a fingerprint of the file, or of a notebook's cell, that a function is written in; empty if there is none.

    >>> source_of(name_of) == source_of(functools.partial(better_of, "loss")), source_of(abs)
    (True, '')
    """
    function = inspect.unwrap(train.func if isinstance(train, functools.partial) else train)
    try:
        path = inspect.getsourcefile(function)
    except TypeError:  # builtins, and objects with __call__
        return ""
    linecache.checkcache(path)
    lines = linecache.getlines(path) if path else []
    return hashlib.sha256("".join(lines).encode()).hexdigest()[:16] if lines else ""


def better_of(name: str) -> Better:
    """Return whether a higher or a lower value of a metric is better, by the last known word of its name."""
    if found := known_better(name):
        return found
    raise InvalidValueError(
        "it is not known whether a higher or a lower value of this metric is better",
        where="parity(better=)",
        found=name,
        allowed=f"a name with one of {', '.join(sorted(HIGHER | LOWER))}; or better= stated",
        fix='state better="higher" or better="lower"',
    )


def known_better(name: str) -> Better | None:
    """Return as `better_of`, or None if the name does not tell: then it may be a time, or a number of steps."""
    words = [word for word in re.split(r"[^a-z0-9]+", name.lower()) if word in HIGHER | LOWER | {"value"}]
    return None if not words else "higher" if words[-1] in HIGHER else "lower"


def _call_of(train: Callable[..., Any]) -> Callable[[Policy, int], Any]:
    """Return how to call the function: with policy and seed by name if it has these names, else one after the other."""
    if not callable(train):
        raise _not_a_function(shown(train))
    try:
        parameters = inspect.signature(train).parameters
    except ValueError:  # builtins
        return train
    by_name = [one.name for one in parameters.values() if one.kind not in (one.POSITIONAL_ONLY, *_ANY_NUMBER)]
    known = {name for name in ("policy", "seed") if name in by_name}
    needed = {one.name for one in parameters.values() if one.default is one.empty and one.kind not in _ANY_NUMBER}
    if "seed" in known and needed <= known:
        return lambda policy, seed: train(**{"policy": policy, "seed": seed} if len(known) == 2 else {"seed": seed})
    first_two = list(parameters.values())[:2]
    if not known and len(first_two) == 2 and needed <= {one.name for one in first_two}:
        return train
    raise _not_a_function(f"{getattr(train, '__name__', shown(train))}{inspect.signature(train)}")


_ANY_NUMBER = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def _not_a_function(found: str) -> InvalidTypeError:
    return InvalidTypeError(
        "this is not a training function that parity can call",
        where="parity(train)",
        found=found,
        allowed="train(policy, seed), or train(seed) that trains under the current policy",
        fix="write a function that makes a fresh model from the seed, trains it, and returns the metric",
    )


def _parts(made: Any) -> tuple[dict[str, float], Any]:
    """Return the metrics by name, and the optimizer if there is one."""
    holder = None
    if isinstance(made, tuple) and len(made) == 2 and _number(made[1]) is None:
        made, holder = made if registry.adapter_within(made[1]) is not None else (made, None)
    named = made if isinstance(made, Mapping) else {"value": made}
    metrics = {str(name): _number(value) for name, value in named.items()}
    if not metrics or None in metrics.values():
        raise _unreadable(made, metrics)
    return {name: value for name, value in metrics.items() if value is not None}, holder


def _number(value: object) -> float | None:
    try:
        return as_number(value)
    except (TypeError, ValueError, OverflowError):
        return None


def _unreadable(made: object, metrics: Mapping[str, float | None]) -> InvalidTypeError:
    wrong = [name for name, value in metrics.items() if value is None]
    if isinstance(made, Mapping) and 0 < len(wrong) < len(metrics):
        what, fix = f"train returned what is not a number: {', '.join(wrong)}", "return the numbers only"
    else:
        what, fix = "train returned no metric", "return the metric on data that it did not train on, with its name, "
        fix += 'as in {"accuracy": 0.97}'
    return InvalidTypeError(what, where="parity(train)", found=shown(made), allowed=_FORMS, fix=fix)


def _check_known(name: str, metrics: Mapping[str, float]) -> None:
    if name not in metrics:
        raise InvalidValueError(
            "train returned no such metric",
            where="parity(metric=)",
            found=name,
            allowed=", ".join(metrics),
            fix="name one that train returns, each time",
        )
