"""Steps by polyamp's own operators: statistics, then unscale, clip, skip, update and advance the loss scale together.

A usual step reads and writes every gradient to unscale it, reads and writes it again to clip it, and reads it a third
time to update. The operators read the gradients twice and never write them, so a step takes as long as its memory
traffic. With gradients of a loss that was multiplied by 1024, and ``max_norm`` 1:

    grad_stats   reads  grads = [3072, 4096]        writes  stats = sum of squares 25, non-finite 0
    sgd_step_    reads  grads, stats, loss scale    the norm is 5, so the gradients become [3, 4] / 5 = [0.6, 0.8]
                                                    writes  params - lr * [0.6, 0.8], and the advanced loss scale

If ``stats`` counts an element that is not finite, the second operator changes only the loss scale. Everything stays on
the device: the host reads a report of the step at a later step. On a GPU with the compiled extension these are two
kernels; elsewhere they are the PyTorch code in ``kernels/reference.py``.

`FusedStep` has three uses, and `LossScaledOptimizer.make_step` chooses between them:

- `FusedStep.step_scaled` is the step above, for `SGD`, `Adam` and `AdamW`;
- `FusedStep.step_unscaled` updates from gradients that are unscaled already, for example after ``unscale_()``;
- `FusedStep.unscale_and_clip` serves every other optimizer, which then makes its own update.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from polyamp.backends.torch.dtypes import SIXTEEN_BIT
from polyamp.backends.torch.extension import available
from polyamp.backends.torch.gradients import Gradients
from polyamp.backends.torch.kernels.arguments import Settings
from polyamp.backends.torch.kernels.control import SIZE, applied_flag, check_first_use, is_captured, kept
from polyamp.backends.torch.kernels.operators import STATS, WORKSPACE
from polyamp.backends.torch.operands import NO_MASTERS, Batch, Calls, Masters, count_on_host, is_dense
from polyamp.backends.torch.ranks import Overflowed, add_shards_, any_rank, has_peers
from polyamp.backends.torch.unstable import (
    has_step_pre_hooks,
    is_flattened,
    note_step,
    run_with_step_hooks,
    step_without_hooks,
)
from polyamp.backends.torch.update_rules import rules_of, update_rule_of
from polyamp.errors import InvalidTypeError, InvalidValueError, PolyampError, shown
from polyamp.scale import LossScale

_REAL = frozenset({*SIXTEEN_BIT, torch.float32})


class Scratch:
    """Memory on one device that operators write in addition to parameters: statistics, workspace, an unused control."""

    def __init__(self, device: torch.device) -> None:
        self.stats = torch.zeros(STATS, dtype=torch.float64, device=device)
        self.nothing_found = torch.zeros(STATS, dtype=torch.float64, device=device)
        self.workspace = torch.zeros(WORKSPACE, dtype=torch.float64, device=device)
        self.control = torch.zeros(SIZE, dtype=torch.int32, device=device)


class Scaled(NamedTuple):
    """The inputs of a step from scaled gradients, apart from the gradients."""

    scale: Tensor  # the factor by which the gradients were multiplied; a float32 scalar on their device
    settings: LossScale  # the settings of the loss scale
    control: Tensor  # the loss scale's state, which the step advances; see ``control.py``
    advance: bool  # whether the step advances this state; False for a second optimizer on the same loss
    max_norm: float | None  # the norm to clip to; None does not clip
    process_group: Any  # see `any_rank`


class FusedStep:
    """Polyamp's operators for one optimizer: whole steps for Adam, AdamW and SGD, unscaling and clipping for others."""

    def __init__(self, inner: torch.optim.Optimizer, wanted: bool | None) -> None:
        if not (wanted is None or isinstance(wanted, bool)):
            raise InvalidTypeError(
                "wrong type, expected bool",
                where="wrap_optimizer(fused_step=)",
                found=shown(wanted),
                fix="leave it out for polyamp's kernels on GPUs that have them, or give True or False",
            )
        self.inner = inner
        self.wanted = wanted
        self._forget()

    def _forget(self) -> None:
        self._scaled, self._unscaled = Calls(), Calls()
        self._scratch: dict[torch.device, Scratch] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {"inner": self.inner, "wanted": self.wanted}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._forget()

    def are_used(self) -> bool:
        """Return whether the operators are used for the optimizer's first parameter."""
        if self.wanted is False:
            return False
        for group in self.inner.param_groups:
            for param in group["params"]:
                return self.is_for(param.device)
        return False

    def is_for(self, device: torch.device) -> bool:
        """Return whether the operators are used for parameters on a device."""
        if self.wanted is False or (self.wanted is None and device.type != "cuda"):
            return False
        compiled = available(device)  # called in any case, because it loads the extension
        return compiled or self.wanted is True

    def scaled_batches(self, masters: Masters, *, clips: bool) -> list[Batch] | None:
        """Return the calls that step all parameters from the scaled gradients, or None if operators cannot step them.

        For example, they cannot if a hook runs before the step, because it must see unscaled gradients; or if gradients
        that are sharded over ranks in several layouts must be clipped, because PyTorch computes their norm.

        Args:
            masters: the model's parameters by their masters.
            clips: whether the norm is needed.

        Raises:
            UsageError: this is the first step, and a CUDA graph is being captured.
            InvalidValueError: a learning rate is on another GPU.
        """
        rule = update_rule_of(self.inner)
        if rule is None or has_step_pre_hooks(self.inner):
            return None
        batches, left = self._scaled.of(self.inner, rule, masters, self.is_for)
        if left or len({batch.device for batch in batches}) > 1:  # their statistics would have to be combined
            return None
        if clips and (len(set().union(*(batch.layouts for batch in batches))) > 1 or self._has_flattened_shards()):
            return None
        self._check(batches)
        return batches

    @torch.no_grad()
    def step_scaled(self, batches: Sequence[Batch], scaled: Scaled) -> tuple[Tensor, Overflowed | None]:
        """Step from scaled gradients, or skip, without a host sync."""
        # The host waits only if the optimizer's state was created for this step: a skip removes that state again.
        grads = [batch.grads() for batch in batches]
        stats, overflowed = self._statistics(batches, [grad for some in grads for grad in some], scaled)
        numbers = functools.partial(_settings, scaled.settings, scaled.max_norm)
        report = torch.empty_like(scaled.control)

        def call() -> None:
            self._call(batches, grads, scaled.scale, stats, scaled.control, numbers, scaled.advance, report)

        run_with_step_hooks(self.inner, call)
        made = [batch for batch in batches if batch.made]
        if made:
            _settle(made, applied=bool(applied_flag(report)))
        return report, overflowed

    def step_unscaled(self, overflow: Tensor) -> tuple[Any, bool | Tensor] | None:
        """Step from the unscaled gradients of the parameters in the optimizer's groups, or skip."""
        # The optimizer's own step updates the groups that no operator can step. In that case the host decides whether
        # to skip.
        rule = update_rule_of(self.inner)
        if rule is None:
            return None
        batches, left = self._unscaled.of(self.inner, rule, NO_MASTERS, self.is_for)
        if not batches:
            return None
        self._check(batches)
        made = [batch for batch in batches if batch.made]
        if (left or made) and overflow:
            _settle(made, applied=False)
            note_step(self.inner)
            return None, False

        def call() -> Any:
            self._call_unscaled(batches, overflow)
            return self._step_groups(left) if left else None

        result = run_with_step_hooks(self.inner, call)
        _settle(made, applied=True)
        return result, (True if left else overflow == 0)

    def can_clip(self, gradients: Gradients) -> bool:
        """Return whether `unscale_and_clip` supports these: real, on one device, whole, without overlap in memory."""
        if not gradients or not self.is_for(gradients.first.device) or self._has_flattened_shards():
            return False
        buckets = gradients.buckets()
        grads = [grad for bucket in buckets for grad in bucket]
        return len({grad.device for grad in grads}) == 1 and all(
            type(grad) is Tensor and grad.dtype in _REAL and is_dense(grad) for grad in grads
        )

    @torch.no_grad()
    def unscale_and_clip(self, gradients: Gradients, scale: Tensor, max_norm: float) -> Tensor:
        """Unscale and clip for any optimizer: one pass reads the gradients, one writes them unless the step is skipped.

        Returns:
            Float32 scalar: 1.0 if a gradient was not finite, else 0.0.
        """
        grads = [grad for bucket in gradients.buckets() for grad in bucket]
        scratch = self._scratch_on(grads[0].device)
        torch.ops.polyamp.grad_stats(grads, [], scale, scratch.stats, scratch.workspace)
        torch.ops.polyamp.unscale_clip_(grads, scale, scratch.stats, max_norm)
        increment_version(grads)
        return (scratch.stats[1] != 0).float()

    def _check(self, batches: Sequence[Batch]) -> None:
        """Refuse what the operators cannot do, before anything is changed."""
        made = [batch for batch in batches if batch.made]
        is_first = made or any(batch.device not in self._scratch for batch in batches)
        try:
            check_first_use(captured=bool(is_first) and is_captured())
            for batch in batches:
                for number in batch.numbers:
                    lr = self.inner.param_groups[number]["lr"]
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
        return any(is_flattened(param) for group in self.inner.param_groups for param in group["params"])

    def _statistics(
        self, batches: Sequence[Batch], grads: Sequence[Tensor], scaled: Scaled
    ) -> tuple[Tensor, Overflowed | None]:
        scratch = self._scratch_on(scaled.scale.device)
        if not scaled.settings.check and scaled.max_norm is None:
            return scratch.nothing_found, None
        stats, overflowed = scratch.stats, None
        torch.ops.polyamp.grad_stats(grads, [], scaled.scale, stats, scratch.workspace)
        if scaled.max_norm is not None and batches and hasattr(batches[0].first, "placements"):
            add_shards_(stats[:1], batches[0].first)
        if not scaled.settings.check:
            stats[1:].zero_()
        elif has_peers(scaled.process_group):
            stats[1:], overflowed = any_rank(stats[1:], scaled.process_group)
        return stats, overflowed

    def _call(
        self,
        batches: Sequence[Batch],
        grads: Sequence[Sequence[Tensor]],
        scale: Tensor,
        stats: Tensor,
        control: Tensor,
        numbers: Callable[[bool], Tensor],
        advance: bool,
        report: Tensor,
    ) -> None:
        rule: Any = update_rule_of(self.inner)
        step = getattr(torch.ops.polyamp, rule.operator)
        workspace = self._scratch_on(scale.device).workspace
        last = len(batches) - 1
        for place, (batch, some) in enumerate(zip(batches, grads, strict=True)):
            rules, lrs = rules_of(rule, self.inner, batch.numbers, scale.device)
            step(
                *batch.tensors(some), batch.groups, rules, lrs, scale, stats, control, workspace,
                numbers(advance and place == last), report,
            )  # fmt: skip
            increment_version(batch.written)
        if not batches:  # the loss scale advances together with the other ranks'
            nothing: list[list[Tensor]] = [[] for _ in range(3 + rule.lists)]
            groups = torch.empty(0, dtype=torch.int64, device="cpu")
            rules, lrs = rules_of(rule, self.inner, (), scale.device)
            step(*nothing, groups, rules, lrs, scale, stats, control, workspace, numbers(advance), report)

    @torch.no_grad()
    def _call_unscaled(self, batches: Sequence[Batch], overflow: Tensor) -> None:
        for batch in batches:
            scratch = self._scratch_on(batch.device)
            scratch.stats[1:] = overflow.to(batch.device)
            one = kept(1.0, torch.float32, batch.device)
            report = torch.empty_like(scratch.control)
            numbers = functools.partial(_settings, LossScale.none(), None)
            self._call([batch], [batch.grads()], one, scratch.stats, scratch.control, numbers, False, report)

    def _step_groups(self, left: Sequence[int]) -> Any:
        groups = self.inner.param_groups
        self.inner.param_groups = [groups[index] for index in left]
        try:
            for group in self.inner.param_groups:
                count_on_host(self.inner, group)
            return step_without_hooks(self.inner)
        finally:
            self.inner.param_groups = groups

    def _scratch_on(self, device: torch.device) -> Scratch:
        if device not in self._scratch:
            check_first_use(captured=is_captured())
            self._scratch[device] = Scratch(device)
        return self._scratch[device]


def _settle(batches: Sequence[Batch], *, applied: bool) -> None:
    """Keep the state that was created for a step, or remove it."""
    for batch in batches:
        if applied:
            batch.made.clear()
        else:
            batch.unmake()


@functools.lru_cache(maxsize=64)
def _settings(settings: LossScale, max_norm: float | None, advance: bool) -> Tensor:
    numbers = Settings.of(settings, max_norm=math.inf if max_norm is None else max_norm, advance=advance)
    return torch.tensor(numbers, dtype=torch.float64, device="cpu")
