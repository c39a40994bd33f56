"""The parts of a wrapped optimizer's step: a window of gradients, its unscaling, and its end."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from polyamp.backends.torch.kernels.control import scale_on
from polyamp.backends.torch.steps import reasons, refusals
from polyamp.backends.torch.steps.gradients import Gradients
from polyamp.backends.torch.steps.guards import check_scaled
from polyamp.backends.torch.steps.masters import Kind, MasterWeights
from polyamp.backends.torch.steps.provenance import Witness
from polyamp.backends.torch.steps.ranks import has_peers
from polyamp.backends.torch.steps.scaler import LossScaler
from polyamp.backends.torch.steps.skipping import Stepper
from polyamp.backends.torch.steps.window import LossScalers, Scaling, Window
from polyamp.backends.torch.steps.wrapper import OptimizerWrapper
from polyamp.result import StepResult


class WindowedOptimizer(OptimizerWrapper):
    """The parts of a step that closures and loss scalers use too; `LossScaledOptimizer` combines them.

    Attributes:
        scalers: the loss scalers, one per loss id.
        stepper: steps the inner optimizer, or skips.
        masters: master weights of 16-bit parameters; None without them.
        window: the gradients since the last step.
        witness: observes where the gradients of one parameter come from; None if nothing is scaled.
        steps_now: whether this object is stepping the inner optimizer now.
        max_grad_norm, process_group, named, last_step: see `LossScaledOptimizer`.
    """

    scalers: LossScalers
    stepper: Stepper
    masters: MasterWeights | None
    window: Window
    witness: Witness | None
    steps_now: bool
    max_grad_norm: float | None
    process_group: Any
    named: Mapping[str, Tensor]
    last_step: StepResult
    _master_weights: Kind
    _asked: int  # number of parameters at the last call of `Gradients.are_simple`
    _simple: bool  # its result

    @property
    def scaler(self) -> LossScaler:
        """The loss scaler of losses without an id."""
        return self.scalers.main

    def open_window(self) -> None:
        """Start a new window."""
        self.window = Window()

    def expect(self, scaling: Scaling, *, own: bool) -> None:
        """Record that a loss was scaled, before its backward pass; see `Window.expect`."""
        window = self.window
        if window.found is not None or (window.scaling is not None and not window.scaling.same_scale(scaling)):
            self._set_aside()
        window.expect(scaling, own=own)

    def model_parameters(self) -> Iterator[Tensor]:
        """Return the model's own parameters, which get gradients from backward passes, in place of their masters."""
        models = (
            {} if self.masters is None else dict(zip(map(id, self.masters.masters), self.masters.model, strict=True))
        )
        return (models.get(id(param), param) for group in self.param_groups for param in group["params"])

    def prepare_on_host(self, scaled: bool | None = None) -> bool:
        """Unscale, test and clip, and return whether all gradients were finite."""
        self._say(scaled)
        found, _ = self._prepare()
        return not found

    def update_model(self) -> None:
        """Round the masters into the model's 16-bit parameters."""
        if self.masters is not None:
            self.masters.update_model()

    def finish(self, finite: bool | Tensor) -> None:
        """Advance the loss scale, and end the window."""
        window, losses_were_finite = self.window, True
        scaler = window.scaling_or(self.scaler).scaler
        explain = reasons.later(self, window.suspects(scaler))
        if finite is False:
            losses_were_finite = window.losses_were_finite()
            explain = reasons.now(self, window.saw_loss and losses_were_finite)
        else:
            self.update_model()
        if self.masters is not None:
            self.masters.release()
        for each, was_finite in window.reports_of(finite):
            each.advance(was_finite, self, window.suspects(each))
        self.close(scaler, finite, explain)
        if not losses_were_finite:
            scaler.report_loss("inf or NaN", alone=self._is_alone, where="scaling the loss")
        scaler.report(explain)

    def close(self, scaler: LossScaler, finite: bool | Tensor, explain: Callable[[], str]) -> None:
        """End the window with a result."""
        if finite is not False:
            torch.clear_autocast_cache()  # else an autocast region would go on using the old weights
        self.last_step = StepResult(scaler.state, finite, explain)
        self.window = Window(left_over=self._first_gradient())

    def check_gradients(self, first: Tensor | None) -> None:
        """Raise if there are no gradients, only those of the last step, or 16-bit ones without masters.

        Args:
            first: the first gradient, if there is one.
        """
        if self.is_consumed():
            raise refusals.no_backward("the gradients of the last step")
        if first is None and not self.window and not has_peers(self.process_group):  # peers wait for this rank
            raise refusals.no_backward("no parameter with a gradient")
        if first is not None and self.window.found is None:
            check_scaled(self)
        if first is not None and self.masters is None and self._master_weights is not False:
            refusals.check_width(first.dtype)

    def _prepare(self) -> tuple[Tensor, Gradients]:
        norm, gradients = self.max_grad_norm, self._collect()
        scaler, state, _ = self.window.scaling_or(self.scaler)
        operators = self.stepper.operators
        if norm is not None and scaler.config.check and self.window.is_untouched and operators.can_clip(gradients):
            scale = scale_on(state, gradients.first.device)
            self.window.note(scaler, operators.unscale_and_clip(gradients, scale, norm))
            return self.window.close(gradients, self.process_group)
        found, gradients = self._unscaled(gradients)
        if norm is not None:
            gradients.clip(norm, skipped=found)
        return found, gradients

    def _unscaled(self, gradients: Gradients) -> tuple[Tensor, Gradients]:
        found = self.window.found
        return self._unscale(gradients) if found is None else (found, gradients)

    @property
    def _is_alone(self) -> bool:
        """Whether no other rank waits for this one."""
        return not has_peers(self.process_group)

    def _say(self, scaled: bool | None) -> None:
        if scaled is None:
            return
        if not isinstance(scaled, bool):
            raise refusals.not_said(scaled)
        if scaled and self.window.found is not None:
            raise refusals.unscaled_already(where="step(scaled=True)", fix="leave scaled= out after unscale_()")
        self.window.said = scaled

    def _collect(self, scaled: bool | None = None) -> Gradients:
        self._say(scaled)
        if self.window.found is None and not self.is_consumed():
            self._take_gradients()
        gradients = Gradients(self.param_groups)
        self.check_gradients(gradients.first if gradients else None)
        return gradients

    def _take_gradients(self) -> None:
        if self.masters is not None:
            self.masters.take_gradients()

    def _unscale(self, gradients: Gradients) -> tuple[Tensor, Gradients]:
        window = self.window
        if not window.scaling_or(self.scaler).scaler.config.check:
            window.found = torch.zeros((), device="cpu")
            return window.found, gradients
        window.unscale(gradients, self.scaler, simple=self._are_simple(gradients))
        return window.close(gradients, self.process_group)

    def _are_simple(self, gradients: Gradients) -> bool:
        if self._asked != gradients.parameter_count:
            self._asked, self._simple = gradients.parameter_count, gradients.are_simple()
        return self._simple

    def _set_aside(self) -> None:
        """Unscale the gradients of earlier losses and set them aside before a loss with another scale."""
        if self.window.found is None:
            self._take_gradients()
            gradients = Gradients(self.param_groups)
            if gradients:
                self.window.unscale(gradients, self.scaler, simple=self._are_simple(gradients))
        self.window.set_aside(param for group in self.param_groups for param in group["params"])
        if self.masters is not None:
            self.masters.zero_grad(set_to_none=True)

    def _first_gradient(self) -> tuple[Any, int] | None:
        """Return the first gradient as a weak reference, so that it can be freed, with its version, to recognise it."""
        groups = self.param_groups if self.masters is None else [{"params": self.masters.model}]
        grads = (param.grad for group in groups for param in group["params"])
        first = next((grad for grad in grads if grad is not None), None)
        return None if first is None else (weakref.ref(first), first._version)

    def is_consumed(self) -> bool:
        """Return whether the gradients are those of the last step."""
        left_over = self.window.left_over
        return left_over is not None and left_over == self._first_gradient()

    def _refuse_mixing(self) -> None:
        if not Gradients(self.param_groups):
            self.open_window()  # the model's own zero_grad was called
            return
        raise refusals.unscaled_already(
            where="scale(loss), backward(loss): a scaled backward would add to them",
            fix="call step() or zero_grad() first, and unscale_() after the last backward of a window",
        )
