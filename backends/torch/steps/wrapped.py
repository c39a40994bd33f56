"""A wrapped optimizer's data: the optimizer inside, and what the parts of a step know about its gradients."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from polyamp.backends.torch.steps import refusals
from polyamp.backends.torch.steps.fused import FusedStep
from polyamp.backends.torch.steps.gradients import Gradients
from polyamp.backends.torch.steps.losses import LossScalers, Scaling, Witness
from polyamp.backends.torch.steps.masters import MasterWeights
from polyamp.backends.torch.steps.ranks import has_peers, is_distributed
from polyamp.backends.torch.steps.scaler import LossScaler
from polyamp.backends.torch.steps.skipping import Stepper
from polyamp.backends.torch.steps.window import State, Window
from polyamp.scale import StepResult

Groups = list[dict[str, Any]]


class WrappedOptimizer(torch.optim.Optimizer):
    """An optimizer whose groups, state, defaults, hooks and other attributes are those of ``inner``."""

    scalers: LossScalers  # the loss scalers, one per loss id
    masters: MasterWeights | None  # master weights of 16-bit parameters; None without them
    window: Window  # the gradients since the last step
    witness: Witness | None  # observes where the gradients of one parameter come from; None if nothing is scaled
    stepper: Stepper  # steps the inner optimizer, or skips
    operators: FusedStep  # polyamp's operators, in place of the inner optimizer's step
    steps_now: bool  # whether this object is stepping the inner optimizer now
    max_grad_norm: float | None
    process_group: Any
    norm_group: Any
    named: Mapping[str, Tensor]
    last_step: StepResult
    regions_before: int  # number of autocast regions that this thread had entered at the last step
    masters_wanted: bool | None  # the argument ``master_weights`` of `LossScaledOptimizer`
    _simple: tuple[int, bool] = (
        0,
        False,
    )  # the number of parameters at the last `Gradients.are_simple`, and its result

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        # No super().__init__(): it would build its own groups and state in addition to the inner optimizer's.
        self.inner = inner

    @property
    def param_groups(self) -> Groups:
        """The inner optimizer's groups, with master weights in place of 16-bit parameters."""
        return self.inner.param_groups

    @param_groups.setter
    def param_groups(self, groups: Groups) -> None:
        self.inner.param_groups = groups

    @property
    def state(self) -> Any:
        """The inner optimizer's state, by parameter."""
        return self.inner.state

    @state.setter
    def state(self, state: Any) -> None:
        self.inner.state = state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        """The inner optimizer's default options."""
        return self.inner.defaults

    def __getattr__(self, name: str) -> Any:
        if name == "inner" or name.startswith("__"):  # copying and unpickling start without an inner optimizer
            raise AttributeError(name)
        return getattr(self.inner, name)

    @property
    def scaler(self) -> LossScaler:
        """The loss scaler of losses without an id."""
        return self.scalers.main

    @property
    def is_alone(self) -> bool:
        """Whether no other rank waits for this one."""
        return not has_peers(self.process_group)

    @property
    def may_have_gradients(self) -> bool:
        """Whether there may be something to update, here or on another rank."""
        return not self.is_alone or any(param.grad is not None for param in self.model_parameters())

    @property
    def is_consumed(self) -> bool:
        """Whether the gradients are those of the last step."""
        window = self.window
        return window.state is State.STEPPED and window.last_gradient == self.first_gradient()

    def open_window(self) -> None:
        """Start a new window."""
        self.window.open()

    def close_window(self) -> None:
        """Start a new window after a step, which recognises the gradients that the step left."""
        self.window.open(self.first_gradient())

    def expect(self, scaling: Scaling, *, own: bool) -> None:
        """Record a scaled loss, before its backward pass."""
        # Gradients that are unscaled are set aside; those with another scale are unscaled and set aside. Those that a
        # step left stay what they are until a loss of this optimizer itself is scaled.
        window = self.window
        if not own and self.is_consumed:
            return
        if window.is_unscaled and self._were_cleared():
            self.open_window()
        elif self.scaler.settings.check and (
            window.is_unscaled or (window.scaling is not None and not window.scaling.same_scale(scaling))
        ):
            self._set_aside()
        window.expect(scaling, own=own)

    def model_parameters(self) -> Iterator[Tensor]:
        """Return the model's own parameters, which get gradients from backward passes, in place of their masters."""
        masters = self.masters
        models = {} if masters is None else dict(zip(map(id, masters.masters), masters.model, strict=True))
        return (models.get(id(param), param) for group in self.param_groups for param in group["params"])

    def unscale_gradients(self, gradients: Gradients) -> None:
        """Unscale and test the gradients that the parameters have now; see `Window.unscale`."""
        simple, over_mesh = self.are_simple(gradients), self.process_group is not None  # which may not span the mesh
        self.window.unscale(gradients, self.scaler, simple=simple, over_mesh=over_mesh)

    def gradients(self) -> Gradients:
        """Return the gradients of the parameters in the optimizer's groups, masters included."""
        if self.norm_group is None:
            return Gradients(self.param_groups)
        return Gradients(self.param_groups, lambda _: self.norm_group)

    def take_gradients(self) -> None:
        """Set the masters' gradients to the model's gradients, in float32."""
        if self.masters is not None:
            self.masters.take_gradients()

    def update_model(self) -> None:
        """Round the masters into the model's 16-bit parameters."""
        if self.masters is not None:
            self.masters.update_model()

    def are_simple(self, gradients: Gradients) -> bool:
        """Return the result of `Gradients.are_simple`, cached until there are more parameters."""
        if self._simple[0] != gradients.parameter_count:
            self._simple = gradients.parameter_count, gradients.are_simple()
        return self._simple[1]

    def holders(self) -> Iterator[Any]:
        """Yield the objects that hold the data of a window, for `hooks.keep`."""
        yield from (self, self.window, self.scalers, *([] if self.witness is None else [self.witness]))
        for scaler in self.scalers:
            yield from scaler.holders()

    def _set_aside(self) -> None:
        window = self.window
        if not window.is_reduced and not self.is_alone:
            raise refusals.set_aside_before_reduction()
        if not window.is_unscaled:
            self.take_gradients()
            gradients = Gradients(self.param_groups)
            if gradients or not self.is_alone:  # all ranks combine the flags of the same losses
                self.unscale_gradients(gradients)
        trained = (param for group in self.param_groups for param in group["params"])
        window.set_aside(trained, copies=is_distributed())  # DistributedDataParallel's gradients can be views
        if self.masters is not None:
            self.masters.zero_grad(set_to_none=True)

    def _were_cleared(self) -> bool:
        """Return whether the model's own ``zero_grad`` was called after the gradients were unscaled."""
        before = self.window.unscaled_from
        if before is None:
            return False
        grads = [grad for param in self.model_parameters() if (grad := param.grad) is not None]
        if self.masters is None or not grads:
            return not grads
        return self.first_gradient() != before and not any(grad.any() for grad in grads)

    def first_gradient(self) -> tuple[Any, int] | None:
        """Return the first gradient as a weak reference, so that it can be freed, with its version, to recognise it."""
        groups = self.param_groups if self.masters is None else [{"params": self.masters.model}]
        grads = (param.grad for group in groups for param in group["params"])
        first = next((grad for grad in grads if grad is not None), None)
        return None if first is None else (weakref.ref(first), first._version)
