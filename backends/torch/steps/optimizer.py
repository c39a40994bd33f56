"""`LossScaledOptimizer`: any torch optimizer, with the order of a mixed-precision step in one place."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from polyamp.backends.torch.kernels.control import scale_on
from polyamp.backends.torch.steps import reasons, refusals, saving
from polyamp.backends.torch.steps.closures import step_with_closure
from polyamp.backends.torch.steps.gradients import Gradients
from polyamp.backends.torch.steps.masters import Kind, make_masters
from polyamp.backends.torch.steps.onlookers import update_begins
from polyamp.backends.torch.steps.overflow import Overflow
from polyamp.backends.torch.steps.ranks import check_process_group, has_peers
from polyamp.backends.torch.steps.scaled import calls_of, step_scaled
from polyamp.backends.torch.steps.scaler import LossScaler
from polyamp.backends.torch.steps.skipping import Stepper
from polyamp.backends.torch.steps.window import LossScalers, Scaling, Window
from polyamp.backends.torch.steps.wrapper import OptimizerWrapper
from polyamp.backends.torch.unstable import not_traced
from polyamp.errors import InvalidValueError
from polyamp.loss_scale import LossScale
from polyamp.refusals import no_optimizer, non_finite_loss, wrapped_already
from polyamp.result import StepResult


class LossScaledOptimizer(OptimizerWrapper):
    """An optimizer that unscales, tests, clips, then updates or skips, then moves the loss scale: always in that order.

    It is a `torch.optim.Optimizer`: ``param_groups``, ``state``, ``defaults`` and hooks are the inner optimizer's own,
    so schedulers and trainers work. Step hooks run where the inner optimizer steps.

    >>> weight = torch.ones(2, requires_grad=True)
    >>> opt = LossScaledOptimizer(torch.optim.SGD([weight], lr=0.5), LossScale(init=8.0), max_grad_norm=1.0)
    >>> opt.backward((weight * torch.tensor([3.0, 4.0])).sum())
    >>> opt.step()
    >>> weight.detach(), opt.last_step
    (tensor([0.7000, 0.6000]), StepResult(applied=True, scale=8.0, skipped_in_a_row=0))

    Args:
        optimizer: any `torch.optim.Optimizer`. On an accelerator a step of a fused one costs no host sync, and of any
            other costs one. LBFGS and other optimizers that evaluate a closure more than once cost a copy of parameters
            and state, from which an overflow is undone.
        loss_scale: None is ``LossScale()``. ``LossScale.none()`` makes this do exactly what ``optimizer`` does.
        max_grad_norm: clip unscaled gradients to this global L2 norm at every step; None does not.
        master_weights: train float32 copies of 16-bit parameters, which then stand in ``param_groups``. None does so
            where there are such parameters; False updates them as they are, gradients staying in 16 bits. To save
            memory, "remainder" keeps only the bits of the copies that bfloat16 parameters lack, and "stochastic" keeps
            none and rounds by chance; between steps those copies then read as NaN.
        skip_on_device: leave skipping to the optimizer's kernel, without a host sync. None does so on accelerators
            where the optimizer can.
        fused_step: unscale, clip, skip, update and move the loss scale in polyamp's own operators, for SGD, Adam and
            AdamW; gradients then stay scaled after a step. None does so on GPUs where the compiled extension is in use,
            True everywhere, False nowhere.
        process_group: the ranks that step or skip together: an overflow on one is an overflow on all. None is the
            default group of ``torch.distributed`` where that is initialised; False is this rank alone.
        named_parameters: names for the parameters in messages, as of ``model.named_parameters()``. Without them, those
            that the optimizer was made with, or those of a module that has the parameters.
        share: another wrapped optimizer that trains on the same losses: both then share their loss scales.

    Raises:
        InvalidTypeError: no optimizer, or another argument of the wrong type.
        UsageError: it is wrapped already.
        InvalidValueError: ``skip_on_device`` of an optimizer that cannot.
    """

    # What copies and pickles keep: not the window under way, nor a `step` that a scheduler patched on the instance,
    # nor a process group, which cannot be copied.
    _KEPT = ("inner", "scalers", "max_grad_norm", "masters", "last_step", "stepper", "_master_weights")

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        loss_scale: LossScale | None = None,
        *,
        max_grad_norm: float | None = None,
        master_weights: Kind = None,
        skip_on_device: bool | None = None,
        fused_step: bool | None = None,
        process_group: Any = None,
        named_parameters: Iterable[tuple[str, Tensor]] = (),
        share: LossScaledOptimizer | None = None,
    ) -> None:
        if isinstance(optimizer, LossScaledOptimizer):
            raise wrapped_already(f"a LossScaledOptimizer around {type(optimizer.inner).__name__}")
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise no_optimizer(optimizer, allowed="an instance of torch.optim.Optimizer")
        if share is not None and not isinstance(share, LossScaledOptimizer):
            raise refusals.not_a(
                LossScaledOptimizer, share, where="wrap_optimizer(share=)", fix="give a wrapped optimizer"
            )
        check_process_group(process_group)
        named = refusals.named_tensors(named_parameters)
        super().__init__(optimizer)
        self.scalers: LossScalers = LossScalers(loss_scale or LossScale()) if share is None else share.scalers
        self.stepper = Stepper(optimizer, skip_on_device if self.scaler.config.check else False, fused_step)
        self.max_grad_norm = max_grad_norm
        self.masters = make_masters(optimizer, master_weights)
        self.last_step = StepResult(self.scaler.state)
        self._master_weights = master_weights
        self._start(process_group, named)

    def _start(self, process_group: Any = None, named: Mapping[str, Tensor] | None = None) -> None:
        self.scalers.join(self)
        ALIVE.add(self)
        self.process_group = process_group
        self.named = {} if named is None else named
        self._asked, self._simple = 0, False  # of how many parameters `Gradients.are_simple` was asked, and its answer
        self._forget()

    def _forget(self) -> None:
        self.window = Window()

    def __getstate__(self) -> dict[str, Any]:
        return {name: self.__dict__[name] for name in self._KEPT}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._start()

    def __repr__(self) -> str:
        return f"LossScaledOptimizer({self.inner!r}, {self.scaler.config!r})"

    @property
    def scaler(self) -> LossScaler:
        """The loss scaler of losses without an id."""
        return self.scalers.main

    @property
    def loss_scale(self) -> float:
        """The scale that the next loss is multiplied by. Reading it waits for the device, if it lives on one."""
        return float(self.scaler.state.scale)

    def scale(self, loss: Any, loss_id: Hashable = None) -> Any:
        """The loss in float32 (float64 stays) times the loss scale, for ``scale(loss).backward()``.

        >>> weight = torch.ones(1, requires_grad=True)
        >>> opt = LossScaledOptimizer(torch.optim.SGD([weight], lr=0.5), LossScale(init=8.0))
        >>> opt.scale(weight.sum()).backward()
        >>> opt.scale(3 * weight.sum(), loss_id="penalty").backward()  # with a scale of its own
        >>> opt.unscale_()
        >>> weight.grad
        tensor([4.])

        Args:
            loss: floating tensor of any shape, or such tensors in lists, tuples and dicts.
            loss_id: for a loss that is to have a scale of its own: any name for it. Its gradients are added to those of
                the other losses once they are unscaled; until then those are set aside.

        Raises:
            InvalidTypeError: no floating tensor.
            NonFiniteLossError: inf or NaN on the CPU; on other devices it is raised by a later `step`.
            UsageError: `unscale_` was called in this window: scaled gradients would be added to unscaled ones.
        """
        if self.window.found is not None:
            self._refuse_mixing()
        return self.scalers.scale(loss, loss_id, alone=not has_peers(self.process_group))

    @not_traced
    def backward(self, loss: Tensor, loss_id: Hashable = None, **options: Any) -> None:
        """``scale(loss, loss_id).backward(**options)``. Gradients of several calls add up until `zero_grad`, as ever.

        Raises:
            UsageError: the gradients of the last step are still there.
        """
        if self.scaler.config.check and self._is_consumed():
            raise refusals.not_cleared()
        self.scale(loss, loss_id).backward(**options)

    @not_traced
    def unscaled_grad(self, loss: Tensor, inputs: Tensor | Sequence[Tensor], **options: Any) -> tuple[Any, ...]:
        """Gradients of a scaled loss, unscaled: for a penalty on gradients. The parameters' ``grad`` stays untouched.

        >>> weight = torch.tensor([3.0], requires_grad=True)
        >>> opt = LossScaledOptimizer(torch.optim.SGD([weight], lr=0.5))
        >>> (grad,) = opt.unscaled_grad(weight.square().sum(), [weight])
        >>> opt.backward(weight.square().sum() + grad.square().sum())
        >>> weight.grad / opt.loss_scale
        tensor([30.])

        Args:
            loss: floating scalar.
            inputs: what to differentiate by.
            **options: of ``torch.autograd.grad``, with ``create_graph=True`` unless given.
        """
        scaled = torch.autograd.grad(self.scaler.scale(loss), inputs, **{"create_graph": True, **options})
        inverse = self.scaler.inverse_scale()
        return tuple(None if grad is None else grad.float() * inverse.to(grad.device) for grad in scaled)

    @not_traced
    def unscale_(self) -> None:
        """Unscale the gradients now, to look at or change them before `step`.

        Where there are master weights, the unscaled gradients are those of the parameters in ``param_groups``.

        Raises:
            UsageError: no parameter has a gradient, or they are unscaled already.
        """
        update_begins()
        if self.window.found is not None:
            raise refusals.unscaled_already(where="unscale_()", fix="call it once between backward() and step()")
        self._unscale(self._collect())

    @not_traced
    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Unscale if need be, then clip to a global L2 norm, as ``torch.nn.utils.clip_grad_norm_`` does.

        Returns:
            The norm before clipping; float32 scalar tensor, not finite where the step will be skipped.

        Raises:
            UsageError: no parameter has a gradient.
            InvalidValueError: ``max_norm`` is negative or NaN.
        """
        refusals.check_norm(max_norm)
        update_begins()
        _, gradients = self._unscaled(self._collect())
        return gradients.clip(max_norm)

    @not_traced
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Unscale, test, clip, update or skip, and move the loss scale.

        A skipped step leaves parameters, masters and optimizer state bit-identical; `last_step` says so.

        Args:
            closure: computes the loss, calls `backward` and returns the unscaled loss.

        Returns:
            What the inner optimizer's ``step`` returns; where skipped, the closure's loss or None.

        Raises:
            UsageError: no parameter has a gradient, or they are those of the last step.
            LossScaleError: see `LossScale`: ``max_skips`` and ``on_min``.
            NonFiniteLossError: a loss on an accelerator was inf or NaN.
        """
        update_begins(closure)
        if closure is not None:
            return step_with_closure(self, closure)
        for scaler in self.scalers:
            scaler.report_earlier_step(functools.partial(reasons.explain, self))
        if (calls := calls_of(self)) is not None:
            return step_scaled(self, calls)
        result, finite = self.stepper.step(*self._prepare())
        self.finish(finite)
        return result

    def overflowed(self) -> list[Overflow]:
        """The parameters whose gradients hold inf or NaN now, by name. Waits for the device.

        >>> model = torch.nn.Linear(2, 1)
        >>> opt = LossScaledOptimizer(torch.optim.SGD(model.parameters(), lr=0.5))
        >>> opt.backward(model(torch.full((1, 2), 3e34)).sum())
        >>> opt.step()
        >>> bool(opt.last_step), *opt.overflowed()
        (False, Overflow(name='weight', inf=2, nan=0, elements=2))
        """
        return reasons.overflowed(self)

    @not_traced
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear all gradients, the model's own 16-bit ones included, and begin a new window."""
        self.inner.zero_grad(set_to_none)
        if self.masters is not None:
            self.masters.zero_grad(set_to_none)
        self.open_window()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group to the inner optimizer, with master weights if its parameters have 16 bits.

        Raises:
            InvalidValueError: a parameter that is in another group already, or cannot have such master weights.
        """
        self.inner.add_param_group(param_group)
        try:
            if self.masters is None:
                self.masters = make_masters(self.inner, self._master_weights)
            else:
                self.masters.adopt(self.inner, self.param_groups[-1])
        except InvalidValueError:
            self.param_groups.pop()
            raise

    def state_dict(self) -> dict[str, Any]:
        """The inner optimizer's ``state`` and ``param_groups``, with ``loss_scale`` and ``master_weights``.

        >>> opt = LossScaledOptimizer(torch.optim.SGD([torch.ones(2, requires_grad=True)], lr=0.5))
        >>> sorted(opt.state_dict())
        ['loss_scale', 'master_weights', 'param_groups', 'state']
        """
        return saving.save(self)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue bit for bit from what `state_dict` gave; the state keeps its dtypes.

        Raises:
            StateError: of another kind, incomplete, or of other parameters; nothing is changed.
        """
        saving.load(self, state_dict)
        self.stepper.forget()
        self._forget()

    def holders(self) -> Iterator[Any]:
        """The objects that hold what this knows of a window, for `keeping.keep`."""
        yield from (self, self.window, self.scalers)
        for scaler in self.scalers:
            yield from scaler.holders()

    # The parts of a step, for `closures` and for the scalers.

    def open_window(self) -> None:
        """Begin to gather gradients anew."""
        self.window = Window()
        self.scalers.forget_losses()

    def expect(self, scaling: Scaling) -> None:
        """A loss was multiplied by a scale, and its backward pass is to come."""
        window = self.window
        if window.found is not None or (window.scaling is not None and not window.scaling.same_scale(scaling)):
            self._set_aside()
        window.scaling, window.left_over = scaling, None

    def prepare_on_host(self) -> bool:
        """Unscale, test and clip; whether all gradients were finite."""
        found, _ = self._prepare()
        return not found

    def update_model(self) -> None:
        """Bring the model's 16-bit parameters to their masters' values."""
        if self.masters is not None:
            self.masters.update_model()

    def finish(self, finite: bool | Tensor) -> None:
        """Move the loss scale, and end the window."""
        window, losses_were_finite = self.window, True
        explain = reasons.later(self)
        if finite is False:
            losses_were_finite = self.scalers.losses_were_finite()
            explain = reasons.now(self, window.saw_loss and losses_were_finite)
        else:
            self.update_model()
        if self.masters is not None:
            self.masters.release()
        for scaler, was_finite in window.reports_of(finite):
            scaler.advance(was_finite, self)
        scaler = window.scaling_or(self.scaler).scaler
        self.close(scaler, finite, explain)
        if not losses_were_finite and not has_peers(self.process_group):
            raise non_finite_loss("inf or NaN")
        scaler.report(explain)

    def close(self, scaler: LossScaler, finite: bool | Tensor, explain: Callable[[], str]) -> None:
        """End the window with a result."""
        if finite is not False:
            torch.clear_autocast_cache()  # which else, inside an autocast region, goes on with the old weights
        self.last_step = StepResult(scaler.state, finite, explain)
        self.window = Window(left_over=self._first_gradient())

    def check_gradients(self, first: Tensor | None) -> None:
        """Refuse to step on nothing, on what the last step left, or on 16 bits without masters.

        Args:
            first: gradient, if there is any.
        """
        if self._is_consumed():
            raise refusals.no_backward("the gradients of the last step")
        if first is None and not self.window and not has_peers(self.process_group):  # which wait for this rank
            raise refusals.no_backward("no parameter with a gradient")
        if first is not None and self.masters is None and self._master_weights is not False:
            refusals.check_width(first.dtype)

    def _prepare(self) -> tuple[Tensor, Gradients]:
        norm, gradients = self.max_grad_norm, self._collect()
        scaler, state = self.window.scaling_or(self.scaler)
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

    def _collect(self) -> Gradients:
        if self.window.found is None and not self._is_consumed():
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
        """Unscale what earlier losses left, and keep it apart from what a loss of another scale will leave."""
        if self.window.found is None:
            self._take_gradients()
            gradients = Gradients(self.param_groups)
            if gradients:
                self.window.unscale(gradients, self.scaler, simple=self._are_simple(gradients))
        self.window.set_aside(param for group in self.param_groups for param in group["params"])
        if self.masters is not None:
            self.masters.zero_grad(set_to_none=True)

    def _first_gradient(self) -> tuple[Any, int] | None:
        """The first gradient and its version, to know it again; a weak reference, so that it can be freed."""
        groups = self.param_groups if self.masters is None else [{"params": self.masters.model}]
        grads = (param.grad for group in groups for param in group["params"])
        first = next((grad for grad in grads if grad is not None), None)
        return None if first is None else (weakref.ref(first), first._version)

    def _is_consumed(self) -> bool:
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


ALIVE: weakref.WeakSet[LossScaledOptimizer] = weakref.WeakSet()
"""All of them in this process."""
