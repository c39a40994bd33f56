"""`GradScaler`: polyamp's loss scale behind the interface of torch's scaler, for code that takes one.

The scaler unscales and steps plain optimizers itself. Wrapped optimizers unscale and step themselves, so it passes
the calls on to them.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from polyamp.backends.torch.modules import names_of
from polyamp.backends.torch.step import refusals
from polyamp.backends.torch.step.gradients import Gradients
from polyamp.backends.torch.step.guards import report_hooks
from polyamp.backends.torch.step.optimizer import LossScaledOptimizer, update_or_skip
from polyamp.backends.torch.step.overflow import explanation
from polyamp.backends.torch.step.passes import LISTENERS, scale, update_begins
from polyamp.backends.torch.step.ranks import RankSet, has_peers
from polyamp.backends.torch.step.saving import FIX, bad_state
from polyamp.backends.torch.step.scale import LossScaler
from polyamp.backends.torch.unstable import ask_before_clipping, leave_clipping, not_traced
from polyamp.errors import UsageError, is_number, kind_of, warn_once, wrong_type
from polyamp.libraries import LIBRARIES, write
from polyamp.scale import StepResult, on_host
from polyamp.settings import LossScale


def _setting(name: str) -> Any:
    """Return a property for a setting, which is stored with the loss scale's settings."""

    def change(scaler: GradScaler, value: Any) -> None:
        scaler.scaler.settings = replace(scaler.config, **{name: value})

    return property(lambda scaler: getattr(scaler.config, name), change)


@dataclass
class _Tested:
    """What a plain optimizer's gradients showed since `update`."""

    bad: Tensor  # 1.0 if a rank had gradients that were not finite when they were unscaled, else 0.0
    overflowed: RankSet | None  # the ranks that had them
    finite: bool | Tensor | None = None  # whether it stepped; None before


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
        optimizers: a wrapped optimizer, or several that share their loss scales, as
            ``polyamp.wrap_optimizer([first, second], policy)`` returns them. Their settings are used.

    Raises:
        InvalidTypeError: ``loss_scale`` is not a loss scale, or an optimizer is not wrapped.
        InvalidValueError: a setting that `LossScale` refuses.
        UsageError: the optimizers do not share their loss scales.
    """

    _growth_factor, _backoff_factor, _growth_interval = map(_setting, ("growth", "backoff", "interval"))

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
        optimizers: LossScaledOptimizer | Iterable[LossScaledOptimizer] | None = None,
    ) -> None:
        super().__init__("cpu", enabled=False)  # none of torch's own state is used
        self._wrapped: Sequence[LossScaledOptimizer] = () if optimizers is None else _checked(optimizers)
        if not enabled:
            own = LossScale.none()
        elif loss_scale is not None:
            own = LossScale.of(loss_scale, where="GradScaler(loss_scale=)")
        else:
            asked = [init_scale] if is_number(init_scale) else []
            own = LossScale.like("torch", min=min(LossScale().min, *asked), max=max(2.0**24, *asked), init=init_scale,
                                 growth=growth_factor, backoff=backoff_factor, interval=growth_interval)  # fmt: skip
        self._own = LossScaler(own)
        self._last_step = StepResult(self._own.state)
        self._start()

    def _start(self) -> None:
        self._explain: Callable[[], str] = str
        self._seen: dict[int, _Tested] = {}  # since the last `update`, by the optimizer's id
        self._stepped: weakref.WeakKeyDictionary[torch.optim.Optimizer, bool] = weakref.WeakKeyDictionary()
        if self._own.settings.check and not self._wrapped:
            _ALIVE.add(self)
            ask_before_clipping("scalers", _report_clipping)
            weakref.finalize(self, leave_clipping, "scalers").atexit = False

    @property
    def optimizers(self) -> Sequence[LossScaledOptimizer]:
        """The wrapped optimizers; empty for a scaler of plain ones."""
        return self._wrapped

    @property
    def scaler(self) -> LossScaler:
        """The loss scale in use, which is that of the wrapped optimizers if there are some."""
        return self.optimizers[0].scaler if self.optimizers else self._own

    @property
    def config(self) -> LossScale:
        """The settings, including changes by torch's ``set_...`` methods."""
        return self.scaler.settings

    @property
    def last_step(self) -> StepResult:
        """The result of the last step; of several wrapped optimizers, of the first one's."""
        return self.optimizers[0].last_step if self.optimizers else self._last_step

    def is_enabled(self) -> bool:
        """Return whether losses are multiplied."""
        return self.scaler.multiplies

    def scale(self, outputs: Any) -> Any:
        """Return the outputs times the scale, as torch does; 16-bit tensors in float32. An inf or NaN skips a step.

        Raises:
            NonFiniteLossError: under ``LossScale(nonfinite_loss="raise")``, inf or NaN on the CPU; on other devices a
                later `step` raises it.
            UsageError: the loss is the result of an earlier call.
        """
        if self.optimizers:
            return self.optimizers[0].scale(outputs)
        if not isinstance(outputs, Tensor | list | tuple) and isinstance(outputs, Iterable):
            outputs = list(outputs)
        if not self.config.check or (isinstance(outputs, list | tuple) and not outputs):
            return outputs
        return scale(self.scaler, outputs, process_group=None)

    @not_traced
    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Unscale the gradients of an optimizer now, as torch does.

        Raises:
            UsageError: they are unscaled, or used by a step, already.
        """
        if self.optimizers:
            self._own_optimizer(optimizer, "scaler.unscale_(optimizer)").unscale_()
        elif id(optimizer) in self._seen:
            fix = "call it once, after the last backward() and before step(); call update() after the steps"
            raise refusals.unscaled_already(where="GradScaler.unscale_(optimizer)", fix=fix)
        elif self.config.check:
            self._look(optimizer)

    @not_traced
    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        """Step the optimizer or skip, as torch does. A skip on one device or rank is a skip on all.

        Raises:
            UsageError: a closure, a second step before `update`, or a wrapped optimizer that the scaler was not made
                with.
            LossScaleError: by ``max_skips`` or ``on_min``, found at an earlier `update` on an accelerator.
            NonFiniteLossError: see `scale`.
        """
        if self.optimizers:
            return self._own_optimizer(optimizer, "scaler.step(optimizer)").step(*args, **kwargs)
        if not self.config.check:
            return optimizer.step(*args, **kwargs)
        update_begins(scale=self.get_scale)
        if any(map(callable, [*args, kwargs.get("closure")])):
            raise refusals.closure_with_scaler()
        scaler = self.scaler
        scaler.report_earlier_step(self._explain, process_group=None)
        seen = self._seen.get(id(optimizer)) or self._look(optimizer)
        if seen.finite is not None:
            what, fix = "this optimizer has stepped already since the last update()", "call update() after all steps"
            raise UsageError(what, where="GradScaler.step(optimizer)", fix=fix)
        gradients, has_stepped = Gradients(optimizer.param_groups), self._stepped.get(optimizer, False)
        result, seen.finite = update_or_skip(optimizer, seen.bad, gradients, None, has_stepped=has_stepped)
        self._stepped[optimizer] = has_stepped or seen.finite is True
        self._explain = explanation(optimizer, scaler.loss_was_finite, seen.overflowed)
        self._last_step = StepResult(scaler.state, seen.finite, self._explain)
        return result

    @not_traced
    def update(self, new_scale: float | Tensor | None = None) -> None:
        """Update the scale by `polyamp.advance`, or set it.

        Raises:
            InvalidValueError: ``new_scale`` is outside the limits of the settings.
            LossScaleError: by ``max_skips`` or ``on_min``; on an accelerator a later `step` raises it.
            UsageError: nothing was unscaled or stepped on since the last call.
        """
        if not self.config.check or (self.optimizers and new_scale is None):
            return
        seen, self._seen = list(self._seen.values()), {}
        if new_scale is not None:
            scale = new_scale.item() if isinstance(new_scale, Tensor) else new_scale
            self.scaler.set(scale, where="GradScaler.update(new_scale)")
            return
        if not seen:
            what, fix = "no gradients were tested since the last update()", "call scaler.step(optimizer) before it"
            raise UsageError(what, where="GradScaler.update()", fix=fix)
        bad = torch.stack([one.bad.to(seen[0].bad.device) for one in seen]).amax()
        on_host_already = bad.device.type == "cpu" or all(isinstance(one.finite, bool) for one in seen)
        finite: bool | Tensor = not bad if on_host_already else bad == 0
        self.scaler.advance(finite)
        self._last_step = StepResult(self.scaler.state, finite, self._explain)
        self.scaler.report_step(self._explain)

    def get_scale(self) -> float:
        """Return the scale that the next loss is multiplied by. Waits for the device if the scale is on one."""
        return float(self.scaler.state.scale)

    def _get_growth_tracker(self) -> int:
        return int(self.scaler.state.good_steps)

    def state_dict(self) -> dict[str, Any]:
        """Return torch's keys, and under ``polyamp`` all fields if needed; for wrapped optimizers only the fields."""
        settings, state = self.config, on_host(self.scaler.state)
        ours = settings.to_state_dict(state)
        if self.optimizers:
            return ours
        saved = write(vars(settings), state._asdict(), "torch")
        return saved | {"polyamp": ours} if saved and (settings.hysteresis > 1 or settings.max_skips) else saved

    def load_state_dict(self, state_dict: Any) -> None:
        """Resume from a result of polyamp's or torch's `state_dict`. A disabled scaler stays as it is.

        Raises:
            StateError: it is not a state of a loss scale, or its scale is outside the limits of the settings: 0, inf
                and NaN, which torch's own scaler can reach, always are.
            UsageError: an empty state, which a disabled scaler saved; with wrapped optimizers that is ignored.
        """
        if not isinstance(state_dict, Mapping):
            raise bad_state("this is not a saved state", kind_of(state_dict), "a mapping", FIX)
        if not state_dict and not self.optimizers and self.is_enabled():
            what, fix = "the saved state is empty, as that of a disabled scaler", "load that of an enabled scaler"
            raise UsageError(what, where="GradScaler.load_state_dict(saved)", fix=fix)
        if not state_dict or not self.config.check:
            return
        settings = self.config
        if not self.optimizers:
            names = LIBRARIES["torch"].options
            settings = replace(settings, **{names[key]: state_dict[key] for key in names.keys() & state_dict.keys()})
        state = settings.from_state_dict(state_dict.get("polyamp", state_dict))
        self.scaler.settings = settings
        self.scaler.resume(state)

    def __getstate__(self) -> dict[str, Any]:
        kept = {key: value for key, value in self.__dict__.items() if key not in _NOT_COPIED}
        return {**kept, "_last_step": StepResult(on_host(self.scaler.state), bool(self.last_step))}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._start()

    def _look(self, optimizer: torch.optim.Optimizer) -> _Tested:
        """Unscale and test the gradients of a plain optimizer."""
        if isinstance(optimizer, LossScaledOptimizer):
            raise refusals.scaled_twice(optimizer.inner)
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise wrong_type(
                optimizer, where="GradScaler", allowed="a torch.optim.Optimizer", fix="give the plain optimizer"
            )
        gradients, scaler = Gradients(optimizer.param_groups), self.scaler
        for param in gradients.params:
            if param.grad is not None and param.grad.dtype == torch.float16:
                raise refusals.half_gradients(names_of(optimizer.param_groups)[param])
        if scaler.multiplies and optimizer not in self._stepped:
            report_hooks(gradients.parameters, clip="after scaler.unscale_(optimizer)")
        bad, overflowed = gradients.unscale(scaler.inverse(scaler.state.scale)), None
        increment_version([param.grad for param in gradients.params if param.grad is not None])  # the kernel does not
        if has_peers():
            decision = scaler.decide(bad, None)
            bad, overflowed = decision.flag(bad.device), decision.overflowed
        seen = self._seen[id(optimizer)] = _Tested(bad, overflowed)
        return seen

    def _own_optimizer(self, optimizer: torch.optim.Optimizer, where: str) -> LossScaledOptimizer:
        if not (isinstance(optimizer, LossScaledOptimizer) and optimizer in self.optimizers):
            raise refusals.of_another_scaler(optimizer, where=where)
        return optimizer


_NOT_COPIED = ("_seen", "_stepped", "_explain")
_ALIVE: weakref.WeakSet[GradScaler] = weakref.WeakSet()  # all enabled scalers of plain optimizers in this process


def _report_clipping(given: list[Tensor], limit: float, measured: bool) -> list[Tensor]:
    """Return ``given``; warn once if the gradients to clip are still scaled, which torch allows."""
    graded = set() if math.isinf(limit) or LISTENERS else {id(one) for one in given if one.grad is not None}
    for scaler in tuple(_ALIVE) if graded else ():
        # A scaler meets an optimizer at its first step, so nothing is known before.
        known = [one for one in scaler._stepped if id(one) not in scaler._seen] if scaler.scaler.has_losses else []
        if any(id(param) in graded for one in known for group in one.param_groups for param in group["params"]):
            warn_once(
                "gradients are clipped while they are multiplied by the loss scale, which makes them far too small: "
                "call scaler.unscale_(optimizer) before clipping.",
            )
    return given


def _checked(optimizers: LossScaledOptimizer | Iterable[LossScaledOptimizer]) -> Sequence[LossScaledOptimizer]:
    wrapped = [optimizers] if isinstance(optimizers, torch.optim.Optimizer) else list(optimizers)
    where = "GradScaler(optimizers=)"
    for one in wrapped:
        if not isinstance(one, LossScaledOptimizer):
            what, allowed = "wrong type, expected LossScaledOptimizer", "what polyamp.wrap_optimizer returned"
            fix = "GradScaler(optimizers=polyamp.wrap_optimizer(optimizer, policy))"
            raise wrong_type(one, where=where, allowed=allowed, fix=fix, what=what)
        if one.scaler is not wrapped[0].scaler:
            fix = "wrap them together: polyamp.wrap_optimizer([first, second], policy)"
            raise refusals.different_loss_scales(where=where, fix=fix)
    return wrapped


def unscale_once(optimizer: LossScaledOptimizer) -> None:
    """Unscale the gradients of a wrapped optimizer, unless they are unscaled already or no rank can have any."""
    witness = optimizer.witness
    if optimizer.may_have_gradients and (witness.has_more or not witness.is_unscaled):
        optimizer.unscale_()
