"""The loss scales of `apex.amp`, which all its optimizers share: one for each loss, under Apex' names.

with amp.scale_loss(loss, optimizer, loss_id=1) as scaled_loss:   the loss times the scale of loss 1
    scaled_loss.backward()
optimizer.step()                                                  unscaled when the block ended; updates or skips
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from polyamp.backends.torch.apex_casts import AmpHandle
from polyamp.backends.torch.attached import wrapper_of
from polyamp.backends.torch.autocast.casts import forget_casts
from polyamp.backends.torch.grad_scaler import unscale_once
from polyamp.backends.torch.optimizer import LossScaledOptimizer
from polyamp.backends.torch.scale import LossScaler
from polyamp.errors import InvalidValueError, StateError, UsageError, shown, warn_deprecated
from polyamp.settings import LossScale


@dataclass
class Properties:
    """The options in force, under Apex' names. Programs read them as ``_amp_state.opt_properties.master_weights``."""

    enabled: bool = False
    opt_level: str | None = None
    cast_model_type: Any = None
    patch_torch_functions: bool = False
    keep_batchnorm_fp32: bool | None = None
    master_weights: bool | None = None
    loss_scale: Any = 1.0


class AmpState(ModuleType):
    """What `initialize` decided, and the loss scales, which all its optimizers share."""

    # Apex has a module and an object of the name ``_amp_state``. Here they are one.
    opt_properties: Properties  # missing before the first call of `initialize`

    def __init__(self) -> None:
        super().__init__("apex.amp._amp_state")
        self.handle: AmpHandle | None = None
        self.loss_scalers: list[ShownScaler] = []
        self.scaler = LossScaler(LossScale.like("apex"))
        self._amp_state = self


class ShownScaler:
    """A loss scale under Apex' names."""

    def __init__(self, scaler: LossScaler, loss_id: int) -> None:
        self._scaler = scaler
        self.key = loss_id or None  # the loss without an id in polyamp has number 0 here

    @property
    def scaler(self) -> LossScaler:
        """Polyamp's loss scaler."""
        return self._scaler.of(self.key)

    def loss_scale(self) -> float:
        """Return the scale. Waits for the device if it is on one."""
        return float(self.scaler.state.scale)

    def _set(self, scale: float) -> None:
        if not self.scaler.settings.dynamic:
            self.scaler.settings = LossScale.fixed(scale).in_float32()
        self.scaler.set(scale, where="loss_scaler._loss_scale = scale")

    _loss_scale = property(loss_scale, _set)
    _unskipped = property(lambda self: int(self.scaler.state.good_steps))


def master_params(optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    """Yield the parameters that an optimizer trains: master weights in place of 16-bit parameters.

    >>> [param.shape for param in master_params(torch.optim.SGD([torch.ones(2)], lr=0.1))]
    [torch.Size([2])]
    """
    warn_deprecated("apex.amp.master_params(opt)", "opt.clip_grad_norm_(max_norm), or opt.param_groups")
    for group in optimizer.param_groups:
        yield from group["params"]


_amp_state = AmpState()


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
        delay_overflow_check: not used.

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
    wrapped, shown_scaler = _wrapped(optimizers), _scaler_of(loss_id)
    yield wrapped[0].scale(loss, shown_scaler.key)
    if not delay_unscale:
        for one in wrapped:
            unscale_once(one)
        _skip_together(wrapped, shown_scaler.scaler)
    forget_casts()


def _wrapped(optimizers: Any) -> list[LossScaledOptimizer]:
    given = [optimizers] if isinstance(optimizers, torch.optim.Optimizer) else list(optimizers)
    known = [one for one in map(wrapper_of, given) if one is not None]
    if not known or len(known) < len(given):
        raise UsageError(
            "the optimizer did not go through amp.initialize",
            where="amp.scale_loss(loss, optimizers)",
            found=", ".join(map(shown, given)) or "no optimizer",
            fix="model, optimizer = amp.initialize(model, optimizer, opt_level=...)",
        )
    return known


def _scaler_of(loss_id: int) -> ShownScaler:
    if not 0 <= loss_id < len(_amp_state.loss_scalers):
        raise InvalidValueError(
            "there is no loss of this number",
            where="amp.scale_loss(loss_id=)",
            found=loss_id,
            allowed=f"0 to {len(_amp_state.loss_scalers) - 1}",
            fix="pass num_losses= to amp.initialize",
        )
    return _amp_state.loss_scalers[loss_id]


def _skip_together(wrapped: Sequence[LossScaledOptimizer], scaler: LossScaler) -> None:
    """Let all optimizers of a block skip if the block made one of them skip, as in Apex."""
    flags = [flag for one in wrapped if (flag := one.findings.flags.get(scaler)) is not None]
    for one in wrapped if len(flags) > 1 else ():
        one.findings.skip_with(torch.stack([flag.to(flags[0].device) for flag in flags]).amax())


def state_dict(destination: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return the loss scales as ``{"loss_scaler0": {"loss_scale": ..., "unskipped": ...}, ...}``.

    The state of an optimizer has them too, with everything else that it needs to resume bit for bit.
    """
    warn_deprecated(
        "apex.amp.state_dict()", "opt.state_dict(), which has the loss scale, or polyamp.save_loss_scale(opt)"
    )
    destination = {} if destination is None else destination
    for number, scaler in enumerate(_amp_state.loss_scalers):
        destination[f"loss_scaler{number}"] = {"loss_scale": scaler.loss_scale(), "unskipped": scaler._unskipped}
    return destination


def load_state_dict(state_dict: Mapping[str, Any]) -> None:
    """Resume the loss scales from a result of `state_dict`, also of Apex' own.

    If there are more losses in the state than ``num_losses``, the others are left out, as in Apex.

    Raises:
        StateError: it is another kind of state, or a scale is outside the settings; nothing is changed.
    """
    warn_deprecated(
        "apex.amp.load_state_dict(saved)", "opt.load_state_dict(saved), or polyamp.load_loss_scale(opt, saved)"
    )
    saved = list(state_dict.items()) if isinstance(state_dict, Mapping) else [(shown(state_dict), None)]
    for key, one in saved:
        if "loss_scaler" not in str(key) or not (isinstance(one, Mapping) and {"loss_scale", "unskipped"} <= set(one)):
            raise StateError(
                "this is not a state of apex.amp",
                where="amp.load_state_dict(saved)",
                found=f"{key}: {shown(one)}",
                allowed="loss_scaler0, ..., each with loss_scale and unskipped",
            )
    loaded = []
    for shown_scaler, (_, one) in zip(_amp_state.loss_scalers, saved, strict=False):
        scaler = shown_scaler.scaler
        settings = scaler.settings if scaler.settings.dynamic else LossScale.fixed(one["loss_scale"])  # any number
        loaded.append((scaler, settings, settings.from_state_dict({"loss_scaler0": dict(one)})))
    for scaler, settings, state in loaded:
        scaler.settings = settings
        scaler.resume(state)
