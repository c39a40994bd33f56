"""`GradScaler`: the interface of torch's scaler, for code that takes one, in front of polyamp's loss scale.

It has two kinds of optimizers behind it. Plain ones it unscales and steps itself, as torch's scaler does, with torch's
two tensors for the scale and its count. Optimizers that are wrapped do that themselves, so it passes the calls on.
"""

from __future__ import annotations

import functools
import math
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from polyamp.backends.torch.casting import leaves, map_leaves
from polyamp.backends.torch.dtypes import SIXTEEN_BIT
from polyamp.backends.torch.recording.reach import is_recorded, update_begins
from polyamp.backends.torch.steps import refusals
from polyamp.backends.torch.steps.optimizer import LossScaledOptimizer
from polyamp.backends.torch.steps.overflow import Overflow, describe, find, named, names_of
from polyamp.backends.torch.steps.ranks import Overflowed, any_rank, check_process_group, has_peers
from polyamp.backends.torch.steps.scaler import LossScaler, is_finite, non_finite
from polyamp.backends.torch.steps.skipping import state_is_complete
from polyamp.backends.torch.unstable import before_clipping, not_traced, note_step
from polyamp.errors import InvalidValueError, UsageError, shown, warn_once
from polyamp.policies import Policy
from polyamp.policies import policy as make_policy
from polyamp.scale import LossScale, LossScaleState, StepResult, on_host

_LOSSES_KEPT = 256  # of one step, on accelerators


def _setting(name: str) -> Any:
    """Return a property for one of torch's settings, which are those of the loss scale."""

    def change(scaler: GradScaler, value: Any) -> None:
        if scaler._lead is not None:
            raise UsageError(
                "the settings of the loss scale are the wrapped optimizer's",
                where=f"GradScaler: {name}",
                fix="polyamp.wrap_optimizer(optimizer, policy, loss_scale=LossScale(growth=, backoff=, interval=))",
            )
        scaler._own.settings = replace(scaler._own.settings, **{name: value})

    return property(lambda scaler: getattr(scaler.config, name), change)


class GradScaler(torch.amp.GradScaler):
    """A drop-in replacement for `torch.amp.GradScaler`: the same arguments, methods, order of calls and scales.

    Differences: the scale never falls below a floor, so it cannot become 0; an overflow on any device or rank skips the
    step everywhere; a float16 loss of one element is scaled in float32; an optimizer without gradients makes a finite
    step that does nothing; `last_step` reports what happened, and error messages name the call to use instead.

    >>> model = torch.nn.Linear(2, 1)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> scaler = GradScaler("cpu", init_scale=1024.0)
    >>> scaler.scale(model(torch.ones(1, 2)).sum()).backward()
    >>> scaler.step(optimizer)
    >>> scaler.update()
    >>> bool(scaler.last_step), scaler.get_scale()
    (True, 1024.0)

    With ``optimizers=``, it drives wrapped optimizers, so that a loop or a trainer that takes a scaler has all that a
    wrapped optimizer has: master weights, clipping, rules and reasons of skips.

    Args:
        device, init_scale, growth_factor, backoff_factor, growth_interval, enabled: as in torch.
        loss_scale: all settings as a `LossScale`, including hysteresis, limits and ``max_skips``, instead of the four
            numbers. None is torch's behaviour with a floor of 2**-14.
        policy: a policy or its name, instead of ``loss_scale``. The scaler has the policy's loss scale, and is disabled
            if the policy needs none, as in bfloat16.
        optimizers: a wrapped optimizer, or several that share their loss scales, as
            ``polyamp.wrap_optimizer([first, second], policy)`` returns them. Their settings are used.
        process_group: see `LossScaledOptimizer`.

    Raises:
        InvalidTypeError: ``loss_scale`` is not a `LossScale`, or an optimizer is not wrapped.
        InvalidValueError: a setting that `LossScale` refuses, or both a policy and a loss scale.
        UsageError: the optimizers do not share their loss scales.
    """

    _growth_factor, _backoff_factor = _setting("growth"), _setting("backoff")
    _growth_interval = _setting("interval")
    _wrapped: Sequence[LossScaledOptimizer] = ()

    def __init__(
        self,
        device: str = "cuda",
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
        *,
        loss_scale: LossScale | None = None,
        policy: Policy | str | None = None,
        optimizers: LossScaledOptimizer | Iterable[LossScaledOptimizer] | None = None,
        process_group: Any = None,
    ) -> None:
        if optimizers is not None:
            self._wrapped = _checked(optimizers)
            super().__init__("cpu", enabled=False)  # torch's own state is not used
            return
        given = _given(loss_scale, policy)
        if given is not None:
            enabled = enabled and (policy is None or given.check)
            init_scale, growth_factor, backoff_factor = given.init, given.growth, given.backoff
            growth_interval = given.interval
        limits = given or LossScale.like("torch", min=LossScale().min)
        limits = replace(limits, init=init_scale, min=min(limits.min, init_scale), max=max(limits.max, init_scale))
        self._own = LossScaler(limits)
        super().__init__(device, init_scale, growth_factor, backoff_factor, growth_interval, enabled)
        check_process_group(process_group)
        self._init_growth_tracker = self._own.state.good_steps
        self._process_group = process_group
        self._last_step = StepResult(self._own.state)
        self._start()

    def _start(self) -> None:
        self._losses: list[Tensor] = []  # losses that may be inf or NaN
        self._saw_loss = False
        self._explain: Callable[[], str] = str
        self._overflowed: Overflowed | None = None
        self._stepped: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._met: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        if self._enabled:
            _ALIVE.add(self)
            before_clipping("scalers", _report_clipping)

    @property
    def optimizers(self) -> Sequence[LossScaledOptimizer]:
        """The wrapped optimizers; empty for a scaler of plain ones."""
        return self._wrapped

    @property
    def _lead(self) -> LossScaledOptimizer | None:
        return self._wrapped[0] if self._wrapped else None

    @property
    def _scaler(self) -> LossScaler:
        return self._own if self._lead is None else self._lead.scaler

    @property
    def config(self) -> LossScale:
        """The settings, including changes by torch's ``set_...`` methods."""
        return self._scaler.settings

    @property
    def last_step(self) -> StepResult:
        """The result of the last step; of several wrapped optimizers, of the first one's."""
        return self._last_step if self._lead is None else self._lead.last_step

    def is_enabled(self) -> bool:
        """Return whether losses are multiplied."""
        return self._enabled if self._lead is None else self._lead.scaler.multiplies

    def scale(self, outputs: Any) -> Any:
        """Return the outputs times the scale, as torch does; 16-bit tensors in float32. A non-finite one skips a step.

        Raises:
            NonFiniteLossError: under ``LossScale(nonfinite_loss="raise")``, inf or NaN on the CPU; on other devices a
                later `step` raises it.
            UsageError: with wrapped optimizers, the loss is the result of an earlier call.
        """
        if (lead := self._lead) is not None:
            return lead.scale(outputs)
        if not self._enabled or not isinstance(outputs, Tensor | list | tuple):
            return super().scale(outputs)
        if losses := list(leaves(outputs)):
            self._saw_loss = True
            suspects = self._own.suspects(losses, alone=self._is_alone(), stacklevel=_STACKLEVEL)
            self._losses = [*self._losses, *suspects][-_LOSSES_KEPT:]
        return super().scale(map_leaves(_widened, outputs))

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Unscale the gradients of an optimizer now, as torch does."""
        if self._lead is not None:
            self._own_optimizer(optimizer, "scaler.unscale_(optimizer)").unscale_()
        elif self._enabled:
            self._met.add(optimizer)
            super().unscale_(optimizer)

    @not_traced
    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        """Step the optimizer or skip, as torch does. A skip on one device or rank is a skip on all.

        Raises:
            UsageError: a closure, a second step before `update`, or a wrapped optimizer that the scaler was not made
                with.
            LossScaleError: by ``max_skips`` or ``on_min``, found at an earlier `update` on an accelerator.
            NonFiniteLossError: see `scale`.
        """
        if self._lead is not None:
            return self._own_optimizer(optimizer, "scaler.step(optimizer)").step(*args, **kwargs)
        if not self._enabled:
            return super().step(optimizer, *args, **kwargs)
        self._met.add(optimizer)
        update_begins(scale=self.get_scale)
        _refuse(optimizer, [*args, kwargs.get("closure")])
        self._own.report_earlier_step(self._explain, alone=self._is_alone())
        params = (param for group in optimizer.param_groups for param in group["params"] if param.grad is not None)
        kernel_skips = vars(optimizer).get("_step_supports_amp_scaling", False)
        if kernel_skips and not state_is_complete(optimizer, params, has_stepped=optimizer in self._stepped):
            vars(optimizer)["_step_supports_amp_scaling"] = False  # so that torch lets the host skip
        try:
            result = super().step(optimizer, *args, **kwargs)
        finally:
            if kernel_skips:
                vars(optimizer)["_step_supports_amp_scaling"] = True
        if flags := list(self._found_inf_per_device(optimizer).values()):
            losses = self._losses if self._saw_loss else None
            self._explain = functools.partial(_explain, weakref.ref(optimizer), losses, self._overflowed)
            self._last_step = StepResult(self._state(), flags[0] == 0, self._explain)
        return result

    @not_traced
    def update(self, new_scale: float | Tensor | None = None) -> None:
        """Update the scale, as torch does, by `polyamp.advance`.

        Raises:
            LossScaleError: by ``max_skips`` or ``on_min``; on an accelerator a later `step` raises it.
        """
        if (lead := self._lead) is not None:
            if new_scale is not None:
                lead.loss_scale = float(new_scale)
            return
        states = self._per_optimizer_states.values() if self._enabled else ()
        flags = [flag for state in states for flag in state["found_inf_per_device"].values()]
        if not flags or new_scale is not None:
            _check_scale(new_scale, self._enabled)
            super().update(new_scale)
            return
        scale, _ = self._check_scale_growth_tracker("update")
        finite: bool | Tensor
        if scale.device.type == "cpu":
            finite = not any(map(bool, flags))
        else:
            finite = torch.stack([flag.to(scale.device, non_blocking=True) for flag in flags]).amax() == 0
        self._own.state = self._state()
        self._own.advance(finite, losses=self._losses)
        self._show()
        self._last_step = StepResult(self._own.state, finite, self._explain)
        self._own.report(self._explain)
        self._per_optimizer_states.clear()
        self._losses, self._saw_loss = [], False

    def _show(self) -> None:
        """Write the state into torch's two tensors."""
        if self._scale is not None and self._growth_tracker is not None:
            self._scale.copy_(torch.as_tensor(self._own.state.scale))
            self._growth_tracker.copy_(torch.as_tensor(self._own.state.good_steps))

    def get_scale(self) -> float:
        """Return the scale that the next loss is multiplied by. Waits for the device if the scale is on one."""
        return super().get_scale() if self._lead is None else self._lead.loss_scale

    @property
    def loss_scale(self) -> float:
        """The scale that the next loss is multiplied by; it can be set, within the settings."""
        return self.get_scale()

    @loss_scale.setter
    def loss_scale(self, scale: float) -> None:
        settings, state = self.settings_and_state()
        checked = refusals.checked_scale(settings, scale, where="scaler.loss_scale = scale")
        self.resume(state._replace(scale=checked))

    def settings_and_state(self) -> tuple[LossScale, LossScaleState]:
        """Return the settings, and the state as Python numbers. Waits for the device if the state is on one."""
        if self._lead is None and not self._enabled:
            return LossScale.none(), LossScale.none().initial_state()
        return self.config, on_host(self._state())

    def resume(self, state: LossScaleState) -> None:
        """Resume from a state of Python numbers."""
        if self._lead is not None or self._enabled:
            self._scaler.resume(state)
        if self._lead is None and self._enabled:
            self._init_scale, self._init_growth_tracker = state.scale, state.good_steps
            self._show()

    def overflowed(self, optimizer: torch.optim.Optimizer) -> list[Overflow]:
        """Return the parameters of an optimizer whose gradients hold inf or NaN now, by name. Waits for the device."""
        return named(find(optimizer.param_groups), names_of(optimizer.param_groups))

    def state_dict(self) -> dict[str, Any]:
        """Return torch's five keys, and ``counts`` if its settings need them; with wrapped optimizers, all fields."""
        if self._lead is not None:
            settings, state = self.settings_and_state()
            return settings.to_state_dict(state)
        saved = super().state_dict()
        if saved and (self.config.hysteresis > 1 or self.config.max_skips):
            saved["counts"] = list(on_host(self._state())[2:])
        return saved

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Resume from a result of `state_dict`, or from that of torch's own scaler.

        Raises:
            InvalidValueError: a scale of 0, inf or NaN, which torch's own scaler can reach.
            StateError: with wrapped optimizers, it is not a state of a loss scale. An empty one changes nothing.
        """
        if self._lead is not None:
            if state_dict:
                self._lead.scaler.load(state_dict)
            return
        if state_dict:
            _check_scale(state_dict["scale"], self._enabled)
        super().load_state_dict(dict(state_dict))
        if self._enabled:
            counts, initial = state_dict.get("counts", ()), self.config.initial_state()[2:]
            fields = (self._init_scale, self._init_growth_tracker, *counts, *initial[len(counts) :])
            self._own.resume(LossScaleState(*fields))

    def __getstate__(self) -> dict[str, Any]:
        kept = {key: value for key, value in super().__getstate__().items() if key not in _NOT_COPIED}
        if not self._enabled:
            return kept
        return {**kept, "_last_step": StepResult(on_host(self._state()), bool(self.last_step))}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__({"_process_group": None, **state})
        self._start()

    # What torch's own methods call.

    def _unscale_grads_(
        self, optimizer: torch.optim.Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        for param in () if allow_fp16 else (param for group in optimizer.param_groups for param in group["params"]):
            if param.grad is not None and param.grad.dtype == torch.float16:
                raise refusals.half_gradients(names_of(optimizer.param_groups)[param], param.grad.dtype)
        flags = list(super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16).values()) or [found_inf]
        if self._losses:
            flags.append(non_finite(self._losses, flags[0].device))
        overflow = flags[0] if len(flags) == 1 else torch.stack([flag.to(flags[0].device) for flag in flags]).amax()
        overflow, self._overflowed = any_rank(overflow, self._process_group)
        return {overflow.device: overflow}  # one flag: torch adds flags up, and fused kernels compare with 1

    def _maybe_opt_step(
        self, optimizer: torch.optim.Optimizer, optimizer_state: dict[str, Any], *args: Any, **kwargs: Any
    ) -> Any:
        note_step(optimizer)
        if any(map(bool, optimizer_state["found_inf_per_device"].values())):
            return None
        self._stepped.add(optimizer)
        return optimizer.step(*args, **kwargs)

    def _state(self) -> LossScaleState:
        """Return the state: torch's two tensors, and the counters that torch does not have."""
        if self._lead is not None:
            return self._lead.scaler.state
        scale = self._init_scale if self._scale is None else self._scale
        tracker = self._init_growth_tracker if self._growth_tracker is None else self._growth_tracker
        return self._own.state._replace(scale=scale, good_steps=tracker)

    def _is_alone(self) -> bool:
        return not has_peers(self._process_group)

    def has_scaled_gradients(self, params: set[int]) -> bool:
        """Return whether gradients of these parameters, by id, are still multiplied, as far as this is known."""
        # The scaler meets an optimizer at its first step, so nothing is known before.
        scaled = (one for one in self._met if not self._found_inf_per_device(one)) if self._saw_loss else ()
        owned = (param for one in scaled for group in one.param_groups for param in group["params"])
        return any(param.grad is not None and id(param) in params for param in owned)

    def _own_optimizer(self, optimizer: torch.optim.Optimizer, where: str) -> LossScaledOptimizer:
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


_STACKLEVEL = 5  # of a warning about a loss: from where it is issued to the user's call of `scale`
_NOT_COPIED = ("_losses", "_saw_loss", "_explain", "_overflowed", "_stepped", "_met", "_process_group")
_ALIVE: weakref.WeakSet[GradScaler] = weakref.WeakSet()  # all enabled scalers of plain optimizers in this process


def _report_clipping(given: list[Tensor], limit: float, *, measured: bool) -> list[Tensor]:
    """Warn once if gradients are clipped that a scaler has not unscaled; torch's scaler allows it."""
    if not math.isinf(limit) and _ALIVE and not is_recorded():
        clipped = {id(param) for param in given}
        if any(scaler.has_scaled_gradients(clipped) for scaler in tuple(_ALIVE)):
            warn_once(
                "gradients are clipped while they are multiplied by the loss scale, which makes them far too small: "
                "call scaler.unscale_(optimizer) before clipping.",
                stacklevel=4,
            )
    return given


def _checked(optimizers: LossScaledOptimizer | Iterable[LossScaledOptimizer]) -> Sequence[LossScaledOptimizer]:
    wrapped = [optimizers] if isinstance(optimizers, torch.optim.Optimizer) else list(optimizers)
    for one in wrapped:
        if not isinstance(one, LossScaledOptimizer):
            fix = "GradScaler(optimizers=polyamp.wrap_optimizer(optimizer, policy))"
            raise refusals.not_a(LossScaledOptimizer, one, where="GradScaler(optimizers=)", fix=fix)
        if one.scalers is not wrapped[0].scalers:
            fix = "wrap them together: polyamp.wrap_optimizer([first, second], policy)"
            raise refusals.different_loss_scales(where="GradScaler(optimizers=)", fix=fix)
    return wrapped


def _given(loss_scale: object, policy: Policy | str | None) -> LossScale | None:
    """Return the settings that a policy or a loss scale stands for; None for torch's numbers."""
    if loss_scale is not None and policy is not None:
        raise InvalidValueError(
            "a policy and a loss scale were given",
            where="GradScaler(policy=, loss_scale=)",
            found=f"{policy} and {loss_scale}",
            allowed="one of them: a policy has its own loss scale",
            fix="leave policy= out, or give polyamp.policy(name, loss_scale=...)",
        )
    if not isinstance(loss_scale, LossScale | None):
        fix = "write LossScale(...), or give init_scale= and the other numbers"
        raise refusals.not_a(LossScale, loss_scale, where="GradScaler(loss_scale=)", fix=fix)
    return loss_scale if policy is None else make_policy(policy).loss_scale


def _check_scale(scale: float | Tensor | None, enabled: bool) -> None:
    """Refuse an invalid scale if the host can see it; a tensor on a device is not tested, since that would wait."""
    known = not isinstance(scale, Tensor) or (scale.device.type == "cpu" and scale.numel() == 1)
    if enabled and scale is not None and known and not (math.isfinite(scale) and scale > 0):
        raise refusals.no_scale(scale)


def _widened(loss: Tensor) -> Tensor:
    return loss.float() if loss.dtype in SIXTEEN_BIT else loss


def _refuse(optimizer: torch.optim.Optimizer, arguments: list[Any]) -> None:
    if isinstance(optimizer, LossScaledOptimizer):
        raise refusals.scaled_twice(optimizer.inner)
    closure = next((argument for argument in arguments if callable(argument)), None)
    if closure is not None:
        raise refusals.closure_refused(closure)


def _explain(
    optimizer: weakref.ref[torch.optim.Optimizer], losses: list[Tensor] | None, overflowed: Overflowed | None
) -> str:
    """Explain why a step was skipped. ``losses`` are those that may not be finite; None if none was scaled."""
    alive = optimizer()
    bad = [] if alive is None else find(alive.param_groups)
    finite = None if losses is None else all(map(is_finite, losses))
    if alive is None or not bad:
        return describe([], finite, overflowed) if finite is False or overflowed is not None else ""
    return describe(named(bad, names_of(alive.param_groups)), finite, overflowed)
