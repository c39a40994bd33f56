"""Guards against programs that use a wrapped optimizer in a wrong way, before anything is changed.

Without them each of these cases results in finite but wrong numbers: a parameter in two optimizers, a direct step of
the inner optimizer, and clipping of scaled gradients. ``provenance.py`` tests that a loss was scaled. Regions
that do not fit an optimizer's policy, so that nothing runs in 16 bits or nothing is scaled, are only reported.
"""

from __future__ import annotations

import functools
import math
import weakref
from collections.abc import Iterable, Sequence, Set
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.weak import WeakIdKeyDictionary

from polyamp.backends.torch.autocast.regions import HERE
from polyamp.backends.torch.dtypes import DTYPES, SIXTEEN_BIT
from polyamp.backends.torch.step import refusals
from polyamp.backends.torch.step.gradients import Gradient
from polyamp.backends.torch.step.passes import LISTENERS, OBSERVERS, PASSES, Pass, parts_of
from polyamp.backends.torch.step.provenance import ALIVE, NEW, WrappedOptimizer
from polyamp.backends.torch.unstable import (
    ask_before_clipping,
    ask_before_joining,
    gradient_hooks,
    leave_clipping,
    not_traced,
    running_task,
)
from polyamp.errors import UsageError, warn_once

STEPS = 2  # after which a policy that does not fit is reported; the first one can be a warm-up


def guard(optimizer: WrappedOptimizer) -> None:
    """Guard other optimizers' steps, and, while this optimizer lives, torch's clipping functions."""
    if torch.distributed.is_available():
        ask_before_joining(_check_join)
    if not (optimizer.scaler.multiplies or optimizer.masters is not None):
        return
    _guard_steps()
    ask_before_clipping("optimizers", _clipped)
    weakref.finalize(optimizer, leave_clipping, "optimizers").atexit = False


def _check_join(joinables: Sequence[Any]) -> None:
    from polyamp.backends.torch.step.joining import check_join  # other programs do not load it

    check_join(joinables, list(ALIVE))


class Outside:
    """Parameters without a wrapped optimizer that scaled losses reach, and which of their gradients are scaled."""

    def __init__(self) -> None:
        self._watched = WeakIdKeyDictionary()
        self._scaled: dict[int, Gradient] = {}  # by the parameter's id
        self._reached: list[Tensor] = []  # by the pass that runs

    def prepare_for(self, begun: Pass, _: Set[int]) -> None:
        """Observe what a pass reaches besides wrapped optimizers' parameters, until each optimizer has stepped."""
        if NEW and begun.entry.scaling.scaler.multiplies:
            own = {id(param) for one in list(ALIVE) for param in one.model_parameters()}
            leaves = parts_of(begun.call.roots, whole=True)[1]
            self.watch(param for name, param in leaves.items() if name not in own)

    def end_of(self, ended: Pass) -> None:
        """Note the gradients after a pass; all writes to them before its end count as the pass's."""
        reached, self._reached = self._reached, []
        for param in reached:
            if param.grad is not None:
                self._scaled[id(param)] = Gradient.of(param)

    def watch(self, params: Iterable[Tensor]) -> None:
        """Observe what adds to the gradients of parameters."""
        for param in params:
            if param not in self._watched:
                self._watched[param] = param.register_post_accumulate_grad_hook(self._note)  # type: ignore[no-untyped-call]

    def are_scaled(self, params: Iterable[Tensor]) -> bool:
        """Return whether a gradient of these parameters is unchanged since a scaled loss's pass."""
        found = (self._scaled.get(id(param)) for param in params) if self._scaled else ()
        return any(one is not None and one.is_untouched() for one in found)

    @not_traced
    def _note(self, param: Tensor) -> None:
        self._scaled.pop(id(param), None)
        begun = PASSES.current()
        if begun is not None and (begun.scaling is None or begun.scaling.scaler.multiplies):
            self._reached.append(param)


OUTSIDE = Outside()
OBSERVERS[OUTSIDE] = OUTSIDE


class StepGuard:
    """A hook before the step of every optimizer: only wrapped optimizers may use gradients that are scaled."""

    is_polyamps = True  # see `has_step_pre_hooks`

    def __call__(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if torch.compiler.is_compiling() or not ALIVE:
            return
        owner, wrapped = None, list(ALIVE)
        for one in wrapped:
            if one.is_stepping:
                return
            owner = one if one.inner is optimizer else owner
        name = f"{type(optimizer).__name__}.step()"
        begun = PASSES.current()
        if begun is not None and (begun.scaling is None or begun.scaling.scaler.multiplies):
            raise refusals.steps_in_backward(where=name)
        if owner is not None:
            if owner.witness.are_scaled:
                raise refusals.inner_stepped(where=name)
            return
        params = [param for group in optimizer.param_groups for param in group["params"] if param.grad is not None]
        own = {id(param) for one in wrapped if one.witness.latest_is_scaled for param in one.model_parameters()}
        if OUTSIDE.are_scaled(params) or any(id(param) in own for param in params):
            raise refusals.not_wrapped(where=name)


@functools.cache
def _guard_steps() -> None:
    """Guard steps from now on, at little cost where no wrapped optimizer is alive."""
    # Never removed: a garbage collection would do so inside torch's loop over its hooks, or while Dynamo compiles.
    register_optimizer_step_pre_hook(StepGuard())


def _clipped(params: list[Tensor], limit: float, measured: bool) -> list[Tensor]:
    """Return the parameters to clip, with masters, which have unscaled gradients, in place of 16-bit parameters.

    Args:
        params: those that torch's function was called with.
        limit: infinite if the call only measures.
        measured: whether the norm of ``params`` is known already, so that others would be clipped by a wrong norm.

    Raises:
        UsageError: gradients that are scaled, or masters whose norm was not measured.
    """
    if LISTENERS or torch.compiler.is_compiling():
        return params
    clipped = set(map(id, params))
    masters_of: dict[int, Tensor] = {}
    for optimizer in list(ALIVE):
        masters, witness = optimizer.masters, optimizer.witness
        witness.forget_by_hand()
        if not math.isinf(limit) and witness.are_scaled:
            later = [] if masters is None else masters.masters  # they get their gradients later
            graded = (param for param in optimizer.model_parameters() if param.grad is not None)
            if any(id(param) in clipped for param in (*graded, *later)):
                raise UsageError(
                    "gradients were clipped while they were scaled",
                    where="torch.nn.utils.clip_grad_norm_, clip_grad_value_ or a trainer that calls them",
                    found="gradients that were changed between the backward pass and unscaling",
                    allowed="clipping of unscaled gradients",
                    fix="give polyamp.wrap_optimizer(..., max_grad_norm=) and leave this clipping out (max_grad_norm=0 "
                    "in a Hugging Face Trainer), or call opt.clip_grad_norm_(max_norm), or opt.unscale_() before it",
                )
        elif masters is not None and witness.is_unscaled:
            pairs = zip(masters.model, masters.masters, strict=True)
            masters_of |= {id(model): master for model, master in pairs if id(model) in clipped}
            is_reached = bool(masters_of) or any(id(master) in clipped for master in masters.masters)
            masters.are_clipped |= is_reached and not math.isinf(limit)
        elif masters is not None:  # the masters take the gradients later
            masters_of |= {master: model for master, model in masters.models.items() if master in clipped}
    if masters_of and measured:
        raise UsageError(
            "the 16-bit gradients of the model are not the unscaled ones",
            where="clipping by a norm that was computed before",
            found="parameters of the model that have master weights",
            allowed="the parameters in opt.param_groups, which have the unscaled gradients",
            fix="call opt.clip_grad_norm_(max_norm), or clip the parameters in opt.param_groups",
        )
    return [masters_of.get(id(param), param) for param in params] if masters_of else params


def report_hooks(params: Iterable[Tensor], *, clip: str = "by max_grad_norm=, or after opt.unscale_()") -> None:
    """Warn once if a parameter has a hook of the user's, which may clip or change scaled gradients."""
    if running_task() != -1:  # in a pass a hook of the user's itself makes the step
        return
    if any(_is_users(hook) for param in params for hook in gradient_hooks(param)):
        warn_once(
            "a parameter has a hook (register_hook, register_post_accumulate_grad_hook), which sees gradients "
            "multiplied by the loss scale: a hook that is not linear, such as one that clips or adds noise, is wrong "
            f"there. Clip {clip}."
        )


def _is_users(hook: Any) -> bool:
    """Return whether a hook is a user's, not polyamp's or PyTorch's for several ranks."""
    module = getattr(getattr(hook, "func", hook), "__module__", None) or ""
    return not module.startswith(("polyamp.", "torch.distributed.", "torch.nn.parallel.", "torch._"))


def look_for_casts(optimizer: WrappedOptimizer, losses: Iterable[Tensor]) -> None:
    """Note, for a 16-bit policy, whether a region was entered or one of the first losses shows a cast."""
    dtype = DTYPES.get(optimizer.scaler.compute or "")
    if dtype in SIXTEEN_BIT and not torch.compiler.is_compiling():
        optimizer.lowers = optimizer.lowers or HERE.thread.policy is not None or any(map(_casts, losses))


def report_policy(optimizer: WrappedOptimizer) -> None:
    """Warn once, from the second step on, if the policies of the regions and of the optimizer do not fit each other."""
    optimizer.steps = min(optimizer.steps + 1, STEPS)
    own, forward = optimizer.scaler.policy, HERE.thread.policy
    if optimizer.steps < STEPS or (own is not None and forward is not None and own.compute == forward.compute):
        return
    # Another optimizer may have a loss scale, and the region may have been for that one.
    if not (own is not None and forward is not None and any(one.scaler.multiplies for one in list(ALIVE))):
        from polyamp.agreement import report_disagreement  # programs that agree do not load it

        said = _IN_FLOAT32 if optimizer.lowers is False else ""
        report_disagreement(own, forward, optimizer.scaler.settings, in_float32=said)


_IN_FLOAT32 = (
    "its losses were computed in float32 alone: nothing runs in 16 bits. Compute the loss in a region: "
    "with polyamp.autocast(policy): ..."
)


def _casts(loss: Tensor) -> bool:
    """Return whether a loss has 16 bits, or its graph has a cast, or compiled code, which can hide one."""
    if loss.dtype in SIXTEEN_BIT:
        return True
    waiting, seen = [loss.grad_fn], set[Any]()
    while waiting and len(seen) < 20_000:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if node.name().startswith(("ToCopyBackward", "CompiledFunction")):
            return True
        waiting += [child for child, _ in node.next_functions]
    return loss.grad_fn is None
