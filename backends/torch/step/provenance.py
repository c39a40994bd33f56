"""What gradients are multiplied by, observed where they are made.

A step divides gradients by the loss scale, so it has to know which losses made them. Nobody is told. A hook on each
scaled loss marks its backward pass while it runs, and a hook on parameters notes the marks that reach them:

    opt.backward(loss)      a pass marked with 1024 reaches the parameters: their gradients are multiplied by 1024
    penalty.backward()      a pass without a mark reaches them too
    opt.step()              refused: no factor is right for both

If a pass starts from more than one loss, its graph shows what it reaches without a scale.

Gradients have one scale. If a pass with another one begins while there are gradients, whatever of it arrives is brought
to the scale of what is there, by a power of two in the usual case, which is exact:

    opt.unscale_()          gradients multiplied by 1
    opt.backward(other)     a pass marked with 1024: what arrives is multiplied by 1/1024, and added

The hook is on every parameter, since an unscaled loss may reach any one of them. `passes.py` has the passes.

A `Witness` and the `WrappedOptimizer` that it observes know each other, so they are in one file.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from functools import partial, reduce
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from polyamp.backends.torch.step.gradients import ByHand, Gradient, Gradients, WindowFlags, are_filled
from polyamp.backends.torch.step.masters import MasterWeights
from polyamp.backends.torch.step.passes import OBSERVERS, PASSES, Entry, Pass
from polyamp.backends.torch.step.ranks import has_peers
from polyamp.backends.torch.step.refusals import loss_not_scaled, mixed, mixed_by_hand, not_cleared
from polyamp.backends.torch.step.scale import LossScaler, Scaling
from polyamp.backends.torch.unstable import (
    gradient_hooks,
    not_traced,
    running_backward,
    running_task,
    until_backward_ends,
)
from polyamp.scale import StepResult


class WrappedOptimizer(torch.optim.Optimizer):
    """What a wrapped optimizer has, for the parts of a step; `LossScaledOptimizer` adds what users call."""

    inner: torch.optim.Optimizer
    scaler: LossScaler  # of losses without an id
    masters: MasterWeights | None
    max_grad_norm: float | None
    process_group: Any  # the ranks that step or skip together
    norm_group: Any  # ranks that have other parameters of the same model
    named: Mapping[str, Tensor]  # names for the parameters in messages
    witness: Witness
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
        """Return the model's own parameters by group, which get gradients from backward passes, without masters."""
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
        """Return whether to skip, by this rank's flag and those of the others: 1.0 or 0.0."""
        self.is_decided = True
        return self.findings.note_decision(scaling.scaler.decide(bad, self.process_group), bad.device)

    def tell_peers(self) -> None:
        """Let the other ranks refuse a step too that this one refuses, unless all have decided: they would wait."""
        if self.checks and not self.is_decided and has_peers(self.process_group):
            flag = torch.zeros((), device=self.join_device)
            self.scaler.decide(flag, self.process_group, refuses=True)


ALIVE: weakref.WeakSet[WrappedOptimizer] = weakref.WeakSet()
"""All wrapped optimizers in this process."""


class Witness:
    """What reached the gradients of one optimizer's parameters."""

    def __init__(self, owner: WrappedOptimizer) -> None:
        self._owner = weakref.ref(owner)
        self._handles: dict[int, Any] = {}  # of the hooks, by the parameters' ids
        self._stepped_at = PASSES.seen
        self._hook = _hook(weakref.ref(self))
        OBSERVERS.add(self)
        NEW.add(self)
        weakref.finalize(self, _remove, self._handles).atexit = False
        self.open()
        self._refuse_what_is_there()  # of passes before there was a hook

    def open(self) -> None:
        """Forget everything: there are no gradients."""
        self.scaling: Scaling | None = None  # of the gradients; None if there are none, or nothing is known
        self.model_scaling: Scaling | None = None  # of the model's own gradients, if masters have the unscaled ones
        self.contributors: list[LossScaler] = []  # whose losses added to the gradients since they were tested
        # What the last step left: the first gradient, and all once a pass began beside them.
        self.from_last_step: list[Gradient] = []
        self.shared: list[tuple[Gradient, Scaling | None]] = []  # gradients of others that it changed; None: it clips
        self.is_unscaled = False  # by `unscale_`, before the step
        self._has_more = False  # whether a pass added to unscaled gradients
        # Why no factor is right: a pass of an "unscaled" loss, of losses of "mixed" scales, or onto what a step "left".
        self._faults: set[str] = set()
        self._by_hand: list[ByHand] = []  # what passes returned instead of adding it
        self._starts_from_one: bool | None = None  # whether passes that go on from representations are those of losses
        self._partly_scaled: list[Gradient] = []  # that a pass added to partly without a scale
        self._pass_onto_old = -1  # autograd's number of the pass that began while they were those of the last step
        self._latest_gradient: Gradient | None = None
        self.task = -1
        self._opened_at = PASSES.count
        owner = self._owner()
        for group in () if owner is None else owner.parameter_groups():
            self.watch(group)

    def close(self, scaling: Scaling) -> None:
        """Note that a step used the gradients, and left them multiplied by the factor of a scaling."""
        model_scaling, owner = self.model_scaling, self._owner()
        self.open()
        self._stepped_at = PASSES.seen
        NEW.discard(self)
        param = None if owner is None else owner.first_with_gradient()
        if param is not None:
            # masters leave the model's gradients multiplied as they were
            self.scaling, self.from_last_step = model_scaling or scaling, [Gradient.of(param)]
            masters = None if owner is None else owner.masters
            if owner is not None and masters is not None and masters.have_taken and not owner.checks:
                # nothing is refused, so the next step may use them again, with all that masters changed
                self.model_scaling, self.scaling, self.is_unscaled, self._has_more = self.scaling, scaling, True, True
            if len(ALIVE) > 1:
                self._share()

    def with_hooks(self) -> list[Tensor]:
        """Return parameters that may have a user's hooks: at the first step all, later the latest if it has some."""
        latest = None if self._latest_gradient is None else self._latest_gradient.param()
        if latest is None or self in NEW:
            return self.parameters()
        return [latest] if len(gradient_hooks(latest)) > 1 else []

    def _share(self) -> None:
        """Note the gradients that other optimizers have too, and what they are multiplied by now."""
        owner = self._owner()
        if owner is None:
            return
        # masters, and polyamp's operators, do not clip the model's own gradients
        scaling = None if owner.max_grad_norm is not None else self.model_scaling or self.scaling
        self.shared += [(Gradient.of(param), scaling) for param in self._shared() if param.grad is not None]

    def _shared(self) -> list[Tensor]:
        """Return the parameters that another optimizer has too."""
        others = {id(param) for one in list(ALIVE) if one.witness is not self for param in one.model_parameters()}
        return [param for param in self.parameters() if id(param) in others]

    @property
    def is_consumed(self) -> bool:
        """Whether the gradients are those that the last step left."""
        return any(map(Gradient.is_untouched, self.from_last_step))

    @property
    def are_scaled(self) -> bool:
        """Whether the gradients are multiplied by another factor than 1, as far as this is known."""
        scaling = self.scaling
        if scaling is None:  # no pass reached the gradients: they are by hand, or of this optimizer's last loss
            scaling = next(reversed(self._scalings_by_hand() or [one.scaling for one in self._own_passes()]), None)
        if scaling is None or scaling.factor == 1.0 or self.is_consumed or not scaling.scaler.multiplies:
            return False
        return self._first_with_gradient() is not None

    @property
    def latest_is_scaled(self) -> bool:
        """Whether the latest gradient that a pass reached is scaled, and nobody has written to it since."""
        latest = self._latest_gradient
        return latest is not None and latest.is_untouched() and self.are_scaled

    @property
    def has_more(self) -> bool:
        """Whether something was added to gradients since they were unscaled."""
        return self._has_more or bool(self._added_by_hand())

    @property
    def has_gradients(self) -> bool:
        """Whether passes since the last step have made gradients."""
        return self.scaling is not None and not self.from_last_step and self._first_with_gradient() is not None

    @property
    def has_seen_a_pass(self) -> bool:
        """Whether there was a backward pass since the last step, of whatever optimizer and loss."""
        return PASSES.seen > self._stepped_at

    def _own_passes(self) -> list[Entry]:
        """Return the passes since the last step that the owner's own method made."""
        own = id(self._owner())
        return [one for one in PASSES.since(self._opened_at) if one.scaling.by == own]

    def note_unscaled(self, scaler: LossScaler, *, masters: bool) -> None:
        """Note that the gradients, or those of masters that were taken from them, were divided by their factor."""
        if masters and not self.is_unscaled:
            self.model_scaling = self.scaling
        self.scaling, self.contributors = Scaling(scaler, 1.0), []
        self.is_unscaled, self._has_more, self.from_last_step = True, False, []
        if len(ALIVE) > 1:
            self._share()

    def scaling_of_gradients(self, own: LossScaler, *, declared: bool | None = None) -> Scaling:
        """Return what the gradients are multiplied by.

        Raises:
            UsageError: no factor is right for all of them, or their loss was not scaled.
        """
        if declared is not None:
            self.scaling = Scaling(own, own.state.scale if declared else 1.0)
            return self.scaling
        is_left = any(map(Gradient.is_there, self.from_last_step))
        if own.settings.check and ("left" in self._faults or is_left):
            raise not_cleared()
        if "mixed" in self._faults or (self._partly_scaled and any(one.is_there() for one in self._partly_scaled)):
            raise mixed()
        if self.from_last_step and not is_left:
            self.scaling = None
        has_unscaled = "unscaled" in self._faults
        if has_unscaled and (own.multiplies or not (self.scaling is None or self.scaling.factor == 1.0)):
            raise loss_not_scaled(partly=self.scaling is not None)
        if self.scaling is None:
            self.scaling = Scaling(own, 1.0) if has_unscaled else self._unobserved(own)
        if self._by_hand and not all(map(self._is_alike, self._added_by_hand())):
            raise mixed_by_hand()
        return self.scaling

    def _added_by_hand(self) -> list[ByHand]:
        return [one for one in self._by_hand if one.look()]

    def _is_alike(self, added: ByHand) -> bool:
        """Return whether gradients that were added by hand have the scale of the others."""
        if added.is_master and not self.is_unscaled:  # the step replaces those of masters by the model's
            return False
        own = self.scaling if added.is_master or self.model_scaling is None else self.model_scaling
        return own is not None and added.scaling is not None and own.is_like(added.scaling)

    def _unobserved(self, own: LossScaler) -> Scaling:
        """Return the scaling of gradients that were set by hand, so that no hook has seen them."""
        found = self._unobserved_scalings()
        found = [one for one in found if one.scaler is own] or found
        if not found:
            if own.multiplies:
                raise loss_not_scaled(partly=False)
            return Scaling(own, 1.0)
        if not all(map(found[0].is_like, found)):
            raise mixed()
        self.contributors = []
        is_by_hand = any(one.is_written for one in self._by_hand)  # else the loss may have been for others
        self._note_scaled_loss(reduce(Scaling.with_finite, found) if is_by_hand else found[0]._replace(finite=True))
        return found[0]

    def _unobserved_scalings(self) -> list[Scaling]:
        """Return the scalings that gradients may have that no hook has seen."""
        return self._scalings_by_hand() or PASSES.scalings_since(self._opened_at, unobserved=True)

    def _scalings_by_hand(self) -> list[Scaling]:
        return [one.scaling for one in self._added_by_hand() if one.scaling is not None]

    def prepare_for(self, begun: Pass, unscaled: Set[int]) -> None:
        """Prepare for a pass that may add to the gradients, and reaches leaves with these ids without a scale."""
        owner, own, other = self._owner(), self.scaling, begun.scaling
        self._forget_cleared()
        if self._by_hand:
            self._added_by_hand()
        if not begun.call.accumulates:
            self._note_by_hand(begun)
            return
        if unscaled:  # some may have arrived before this
            reached = [param for param in self.parameters() if id(param) in unscaled]
            until_backward_ends(partial(self._mix, reached))
        if owner is None or other is None:
            return
        if own is None:
            if PASSES.count > self._opened_at + 1:
                self._look_for_unobserved(begun, other)
            return
        if self._starts_afresh(begun):
            return
        if owner.checks and self.from_last_step:
            self._pass_onto_old = begun.task
            self._keep_all_left()
        else:
            self._bring(begun, other)

    def _forget_cleared(self) -> None:
        """Forget what is known of gradients that somebody has set to zeros."""
        if self._faults:
            self._keep_after_write()
        if self._partly_scaled and not self._is_filled():
            self._partly_scaled = []
        owner = self._owner()
        if owner is not None and (owner.findings.flags or owner.findings.losses) and not self._is_untouched():
            owner.findings.forget_cleared(self._filled())
        if self.shared:
            self.shared = [one for one in self.shared if one[0].is_filled()]

    def _mix(self, reached: Sequence[Tensor]) -> None:
        """Note that a pass has added to gradients what no factor is right for."""
        self._partly_scaled += [Gradient.of(param) for param in reached if param.grad is not None]

    def _starts_afresh(self, begun: Pass) -> bool:
        """Open another window if the gradients were cleared, so that a pass may have another scale than they had."""
        own, left = self.scaling, self.from_last_step
        if own is None or (not left and begun.scaling is not None and own.is_like(begun.scaling)):
            return False
        is_cleared = bool(left) and not (self.is_consumed or self._is_filled())
        if not is_cleared and self._first_with_gradient() is not None:
            return False
        self.open()
        self._opened_at = begun.entry.number - 1
        return True

    def _keep_all_left(self) -> None:
        """Look for all gradients that the last step left, since others are about to be added."""
        self.from_last_step = [Gradient.of(param) for param in self.parameters() if param.grad is not None]

    def _note_by_hand(self, begun: Pass) -> None:
        """Note the parameters by which a pass differentiates, to return the result."""
        owner, given = self._owner(), {*map(id, begun.call.inputs)}
        begun.entry.has_arrived |= not given.isdisjoint(map(id, self.parameters()))
        if owner is None or begun.call.create_graph:  # that of a penalty, which is part of a loss
            return
        if not self._starts_afresh(begun) and self.from_last_step:
            self._keep_all_left()
        models = {} if owner.masters is None else owner.masters.models
        for group in owner.inner.param_groups:
            for param in group["params"]:
                model = models.get(id(param), param)
                if id(model) in given:
                    holders = [model] if model is param else [model, param]
                    result = (begun.task, id(model))
                    self._by_hand += [ByHand(begun.scaling, one, result, is_master=one is not model) for one in holders]

    def _look_for_unobserved(self, begun: Pass, other: Scaling) -> None:
        """Look for gradients of an earlier loss with another scale that were set by hand."""
        earlier = [one for one in self._unobserved_scalings() if one is not other]
        if all(map(other.is_like, earlier)) or not self._is_filled():
            return
        if all(map(earlier[0].is_like, earlier)):
            self.contributors = []
            self._note_scaled_loss(earlier[0])
            self._bring(begun, other)
        else:
            self._refuse_what_is_there(mixed=True)

    def _bring(self, begun: Pass, other: Scaling) -> None:
        """Let what a pass adds arrive with the scale of what is there."""
        owner = self._owner()
        if owner is None:
            return
        if self.model_scaling is not None and owner.masters is not None:
            is_mixed = owner.masters.are_torn() or not all(map(self._is_alike, self._added_by_hand()))
            self._give_back(owner.masters, self.model_scaling)
            if is_mixed:
                self._refuse_what_is_there(mixed=True)
        if other.scaler not in self.contributors and self.contributors and other.scaler in owner.scaler.all():
            # an overflow until here is not one of the other loss
            gradients = Gradients([{"params": self.parameters()}])
            if gradients:
                owner.findings.note(gradients.test(), self.contributors)
                self.contributors = []
        own = self.scaling
        if own is None or own.is_like(other):
            return
        if self._shared():  # the other optimizer would not know
            self._refuse_what_is_there(mixed=True)
            if "mixed" not in self._faults:  # there are only zeros
                self.open()
            return
        ratio = own.factor / other.factor

        def bring(grad: Tensor) -> Tensor:
            return grad * (ratio.to(grad.device, grad.dtype) if isinstance(ratio, Tensor) else ratio)

        params = [param for param in self.parameters() if param.requires_grad]
        begun.handles += [param.register_hook(bring) for param in params]  # type: ignore[no-untyped-call]

    @torch.no_grad()
    def _give_back(self, masters: MasterWeights, scaling: Scaling) -> None:
        """Multiply all gradients as those of the model were before masters took them, with what masters changed."""
        masters.give_back(scaling.factor)
        own = set(map(id, masters.model))
        for param in self.parameters():
            if id(param) not in own and param.grad is not None:  # float32 beside 16 bits: it was divided in place
                param.grad.mul_(scaling.factor)
        self.scaling, self.model_scaling, self.is_unscaled = scaling, None, False
        for one in self._by_hand:
            one.accept()
            one.is_written = one.is_written and not one.is_master  # what was added to a master is in the model's now

    def _filled(self) -> bool | Tensor:
        return are_filled([param.grad for param in self.parameters() if param.grad is not None])

    def _is_filled(self) -> bool:
        return bool(self._filled())  # one wait for the device

    def _is_untouched(self) -> bool:
        """Return whether nobody has written to the latest gradient since the pass that made it."""
        return self._latest_gradient is not None and self._latest_gradient.is_untouched()

    def _refuse_what_is_there(self, *, mixed: bool = False) -> None:
        """Note that there are gradients, other than zeros, that no factor is right for, until they are cleared."""
        param = self._first_with_gradient()
        if param is not None and self._is_filled():
            self._latest_gradient = Gradient.of(param)
            self._faults.add("mixed" if mixed else "unscaled")

    def _keep_after_write(self) -> None:
        """Go on refusing gradients that somebody changed since they were noted, if some are left that are not zeros."""
        if self._is_untouched():
            return
        left = self._first_with_gradient()
        if left is not None and self._is_filled():
            self._latest_gradient = Gradient.of(left)
        elif self._latest_gradient is not None:
            self._faults = set()

    def note(self, param: Tensor, task: int) -> None:
        """Note the pass that has just added to a parameter's gradient, at its first parameter."""
        if param.grad is None:
            return
        self.task = task
        if self._latest_gradient is None or not self._latest_gradient.has_grown(by=param):
            # Somebody cleared the gradients, or wrote to them.
            self._faults = set()
        if task == -1:  # a pipeline schedule lets FSDP reduce gradients after all its passes
            self._latest_gradient = None
            return
        earlier, self._latest_gradient, self._has_more = self._latest_gradient, Gradient.of(param), True
        begun = PASSES.arriving()
        scaling = begun.scaling if begun is not None else PASSES.unmarked_since(self._opened_at)
        if begun is None and scaling is None:
            self._note_unscaled_loss(param, is_new=earlier is not None and not earlier.is_there())
        elif begun is not None and begun.task == self._pass_onto_old:
            self._faults.add("left")
        elif scaling is None:
            self._faults.add("mixed")
        else:
            self._note_scaled_loss(scaling, is_marked=begun is not None)
        self.from_last_step, self._pass_onto_old = [], -1
        if begun is None or begun.task != task:
            # after other callbacks, as in `Pass`
            until_backward_ends(partial(until_backward_ends, self.accept_writes))

    def end_of(self, ended: Pass) -> None:
        """Look at the gradients after a pass."""
        if self.task == ended.task:
            self.accept_writes()
            return
        for one in self._by_hand if ended.call.accumulates else ():
            one.accept()

    def accept_unscaling(self) -> None:
        """Go on from unscaled gradients, with all that was added to them by hand."""
        added = {one.result for one in self._by_hand if one.is_written}
        self._by_hand = [one for one in self._by_hand if one.result not in added]
        self.accept_writes()

    def accept_writes(self) -> None:
        """Count writes to the gradient before a backward pass ended as part of that pass."""
        param = None if self._latest_gradient is None else self._latest_gradient.param()
        if param is not None and param.grad is not None:
            self._latest_gradient = Gradient.of(param)
        for one in self._by_hand:
            one.accept()

    def _note_scaled_loss(self, scaling: Scaling, *, is_marked: bool = True) -> None:
        """Note a loss that added to the gradients; if it was not finite, the step is skipped, whatever they are."""
        if self.scaling is None or (self.from_last_step and not is_marked):
            self.scaling = scaling
        elif not (is_marked or self.scaling.is_like(scaling)):
            self._faults.add("mixed")
        if scaling.scaler not in self.contributors:
            self.contributors.append(scaling.scaler)
        if scaling.finite is not True and (owner := self._owner()) is not None:
            owner.findings.note_loss(scaling.finite, scaling.scaler)

    def _note_unscaled_loss(self, param: Tensor, *, is_new: bool) -> None:
        owner = self._owner()
        if owner is not None and is_new:  # somebody set the gradients to None
            owner.findings.forget_cleared(filled=False)
        own = [one.scaling for one in self._own_passes() if not one.has_arrived]
        if self.from_last_step:
            self.scaling = None
            if any(one.has_grown(by=param) or (own and one.is_there()) for one in self.from_last_step):
                self._faults.add("left")
        if own and self._continues(own[-1]):
            self.scaling = own[-1]
            self._note_scaled_loss(own[-1])
            return
        model = self.model_scaling if self.model_scaling is not None else self.scaling
        if own or not (self.is_unscaled and model is not None and model.factor == 1.0):
            self._faults.add("unscaled")

    def _continues(self, own: Scaling) -> bool:
        """Return whether a pass goes on from representations that the optimizer's own loss was differentiated by.

        Nothing shows it, so all passes of a window have to start in the same way: from gradients of representations,
        or from losses that hold these.
        """
        is_first = self.scaling is None and "unscaled" not in self._faults
        call = running_backward()
        starts_from_one = call is not None and all(
            grad is None or (grad.numel() == 1 and bool(grad == 1)) for grad in call.gradients
        )
        if is_first:
            self._starts_from_one = starts_from_one
            return True
        is_alike = self.scaling is not None and self.scaling.is_like(own)
        return is_alike and self._starts_from_one is starts_from_one

    def _first_with_gradient(self) -> Tensor | None:
        owner = self._owner()
        return None if owner is None else owner.first_with_gradient()

    def parameters(self) -> list[Tensor]:
        """Return the model's own parameters, which get the gradients."""
        owner = self._owner()
        return [] if owner is None else [*owner.model_parameters()]

    def forget_by_hand(self) -> None:
        """Forget gradients that nobody has added by hand yet, since others are about to be changed."""
        self._by_hand = self._added_by_hand()

    def add(self, params: Sequence[Tensor]) -> None:
        """Observe parameters that may have gradients already."""
        if any(param.grad is not None for param in params):
            self._refuse_what_is_there()
        self.watch(params)

    def watch(self, params: Iterable[Tensor]) -> None:
        """Observe what adds to the gradients of parameters."""
        for param in params:
            if id(param) not in self._handles and param.requires_grad and param.is_leaf:
                self._handles[id(param)] = param.register_post_accumulate_grad_hook(self._hook)  # type: ignore[no-untyped-call]


NEW: weakref.WeakSet[Witness] = weakref.WeakSet()  # whose optimizers have made no step yet


def _hook(witness: weakref.ref[Witness]) -> Callable[[Tensor], None]:
    """Return the hook of parameters. It is short, since it runs for each of them in each pass."""

    @not_traced
    def seen(param: Tensor) -> None:
        alive, task = witness(), running_task()
        if alive is not None and (alive.task != task or task == -1):
            alive.note(param, task)

    return seen


def _remove(handles: dict[int, Any]) -> None:
    for handle in handles.values():
        handle.remove()
