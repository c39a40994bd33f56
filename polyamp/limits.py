"""What to say when a loss is not finite, the loss scale is at its minimum, or too many steps in a row were skipped."""

from __future__ import annotations

from collections.abc import Callable

from polyamp.errors import LossScaleError, warn_once
from polyamp.loss_scale import LossScale, LossScaleState
from polyamp.refusals import look_for_nonfinite, non_finite_loss

NONFINITE_LOSS = "the loss was not finite before scaling: a smaller scale cannot help"
"""Why a step was skipped whose loss was inf or NaN; for `StepResult.reason`."""


def report_nonfinite_loss(
    config: LossScale,
    *,
    compute: str | None = None,
    where: str = "scaling the loss",
    found: object = "inf or NaN",
    stacklevel: int = 3,
) -> None:
    """Warn once, or raise, where a loss was inf or NaN before it was scaled; its step is skipped like any overflow.

    >>> report_nonfinite_loss(LossScale(nonfinite_loss="raise"), compute="float16")
    ... # doctest: +ELLIPSIS
    Traceback (most recent call last):
    polyamp.errors.NonFiniteLossError: the loss was not finite before scaling: a smaller scale cannot help
      where:   scaling the loss
      found:   inf or NaN
      allowed: a finite loss
      to do:   float16 may have overflowed in the forward pass: polyamp.diagnose names the operation; else look for ...

    Args:
        config: the settings: ``nonfinite_loss`` decides.
        compute: the format that the forward pass computed in; None where it is not known.
        where: what was done with the loss, for the error.
        found: the loss, for the error.
        stacklevel: of the warning, as `warnings.warn` counts it from this function.

    Raises:
        NonFiniteLossError: under ``nonfinite_loss="raise"``.
    """
    if config.nonfinite_loss == "raise":
        raise non_finite_loss(found, where=where, compute=compute)
    warn_once(
        f"{NONFINITE_LOSS}. The step is skipped. To do: {look_for_nonfinite(compute)}.", stacklevel=stacklevel + 1
    )


def report_limits(config: LossScale, state: LossScaleState, explain: Callable[[], str] | None = None) -> None:
    """Warn or raise where a state of Python numbers says that the scale cannot help any more.

    Adapters call it whenever the state is on the host anyway; it never causes a sync.

    Args:
        config: the settings.
        state: after a step.
        explain: what was not finite, for the error; called only when there is one.

    Raises:
        LossScaleError: ``max_skips`` steps in a row were skipped, or an overflow came at ``min`` under
            ``on_min="raise"``.
    """
    skips = state.skipped_in_a_row
    if config.max_skips is not None and skips >= config.max_skips:
        raise LossScaleError(
            f"{skips} steps in a row were skipped because gradients were not finite",
            where=f"loss scale {state.scale:g}",
            found=explain and explain(),
            allowed=f"fewer than max_skips = {config.max_skips}",
            fix=_FIX,
        )
    if config.on_min == "ignore" or not config.dynamic or skips == 0 or state.scale > config.min:
        return
    if state.hysteresis >= 0:  # this overflow only brought the scale here, or was tolerated
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
