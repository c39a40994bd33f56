"""Carries out a step or skips it: the host decides, or a kernel that reads the flag on the device."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from polyamp.backends.torch.steps import refusals
from polyamp.backends.torch.steps.fused import FusedStep
from polyamp.backends.torch.steps.gradients import Gradients
from polyamp.backends.torch.unstable import note_step


class Stepper:
    """Steps an optimizer unless its gradients were not finite.

    >>> weight = torch.ones(1, requires_grad=True)
    >>> weight.grad = torch.ones(1)
    >>> stepper = Stepper(torch.optim.SGD([weight], lr=0.5), skip_on_device=None)
    >>> stepper.step(torch.tensor(1.0), Gradients([{"params": [weight]}]))
    (None, False)

    Args:
        inner: the optimizer.
        skip_on_device: True leaves skipping to the optimizer's kernel, False never does, None does so on accelerators
            if the optimizer can.

        fused_step: the argument ``wanted`` of `FusedStep`.

    Raises:
        InvalidValueError: ``skip_on_device`` for an optimizer that cannot skip.
    """

    def __init__(
        self, inner: torch.optim.Optimizer, skip_on_device: bool | None, fused_step: bool | None = None
    ) -> None:
        self.inner = inner
        self.skip_on_device = skip_on_device
        self.operators = FusedStep(inner, fused_step)
        self._has_stepped = False
        if skip_on_device and not self._can_skip:
            raise refusals.cannot_skip(inner)

    def forget(self) -> None:
        """Reset what is known, because the optimizer's state was replaced."""
        self._has_stepped = False

    def step(self, found: Tensor, gradients: Gradients) -> tuple[Any, bool | Tensor]:
        """Step or skip.

        Args:
            found: float32 scalar, 1.0 to skip the step, else 0.0.
            gradients: the optimizer's gradients.

        Returns:
            The optimizer's return value, and whether the step was applied: a bool after one host sync, or a boolean
            scalar on the device without a sync.
        """
        made = None if self.skip_on_device is False else self.operators.step_unscaled(found)
        if made is not None:
            return made
        return self._step_on_device(found) if self._leaves_it_to_the_kernel(found, gradients) else self._on_host(found)

    @property
    def _can_skip(self) -> bool:
        return getattr(self.inner, "_step_supports_amp_scaling", False)

    def _leaves_it_to_the_kernel(self, found: Tensor, gradients: Gradients) -> bool:
        if not self._can_skip or self.skip_on_device is False:
            return False
        wanted = self.skip_on_device or found.device.type != "cpu"
        return wanted and state_is_complete(self.inner, gradients.params, has_stepped=self._has_stepped)

    def _on_host(self, found: Tensor) -> tuple[Any, bool]:
        finite = not found
        if not finite:
            note_step(self.inner)
            return None, False
        result = self.inner.step()
        self._has_stepped = True
        return result, True

    def _step_on_device(self, found: Tensor) -> tuple[Any, Tensor]:
        self.inner.found_inf = found  # type: ignore[attr-defined]  # interface of _step_supports_amp_scaling
        try:
            return self.inner.step(), found == 0
        finally:
            del self.inner.found_inf  # type: ignore[attr-defined]


def state_is_complete(optimizer: torch.optim.Optimizer, params: Iterable[Tensor], *, has_stepped: bool) -> bool:
    """Return whether a kernel may skip. The host decides until every parameter had an applied step.

    torch's fused SGD allocates momentum without filling it, and would keep that memory if its kernel skipped.

    Args:
        optimizer: the optimizer.
        params: its parameters that have a gradient.
        has_stepped: whether a step was applied, for optimizers without state.
    """
    state = optimizer.state
    return all(map(state.__contains__, params)) if state else has_stepped
