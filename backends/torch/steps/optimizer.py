"""`LossScaledOptimizer`, the optimizer that `polyamp.wrap_optimizer` returns; ``step.py`` has what its step does."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from polyamp.backends.torch.autocast.regions import LAST
from polyamp.backends.torch.recording.reach import update_begins
from polyamp.backends.torch.sharding import check_groups
from polyamp.backends.torch.steps import checkpoints, overflow, refusals, saving
from polyamp.backends.torch.steps.fused import FusedStep
from polyamp.backends.torch.steps.guards import check_no_scaler, guard, report_forgotten_scale
from polyamp.backends.torch.steps.losses import LossScalers, Witness
from polyamp.backends.torch.steps.masters import make_masters
from polyamp.backends.torch.steps.overflow import Overflow
from polyamp.backends.torch.steps.ranks import check_norm_group, check_process_group
from polyamp.backends.torch.steps.skipping import Stepper
from polyamp.backends.torch.steps.step import collect, declare, step, unscale
from polyamp.backends.torch.steps.window import Window
from polyamp.backends.torch.steps.wrapped import Groups, WrappedOptimizer
from polyamp.backends.torch.unstable import asked_by_checkpoint, infers_pipeline, not_traced, watch_no_sync
from polyamp.errors import InvalidValueError, no_optimizer, wrapped_already
from polyamp.scale import LossScale, StepResult


class LossScaledOptimizer(WrappedOptimizer):
    """An optimizer that unscales, tests, clips, updates or skips, then advances the loss scale: always in that order.

    It is a `torch.optim.Optimizer`: ``param_groups``, ``state``, ``defaults`` and hooks are the inner optimizer's own,
    so schedulers and trainers work. Step hooks run when the inner optimizer steps.

    >>> weight = torch.ones(2, requires_grad=True)
    >>> opt = LossScaledOptimizer(torch.optim.SGD([weight], lr=0.5), LossScale(init=8.0), max_grad_norm=1.0)
    >>> opt.backward((weight * torch.tensor([3.0, 4.0])).sum())
    >>> opt.step()
    >>> weight.detach(), opt.last_step
    (tensor([0.7000, 0.6000]), StepResult(applied=True, scale=8.0, skipped_in_a_row=0))

    Args:
        optimizer: any `torch.optim.Optimizer`. On an accelerator a step of a fused optimizer needs no host sync, of any
            other optimizer one. LBFGS and other optimizers that evaluate a closure more than once need a copy of
            parameters and state, to undo an overflow.
        loss_scale: None is ``LossScale()``. With ``LossScale.none()`` the steps are exactly those of ``optimizer``.
        max_grad_norm: clip unscaled gradients to this global L2 norm at every step; None does not clip.
        master_weights: train float32 copies of 16-bit parameters, which replace them in ``param_groups``. None does so
            if there are such parameters; False updates them directly, with gradients in 16 bits.
        fused_step: leave skipping to a kernel on the device, without a host sync. None does so on accelerators where it
            can: in polyamp's own operators for SGD, Adam and AdamW, which also unscale, clip, update and advance the
            loss scale (gradients then stay scaled after a step), on GPUs if the compiled extension is in use; else in
            the optimizer's kernel if that is fused. True does so on all devices, False never.
        process_group: the ranks that step or skip together: an overflow on one is an overflow on all. None is the
            default group of ``torch.distributed`` if that is initialised; False is this rank alone.
        norm_group: ranks that have other parameters of the same model, such as the stages of a pipeline: gradients are
            clipped by the norm over all of them. None: every rank has all of a parameter, or a shard of a distributed
            tensor, whose ranks are known.
        named_parameters: names for the parameters in messages, as in ``model.named_parameters()``. Without them, the
            names given to the optimizer, or those of a module that has the parameters.
        compute: the format that forward passes compute in, for messages about losses that are not finite.

    Raises:
        InvalidTypeError: ``optimizer`` is not an optimizer, or another argument has the wrong type.
        UsageError: it is wrapped already, or ``fully_shard`` put its parameters of several dtypes into one group.
    """

    # What copies and pickles keep. Not kept: the current window, a `step` that a scheduler patched on the instance, and
    # process groups, which cannot be copied.
    _KEPT = ("inner", "scalers", "max_grad_norm", "masters", "last_step", "stepper", "operators", "masters_wanted")

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        loss_scale: LossScale | None = None,
        *,
        max_grad_norm: float | None = None,
        master_weights: bool | None = None,
        fused_step: bool | None = None,
        process_group: Any = None,
        norm_group: Any = None,
        named_parameters: Iterable[tuple[str, Tensor]] = (),
        compute: str | None = None,
    ) -> None:
        if isinstance(optimizer, LossScaledOptimizer):
            raise wrapped_already(f"a LossScaledOptimizer around {type(optimizer.inner).__name__}")
        if isinstance(getattr(optimizer, "polyamp_wrapper", None), LossScaledOptimizer):
            raise wrapped_already(f"{type(optimizer).__name__}, attached to its wrapper")
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise no_optimizer(optimizer, allowed="an instance of torch.optim.Optimizer")
        check_process_group(process_group)
        check_norm_group(norm_group)
        check_groups([param for group in optimizer.param_groups for param in group["params"]])
        named = refusals.named_tensors(named_parameters)
        super().__init__(optimizer)
        settings = loss_scale or LossScale()
        self.scalers: LossScalers = LossScalers(settings, compute)
        self.operators = FusedStep(optimizer, fused_step)
        self.stepper = Stepper(optimizer, fused_step if settings.check else False)
        self.max_grad_norm = max_grad_norm
        self.masters = make_masters(optimizer, master_weights)
        self.last_step = StepResult(self.scaler.state)
        self.masters_wanted = master_weights
        self._start(process_group, norm_group, named)

    def _start(
        self, process_group: Any = None, norm_group: Any = None, named: Mapping[str, Tensor] | None = None
    ) -> None:
        self.scalers.join(self)
        ALIVE.add(self)
        self.steps_now, self.witness, self.regions_before = False, None, LAST.count
        if self.scaler.multiplies:
            self.witness = Witness.of(self.model_parameters())
        if self.scaler.multiplies or self.masters is not None:
            guard(self, lambda: ALIVE)
        self.process_group, self.norm_group = process_group, norm_group
        self.named = {} if named is None else named
        self.window = Window()
        if not self.is_alone:
            watch_no_sync()

    def share_scales(self, other: LossScaledOptimizer) -> None:
        """Use the loss scales of another wrapped optimizer, which trains on the same losses."""
        self.scalers = other.scalers
        self.scalers.join(self)
        self.last_step = StepResult(self.scaler.state)

    def __getstate__(self) -> dict[str, Any]:
        return {name: self.__dict__[name] for name in self._KEPT}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._start()

    def __repr__(self) -> str:
        return f"LossScaledOptimizer({self.inner!r}, {self.scaler.settings!r})"

    @property
    def loss_scale(self) -> float:
        """The scale that the next loss is multiplied by. Reading it waits for the device if the scale is on one."""
        return float(self.scaler.state.scale)

    @loss_scale.setter
    def loss_scale(self, scale: float) -> None:
        self.scaler.set(scale, where="opt.loss_scale = scale")

    @property
    def step_was_skipped(self) -> bool:
        """Whether the last step was skipped. Reading it costs a sync if the device decided."""
        return not self.last_step.applied

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Whether `torch.amp.GradScaler` sets its scale as attributes, so that `step` can refuse it."""
        return self.scaler.multiplies

    def scale(self, loss: Any, loss_id: Hashable = None) -> Any:
        """Return the loss in float32 (float64 stays) times the loss scale, for ``scale(loss).backward()``.

        >>> weight = torch.ones(1, requires_grad=True)
        >>> opt = LossScaledOptimizer(torch.optim.SGD([weight], lr=0.5), LossScale(init=8.0))
        >>> opt.scale(weight.sum()).backward()
        >>> opt.scale(3 * weight.sum(), loss_id="penalty").backward()  # with another scale
        >>> opt.unscale_()
        >>> weight.grad
        tensor([4.])

        After `unscale_` too, further losses can be scaled: the unscaled gradients are set aside, so ``grad`` has those
        of the new losses alone, until `unscale_`, `clip_grad_norm_` or `step` adds all of them.

        Args:
            loss: floating-point tensor of any shape, or such tensors in lists, tuples and dicts.
            loss_id: any name for a loss that gets its own scale. Its gradients are added to those of the other losses
                when they are unscaled; until then those are set aside.

        Raises:
            InvalidTypeError: ``loss`` is not a floating-point tensor.
            NonFiniteLossError: under ``nonfinite_loss="raise"``, inf or NaN on the CPU; on other devices a later `step`
                raises it. By default the step is skipped, with a warning.
            UsageError: the loss is the result of an earlier call.
        """
        if not torch.compiler.is_compiling() and infers_pipeline():
            return loss
        return self.scalers.scale(loss, loss_id, self, alone=self.is_alone)

    @not_traced
    def backward(self, loss: Tensor, loss_id: Hashable = None, **options: Any) -> None:
        """Call ``scale(loss, loss_id).backward(**options)``. Gradients of several calls add up until `zero_grad`.

        Raises:
            UsageError: the gradients of the last step were not cleared.
        """
        if self.scaler.settings.check and self.is_consumed:
            raise refusals.not_cleared()
        self.scale(loss, loss_id).backward(**options)

    @not_traced
    def unscaled_grad(self, loss: Tensor, inputs: Tensor | Sequence[Tensor], **options: Any) -> tuple[Any, ...]:
        """Return unscaled gradients of a scaled loss, for a gradient penalty. The parameters' ``grad`` stays unchanged.

        >>> weight = torch.tensor([3.0], requires_grad=True)
        >>> opt = LossScaledOptimizer(torch.optim.SGD([weight], lr=0.5))
        >>> (grad,) = opt.unscaled_grad(weight.square().sum(), [weight])
        >>> opt.backward(weight.square().sum() + grad.square().sum())
        >>> weight.grad / opt.loss_scale
        tensor([30.])

        Args:
            loss: floating-point scalar.
            inputs: tensors to differentiate by.
            **options: options of ``torch.autograd.grad``; ``create_graph=True`` is the default.
        """
        scaled = torch.autograd.grad(self.scaler.scale(loss), inputs, **{"create_graph": True, **options})
        inverse = self.scaler.inverse_scale()
        return tuple(None if grad is None else grad.float() * inverse.to(grad.device) for grad in scaled)

    @not_traced
    def unscale_(self, *, scaled: bool | None = None) -> None:
        """Unscale the gradients now, to read or change them before `step`; call it again after further losses.

        With master weights, the unscaled gradients are those of the parameters in ``param_groups``.

        Args:
            scaled: see `step`.

        Raises:
            UsageError: no parameter has a gradient, they are unscaled already, or their loss was not scaled.
        """
        update_begins()
        if self.window.is_unscaled:
            raise refusals.unscaled_already(where="unscale_()", fix="call it once after the last backward()")
        declare(self, scaled)
        unscale(self, collect(self))

    @not_traced
    def clip_grad_norm_(self, max_norm: float, *, scaled: bool | None = None) -> Tensor:
        """Unscale if necessary, then clip to a global L2 norm, as ``torch.nn.utils.clip_grad_norm_`` does.

        Args:
            max_norm: not negative.
            scaled: see `step`.

        Returns:
            The norm before clipping; float32 scalar tensor, not finite if the step will be skipped.

        Raises:
            UsageError: no parameter has a gradient, or their loss was not scaled.
            InvalidValueError: ``max_norm`` is negative or NaN.
        """
        refusals.check_norm(max_norm)
        update_begins()
        declare(self, scaled)
        _, gradients = unscale(self, collect(self))
        return gradients.clip(max_norm)

    @not_traced
    def step(self, closure: Callable[[], Any] | None = None, *, scaled: bool | None = None) -> Any:
        """Unscale, test, clip, update or skip, and advance the loss scale.

        A skipped step leaves parameters, masters and optimizer state bitwise unchanged; see `last_step`.

        >>> weight = torch.ones(1, requires_grad=True)
        >>> opt = LossScaledOptimizer(torch.optim.SGD([weight], lr=0.5), LossScale(init=8.0))
        >>> weight.grad = torch.ones(1)
        >>> opt.step(scaled=False), weight.detach()
        (None, tensor([0.5000]))

        Args:
            closure: computes the loss, calls `backward` and returns the unscaled loss.
            scaled: for gradients that were set by hand, or by a backward pass that did not start from a scaled loss:
                True if they are multiplied by the loss scale; False if they are not, and are to be tested, clipped and
                used as they are. None: `backward`, or `scale` and a backward pass, made them.

        Returns:
            The return value of the inner optimizer's ``step``; after a skip, the closure's loss or None.

        Raises:
            UsageError: no parameter has a gradient, they are from the last step, or their loss was not scaled.
            LossScaleError: see `LossScale`: ``max_skips`` and ``on_min``.
            NonFiniteLossError: under ``nonfinite_loss="raise"``, a loss on an accelerator was inf or NaN.
        """
        check_no_scaler(self)
        update_begins(closure)
        result = step(self, closure, scaled)
        report_forgotten_scale(self, ALIVE)
        return result

    def overflowed(self) -> list[Overflow]:
        """Return the parameters whose gradients hold inf or NaN now, by name. Waits for the device.

        >>> model = torch.nn.Linear(2, 1)
        >>> opt = LossScaledOptimizer(torch.optim.SGD(model.parameters(), lr=0.5))
        >>> opt.backward(model(torch.full((1, 2), 3e34)).sum())
        >>> opt.step()
        >>> bool(opt.last_step), *opt.overflowed()
        (False, Overflow(name='weight', inf=2, nan=0, elements=2))
        """
        return overflow.overflowed(self)

    @not_traced
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear all gradients, including the model's own 16-bit ones, and start a new window."""
        self.inner.zero_grad(set_to_none)
        if self.masters is not None:
            self.masters.zero_grad(set_to_none)
        self.open_window()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group to the inner optimizer, with master weights if its parameters have 16 bits.

        Raises:
            InvalidValueError: a parameter is in another group already.
        """
        self.inner.add_param_group(param_group)
        try:
            if self.masters is None:
                self.masters = make_masters(self.inner, self.masters_wanted)
            else:
                self.masters.adopt(self.inner, self.param_groups[-1])
        except InvalidValueError:
            self.param_groups.pop()
            raise

    @property
    def param_groups(self) -> Groups:
        """The inner optimizer's groups, with master weights in place of 16-bit parameters."""
        return checkpoints.shown_groups(self) if asked_by_checkpoint() else self.inner.param_groups

    @param_groups.setter
    def param_groups(self, groups: Groups) -> None:
        self.inner.param_groups = groups

    @property
    def state(self) -> Any:
        """The inner optimizer's state, by parameter."""
        return checkpoints.ShownState(self) if asked_by_checkpoint() else self.inner.state

    @state.setter
    def state(self, state: Any) -> None:
        self.inner.state = state

    def state_dict(self) -> dict[str, Any]:
        """Return the inner optimizer's ``state`` and ``param_groups``, with ``loss_scale`` and ``master_weights``.

        `torch.distributed.checkpoint` gets the same data in another form; see ``checkpoints.py``.

        >>> opt = LossScaledOptimizer(torch.optim.SGD([torch.ones(2, requires_grad=True)], lr=0.5))
        >>> sorted(opt.state_dict())
        ['loss_scale', 'master_weights', 'param_groups', 'state']
        """
        return checkpoints.shown(self) if asked_by_checkpoint() else saving.save(self)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Resume bit for bit from a result of `state_dict`; the state keeps its dtypes.

        The state of a plain optimizer is accepted too, with a warning: the loss scale starts at ``init``.

        Raises:
            StateError: it is another kind of state, incomplete, or of other parameters; nothing is changed.
        """
        saving.load(self, checkpoints.unpacked(self, state_dict) if checkpoints.is_shown(state_dict) else state_dict)
        self.stepper.forget()
        self.open_window()


ALIVE: weakref.WeakSet[LossScaledOptimizer] = weakref.WeakSet()
"""All wrapped optimizers in this process."""
