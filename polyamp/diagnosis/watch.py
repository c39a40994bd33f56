"""Watching a training step: it is diagnosed automatically if several steps in a row are skipped."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any, TypeVar

from polyamp import adapters
from polyamp.diagnosis.diagnose import Verdict, diagnose
from polyamp.diagnosis.health import Health, health
from polyamp.errors import (
    InvalidTypeError,
    PolyampError,
    UsageError,
    check_callable,
    check_count,
    refuses_unreadable,
    unknown_options,
)
from polyamp.policies import Policy
from polyamp.policies import policy as make_policy
from polyamp.skips import report_verdict

Step = TypeVar("Step", bound=Callable[..., Any])


@refuses_unreadable
def watch(
    step: Step,
    holder: Any = None,
    *,
    after: int = 4,
    on_verdict: Callable[[Verdict], object] | None = None,
    policy: Policy | str | None = None,
    scale: float | None = None,
    backend: str | None = None,
    **mistaken: Any,
) -> Step:
    """Wrap a training step so that it is diagnosed automatically if several steps in a row are skipped.

    At every ``after``-th call the loss scale's counters are read, which waits for the device. If at least ``after``
    steps in a row were skipped, `polyamp.diagnose` examines the step with that call's arguments before it runs, once
    per run of skips. The step and its result do not change.

    >>> import torch
    >>> from polyamp import wrap_optimizer
    >>> weight = torch.ones(2, requires_grad=True)
    >>> opt = wrap_optimizer(torch.optim.SGD([weight], lr=0.1), "mixed_float16")
    >>> def step(x):
    ...     opt.zero_grad()
    ...     opt.backward((weight * x).sum())
    ...     opt.step()
    >>> step = watch(step, opt)
    >>> step(torch.ones(2))

    Args:
        step: a training step, as `polyamp.diagnose` takes it.
        holder: the object that `polyamp.health` takes: the wrapped optimizer or the loss scaler. In JAX, where states
            are values, it may be the optimizer, its state or None: the state is searched for in the step's arguments,
            and then in its last result; donated buffers are read while they still exist.
        after: skipped steps in a row that trigger a diagnosis.
        on_verdict: receives the verdict; None issues it as a `PolyampWarning`.
        policy, scale, backend: passed to `polyamp.diagnose`.
        **mistaken: other options: refused.

    Raises:
        InvalidTypeError: ``step`` or ``on_verdict`` is not callable, or ``after`` is not an integer.
        InvalidValueError: ``after`` is less than 1, or the policy is unknown.
        UnsupportedError: an option does not exist.
        UsageError: at the first check, if nothing holds a loss scale.
    """
    check_callable(step, where="watch(step)", allowed="a function", fix="give the training step itself")
    if on_verdict is not None:
        allowed, fix = "a function of a Verdict", "give print, for example"
        check_callable(on_verdict, where="watch(on_verdict=)", allowed=allowed, fix=fix)
    check_count("after", after, where="watch(after=)")
    if mistaken:
        raise unknown_options([*mistaken], _OPTIONS, where="watch(step, holder)")
    adapters.check_backend(backend)
    chosen = None if policy is None else make_policy(policy)
    explain = Explainer(functools.partial(diagnose, step, policy=chosen, scale=scale, backend=backend), on_verdict)
    calls = itertools.count(1)
    returned: Any = None
    is_value = holder is None or hasattr(adapters.adapter_within(holder), "holds_loss_scale")

    @functools.wraps(step)
    def watched(*args: Any, **kwargs: Any) -> Any:
        nonlocal returned
        call = (args, kwargs)
        if next(calls) % after == 0:
            places = (call, returned, holder)
            found = _look(next(filter(_holds_scale, places), call) if is_value else holder)
            if found.skipped_in_a_row >= after:
                explain(found, *args, **kwargs)
        is_returned = is_value and not _holds_scale(call)
        result = step(*args, **kwargs)
        returned = result if is_returned else None  # kept only if the arguments hold no loss scale
        return result

    return watched  # type: ignore[return-value]


_OPTIONS = ("after", "on_verdict", "policy", "scale", "backend")


def _holds_scale(found: Any) -> bool:
    adapter = adapters.adapter_within(found)
    return adapter is not None and hasattr(adapter, "holds_loss_scale") and adapter.holds_loss_scale(found)


class Explainer:
    """A callable that delivers a verdict on a run of skipped steps, once per run."""

    def __init__(self, diagnose: Callable[..., Verdict], on_verdict: Callable[[Verdict], object] | None) -> None:
        self._diagnose = diagnose
        self._on_verdict = on_verdict
        self._explained: int | None = None  # the step before that run of skips

    def __call__(self, found: Health, *args: Any, **kwargs: Any) -> None:
        """Explain the run of skips before a step with these arguments, unless that was done already."""
        began = found.steps - found.skipped_in_a_row
        if began == self._explained:
            return
        self._explained = began
        try:
            verdict = self._diagnose(*args, **kwargs)
        except PolyampError as error:
            report_verdict(error)
        else:
            (self._on_verdict or report_verdict)(verdict)


def _look(holder: Any) -> Health:
    try:
        return health(holder)
    except (InvalidTypeError, UsageError) as error:
        raise UsageError(
            "no loss scale to watch",
            where="watch(step, holder=)",
            found=str(error).partition("\n")[0],
            allowed="a wrapped optimizer or a loss scaler; in JAX, one state among the step's arguments or results",
            fix="pass the optimizer: polyamp.watch(step, optimizer). In JAX, let the step take and return its state",
        ) from error
