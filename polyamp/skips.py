"""What users read about a skipped step: all reasons, warnings and errors about it are worded here.

    `reason_of`                what `StepResult.reason` returns
    `report_nonfinite_loss`    a loss that is inf or NaN
    `report_limits`            a loss scale at its minimum, or too many skips in a row
    `report_verdict`           what `polyamp.watch` found

What the loss scale makes of many skips, and whether that is healthy, is in `polyamp.diagnosis.health`.
"""

from __future__ import annotations

from collections.abc import Callable

from polyamp.errors import LossScaleError, NonFiniteLossError, PolyampError, warn_once
from polyamp.settings import LossScale, LossScaleState

NOT_FINITE = "gradients were not finite"
NONFINITE_LOSS = "the loss was not finite before scaling: a smaller scale cannot help"
FINITE_LOSS = "the loss was finite: the backward pass overflowed at this loss scale"


def reason_of(more: str) -> str:
    """Return why a step was skipped, with what the adapter knows about it.

    >>> reason_of("weight (1 inf of 8)")
    'gradients were not finite: weight (1 inf of 8)'
    """
    if more.startswith(NONFINITE_LOSS):
        return more
    return f"{NOT_FINITE}: {more}" if more else NOT_FINITE


def non_finite_loss(
    found: object, *, where: str = "scaling the loss", compute: str | None = None
) -> NonFiniteLossError:
    """Return the error for a loss that was inf or NaN before scaling."""
    return NonFiniteLossError(
        NONFINITE_LOSS,
        where=where,
        found=found,
        allowed="a finite loss",
        fix=f"{look_for_nonfinite(compute)}; parameters and optimizer state were not changed",
    )


def look_for_nonfinite(compute: str | None) -> str:
    """Describe where a non-finite loss can come from: float16 overflow, or a cause that float32 has too."""
    elsewhere = "look for inf or NaN in the data and the parameters"
    if compute == "float16":
        return (
            f"float16 may have overflowed in the forward pass: polyamp.diagnose names the operation; else {elsewhere}"
        )
    if compute is None:
        return f"{elsewhere}; under float16 the forward pass may have overflowed: polyamp.diagnose names the operation"
    return f"{compute} has the range of float32, so {elsewhere}" if compute == "bfloat16" else elsewhere


def report_nonfinite_loss(
    config: LossScale,
    *,
    compute: str | None = None,
    where: str = "scaling the loss",
    found: object = "inf or NaN",
) -> None:
    """Warn once, or raise, if a loss was inf or NaN before scaling. Its step is skipped like any overflow."""
    if config.nonfinite_loss == "raise":
        raise non_finite_loss(found, where=where, compute=compute)
    warn_once(f"{NONFINITE_LOSS}. The step is skipped. What to do: {look_for_nonfinite(compute)}.")


def report_limits(config: LossScale, state: LossScaleState, explain: Callable[[], str] | None = None) -> None:
    """Warn or raise if a state on the host shows that lowering the scale can no longer help."""
    # Adapters call this whenever the state is on the host anyway, so it never causes a sync.
    skips = state.skipped_in_a_row
    if config.max_skips is not None and skips >= config.max_skips:
        raise LossScaleError(
            f"{skips} steps in a row were skipped because {NOT_FINITE}",
            where=f"loss scale {state.scale:g}",
            found=explain and explain(),
            allowed=f"fewer than max_skips = {config.max_skips}",
            fix=_FIX,
        )
    if config.on_min == "ignore" or not config.dynamic or skips == 0 or state.scale > config.min:
        return
    if state.hysteresis >= 0:  # this overflow was tolerated, or only moved the scale to its minimum
        return
    if config.on_min == "raise":
        raise LossScaleError(
            "gradients overflow although the loss scale is at its minimum",
            where=f"after {skips} skipped steps in a row",
            found=f"loss scale {state.scale:g}" + (f"; {explain()}" if explain else ""),
            allowed=f"more than min = {config.min:g}",
            fix=_FIX,
        )
    warn_once(
        f"the loss scale is at its minimum, {config.min:g}, and gradients still overflow: steps are being skipped. "
        "Look for inf or NaN in the forward pass, or set a smaller LossScale(min=...)."
    )


_FIX = (
    "look for inf or NaN in the forward pass, where a smaller scale cannot help; where the loss was finite, look "
    "at the backward pass, run what overflows in float32 (a rule), or allow a smaller LossScale(min=...)"
)


def report_verdict(verdict: object) -> None:
    """Warn once with what `polyamp.diagnose` found about skipped steps, or with the error that it raised."""
    if isinstance(verdict, PolyampError):  # the step itself may be fine, and training should go on
        warn_once(f"steps are being skipped, and the reason cannot be found: {verdict}")
    else:
        warn_once(f"steps are being skipped in a row; this is why:\n{verdict}")
