"""`LossScaler` and `DynamicLossScaler`: loss scales for loops that unscale by hand, by `polyamp.advance`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from polyamp.backends.torch.steps.scaler import is_finite
from polyamp.errors import warn_deprecated
from polyamp.loss_scale import LossScale, advance

_INSTEAD = 'opt = polyamp.wrap_optimizer(opt, "mixed_float16"), opt.backward(loss), opt.step()'


class LossScaler:
    """A loss scale that does not change.

    >>> LossScaler(128.0).loss_scale
    128.0

    Args:
        scale: the factor for losses.

    Raises:
        InvalidValueError: the scale is not positive and finite.

    Warns:
        PolyampDeprecationWarning: at the first use.
    """

    def __init__(self, scale: float = 1.0) -> None:
        warn_deprecated("apex.fp16_utils.LossScaler(scale)", _INSTEAD)
        self._start(LossScale.fixed(scale))

    def _start(self, settings: LossScale) -> None:
        self._settings, self._state = settings, settings.initial_state()

    @property
    def loss_scale(self) -> float:
        """The factor for the next loss; also named ``cur_scale``."""
        return float(self._state.scale)

    @property
    def cur_scale(self) -> float:
        """The factor for the next loss."""
        return self.loss_scale

    @cur_scale.setter
    def cur_scale(self, scale: float) -> None:
        self._state = self._state._replace(scale=float(scale))

    def has_overflow(self, params: Iterable[Tensor]) -> bool:
        """Return False: a fixed scale does not react to overflows."""
        return False

    def update_scale(self, overflow: bool) -> None:
        """Leave the scale as it is."""

    def scale_gradient(self, module: Any, grad_in: Iterable[Tensor], grad_out: Any) -> tuple[Tensor, ...]:
        """Return the gradients times the scale, for a backward hook."""
        return tuple(self.loss_scale * grad for grad in grad_in)

    def backward(self, loss: Tensor, retain_graph: bool = False) -> None:
        """Call backward on the loss times the scale."""
        torch.autograd.backward(loss * self.loss_scale, retain_graph=retain_graph)


class DynamicLossScaler(LossScaler):
    """A loss scale that halves at an overflow, never below 1, and doubles after a number of steps without one.

    >>> scaler = DynamicLossScaler(init_scale=8.0, scale_window=2)
    >>> for overflow in (True, False, False):
    ...     scaler.update_scale(overflow)
    ...     print(scaler.loss_scale)
    4.0
    4.0
    8.0

    Args:
        init_scale: the first scale.
        scale_factor: the scale is divided or multiplied by it.
        scale_window: steps without an overflow before the scale grows.

    Raises:
        InvalidValueError: a setting that `polyamp.LossScale` refuses.

    Warns:
        PolyampDeprecationWarning: at the first use.
    """

    def __init__(self, init_scale: float = 2.0**32, scale_factor: float = 2.0, scale_window: int = 1000) -> None:
        # No super().__init__(): a fixed scale has other settings.
        warn_deprecated("apex.fp16_utils.DynamicLossScaler()", _INSTEAD)
        self.scale_factor, self.scale_window = scale_factor, scale_window
        self.last_overflow_iter = -1
        limits: dict[str, Any] = {"min": min(1.0, init_scale), "max": 2.0**127, "on_min": "ignore"}
        self._start(LossScale(init_scale, scale_factor, scale_window, 1 / scale_factor, **limits))

    @property
    def cur_iter(self) -> int:
        """The number of updates so far."""
        return int(self._state.steps)

    def has_overflow(self, params: Iterable[Tensor]) -> bool:
        """Return whether a gradient of these parameters holds inf or NaN. Waits for the device."""
        return any(param.grad is not None and not is_finite(param.grad) for param in params)

    @staticmethod
    def _has_inf_or_nan(x: Tensor) -> bool:
        return not is_finite(x)

    def update_scale(self, overflow: bool) -> None:
        """Advance the scale.

        Args:
            overflow: whether the last gradients held inf or NaN.
        """
        if overflow:
            self.last_overflow_iter = self.cur_iter
        self._state = advance(self._settings, self._state, not overflow)
