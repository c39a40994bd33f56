"""Steps by polyamp's own operators: statistics, then unscale, clip, skip, update and advance the loss scale together.

A usual step reads and writes every gradient to unscale it, reads and writes it again to clip it, and reads it a third
time to update. The operators read the gradients twice and never write them, so a step takes as long as its memory
traffic. With gradients of a loss that was multiplied by 1024, and ``max_norm`` 1:

    grad_stats   reads  grads = [3072, 4096]        writes  stats = sum of squares 25, non-finite 0
    sgd_step_    reads  grads, stats, loss scale    the norm is 5, so the gradients become [3, 4] / 5 = [0.6, 0.8]
                                                    writes  params - lr * [0.6, 0.8], and the advanced loss scale

If ``stats`` counts an element that is not finite, the second operator changes only the loss scale. Everything stays on
the device: the host reads a report of the step at a later step. On a GPU with the compiled extension these are two
kernels; elsewhere they are the PyTorch code in ``kernels/operators.py``.

`FusedStep` has two uses, and `LossScaledOptimizer.make_step` chooses between them:

- `FusedStep.step` is the step above, for `SGD`, `Adam` and `AdamW`;
- `FusedStep.unscale_and_clip` serves every other optimizer, which then makes its own update.

`why_not_on` and `FusedStep.why_not` have the reasons for the second.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from polyamp.backends.torch.dtypes import SIXTEEN_BIT
from polyamp.backends.torch.extension import available, status
from polyamp.backends.torch.kernels.control import applied_flag, check_first_use, scale_on
from polyamp.backends.torch.kernels.operators import STATS, WORKSPACE
from polyamp.backends.torch.kernels.optimizers import RULES, Settings, rules_of, update_rule_of
from polyamp.backends.torch.step.batches import NO_MASTERS, Batch, Calls, is_dense
from polyamp.backends.torch.step.gradients import Gradients
from polyamp.backends.torch.step.provenance import WrappedOptimizer
from polyamp.backends.torch.step.ranks import add_shards_, has_peers
from polyamp.backends.torch.step.scale import Scaling
from polyamp.backends.torch.unstable import has_step_pre_hooks, is_flattened, run_with_step_hooks
from polyamp.errors import InvalidValueError, PolyampError
from polyamp.settings import LossScale

_WITH_OPERATORS = f"{', '.join(kind.__name__ for kind in RULES)} have one, unless something changes their step"
_TESTED = "The gradients were unscaled or tested before the step."
_REAL = frozenset({*SIXTEEN_BIT, torch.float32})


class Scratch:
    """Memory on one device that operators write in addition to parameters."""

    def __init__(self, device: torch.device) -> None:
        self.stats = torch.zeros(STATS, dtype=torch.float64, device=device)
        self.workspace = torch.zeros(WORKSPACE, dtype=torch.float64, device=device)


def why_not_on(device: torch.device, *, always: bool = False, builds: bool = True) -> str | None:
    """Return why polyamp's operators are not used on a device; None if they are, for steps they support."""
    if not (always or device.type == "cuda"):
        return "The step is fused on GPUs; under fused_step=True everywhere, in plain operations if not compiled."
    is_compiled = available(device) if builds else status().library is not None  # loads the extension in any case
    return None if is_compiled or always else "The fused operators are not compiled; polyamp doctor has the reason."


class FusedStep:
    """Polyamp's operators for one optimizer: whole steps for Adam, AdamW and SGD, unscaling and clipping for others."""

    def __init__(self, inner: torch.optim.Optimizer, *, always: bool) -> None:
        self._inner = inner
        self._always = always  # also on devices without compiled operators
        self._calls = Calls()
        self._scratch: dict[torch.device, Scratch] = {}
        self._counts_on_device = False
        self.why_not: str | None = "It has made no step yet."

    def is_for(self, device: torch.device) -> bool:
        """Return whether the operators are used for parameters on a device."""
        return why_not_on(device, always=self._always) is None

    @torch.no_grad()
    def step(self, optimizer: WrappedOptimizer, scaling: Scaling, *, is_tested: bool) -> bool | Tensor | None:
        """Make a whole step from scaled gradients, without a host sync, and return whether it was applied.

        Return None, with nothing changed, if operators cannot, for example since gradients were unscaled before.
        """
        # The host waits only if the optimizer's state was created for this step: a skip removes that state again.
        scaler = scaling.scaler
        checks, max_norm = scaler.settings.check, optimizer.max_grad_norm
        batches = _TESTED if is_tested else self._batches(optimizer, checks=checks)
        self.why_not = batches if isinstance(batches, str) else None
        if isinstance(batches, str):
            self._count_on_host()
            return None
        self._counts_on_device = True
        if optimizer.masters is not None:
            optimizer.masters.follow(idle=True)  # the operators let the others follow
            optimizer.masters.clear_gradients()
        device = batches[0].device if batches else self._inner.param_groups[0]["params"][0].device
        scale, control = scale_on(scaling.factor, device), scaler.control_on(device)
        grads = [batch.grads() for batch in batches]
        made = [batch for batch in batches if batch.made]
        try:
            self._measure(optimizer, scaling, batches, grads, scale, checks=checks)
        except PolyampError:  # the ranks refuse this step
            _settle(made, applied=False)
            raise
        advances, report = checks and scaler.opens_round(optimizer), torch.empty_like(control)
        settings = [_settings(scaler.settings, max_norm, advance) for advance in (False, advances)]
        run_with_step_hooks(self._inner, lambda: self._update(batches, grads, scale, control, settings, report))
        if made:
            _settle(made, applied=bool(applied_flag(report)))
        applied: bool | Tensor = applied_flag(report) if checks else True
        if advances:
            scaler.advanced(report, optimizer)
        else:
            scaler.advance(applied, optimizer)
        return applied

    def _measure(
        self,
        optimizer: WrappedOptimizer,
        scaling: Scaling,
        batches: Sequence[Batch],
        grads: Sequence[Sequence[Tensor]],
        scale: Tensor,
        *,
        checks: bool,
    ) -> None:
        """Write to ``stats`` the gradients' sum of squares, and whether one is not finite, over all ranks."""
        scratch, clips = self._scratch_on(scale.device), optimizer.max_grad_norm is not None
        if checks or clips:
            every = [grad for some in grads for grad in some]
            torch.ops.polyamp.grad_stats(every, [], scale, scratch.stats, scratch.workspace)
        if not checks:
            scratch.stats[1 if clips else 0 :].zero_()
        else:
            for finite in optimizer.findings.losses.values():
                scratch.stats[2] += ~finite.to(scale.device)
            if has_peers(optimizer.process_group):
                scratch.stats[1] = optimizer.decide(scratch.stats[1:].amax(), scaling)
        for layout in filter(None, self._calls.layouts if clips else ()):
            add_shards_(scratch.stats[:1], layout)

    def _update(
        self,
        batches: Sequence[Batch],
        grads: Sequence[Sequence[Tensor]],
        scale: Tensor,
        control: Tensor,
        settings: Sequence[Tensor],
        report: Tensor,
    ) -> None:
        """Unscale, clip and update by a call for each batch; the last call also advances the loss scale."""
        rule: Any = update_rule_of(self._inner)
        scratch, step = self._scratch_on(scale.device), getattr(torch.ops.polyamp, rule.operator)
        calls = [(batch.tensors(some), batch.groups, batch.numbers) for batch, some in zip(batches, grads, strict=True)]
        if not calls:  # the loss scale advances together with the other ranks'
            calls = [(([],) * (3 + rule.lists), torch.empty(0, dtype=torch.int64, device="cpu"), [])]
        for place, (tensors, groups, numbers) in enumerate(calls, start=1):
            rules, lrs = rules_of(rule, self._inner, numbers, scale.device)
            one = settings[place == len(calls)]
            step(*tensors, groups, rules, lrs, scale, scratch.stats, control, scratch.workspace, one, report)
        for batch in batches:
            increment_version(batch.written)

    def _count_on_host(self) -> None:
        """Move step counts to the CPU, where torch's own step can read them without waiting for the device."""
        inner = self._inner
        for group in inner.param_groups if self._counts_on_device else ():
            for key in () if group.get("fused") or group.get("capturable") else group["params"]:
                state = inner.state.get(key, {})
                if isinstance(state.get("step"), Tensor):
                    state["step"] = state["step"].cpu()
        self._counts_on_device = False

    def _batches(self, optimizer: WrappedOptimizer, *, checks: bool) -> list[Batch] | str:
        """Return the calls that step all parameters, or as text why the operators cannot step them."""
        masters, clips = optimizer.masters, optimizer.max_grad_norm is not None
        if not (checks or masters is not None):
            return "Without a loss scale and master weights the optimizer's own kernel is as fast."
        if optimizer.checks and not checks:
            return "The gradients are of a loss that another optimizer scaled, and does not test."
        if clips and optimizer.norm_group is not None:
            return "The gradients are clipped by a norm over norm_group=, which all ranks have to sum alike."
        rule = update_rule_of(self._inner)
        if rule is None:
            return f"{type(self._inner).__name__} has no operator: {_WITH_OPERATORS}."
        if has_step_pre_hooks(self._inner):
            return "Hooks before the step must see unscaled gradients."
        batches = self._calls.of(self._inner, rule, NO_MASTERS if masters is None else masters.models, self.is_for)
        if batches is None:
            return "The operators do not support an option, a parameter or a gradient: see the page on PyTorch."
        if len({batch.device for batch in batches}) > 1:
            return "The parameters are on several devices, whose norms and flags would have to be combined."
        if clips and (len(self._calls.layouts) > 1 or self._has_flattened_shards()):
            return "The gradients are clipped, and PyTorch computes the norm of shards in several layouts."
        self._check(batches)
        return batches

    @torch.no_grad()
    def unscale_and_clip(self, gradients: Gradients, scale: float | Tensor, max_norm: float) -> Tensor | None:
        """Unscale and clip for any optimizer: one pass reads the gradients, one writes them unless the step is skipped.

        Returns:
            Float32 scalar: 1.0 if a gradient was not finite, else 0.0. None, with nothing changed, unless they are
            real, on one device, whole, and without overlap in memory.
        """
        if not gradients or not self.is_for(gradients.first.device) or self._has_flattened_shards():
            return None
        grads = [grad for bucket in gradients.buckets() for grad in bucket]
        device = gradients.first.device
        if any(grad.device != device or type(grad) is not Tensor or grad.dtype not in _REAL for grad in grads):
            return None
        if not all(map(is_dense, grads)):
            return None
        factor, scratch = scale_on(scale, device), self._scratch_on(device)
        torch.ops.polyamp.grad_stats(grads, [], factor, scratch.stats, scratch.workspace)
        torch.ops.polyamp.unscale_clip_(grads, factor, scratch.stats, max_norm)
        increment_version(grads)
        return (scratch.stats[1] != 0).float()

    def _check(self, batches: Sequence[Batch]) -> None:
        """Refuse what the operators cannot do, before anything is changed."""
        made = [batch for batch in batches if batch.made]
        is_first = made or any(batch.device not in self._scratch for batch in batches)
        try:
            if is_first:
                check_first_use()
            for batch in batches:
                for number in batch.numbers:
                    lr = self._inner.param_groups[number]["lr"]
                    if isinstance(lr, Tensor) and lr.device not in (batch.device, torch.device("cpu")):
                        raise InvalidValueError(
                            "a learning rate is on another device than its parameters",
                            where=f"param_groups[{number}]['lr'], in step()",
                            found=f"a tensor on {lr.device}",
                            allowed=f"a number, a tensor on the CPU, or one on {batch.device}",
                            fix=f"move it: group['lr'] = group['lr'].to('{batch.device}')",
                        )
        except PolyampError:
            _settle(made, applied=False)
            raise

    def _has_flattened_shards(self) -> bool:
        return any(is_flattened(param) for group in self._inner.param_groups for param in group["params"])

    def _scratch_on(self, device: torch.device) -> Scratch:
        if device not in self._scratch:
            check_first_use()
            self._scratch[device] = Scratch(device)
        return self._scratch[device]


def _settle(batches: Sequence[Batch], *, applied: bool) -> None:
    """Keep the state created for a step, or remove it after a skip."""
    for batch in batches:
        if applied:
            batch.made.clear()
        else:
            batch.unmake()


@functools.lru_cache(maxsize=64)
def _settings(settings: LossScale, max_norm: float | None, advance: bool) -> Tensor:
    numbers = Settings.of(settings, max_norm=math.inf if max_norm is None else max_norm, advance=advance)
    return torch.tensor(numbers, dtype=torch.float64, device="cpu")
