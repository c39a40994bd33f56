"""Reports for a loss that is not finite, a loss scale at its minimum, and too many skipped steps in a row."""

from __future__ import annotations

from collections.abc import Callable

from polyamp.errors import LossScaleError, warn_once
from polyamp.loss_scale import LossScale, LossScaleState
from polyamp.refusals import NONFINITE_LOSS, look_for_nonfinite, non_finite_loss


def report_nonfinite_loss(
    config: LossScale,
    *,
    compute: str | None = None,
    where: str = "scaling the loss",
    found: object = "inf or NaN",
    stacklevel: int = 3,
) -> None:
    """Warn once, or raise, if a loss was inf or NaN before scaling. Its step is skipped like any overflow."""
    if config.nonfinite_loss == "raise":
        raise non_finite_loss(found, where=where, compute=compute)
    warn_once(
        f"{NONFINITE_LOSS}. The step is skipped. What to do: {look_for_nonfinite(compute)}.", stacklevel=stacklevel + 1
    )


def report_limits(config: LossScale, state: LossScaleState, explain: Callable[[], str] | None = None) -> None:
    """Warn or raise if a state on the host shows that lowering the scale can no longer help."""
    # Adapters call this whenever the state is on the host anyway, so it never causes a sync.
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
