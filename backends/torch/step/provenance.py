"""Finds what gradients are multiplied by: notes what is done to them, and judges at the step.

A step divides gradients by the loss scale, so it has to know which losses made them. No caller tells it. A hook on each
scaled loss marks its backward pass while it runs, and a hook on parameters notes the marks that reach them:

    opt.backward(loss)      a pass marked with 1024 reaches the parameters: their gradients are multiplied by 1024
    penalty.backward()      a pass without a mark reaches them too
    opt.step()              refused: no factor is right for both

If a pass starts from more than one loss, its graph shows what it reaches without a scale.

Gradients have one scale. If a pass with another scale begins while there are gradients, what the pass adds is brought
to their scale, by a power of two in the usual case, which is exact:

    opt.unscale_()          gradients multiplied by 1
    opt.backward(other)     a pass marked with 1024: what arrives is multiplied by 1/1024, and added

The hook is on every parameter, since an unscaled loss may reach any one of them. `passes.py` has the passes, and
`witness.py` observes them. `Provenance.judge` answers at a step, from what was noted.

A `WrappedOptimizer` and its `Provenance` know each other, so they are in one file.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import reduce
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from polyamp.backends.torch.dtypes import SIXTEEN_BIT
from polyamp.backends.torch.step import refusals
from polyamp.backends.torch.step.gradients import ByHand, Gradient, WindowFlags
from polyamp.backends.torch.step.masters import MasterWeights
from polyamp.backends.torch.step.passes import PASSES, Entry
from polyamp.backends.torch.step.ranks import has_peers
from polyamp.backends.torch.step.scale import LossScaler, Scaling
from polyamp.backends.torch.unstable import gradient_hooks
from polyamp.errors import wrong_type
from polyamp.scale import StepResult


class WrappedOptimizer(torch.optim.Optimizer):
    """The part of a wrapped optimizer that a step uses; `LossScaledOptimizer` adds what users call."""

    inner: torch.optim.Optimizer
    scaler: LossScaler  # of losses without an id
    masters: MasterWeights | None
    masters_wanted: bool | None
    max_grad_norm: float | None
    process_group: Any  # the ranks that step or skip together
    norm_group: Any  # ranks that have other parameters of the same model
    named: Mapping[str, Tensor]  # names for the parameters in messages
    witness: Provenance
    findings: WindowFlags  # of the gradients so far
    last_step: StepResult
    is_stepping: bool
    is_decided: bool  # whether the ranks have decided about this step
    steps: int  # the first few are counted
    lowers: bool | None  # whether one of its first losses showed 16 bits; see `report_policy`

    @property
    def checks(self) -> bool:
        """Whether gradients are tested at all."""
        return self.scaler.settings.check

    def parameter_groups(self) -> list[list[Tensor]]:
        """Return by group the model's own parameters, which backward passes reach, in place of masters."""
        groups = list(map(itemgetter("params"), self.inner.param_groups))
        if self.masters is None:
            return groups
        models = self.masters.models
        return [[models.get(id(param), param) for param in group] for group in groups]

    def model_parameters(self) -> Iterator[Tensor]:
        """Yield the parameters of `parameter_groups`."""
        return (param for group in self.parameter_groups() for param in group)

    def first_with_gradient(self) -> Tensor | None:
        """Return the first of the model's own parameters that has a gradient."""
        models = {} if self.masters is None else self.masters.models
        for group in self.inner.param_groups:
            for param in group["params"]:
                own: Tensor = models.get(id(param), param)
                if own.grad is not None:
                    return own
        return None

    @property
    def may_have_gradients(self) -> bool:
        """Whether there may be something to update, here or on another rank."""
        return has_peers(self.process_group) or self.first_with_gradient() is not None

    @property
    def join_device(self) -> torch.device:
        """The device of the parameters, under the name that torch's ``Join`` asks for."""
        return next(self.model_parameters()).device

    def decide(self, bad: Tensor, scaling: Scaling) -> Tensor:
        """Return 1.0 to skip the step, else 0.0, from the flags of all ranks."""
        self.is_decided = True
        return self.findings.note_decision(scaling.scaler.decide(bad, self.process_group), bad.device)

    def tell_peers(self) -> None:
        """Let the other ranks refuse a step that this rank refuses, instead of waiting, unless all have decided."""
        if self.checks and not self.is_decided and has_peers(self.process_group):
            flag = torch.zeros((), device=self.join_device)
            self.scaler.decide(flag, self.process_group, refuses=True)


ALIVE: weakref.WeakSet[WrappedOptimizer] = weakref.WeakSet()
"""All wrapped optimizers in this process."""


class Provenance:
    """What passes and hands did to the gradients of one optimizer's parameters, and what follows from it at a step."""

    def __init__(self, owner: WrappedOptimizer, hook: Callable[[Tensor], None]) -> None:
        self.owner: WrappedOptimizer = weakref.proxy(owner)  # who calls this holds it
        self._hook = hook
        self._handles: dict[int, Any] = {}  # of the hooks, by the parameters' ids
        self._stepped_at = PASSES.seen
        NEW.add(self)
        weakref.finalize(self, _remove, self._handles).atexit = False
        self.open()

    # --- what was done to the gradients -------------------------------------------------------------------------------

    def open(self) -> None:
        """Forget everything: there are no gradients."""
        self._opened_at = PASSES.count
        # What is there.
        self.scaling: Scaling | None = None  # of the gradients; None if there are none, or nothing is known
        self.model_scaling: Scaling | None = None  # of the model's own gradients, if masters have the unscaled ones
        self.is_unscaled = False  # by `unscale_`, before the step
        self.from_last_step: list[Gradient] = []  # the first that it left; all, once a pass began beside them
        # What passes did: the latest, and all of them.
        self.task = -1
        self._latest_gradient: Gradient | None = None
        self.contributors: list[LossScaler] = []  # whose losses added to the gradients since they were tested
        self._has_more = False  # whether a pass added to unscaled gradients
        self._starts_from_one: bool | None = None  # whether passes that go on from representations are those of losses
        self._by_hand: list[ByHand] = []  # what passes returned instead of adding it
        # Why no factor is right: a pass of an "unscaled" loss, of losses of "mixed" scales, or onto what a step "left";
        self._faults: set[str] = set()
        self._partly_scaled: list[Gradient] = []  # or one that added to these partly without a scale.
        # What others have too: gradients that it changed, and their scaling; None: it clips.
        self.shared: list[tuple[Gradient, Scaling | None]] = []
        for group in self.owner.parameter_groups():
            self.watch(group)

    def close(self, scaling: Scaling) -> None:
        """Note that a step used the gradients, and left them multiplied by the factor of a scaling."""
        model_scaling, masters = self.model_scaling, self.owner.masters
        self.open()
        self._stepped_at = PASSES.seen
        NEW.discard(self)
        param = self.owner.first_with_gradient()
        if param is not None:
            # masters leave the model's gradients multiplied as they were
            self.scaling, self.from_last_step = model_scaling or scaling, [Gradient.of(param)]
            if masters is not None and masters.have_taken and not self.owner.checks:
                # nothing is refused, so the next step may use them again, with all that masters changed
                self.model_scaling, self.scaling, self.is_unscaled, self._has_more = self.scaling, scaling, True, True
            if len(ALIVE) > 1:
                self._share()

    def note_unscaled(self, scaler: LossScaler, *, masters: bool) -> None:
        """Note that the gradients, or the masters' copies of them, were divided by their factor."""
        if masters and not self.is_unscaled:
            self.model_scaling = self.scaling
        self.scaling, self.contributors = Scaling(scaler, 1.0), []
        self.is_unscaled, self._has_more, self.from_last_step = True, False, []
        if len(ALIVE) > 1:
            self._share()

    def _note_scaled_loss(self, scaling: Scaling, *, is_marked: bool = True) -> None:
        """Note a scaled loss that added to the gradients; if the loss is not finite, this alone skips the step."""
        if self.scaling is None or (self.from_last_step and not is_marked):
            self.scaling = scaling
        elif not (is_marked or self.scaling.is_like(scaling)):
            self._faults.add("mixed")
        if scaling.scaler not in self.contributors:
            self.contributors.append(scaling.scaler)
        if scaling.finite is not True:
            self.owner.findings.note_loss(scaling.finite, scaling.scaler)

    def accept_writes(self) -> None:
        """Treat writes before the end of a backward pass as part of the pass."""
        param = None if self._latest_gradient is None else self._latest_gradient.param()
        if param is not None and param.grad is not None:
            self._latest_gradient = Gradient.of(param)
        for one in self._by_hand:
            one.accept()

    def accept_unscaling(self) -> None:
        """Treat what was added by hand so far as part of unscaled gradients."""
        added = {one.result for one in self._by_hand if one.is_written}
        self._by_hand = [one for one in self._by_hand if one.result not in added]
        self.accept_writes()

    def forget_by_hand(self) -> None:
        """Forget results of `torch.autograd.grad` that nobody has added yet, before other writes."""
        self._by_hand = self._added_by_hand()

    def _share(self) -> None:
        """Note the gradients that other optimizers share, with what multiplies them now."""
        # masters, and polyamp's operators, do not clip the model's own gradients
        scaling = None if self.owner.max_grad_norm is not None else self.model_scaling or self.scaling
        self.shared += [(Gradient.of(param), scaling) for param in self._shared() if param.grad is not None]

    def watch(self, params: Iterable[Tensor]) -> None:
        """Observe what adds to the gradients of parameters."""
        for param in params:
            if id(param) not in self._handles and param.requires_grad and param.is_leaf:
                self._handles[id(param)] = param.register_post_accumulate_grad_hook(self._hook)  # type: ignore[no-untyped-call]

    # --- what follows at a step, or where a pass begins ---------------------------------------------------------------

    def judge(self, declared: Any = None) -> Scaling | None:
        """Return what the gradients are multiplied by, or raise if that is not one factor, before any change.

        None: no gradients are there or were tested, since the backward passes were for other optimizers.

        Raises:
            InvalidTypeError: ``declared``, the argument of `step`, is neither a bool nor None.
            UsageError: no factor is right for all of them, or their loss was not scaled.
        """
        owner, own, masters = self.owner, self.owner.scaler, self.owner.masters
        if not (declared is None or isinstance(declared, bool)):
            where = "step(scaled=), unscale_(scaled=), clip_grad_norm_(scaled=)"
            fix = "True: multiplied by the loss scale; False: not; leave it out if opt.backward(loss) made them"
            raise wrong_type(declared, where=where, allowed="a bool, or None", fix=fix)
        if declared and self.is_unscaled:
            raise refusals.unscaled_already(where="step(scaled=True)", fix="leave scaled= out after unscale_()")
        if self.is_consumed and owner.checks:
            raise refusals.no_backward("the gradients of the last step")
        param = owner.first_with_gradient()
        if param is None or param.grad is None:
            return self._without_gradients()
        if param.grad.dtype in SIXTEEN_BIT and masters is None and owner.masters_wanted is not False:
            raise refusals.converted_later(param.grad.dtype)
        if masters is not None and self.model_scaling is not None and masters.are_torn():
            raise refusals.torn()
        if declared is None:
            self.scaling = self._observed(own)
        else:
            self.scaling = Scaling(own, own.state.scale if declared else 1.0)
        if len(ALIVE) > 1:
            self._check_not_shared(self.scaling)
        return self.scaling

    def _without_gradients(self) -> Scaling | None:
        peers_wait, own = has_peers(self.owner.process_group), self.owner.scaler
        if not (peers_wait or PASSES.seen > self._stepped_at):
            raise refusals.no_backward("no gradients, and no backward pass since the last step")
        if not (peers_wait or self.has_tested or self.owner.findings.losses):
            return None
        return self.scaling or Scaling(own, own.state.scale)

    def _observed(self, own: LossScaler) -> Scaling:
        """Return the scaling of gradients if `step` got no ``scaled=``."""
        is_left = any(map(Gradient.is_there, self.from_last_step))
        if own.settings.check and ("left" in self._faults or is_left):
            raise refusals.not_cleared()
        if "mixed" in self._faults or (self._partly_scaled and any(one.is_there() for one in self._partly_scaled)):
            raise refusals.mixed()
        if self.from_last_step and not is_left:
            self.scaling = None
        has_unscaled = "unscaled" in self._faults
        if has_unscaled and (own.multiplies or not (self.scaling is None or self.scaling.factor == 1.0)):
            raise refusals.loss_not_scaled(partly=self.scaling is not None)
        if self.scaling is None:
            self.scaling = Scaling(own, 1.0) if has_unscaled else self._unobserved(own)
        if self._by_hand and not all(map(self._is_alike, self._added_by_hand())):
            raise refusals.mixed_by_hand()
        return self.scaling

    def _unobserved(self, own: LossScaler) -> Scaling:
        """Return the scaling of gradients that were set by hand, so that no hook has seen them."""
        found = self._unobserved_scalings()
        found = [one for one in found if one.scaler is own] or found
        if not found:
            if own.multiplies:
                raise refusals.loss_not_scaled(partly=False)
            return Scaling(own, 1.0)
        if not all(map(found[0].is_like, found)):
            raise refusals.mixed()
        self.contributors = []
        is_by_hand = any(one.is_written for one in self._by_hand)  # else the loss may have been for others
        self._note_scaled_loss(reduce(Scaling.with_finite, found) if is_by_hand else found[0]._replace(finite=True))
        return found[0]

    def _unobserved_scalings(self) -> list[Scaling]:
        """Return the possible scalings of gradients that no hook has seen."""
        return self._scalings_by_hand() or PASSES.scalings_since(self._opened_at, unobserved=True)

    def _scalings_by_hand(self) -> list[Scaling]:
        return [one.scaling for one in self._added_by_hand() if one.scaling is not None]

    def _added_by_hand(self) -> list[ByHand]:
        return [one for one in self._by_hand if one.look()]

    def _is_alike(self, added: ByHand) -> bool:
        """Return whether gradients added by hand have the scale of the other gradients."""
        if added.is_master and not self.is_unscaled:  # the step replaces those of masters by the model's
            return False
        own = self.scaling if added.is_master or self.model_scaling is None else self.model_scaling
        return own is not None and added.scaling is not None and own.is_like(added.scaling)

    def _check_not_shared(self, scaling: Scaling) -> None:
        """Refuse gradients that another optimizer of the same parameters has unscaled: they would be divided again."""
        own: set[int] = set()
        for other in list(ALIVE):
            for gradient, left in () if other.witness is self else other.witness.shared:
                if gradient.is_there() and not (left is not None and left.is_like(scaling)):
                    own = own or {id(param) for param in self.owner.model_parameters() if param.grad is not None}
                    if id(gradient.param()) in own:
                        raise refusals.unscaled_elsewhere(self.owner.inner, other.inner)

    def _shared(self) -> list[Tensor]:
        """Return the parameters that another optimizer has too."""
        others = {id(param) for one in list(ALIVE) if one.witness is not self for param in one.model_parameters()}
        return [param for param in self.owner.model_parameters() if id(param) in others]

    @property
    def is_consumed(self) -> bool:
        """Whether gradients of the last step are left, unchanged."""
        return any(map(Gradient.is_untouched, self.from_last_step))

    @property
    def are_scaled(self) -> bool:
        """Whether the gradients are multiplied by another factor than 1, as far as this is known."""
        scaling = self.scaling
        if scaling is None:  # no pass reached the gradients: they are by hand, or of this optimizer's last loss
            scaling = next(reversed(self._scalings_by_hand() or [one.scaling for one in self._own_passes()]), None)
        if scaling is None or scaling.factor == 1.0 or self.is_consumed or not scaling.scaler.multiplies:
            return False
        return self.owner.first_with_gradient() is not None

    @property
    def latest_is_scaled(self) -> bool:
        """Whether the latest gradient that a pass reached is scaled, and unchanged since."""
        latest = self._latest_gradient
        return latest is not None and latest.is_untouched() and self.are_scaled

    @property
    def has_more(self) -> bool:
        """Whether something was added to gradients since they were unscaled."""
        return self._has_more or bool(self._added_by_hand())

    @property
    def has_tested(self) -> bool:
        """Whether gradients were tested or unscaled, or a skip was decided, before the step."""
        findings = self.owner.findings
        is_tested = self.is_unscaled or bool(findings.flags) or findings.partners is not None
        return is_tested or len(self.contributors) > 1

    def _own_passes(self) -> list[Entry]:
        """Return the passes since the last step whose losses the owner scaled."""
        return [one for one in PASSES.since(self._opened_at) if one.scaling.by == id(self)]

    def with_hooks(self) -> Iterable[Tensor]:
        """Return parameters to search for users' hooks: at the first step all, later the latest if it has hooks."""
        latest = None if self._latest_gradient is None else self._latest_gradient.param()
        if latest is None or self in NEW:
            return self.owner.model_parameters()
        return [latest] if len(gradient_hooks(latest)) > 1 else []


NEW: weakref.WeakSet[Provenance] = weakref.WeakSet()  # whose optimizers have made no step yet


def _remove(handles: dict[int, Any]) -> None:
    for handle in handles.values():
        handle.remove()
