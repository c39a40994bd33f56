"""Steps by polyamp's own operators: statistics, then unscale, clip, skip, update and advance the loss scale together.

They read the gradients twice and never write them. This makes them fast: a step takes as long as its memory traffic.
On a GPU with the compiled extension a step is two kernels.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from polyamp.backends.torch.building.extension import available
from polyamp.backends.torch.dtypes import SIXTEEN_BIT
from polyamp.backends.torch.kernels.arguments import Settings
from polyamp.backends.torch.kernels.control import SIZE, applied_flag, is_captured, kept
from polyamp.backends.torch.kernels.operators import STATS, WORKSPACE
from polyamp.backends.torch.steps import refusals
from polyamp.backends.torch.steps.gradients import Gradients
from polyamp.backends.torch.steps.guards import InnerStep
from polyamp.backends.torch.steps.operands import Batch, Place, count_on_host, is_dense, sort
from polyamp.backends.torch.steps.ranks import add_shards_, any_rank, has_peers
from polyamp.backends.torch.steps.update_rules import UpdateRule, update_rule_of
from polyamp.backends.torch.unstable import (
    has_step_pre_hooks,
    is_flattened,
    note_step,
    run_with_step_hooks,
    step_without_hooks,
)
from polyamp.errors import PolyampError
from polyamp.loss_scale import LossScale

Standing = Mapping[Tensor, tuple[Tensor, Tensor | None]]
"""For each master in an optimizer's groups: the model's parameter, and what operators keep next to it."""

NO_MASTERS: Standing = MappingProxyType({})

_TAKEN = frozenset({*SIXTEEN_BIT, torch.float32})


class Scratch:
    """Memory on one device that operators write in addition to parameters: statistics, workspace, an unused control."""

    def __init__(self, device: torch.device) -> None:
        self.stats = torch.zeros(STATS, dtype=torch.float64, device=device)
        self.nothing_found = torch.zeros(STATS, dtype=torch.float64, device=device)
        self.workspace = torch.zeros(WORKSPACE, dtype=torch.float64, device=device)
        self.control = torch.zeros(SIZE, dtype=torch.int32, device=device)


class Scaled(NamedTuple):
    """The inputs of a step from scaled gradients, apart from the gradients.

    Attributes:
        scale: the factor that they were multiplied by; float32 scalar on their device.
        config: the loss scale's settings.
        control: the loss scale's state, which the step advances; see ``control.py``.
        advance: whether the step advances it: False for a second optimizer on the same loss.
        losses: losses that are tested too.
        max_norm: the norm to clip to; None does not clip.
        process_group: see `any_rank`.
    """

    scale: Tensor
    config: LossScale
    control: Tensor
    advance: bool
    losses: Sequence[Tensor]
    max_norm: float | None
    process_group: Any


class FusedStep:
    """Steps an `Adam`, `AdamW` or `SGD` by polyamp's operators, and unscales and clips for any other optimizer.

    >>> weight = torch.ones(2, requires_grad=True)
    >>> weight.grad = torch.ones(2)
    >>> FusedStep(torch.optim.SGD([weight], lr=0.5), True).step_unscaled(torch.tensor(0.0)), weight.detach()
    ((None, tensor(True)), tensor([0.5000, 0.5000]))

    Args:
        inner: the optimizer. Its options, state and hooks are used as in its own step.
        wanted: None uses the operators for parameters on a GPU if the compiled extension is in use, True uses them for
            all parameters, False for none.

    Raises:
        InvalidTypeError: ``wanted`` is not one of these.
    """

    def __init__(self, inner: torch.optim.Optimizer, wanted: bool | None) -> None:
        refusals.check_fused_step(wanted)
        self.inner = inner
        self.wanted = wanted
        self._forget()

    def _forget(self) -> None:
        self._scaled, self._unscaled = _Calls(), _Calls()
        self._scratch: dict[torch.device, Scratch] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {"inner": self.inner, "wanted": self.wanted}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._forget()

    def is_for(self, device: torch.device) -> bool:
        """Return whether the operators are used for parameters on a device."""
        if self.wanted is False or (self.wanted is None and device.type != "cuda"):
            return False
        compiled = available(device)  # called in any case, because it loads the extension
        return compiled or self.wanted is True

    def calls(self, standing: Callable[[], Standing], *, clips: bool) -> list[Batch] | None:
        """Return the calls that step all parameters from the model's own scaled gradients; None if operators cannot.

        Hooks that run before a step must see unscaled gradients, so with such hooks the gradients are unscaled first.
        The norm of gradients that are sharded over ranks in several layouts is left to PyTorch.

        Args:
            standing: returns the `Standing` of masters; called only if operators are used for this optimizer.
            clips: whether the norm is needed.

        Raises:
            UsageError: this is a first step, while a CUDA graph is captured.
            InvalidValueError: a learning rate is on another GPU.
        """
        rule = self._rule()
        if rule is None or has_step_pre_hooks(self.inner, beside=InnerStep):
            return None
        batches, left = self._scaled.of(self.inner, rule, standing(), self.is_for)
        if left or len({batch.device for batch in batches}) > 1:  # their statistics would have to be combined
            return None
        if clips and (len(set().union(*(batch.layouts for batch in batches))) > 1 or self._has_flattened_shards()):
            return None
        self._check(batches)
        return batches

    @torch.no_grad()
    def step_scaled(self, batches: Sequence[Batch], scaled: Scaled) -> Tensor:
        """Step from scaled gradients, or skip, without a host sync.

        The host waits only if the optimizer's state was created for this step: a skip removes that state again.

        Returns:
            The report; see ``control.py``.
        """
        grads = [batch.grads() for batch in batches]
        stats = self._statistics(batches, [grad for some in grads for grad in some], scaled)
        settings = functools.partial(_settings, scaled.config, scaled.max_norm)
        report = torch.empty_like(scaled.control)

        def call() -> None:
            self._call(batches, grads, scaled.scale, stats, scaled.control, settings, scaled.advance, report)

        run_with_step_hooks(self.inner, call)
        made = [batch for batch in batches if batch.made]
        if made:
            _settle(made, applied=bool(applied_flag(report)))
        return report

    def step_unscaled(self, found: Tensor) -> tuple[Any, bool | Tensor] | None:
        """Step from the unscaled gradients of the parameters in the optimizer's groups, or skip.

        Groups that no operator can step are left to the optimizer's own step. For that step, and any skip of it, the
        host decides.

        Args:
            found: float32 scalar, 0.0 to make the step.

        Returns:
            The optimizer's return value, and whether the step was made; None if all groups would be left to it.

        Raises:
            UsageError: this is a first step, while a CUDA graph is captured.
            InvalidValueError: a learning rate is on another GPU.
        """
        rule = self._rule()
        if rule is None:
            return None
        batches, left = self._unscaled.of(self.inner, rule, NO_MASTERS, self.is_for)
        if not batches:
            return None
        self._check(batches)
        made = [batch for batch in batches if batch.made]
        if (left or made) and found:
            _settle(made, applied=False)
            note_step(self.inner)
            return None, False

        def call() -> Any:
            self._call_unscaled(batches, found)
            return self._step_groups(left) if left else None

        result = run_with_step_hooks(self.inner, call)
        _settle(made, applied=True)
        return result, (True if left else found == 0)

    def can_clip(self, gradients: Gradients) -> bool:
        """Return whether `unscale_and_clip` supports these: real, on one device, whole, without overlap in memory."""
        if not gradients or not self.is_for(gradients.first.device) or self._has_flattened_shards():
            return False
        buckets = gradients.buckets()
        grads = [grad for bucket in buckets for grad in bucket]
        return len({grad.device for grad in grads}) == 1 and all(
            type(grad) is Tensor and grad.dtype in _TAKEN and is_dense(grad) for grad in grads
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
            refusals.check_first_use(captured=bool(is_first) and is_captured())
            for batch in batches:
                for number in batch.numbers:
                    if isinstance(lr := self.inner.param_groups[number]["lr"], Tensor):
                        refusals.check_rate(lr, number, batch.device)
        except PolyampError:
            _settle(made, applied=False)
            raise

    def _has_flattened_shards(self) -> bool:
        return any(is_flattened(param) for group in self.inner.param_groups for param in group["params"])

    def _rule(self) -> UpdateRule | None:
        """Return the optimizer's update rule, if the operators are used for its first parameter."""
        first = next((param for group in self.inner.param_groups for param in group["params"]), None)
        return update_rule_of(self.inner) if first is not None and self.is_for(first.device) else None

    def _statistics(self, batches: Sequence[Batch], grads: Sequence[Tensor], scaled: Scaled) -> Tensor:
        scratch = self._scratch_on(scaled.scale.device)
        if not scaled.config.check and scaled.max_norm is None:
            return scratch.nothing_found
        stats = scratch.stats
        torch.ops.polyamp.grad_stats(grads, scaled.losses, scaled.scale, stats, scratch.workspace)
        if scaled.max_norm is not None and batches and hasattr(batches[0].first, "placements"):
            add_shards_(stats[:1], batches[0].first)
        if not scaled.config.check:
            stats[1:].zero_()
        elif has_peers(scaled.process_group):
            stats[1:] = any_rank(stats[1:], scaled.process_group)
        return stats

    def _call(
        self,
        batches: Sequence[Batch],
        grads: Sequence[Sequence[Tensor]],
        scale: Tensor,
        stats: Tensor,
        control: Tensor,
        settings: Callable[[bool], Tensor],
        advance: bool,
        report: Tensor,
    ) -> None:
        rule: Any = update_rule_of(self.inner)
        step = getattr(torch.ops.polyamp, rule.operator)
        workspace = self._scratch_on(scale.device).workspace
        last = len(batches) - 1
        for place, (batch, some) in enumerate(zip(batches, grads, strict=True)):
            numbers = _numbers(rule, self.inner, batch.numbers, scale.device)
            step(
                *batch.tensors(some), batch.groups, *numbers, scale, stats, control, workspace,
                settings(advance and place == last), report,
            )  # fmt: skip
            increment_version(batch.written)
        if not batches:  # the loss scale advances together with the other ranks'
            nothing: list[list[Tensor]] = [[] for _ in range(3 + rule.lists)]
            groups = torch.empty(0, dtype=torch.int64, device="cpu")
            numbers = _numbers(rule, self.inner, (), scale.device)
            step(*nothing, groups, *numbers, scale, stats, control, workspace, settings(advance), report)

    @torch.no_grad()
    def _call_unscaled(self, batches: Sequence[Batch], found: Tensor) -> None:
        for batch in batches:
            scratch = self._scratch_on(batch.device)
            scratch.stats[1:] = found.to(batch.device)
            one = kept(1.0, torch.float32, batch.device)
            report = torch.empty_like(scratch.control)
            settings = functools.partial(_settings, LossScale.none(), None)
            self._call([batch], [batch.grads()], one, scratch.stats, scratch.control, settings, False, report)

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
            refusals.check_first_use(captured=is_captured())
            self._scratch[device] = Scratch(device)
        return self._scratch[device]


def _settle(batches: Sequence[Batch], *, applied: bool) -> None:
    """Keep the state that was created for a step, or remove it."""
    for batch in batches:
        if applied:
            batch.made.clear()
        else:
            batch.unmake()


class _Calls:
    """The calls of the last step, reused for the next one as long as parameters and state are the same."""

    def __init__(self) -> None:
        self._keys: list[Tensor] = []
        self._kinds: list[tuple[int, tuple[str, ...]]] = []  # per group: its size and the names of its moments
        self._standing = NO_MASTERS
        self._places: list[Place] = []
        self._supported: list[bool] = []
        self._taken: list[Place] = []
        self._batches: list[Batch] = []
        self._states: list[int] = []

    def of(
        self,
        inner: torch.optim.Optimizer,
        rule: UpdateRule,
        standing: Standing,
        is_for: Callable[[torch.device], bool],
    ) -> tuple[list[Batch], list[int]]:
        """Return the calls, and the numbers of the groups with gradients that no operator can step."""
        kinds = [(len(group["params"]), rule.moments(group)) for group in inner.param_groups]
        if not (kinds == self._kinds and self._are_current(inner, standing)):
            self._look(inner, standing, is_for)
            self._kinds = kinds
        covered = [rule.numbers(group) is not None for group in inner.param_groups]
        graded, left = [], set()
        for place, supported in zip(self._places, self._supported, strict=True):
            param = place.param
            if (grad := param.grad) is not None:
                graded.append(place)
                if not (supported and covered[place.group] and _fits(grad, param)):
                    left.add(place.group)
        taken = [place for place in graded if place.group not in left] if left else graded
        if not _same(taken, self._taken):
            self._taken, self._batches = taken, sort(rule, inner, taken)
            self._states = [*map(id, inner.state.values())]  # these objects live as long as the batches
        return self._batches, sorted(left)

    def _are_current(self, inner: torch.optim.Optimizer, standing: Standing) -> bool:
        """Return whether the optimizer still has these parameters, at the same addresses, with the same state."""
        return (
            standing is self._standing
            and _same(_keys(inner), self._keys)
            and [*map(id, inner.state.values())] == self._states
            and all(batch.is_current() for batch in self._batches)
        )

    def _look(self, inner: torch.optim.Optimizer, standing: Standing, is_for: Callable[[torch.device], bool]) -> None:
        self._taken, self._batches = [], []
        self._keys, self._standing = _keys(inner), standing
        self._places = [
            Place(key, standing.get(key, (key, None)), number)
            for number, group in enumerate(inner.param_groups)
            for key in group["params"]
        ]
        self._supported = [place.is_supported and is_for(place.param.device) for place in self._places]


def _keys(inner: torch.optim.Optimizer) -> list[Tensor]:
    return [key for group in inner.param_groups for key in group["params"]]


def _same(one: Sequence[object], other: Sequence[object]) -> bool:
    """Return whether two lists hold the same objects; ``==`` of tensors would compare elements."""
    return len(one) == len(other) and all(map(operator.is_, one, other))


def _fits(grad: Tensor, param: Tensor) -> bool:
    return grad.layout is torch.strided and grad.dtype is param.dtype


def _numbers(
    rule: UpdateRule, inner: torch.optim.Optimizer, called: Collection[int], device: torch.device
) -> tuple[Tensor, list[Tensor]]:
    """Return the operator's ``rules``, and its ``lrs`` if a group's learning rate is a tensor on the device.

    Groups without a parameter in the call get zeros, since their learning rate may be on another device.
    """
    rows = [(number in called and rule.numbers(group)) or (0.0,) * 6 for number, group in enumerate(inner.param_groups)]
    lrs = [row[0] for row in rows]
    numbers = tuple((float(lr) if _on_host(lr) else 0.0, *row[1:]) for lr, row in zip(lrs, rows, strict=True))
    if all(map(_on_host, lrs)):
        return _rules(numbers), []
    return _rules(numbers), [
        kept(float(lr), torch.float32, device) if _on_host(lr) else lr.detach().reshape(()).float() for lr in lrs
    ]


def _on_host(lr: Any) -> bool:
    return not isinstance(lr, Tensor) or lr.device.type == "cpu"


@functools.lru_cache(maxsize=64)
def _rules(numbers: tuple[tuple[float, ...], ...]) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float64, device="cpu")


@functools.lru_cache(maxsize=64)
def _settings(config: LossScale, max_norm: float | None, advance: bool) -> Tensor:
    numbers = Settings.of(config, max_norm=math.inf if max_norm is None else max_norm, advance=advance)
    return torch.tensor(numbers, dtype=torch.float64, device="cpu")
