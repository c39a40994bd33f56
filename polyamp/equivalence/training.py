"""One training run of `polyamp.parity`: the call of the user's function, and the metric that it returns.

The function may have any of these forms; the policy is also the current one while it runs::

    train(policy, seed)    # in any order, by these names
    train(seed)            # for code that asks for the current policy
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

from polyamp import registry
from polyamp.diagnosis.health import health
from polyamp.errors import InvalidTypeError, InvalidValueError, LossScaleError, NonFiniteLossError
from polyamp.policy import Policy
from polyamp.validation import as_number, shown

Better = Literal["higher", "lower"]

HIGHER = frozenset(
    ("accuracy", "acc", "auc", "bleu", "f1", "iou", "map", "precision", "recall", "reward", "score", "top1", "top5")
)
LOWER = frozenset(("cer", "error", "loss", "mae", "mse", "nll", "perplexity", "ppl", "rate", "rmse", "wer"))
_FORMS = 'a number; {"accuracy": number, ...}; or one of the two and the wrapped optimizer (JAX: its state) in a tuple'


class Metric(NamedTuple):
    """What is compared.

    Attributes:
        name: as ``train`` calls it; "value" if it returns a number without a name.
        better: whether a higher or a lower value is better.
    """

    name: str
    better: Better

    def __str__(self) -> str:
        return f"{self.name}, {self.better} is better"


class Run(NamedTuple):
    """One finished training.

    Attributes:
        seed: its seed.
        value: the metric; inf or NaN if training diverged.
        metrics: all that ``train`` returned, by name.
        skipped: number of skipped steps; None if ``train`` did not return its optimizer.
        failure: text of the error that ended it: the loss scale gave up, or a loss was not finite; else empty.
    """

    seed: int
    value: float
    metrics: Mapping[str, float]
    skipped: int | None = None
    failure: str = ""

    @property
    def is_finite(self) -> bool:
        """Return whether the run ended with a finite value of the metric."""
        return math.isfinite(self.value)


class Trainer:
    """The user's function, called in the form that it has, and read in the form that it returns.

    >>> trainer = Trainer(lambda policy, seed: {"accuracy": 0.9 + seed / 100})
    >>> from polyamp.policy import policy
    >>> trainer(policy("float32"), 3).value, str(trainer.metric)
    (0.93, 'accuracy, higher is better')

    Args:
        train: the function.
        metric: the name of the metric to compare; None is the first that ``train`` returns.
        better: None is decided by the metric's name. A number without a name is taken for a loss.

    Raises:
        InvalidTypeError: ``train`` is not a function of a seed.
    """

    def __init__(self, train: Callable[..., Any], metric: str | None = None, better: Better | None = None) -> None:
        self._call = _call_of(train)
        self.name = name_of(train)
        self._name, self._better = metric, better
        self.metric: Metric | None = None

    def __call__(self, policy: Policy, seed: int, *, may_fail: bool = False) -> Run:
        """Train once.

        Args:
            policy: handed over, and current while it trains.
            seed: decides the weights and the order of the data.
            may_fail: whether a loss scale that gives up, or a loss that is not finite, is a result and not an error.

        Raises:
            InvalidTypeError, InvalidValueError: the result has none of the allowed forms.
        """
        try:
            with policy:
                made = self._call(policy, seed)
        except (LossScaleError, NonFiniteLossError, FloatingPointError) as error:
            if not may_fail:
                raise
            return Run(seed, math.nan, {}, failure=str(error).splitlines()[0])
        metrics, holder = _parts(made)
        skipped = None if holder is None else health(holder).skipped
        return self.read(Run(seed, math.nan, metrics, skipped))

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
    """Return the module and the name of a function; for a partial one also the arguments that it has.

    >>> name_of(functools.partial(math.pow, 2.0))
    'math:pow(2.0)'
    """
    if isinstance(train, functools.partial):
        arguments = [*map(repr, train.args), *(f"{name}={value!r}" for name, value in train.keywords.items())]
        return f"{name_of(train.func)}({', '.join(arguments)})"
    return f"{getattr(train, '__module__', '')}:{getattr(train, '__qualname__', type(train).__name__)}"


def better_of(name: str) -> Better:
    """Return whether a higher or a lower value of a metric is better, by the last known word of its name.

    >>> better_of("test_accuracy"), better_of("error_rate"), better_of("value")
    ('higher', 'lower', 'lower')

    Raises:
        InvalidValueError: no word of the name is known.
    """
    for word in reversed(name.lower().replace("-", "_").replace("/", "_").split("_")):
        if word in HIGHER or word in LOWER or word == "value":
            return "higher" if word in HIGHER else "lower"
    raise InvalidValueError(
        "it is not known whether a higher or a lower value of this metric is better",
        where="parity(better=)",
        found=name,
        allowed=f"a name with one of {', '.join(sorted(HIGHER | LOWER))}; or better= stated",
        fix='state better="higher" or better="lower"',
    )


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
    if isinstance(made, tuple) and len(made) == 2 and registry.adapter_within(made[1]) is not None:
        made, holder = made
    named = made if isinstance(made, Mapping) else {"value": made}
    try:
        metrics = {str(name): as_number(value) for name, value in named.items()}
    except (TypeError, ValueError, OverflowError) as error:
        raise _unreadable(made) from error
    if not metrics:
        raise _unreadable(made)
    return metrics, holder


def _unreadable(made: object) -> InvalidTypeError:
    return InvalidTypeError(
        "train returned no metric",
        where="parity(train)",
        found=shown(made),
        allowed=_FORMS,
        fix='return the metric on data that it did not train on, as in {"accuracy": 0.97}',
    )


def _check_known(name: str, metrics: Mapping[str, float]) -> None:
    if name not in metrics:
        raise InvalidValueError(
            "train returned no such metric",
            where="parity(metric=)",
            found=name,
            allowed=", ".join(metrics),
            fix="name one that train returns, each time",
        )
