"""`LossScaledOptimizer`: any torch optimizer, with the order of a mixed-precision step in one place."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from polyamp.backends.torch import saving
from polyamp.backends.torch.closures import step_with_closure
from polyamp.backends.torch.dtypes import SIXTEEN_BIT
from polyamp.backends.torch.gradients import Gradients
from polyamp.backends.torch.masters import MasterWeights
from polyamp.backends.torch.scaler import LossScaler
from polyamp.errors import InvalidValueError, UsageError, warn_once
from polyamp.loss_scale import LossScale
from polyamp.refusals import no_optimizer, wrapped_already
from polyamp.result import StepResult

Groups = list[dict[str, Any]]


class LossScaledOptimizer(torch.optim.Optimizer):
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
            where there are such parameters; False updates them as they are, gradients staying in 16 bits.
        skip_on_device: leave skipping to the optimizer's kernel, without a host sync. None does so on accelerators
            where the optimizer can.

    Raises:
        InvalidTypeError: no optimizer.
        UsageError: it is wrapped already.
        InvalidValueError: ``skip_on_device`` of an optimizer that cannot.
    """

    # What copies and pickles keep: not the window under way, nor a `step` that a scheduler patched on the instance.
    _KEPT = ("inner", "scaler", "max_grad_norm", "masters", "last_step", "_master_weights", "_skip_on_device")

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        loss_scale: LossScale | None = None,
        *,
        max_grad_norm: float | None = None,
        master_weights: bool | None = None,
        skip_on_device: bool | None = None,
    ) -> None:
        # No super().__init__(): it would build groups and state of its own beside the inner optimizer's.
        _check_optimizer(optimizer, skip_on_device)
        self.inner = optimizer
        self.scaler = LossScaler(LossScale() if loss_scale is None else loss_scale)
        self.max_grad_norm = max_grad_norm
        self.masters = _make_masters(optimizer, master_weights)
        self.last_step = StepResult(self.scaler.state)
        self._master_weights = master_weights
        self._skip_on_device = skip_on_device
        self._start()

    def _start(self) -> None:
        self._found: Tensor | None = None  # 1.0 if this window's gradients, unscaled already, were not finite
        self._consumed: tuple[Any, int] | None = None  # the first gradient of the last step, and its version
        self._has_stepped = False
        self._asked, self._simple = 0, False  # of how many parameters `Gradients.are_simple` was asked, and its answer

    # What schedulers, trainers and users read and write belongs to the inner optimizer.

    @property
    def param_groups(self) -> Groups:
        """The inner optimizer's groups; master weights stand in them where parameters have 16 bits."""
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
        if name == "inner" or name.startswith("__"):  # while copying or unpickling there is no inner optimizer yet
            raise AttributeError(name)
        return getattr(self.inner, name)

    def __getstate__(self) -> dict[str, Any]:
        return {name: self.__dict__[name] for name in self._KEPT}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._start()

    def __repr__(self) -> str:
        return f"LossScaledOptimizer({self.inner!r}, {self.scaler.config!r})"

    @property
    def loss_scale(self) -> float:
        """The scale that the next loss is multiplied by. Reading it waits for the device, if it lives on one."""
        return float(self.scaler.state.scale)

    def scale(self, loss: Any) -> Any:
        """The loss in float32 (float64 stays) times the loss scale, for ``scale(loss).backward()``.

        Args:
            loss: floating tensor of any shape, or such tensors in lists, tuples and dicts.

        Raises:
            InvalidTypeError: no floating tensor.
            NonFiniteLossError: inf or NaN on the CPU; on other devices it is raised by a later `step`.
            UsageError: `unscale_` was called in this window: scaled gradients would be added to unscaled ones.
        """
        if self._found is not None:
            self._refuse_mixing()
        self._consumed = None
        return self.scaler.scale(loss)

    def backward(self, loss: Tensor, **options: Any) -> None:
        """``scale(loss).backward(**options)``. Gradients of several calls add up until `zero_grad`, as ever."""
        self.scale(loss).backward(**options)

    def unscale_(self) -> None:
        """Unscale the gradients now, to look at or change them before `step`. A second call does nothing.

        Where there are master weights, the unscaled gradients are those of the parameters in ``param_groups``.

        Raises:
            UsageError: no parameter has a gradient.
        """
        if self._found is None:
            self._unscale(self._collect())

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Unscale if need be, then clip to a global L2 norm, as ``torch.nn.utils.clip_grad_norm_`` does.

        Returns:
            The norm before clipping; float32 scalar tensor, not finite where the step will be skipped.

        Raises:
            UsageError: no parameter has a gradient.
        """
        self.unscale_()
        return Gradients(self.param_groups).clip(max_norm)

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
        if closure is not None:
            return step_with_closure(self, closure)
        gradients = self._prepare()
        step = self._step_on_device if self._can_skip_on_device(gradients) else self._step_on_host
        result, finite = step()
        self.finish(finite)
        return result

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear all gradients, the model's own 16-bit ones included, and begin a new window."""
        self.inner.zero_grad(set_to_none)
        if self.masters is not None:
            self.masters.zero_grad(set_to_none)
        self.open_window()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group to the inner optimizer, with master weights if its parameters have 16 bits.

        Raises:
            InvalidValueError: a parameter that is in another group already.
        """
        if self.masters is not None and isinstance(param_group.get("params"), list | tuple):
            self.masters.refuse_repeated(param_group["params"])
        self.inner.add_param_group(param_group)
        if self.masters is not None:
            self.masters.adopt(self.inner, self.param_groups[-1])
        elif self._master_weights is not False:
            self.masters = _make_masters(self.inner, None)

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
        self._start()

    # The parts of a step, for `closures`.

    def open_window(self) -> None:
        """Begin to gather gradients anew."""
        self._found = None
        self.scaler.forget_losses()

    def prepare_on_host(self) -> bool:
        """Unscale, test and clip; whether all gradients were finite."""
        self._prepare()
        return not self._found

    def update_model(self) -> None:
        """Bring the model's 16-bit parameters to their masters' values."""
        if self.masters is not None:
            self.masters.update_model()

    def finish(self, finite: bool | Tensor) -> None:
        """Move the loss scale, and end the window."""
        if finite is False:
            self.scaler.report_losses()
        else:
            self.update_model()
            torch.clear_autocast_cache()  # which else, inside an autocast region, goes on with the old weights
        self.scaler.advance(finite)
        self.last_step = StepResult(self.scaler.state)
        self._found = None
        self._consumed = self._first_gradient()
        self.scaler.report()

    def _prepare(self) -> Gradients:
        self.scaler.report_earlier_step()
        gradients = self._collect()
        if self._found is None:
            self._unscale(gradients)
        if self.max_grad_norm is not None:
            gradients.clip(self.max_grad_norm)
        return gradients

    def _collect(self) -> Gradients:
        if self._consumed is not None and self._consumed == self._first_gradient():
            raise _no_backward("the gradients of the last step")
        if self.masters is not None and self._found is None:
            self.masters.take_gradients()
        gradients = Gradients(self.param_groups)
        if not gradients:
            raise _no_backward("no parameter with a gradient")
        if self.masters is None and self._master_weights is not False and gradients.first.dtype in SIXTEEN_BIT:
            raise _became_low(gradients.first.dtype)
        return gradients

    def _unscale(self, gradients: Gradients) -> None:
        if not self.scaler.config.check:
            self._found = torch.zeros((), device="cpu")
            return
        if self._asked != gradients.parameter_count:
            self._asked, self._simple = gradients.parameter_count, gradients.are_simple()
        self._found = gradients.unscale(self.scaler.inverse_scale(), simple=self._simple)

    def _can_skip_on_device(self, gradients: Gradients) -> bool:
        if not self.scaler.config.check or self._skip_on_device is False:
            return False
        wanted = self._skip_on_device or gradients.first.device.type != "cpu"
        return wanted and _skips_itself(self.inner) and self._state_is_complete(gradients)

    def _state_is_complete(self, gradients: Gradients) -> bool:
        """False before the first applied step, which is decided on the host: torch's fused SGD allocates momentum
        without filling it, and would keep that if its kernel skipped."""
        state = self.inner.state
        return all(map(state.__contains__, gradients.params)) if state else self._has_stepped

    def _step_on_host(self) -> tuple[Any, bool | Tensor]:
        finite = not self._found
        self.inner._opt_called = True  # type: ignore[attr-defined]  # for a scheduler made before wrapping: skips count
        if not finite:
            return None, False
        result = self.inner.step()
        self._has_stepped = True
        return result, True

    def _step_on_device(self) -> tuple[Any, bool | Tensor]:
        found = self._found
        assert found is not None
        self.inner.found_inf = found  # type: ignore[attr-defined]  # the contract of _step_supports_amp_scaling
        try:
            return self.inner.step(), found == 0
        finally:
            del self.inner.found_inf  # type: ignore[attr-defined]

    def _first_gradient(self) -> tuple[Any, int] | None:
        """The first gradient and its version, to know it again; a weak reference, so that it can be freed."""
        groups = self.param_groups if self.masters is None else [{"params": self.masters.model}]
        grads = (param.grad for group in groups for param in group["params"])
        first = next((grad for grad in grads if grad is not None), None)
        return None if first is None else (weakref.ref(first), first._version)

    def _refuse_mixing(self) -> None:
        if not Gradients(self.param_groups):
            self.open_window()  # the model's own zero_grad was called
            return
        raise UsageError(
            "the gradients of this window are unscaled already, and a scaled backward would add to them",
            where="scale(loss), backward(loss)",
            fix="call step() or zero_grad() first, and unscale_() after the last backward of a window",
        )


def _skips_itself(inner: torch.optim.Optimizer) -> bool:
    return getattr(inner, "_step_supports_amp_scaling", False)


def _check_optimizer(optimizer: object, skip_on_device: bool | None) -> None:
    if isinstance(optimizer, LossScaledOptimizer):
        raise wrapped_already(f"a LossScaledOptimizer around {type(optimizer.inner).__name__}")
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise no_optimizer(optimizer, allowed="an instance of torch.optim.Optimizer")
    if skip_on_device and not _skips_itself(optimizer):
        raise InvalidValueError(
            "this optimizer cannot skip a step on the device",
            where="wrap_optimizer(skip_on_device=)",
            found=type(optimizer).__name__,
            allowed="SGD, Adam, AdamW or Adagrad with fused=True, and others that set _step_supports_amp_scaling",
            fix="make the optimizer with fused=True, or leave skip_on_device= out",
        )


def _make_masters(optimizer: torch.optim.Optimizer, wanted: bool | None) -> MasterWeights | None:
    params = [param for group in optimizer.param_groups for param in group["params"]]
    if wanted is not False and any(param.dtype in SIXTEEN_BIT for param in params):
        return MasterWeights(optimizer)
    if wanted:
        warn_once(
            "master weights were asked for, and no parameter has 16 bits, so there are none. "
            "Convert the model first: polyamp.convert(model, policy), then wrap its optimizer."
        )
    return None


def _no_backward(found: str) -> UsageError:
    return UsageError(
        "a step without a backward pass",
        where="step(), unscale_()",
        found=found,
        allowed="gradients that a backward pass left since the last step",
        fix="call backward(loss), or scale(loss).backward(), before step(), and zero_grad() after it",
    )


def _became_low(dtype: torch.dtype) -> UsageError:
    return UsageError(
        "parameters had 32 bits when the optimizer was wrapped, and have 16 now",
        where="step()",
        found=f"gradients of {dtype}",
        fix="convert the model before its optimizer is wrapped, or wrap with master_weights=False",
    )
