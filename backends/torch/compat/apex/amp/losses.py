"""`amp.scale_loss`: the block around a backward pass, at whose end the gradients are unscaled."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from polyamp.backends.torch.autocast.weights import forget_casts
from polyamp.backends.torch.compat.apex.amp._amp_state import _amp_state, maybe_print
from polyamp.backends.torch.compat.attached import wrapper_of
from polyamp.backends.torch.steps import refusals
from polyamp.backends.torch.steps.losses import Scaling
from polyamp.backends.torch.steps.optimizer import ALIVE, LossScaledOptimizer
from polyamp.backends.torch.steps.ranks import any_rank
from polyamp.backends.torch.steps.scaler import LossScaler
from polyamp.errors import InvalidValueError, UsageError, warn_deprecated
from polyamp.loss_scale import advance, on_host
from polyamp.validation import shown


@contextmanager
def scale_loss(
    loss: Any,
    optimizers: Any,
    loss_id: int = 0,
    model: Any = None,
    delay_unscale: bool = False,
    delay_overflow_check: bool = False,
) -> Iterator[Any]:
    """Multiply a loss by its scale, for the backward pass of the block, and unscale the gradients when the block ends.

    Blocks before one step add up, also with other optimizers and losses. An overflow in any of them skips the step.

    Args:
        loss: floating-point tensor.
        optimizers: an optimizer of `initialize`, or several.
        loss_id: number of the loss, below ``num_losses``: each has its own scale.
        model: not used.
        delay_unscale: leave the gradients scaled: a later block, or the step, unscales them.
        delay_overflow_check: print no line about an overflow in this block.

    Raises:
        UsageError: `initialize` was not called, or not with these optimizers; the backward pass was not that of the
            scaled loss; or the gradients of the last step were not cleared.
        InvalidValueError: there is no such loss.
    """
    warn_deprecated(
        "with apex.amp.scale_loss(loss, opt) as scaled: scaled.backward()", "opt.backward(loss)", stacklevel=4
    )
    if not hasattr(_amp_state, "opt_properties"):
        raise UsageError(
            "a loss is scaled before anything was initialized",
            where="amp.scale_loss",
            fix="call model, optimizer = amp.initialize(model, optimizer, opt_level=...) first",
        )
    if not _amp_state.opt_properties.enabled:
        yield loss
        return
    wrapped, key = _wrapped(optimizers), _key(loss_id)
    lead = wrapped[0]
    left = [(one, one.first_gradient()) for one in wrapped if one.is_consumed]
    others = [
        one for one in list(ALIVE) if one.scalers is lead.scalers and one not in wrapped and one.window.is_unscaled
    ]
    for one in wrapped:
        one.window.last_flag = None
    scaled = lead.scale(loss, key)
    scaling = lead.window.scaling
    yield scaled
    _check_cleared(left)
    if not delay_unscale:
        _unscale(wrapped, others, scaling)
        _skip_together(wrapped, _amp_state.loss_scalers[loss_id].scaler)
        if not delay_overflow_check and _amp_state.verbosity > 0:
            report_overflow(wrapped, loss_id)
    forget_casts()


def report_overflow(wrapped: Iterable[LossScaledOptimizer], loss_id: int) -> None:
    """Print Apex's line if a gradient of this loss was not finite. Waits for the device."""
    scaler = _amp_state.loss_scalers[loss_id].scaler
    flags = [flag for one in wrapped if (flag := one.window.flags.get(scaler)) is not None]
    if scaler.settings.dynamic and any(map(bool, flags)):
        smaller = advance(scaler.settings, on_host(scaler.state), False).scale
        maybe_print(f"Gradient overflow.  Skipping step, loss scaler {loss_id} reducing loss scale to {smaller}")


def _unscale(
    wrapped: Sequence[LossScaledOptimizer], others: Sequence[LossScaledOptimizer], scaling: Scaling | None
) -> None:
    """Unscale the gradients of the block, and restore those that other optimizers had, unscaled, before it."""
    for one in wrapped:
        if one.window.scaling is None and scaling is not None:  # zero_grad was called in the block
            one.expect(scaling, own=True)
    for one in (*wrapped, *others):
        if not one.window.is_unscaled and (one.may_have_gradients or one.window.has_aside):
            one.unscale_()


def _skip_together(wrapped: Sequence[LossScaledOptimizer], scaler: LossScaler) -> None:
    """Let all optimizers of a block skip if the block made one of them skip, as in Apex."""
    flagged = [(one.window, flag) for one in wrapped if (flag := one.window.last_flag) is not None]
    if len(flagged) > 1:
        here = torch.stack([flag.to(flagged[0][1].device) for _, flag in flagged]).amax()
        flag, _ = any_rank(here, wrapped[0].process_group)
        for window, _ in flagged:
            window.add_overflow(scaler, flag)


def _check_cleared(left: Sequence[tuple[LossScaledOptimizer, Any]]) -> None:
    """Refuse gradients of the last step to which the block's were added; the block may have cleared them."""
    for one, gradient in left:
        now = one.first_gradient()
        if now is not None and now[0]() is gradient[0]() and now[0]() is not None and one.window.scaling is not None:
            raise refusals.not_cleared()


def _wrapped(optimizers: Any) -> list[LossScaledOptimizer]:
    given = [optimizers] if isinstance(optimizers, torch.optim.Optimizer) or _is_one(optimizers) else list(optimizers)
    wrapped = [wrapper_of(getattr(one, "optim", one)) for one in given]
    if not wrapped or None in wrapped:
        raise UsageError(
            "the optimizer did not go through amp.initialize",
            where="amp.scale_loss(loss, optimizers)",
            found=", ".join(map(shown, given)) or "no optimizer",
            fix="model, optimizer = amp.initialize(model, optimizer, opt_level=...)",
        )
    return [one for one in wrapped if one is not None]


def _is_one(optimizers: Any) -> bool:
    """Return whether this is one optimizer around another, such as LARC."""
    return isinstance(getattr(optimizers, "optim", None), torch.optim.Optimizer)


def _key(loss_id: int) -> int | None:
    if not 0 <= loss_id < len(_amp_state.loss_scalers):
        raise InvalidValueError(
            "there is no loss of this number",
            where="amp.scale_loss(loss_id=)",
            found=loss_id,
            allowed=f"0 to {len(_amp_state.loss_scalers) - 1}",
            fix="pass num_losses= to amp.initialize",
        )
    return _amp_state.loss_scalers[loss_id].key
