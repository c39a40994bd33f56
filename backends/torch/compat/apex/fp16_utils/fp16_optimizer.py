"""`FP16_Optimizer`: Apex's optimizer with master weights, in front of a wrapped optimizer.

    Apex                                     wrapped optimizer
    optimizer.backward(loss)                 backward(loss), unscale_(); at an overflow also step(), which skips
    optimizer.clip_master_grads(1.0)         clip_grad_norm_(1.0)
    optimizer.step()                         step(), unless the gradients overflowed

Apex moves its loss scale in ``backward``. So an overflow is skipped there: a loop that does not call ``step`` after it
still gets a lower scale.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NoReturn

import torch
from torch import Tensor

from polyamp.backends.torch.dtypes import SIXTEEN_BIT
from polyamp.backends.torch.steps.gradients import Gradients
from polyamp.backends.torch.steps.verbs import save_loss_scale
from polyamp.errors import InvalidTypeError, StateError, UsageError, warn_deprecated
from polyamp.loss_scale import LossScale
from polyamp.policies import policy
from polyamp.verbs import wrap_optimizer

_ARGUMENTS = {
    "init_scale": "init",
    "scale_factor": "growth",
    "scale_window": "interval",
    "min_loss_scale": "min",
    "max_loss_scale": "max",
}


class FP16_Optimizer:
    """An optimizer for a model with 16-bit parameters: it scales losses and updates float32 master weights.

    >>> model = torch.nn.Linear(2, 1).half()
    >>> optimizer = FP16_Optimizer(torch.optim.SGD(model.parameters(), lr=0.1), static_loss_scale=128.0, verbose=False)
    >>> optimizer.zero_grad()
    >>> optimizer.backward(model(torch.ones(1, 2).half()).sum())
    >>> optimizer.clip_master_grads(1.0)
    tensor(1.7321)
    >>> optimizer.step()
    >>> optimizer.overflow, model.weight.dtype, optimizer.param_groups[0]["params"][0].dtype
    (False, torch.float16, torch.float32)

    Differences from Apex: a step with gradients that are not finite is skipped under a static scale too; the scale
    grows by the number of steps, not of backward passes; a closure that overflows skips the step.

    Args:
        init_optimizer: a `torch.optim.Optimizer`. Master weights replace its 16-bit parameters.
        static_loss_scale: a scale that does not change.
        dynamic_loss_scale: use Apex's dynamic scale instead: it starts at 2**16 and doubles after 2000 steps.
        dynamic_loss_args: ``init_scale``, ``scale_factor``, ``scale_window``, ``min_loss_scale``, ``max_loss_scale``.
        verbose: print a line at an overflow.

    Attributes:
        optimizer: the given optimizer.
        wrapped: the wrapped optimizer.
        overflow: whether the last gradients held inf or NaN.

    Raises:
        InvalidTypeError: not an optimizer, or an unknown dynamic argument.
        InvalidValueError: a loss scale that `LossScale` refuses.

    Warns:
        PolyampDeprecationWarning: at the first use.
    """

    def __init__(
        self,
        init_optimizer: torch.optim.Optimizer,
        static_loss_scale: float = 1.0,
        dynamic_loss_scale: bool = False,
        dynamic_loss_args: Mapping[str, Any] | None = None,
        verbose: bool = True,
    ) -> None:
        warn_deprecated(
            "apex.fp16_utils.FP16_Optimizer(opt)", 'opt = polyamp.wrap_optimizer(opt, "O2"), opt.backward(loss)'
        )
        scale = _dynamic(dynamic_loss_args or {}) if dynamic_loss_scale else LossScale.fixed(static_loss_scale)
        groups = getattr(init_optimizer, "param_groups", ())  # `wrap_optimizer` refuses what has none
        low = any(param.dtype in SIXTEEN_BIT for group in groups for param in group["params"])
        self.wrapped = wrap_optimizer(init_optimizer, policy("O2" if low else "mixed_float16"), loss_scale=scale)
        self.optimizer = init_optimizer
        self.dynamic_loss_scale, self.verbose = dynamic_loss_scale, verbose
        self.overflow, self.first_closure_call_this_step = False, True
        self._evaluates = False

    def __getstate__(self) -> NoReturn:
        raise UsageError(
            "FP16_Optimizer is not pickled",
            where="pickle, copy",
            fix="save optimizer.state_dict(), and load it into a new FP16_Optimizer",
        )

    def backward(self, loss: Tensor, update_master_grads: bool = True, retain_graph: bool = False) -> None:
        """Call backward on the loss, in float32, times the loss scale.

        Args:
            loss: floating-point scalar.
            update_master_grads: unscale into the master gradients now; False leaves that to `update_master_grads`.
            retain_graph: as in ``Tensor.backward``.

        Raises:
            InvalidTypeError: the loss is not a floating-point tensor.
        """
        self.wrapped.scale(loss).backward(retain_graph=retain_graph)
        if update_master_grads and not self._evaluates:
            self.update_master_grads()

    def update_master_grads(self) -> None:
        """Unscale the gradients into those of the master weights, and set `overflow`. Waits for the device."""
        if not Gradients(self._groups_of_the_model()):
            return
        if not self.wrapped.window.is_unscaled:
            self.wrapped.unscale_()
        self.overflow = bool(self.wrapped.window.overflow)
        if self.overflow:
            self.wrapped.step()  # skips, and lowers the scale

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the master weights and the model, unless the gradients overflowed.

        Args:
            closure: calls `zero_grad`, computes the loss, calls `backward` and returns the loss.

        Returns:
            The return value of the optimizer's ``step``; None after an overflow.

        Raises:
            UsageError: there are no gradients.
        """
        if closure is None:
            if not self.overflow and not self.wrapped.window.is_unscaled:
                self.update_master_grads()
            if self.overflow:
                self.maybe_print(f"Gradient overflow.  Skipping step, reducing loss scale to {self.loss_scale}")
                return None
            return self.wrapped.step()
        self._evaluates = True
        try:
            result = self.wrapped.step(closure)
        finally:
            self._evaluates = False
        self.overflow = self.wrapped.step_was_skipped
        return result

    def zero_grad(self, set_grads_to_None: bool = False) -> None:
        """Clear the gradients of the model and of the master weights."""
        self.wrapped.zero_grad(set_grads_to_None)

    def clip_master_grads(self, max_norm: float, norm_type: float = 2) -> Any:
        """Clip the unscaled gradients of all parameters to a global norm.

        Args:
            max_norm: the largest norm.
            norm_type: 2, or another order as in `torch.nn.utils.clip_grad_norm_`.

        Returns:
            The norm before clipping; -1 if the gradients overflowed.
        """
        if not self.overflow and not self.wrapped.window.is_unscaled:
            self.update_master_grads()
        if self.overflow:
            return -1
        if norm_type == 2:
            return self.wrapped.clip_grad_norm_(max_norm)
        params = [param for group in self.param_groups for param in group["params"]]
        return torch.nn.utils.clip_grad_norm_(params, max_norm, norm_type)

    def inspect_master_grad_data(self) -> list[list[Tensor | None]] | None:
        """Return the unscaled gradients by parameter group; None if they overflowed."""
        if self.overflow:
            self.maybe_print("The gradients overflowed, so FP16_Optimizer.inspect_master_grad_data returns None.")
            return None
        return [
            [None if param.grad is None else param.grad.detach() for param in group["params"]]
            for group in self.param_groups
        ]

    def maybe_print(self, msg: str) -> None:
        """Print a line, if ``verbose``."""
        if self.verbose:
            print(msg)

    def state_dict(self) -> dict[str, Any]:
        """Return Apex's fields: the loss scale as JSON values, the flags, the optimizer's state and the masters."""
        return {
            "loss_scaler": save_loss_scale(self.wrapped),
            "dynamic_loss_scale": self.dynamic_loss_scale,
            "overflow": self.overflow,
            "first_closure_call_this_step": self.first_closure_call_this_step,
            "optimizer_state_dict": self.optimizer.state_dict(),
            "fp32_from_fp16": self.fp32_from_fp16_groups,
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Resume from a result of `state_dict`, or from Apex's. Load the model first.

        Raises:
            StateError: a field is missing, the masters have other shapes, or there is no loss scale; nothing is
                changed.
        """
        saved, own = _fields(state_dict), self.fp32_from_fp16_groups
        masters, scaler = saved["fp32_from_fp16"], _scaler(saved["loss_scaler"])
        if [[one.shape for one in group] for group in masters] != [[one.shape for one in group] for group in own]:
            raise _not_a_state("master weights of other numbers or shapes", "the state of an optimizer of this model")
        settings = self.wrapped.scaler.settings
        if not saved["dynamic_loss_scale"] and not self.dynamic_loss_scale:
            settings = LossScale.fixed(_ANY_SCALE.from_state_dict(scaler).scale).in_float32()
        state = settings.from_state_dict(scaler)
        self.optimizer.load_state_dict(saved["optimizer_state_dict"])
        self.wrapped.scaler.settings = settings
        self.wrapped.scaler.resume(state)
        self.wrapped.stepper.forget()
        self.wrapped.open_window()
        with torch.no_grad():
            for group, saved_group in zip(own, masters, strict=True):
                for master, value in zip(group, saved_group, strict=True):
                    master.copy_(value)
        self.wrapped.update_model()
        self.overflow = bool(saved["overflow"])
        self.first_closure_call_this_step = bool(saved["first_closure_call_this_step"])

    @property
    def loss_scale(self) -> float:
        """The factor for the next loss. It can be set."""
        return float(self.wrapped.loss_scale)

    @loss_scale.setter
    def loss_scale(self, scale: float) -> None:
        if self.dynamic_loss_scale:
            self.wrapped.loss_scale = scale
            return
        scaler, settings = self.wrapped.scaler, LossScale.fixed(scale).in_float32()
        scaler.settings = settings
        scaler.resume(scaler.state._replace(scale=settings.init))

    @property
    def state(self) -> Any:
        """The optimizer's state, by master weight."""
        return self.optimizer.state

    @state.setter
    def state(self, state: Any) -> None:
        self.optimizer.state = state

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The optimizer's groups, with the master weights."""
        return self.optimizer.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self.optimizer.param_groups = groups

    @property
    def fp16_groups(self) -> list[list[Tensor]]:
        """The model's 16-bit parameters, by parameter group."""
        return [[model for model, own in group if model is not own] for group in self._pairs()]

    @property
    def fp32_from_fp16_groups(self) -> list[list[Tensor]]:
        """The master weights, by parameter group."""
        return [[own for model, own in group if model is not own] for group in self._pairs()]

    @property
    def fp32_from_fp32_groups(self) -> list[list[Tensor]]:
        """The model's float32 parameters, by parameter group."""
        return [[own for model, own in group if model is own] for group in self._pairs()]

    def _pairs(self) -> Iterator[list[tuple[Tensor, Tensor]]]:
        """Yield each parameter of the model with what the optimizer updates, by group."""
        models = self.wrapped.model_parameters()
        return ([(next(models), own) for own in group["params"]] for group in self.param_groups)

    def _groups_of_the_model(self) -> list[dict[str, Any]]:
        return [{"params": list(self.wrapped.model_parameters())}]


_ANY_SCALE = LossScale(min=2.0**-126, max=2.0**127)


def _dynamic(arguments: Mapping[str, Any]) -> LossScale:
    """Return the settings for ``dynamic_loss_args``."""
    unknown = sorted(set(arguments) - set(_ARGUMENTS))
    if unknown:
        raise InvalidTypeError(
            "unknown arguments of the dynamic loss scale",
            where="FP16_Optimizer(dynamic_loss_args=)",
            found=", ".join(unknown),
            allowed=", ".join(_ARGUMENTS),
            fix="leave them out",
        )
    settings = {_ARGUMENTS[name]: value for name, value in arguments.items() if value is not None}
    if "growth" in settings:
        settings["backoff"] = 1 / settings["growth"]
    return LossScale.like("apex", **settings)


def _fields(saved: Mapping[str, Any]) -> Mapping[str, Any]:
    names = {"loss_scaler", "dynamic_loss_scale", "overflow", "first_closure_call_this_step"}
    missing = (names | {"optimizer_state_dict", "fp32_from_fp16"}) - set(saved)
    if missing:
        raise _not_a_state(f"a state without {', '.join(sorted(missing))}", "what FP16_Optimizer.state_dict() returned")
    return saved


def _scaler(saved: Any) -> Any:
    """Return the state of a loss scaler; that of Apex's object, which its checkpoints hold, as Apex's amp saves it."""
    if hasattr(saved, "_loss_scale"):
        return {"loss_scale": float(saved._loss_scale), "unskipped": int(saved._unskipped)}
    return saved


def _not_a_state(found: str, allowed: str) -> StateError:
    return StateError(
        "this is not a state of this FP16_Optimizer",
        where="FP16_Optimizer.load_state_dict(state_dict)",
        found=found,
        allowed=allowed,
        fix="build model and optimizer as they were when the state was saved",
    )
