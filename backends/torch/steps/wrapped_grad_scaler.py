"""`WrappedGradScaler`: the interface of torch's scaler, in front of optimizers that are wrapped.

Trainers take a scaler and call it themselves. A wrapped optimizer scales, unscales and skips by itself, so each of the
scaler's methods calls the optimizer's own:

    trainer               scaler                   wrapped optimizer
    scaler.scale(loss)    scale(loss)              the loss times the shared loss scale
    scaler.unscale_(opt)  unscale_(opt)            opt.unscale_()
    scaler.step(opt)      step(opt)                opt.step(), which skips, and moves the loss scale
    scaler.update()       update()                 nothing is left to do
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from polyamp.backends.torch.steps import refusals
from polyamp.backends.torch.steps.optimizer import LossScaledOptimizer
from polyamp.backends.torch.steps.verbs import load_loss_scale, save_loss_scale
from polyamp.errors import UsageError
from polyamp.result import StepResult
from polyamp.validation import shown


class WrappedGradScaler(torch.amp.GradScaler):
    """A `torch.amp.GradScaler` that drives wrapped optimizers, for code that takes a scaler.

    Everything that a wrapped optimizer has works behind it: master weights, clipping, rules and reasons of skips.

    >>> from polyamp import LossScale
    >>> model = torch.nn.Linear(2, 1).half()
    >>> sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> optimizer = LossScaledOptimizer(sgd, LossScale(init=1024.0))  # with float32 master weights
    >>> scaler = WrappedGradScaler(optimizer)
    >>> scaler.scale(model(torch.ones(1, 2).half()).sum()).backward()
    >>> scaler.unscale_(optimizer)
    >>> scaler.step(optimizer)
    >>> scaler.update()
    >>> bool(optimizer.last_step), scaler.get_scale()
    (True, 1024.0)

    Args:
        optimizers: a wrapped optimizer, or several that share their loss scales, as
            ``polyamp.wrap_optimizer([first, second], policy)`` returns them.

    Raises:
        InvalidTypeError: an optimizer is not wrapped.
        UsageError: the optimizers do not share their loss scales.
    """

    def __init__(self, optimizers: LossScaledOptimizer | Iterable[LossScaledOptimizer]) -> None:
        super().__init__("cpu", enabled=False)  # torch's own state is not used
        self._wrapped = [optimizers] if isinstance(optimizers, torch.optim.Optimizer) else list(optimizers)
        for one in self._wrapped:
            if not isinstance(one, LossScaledOptimizer):
                fix = "WrappedGradScaler(polyamp.wrap_optimizer(optimizer, policy))"
                raise refusals.not_a(LossScaledOptimizer, one, where="WrappedGradScaler(optimizers)", fix=fix)
            if one.scalers is not self._wrapped[0].scalers:
                fix = "wrap them together: polyamp.wrap_optimizer([first, second], policy)"
                raise refusals.different_loss_scales(where="WrappedGradScaler(optimizers)", fix=fix)

    @property
    def optimizers(self) -> Sequence[LossScaledOptimizer]:
        """The wrapped optimizers."""
        return self._wrapped

    @property
    def last_step(self) -> StepResult:
        """The result of the last step of the first optimizer."""
        return self._first().last_step

    def is_enabled(self) -> bool:
        """Return whether losses are multiplied."""
        return self._first().scaler.multiplies

    def scale(self, outputs: Any) -> Any:
        """Return the losses in float32 (float64 stays) times the loss scale.

        Raises:
            InvalidTypeError: a loss is not a floating-point tensor.
            UsageError: the loss is the result of an earlier call.
        """
        first = self._first()
        return first.scalers.scale(outputs, None, first, alone=first.is_alone)

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Unscale the gradients of a wrapped optimizer; see `LossScaledOptimizer.unscale_`."""
        self._own(optimizer, "scaler.unscale_(optimizer)").unscale_()

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        """Step a wrapped optimizer, or skip; see `LossScaledOptimizer.step`."""
        return self._own(optimizer, "scaler.step(optimizer)").step(*args, **kwargs)

    def update(self, new_scale: float | Tensor | None = None) -> None:
        """Set the loss scale if a new one is passed; otherwise do nothing, since the step has moved it."""
        if new_scale is not None:
            self._first().loss_scale = float(new_scale)

    def get_scale(self) -> float:
        """Return the scale that the next loss is multiplied by. Waits for the device if the scale is on one."""
        return self._first().loss_scale

    def get_growth_factor(self) -> float:
        """Return the factor by which the scale grows."""
        return self._first().scaler.settings.growth

    def get_backoff_factor(self) -> float:
        """Return the factor by which the scale shrinks after an overflow."""
        return self._first().scaler.settings.backoff

    def get_growth_interval(self) -> int:
        """Return the number of finite steps after which the scale grows."""
        return self._first().scaler.settings.interval

    def set_growth_factor(self, new_factor: float) -> NoReturn:
        """Raise `UsageError`, like the other two: the settings are the optimizer's."""
        raise _settings_are_fixed("set_growth_factor")

    def set_backoff_factor(self, new_factor: float) -> NoReturn:
        """Raise `UsageError`."""
        raise _settings_are_fixed("set_backoff_factor")

    def set_growth_interval(self, new_interval: int) -> NoReturn:
        """Raise `UsageError`."""
        raise _settings_are_fixed("set_growth_interval")

    def state_dict(self) -> dict[str, Any]:
        """Return the loss scale's state as JSON values. The optimizer's own state has it too."""
        return save_loss_scale(self._first())

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Resume from a result of `state_dict`, or from that of `torch.amp.GradScaler`. An empty state changes nothing.

        Raises:
            StateError: it is not a state of a loss scale.
        """
        if state_dict:
            load_loss_scale(self._first(), state_dict)

    def _first(self) -> LossScaledOptimizer:
        return self.optimizers[0]

    def _own(self, optimizer: torch.optim.Optimizer, where: str) -> LossScaledOptimizer:
        for one in self.optimizers:
            if optimizer is one:
                return one
        raise UsageError(
            "this is not an optimizer of the scaler",
            where=where,
            found=shown(optimizer),
            allowed="a wrapped optimizer that the scaler was made with",
            fix="pass what polyamp.wrap_optimizer returned; use the plain optimizer nowhere else",
        )


def _settings_are_fixed(method: str) -> UsageError:
    return UsageError(
        "the settings of the loss scale are the wrapped optimizer's",
        where=f"WrappedGradScaler.{method}",
        allowed="settings that are passed when the optimizer is wrapped",
        fix="polyamp.wrap_optimizer(optimizer, policy, loss_scale=LossScale(growth=, backoff=, interval=))",
    )
