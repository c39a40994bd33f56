"""Observes backward passes, and records what each does to the gradients of one optimizer; see ``provenance.py``.

The witness meets a pass twice. When the pass begins, `Witness.prepare_for` looks at existing gradients, so that what
the pass adds arrives with their scale; when it has reached a parameter, `Witness.note` records it. What the program
did in between, such as clearing gradients, is inferred from the tensors, which count what is written to them.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence, Set
from functools import partial

import torch
from torch import Tensor

from polyamp.backends.torch.step.gradients import ByHand, Gradient, Gradients, are_filled
from polyamp.backends.torch.step.masters import MasterWeights
from polyamp.backends.torch.step.passes import OBSERVERS, PASSES, Pass
from polyamp.backends.torch.step.provenance import Provenance, WrappedOptimizer
from polyamp.backends.torch.step.scale import Scaling
from polyamp.backends.torch.unstable import not_traced, running_backward, running_task, until_backward_ends


class Witness(Provenance):
    """The observer of the passes that reach one optimizer's parameters."""

    def __init__(self, owner: WrappedOptimizer) -> None:
        super().__init__(owner, _hook(weakref.ref(owner), weakref.ref(self)))
        OBSERVERS[owner] = self
        self._refuse_what_is_there()  # of passes before there was a hook

    def prepare_for(self, begun: Pass, unscaled: Set[int]) -> None:
        """Prepare for a pass that may add to the gradients; ``unscaled`` has ids of leaves reached without a scale."""
        own, other = self.scaling, begun.scaling
        self._forget_cleared()
        if self._by_hand:
            self._added_by_hand()
        if not begun.call.accumulates:
            self._note_by_hand(begun)
            return
        if unscaled:  # some may have arrived before this
            reached = [param for param in self.owner.model_parameters() if id(param) in unscaled]
            until_backward_ends(partial(self._mix, reached))
        if other is None:
            return
        if own is None:
            if PASSES.count > self._opened_at + 1:
                self._look_for_unobserved(begun, other)
            return
        if self._starts_afresh(begun):
            return
        if self.owner.checks and self.from_last_step:
            begun.onto_left.append(self)
            self._keep_all_left()
        else:
            self._bring(begun, other)

    def _forget_cleared(self) -> None:
        """Forget what is known of gradients that somebody has set to zeros."""
        if self._faults:
            self._keep_after_write()
        if self._partly_scaled and not self._is_filled():
            self._partly_scaled = []
        findings = self.owner.findings
        if (findings.flags or findings.losses) and not self._is_untouched():
            findings.forget_cleared(self._filled())
        if self.shared:
            self.shared = [one for one in self.shared if one[0].is_filled()]

    def _keep_after_write(self) -> None:
        """Keep refusing gradients after a write to them, unless they are all zeros now."""
        if self._is_untouched():
            return
        left = self.owner.first_with_gradient()
        if left is not None and self._is_filled():
            self._latest_gradient = Gradient.of(left)
        elif self._latest_gradient is not None:
            self._faults = set()

    def _starts_afresh(self, begun: Pass) -> bool:
        """Open a new window, where any scale will do, if the gradients were cleared; return whether it was opened."""
        own, left = self.scaling, self.from_last_step
        if own is None or (not left and begun.scaling is not None and own.is_like(begun.scaling)):
            return False
        is_cleared = bool(left) and not (self.is_consumed or self._is_filled())
        if not is_cleared and self.owner.first_with_gradient() is not None:
            return False
        self.open()
        self._opened_at = begun.entry.number - 1
        return True

    def _keep_all_left(self) -> None:
        """Note all gradients that the last step left, before a pass adds to them."""
        self.from_last_step = [Gradient.of(param) for param in self.owner.model_parameters() if param.grad is not None]

    def _mix(self, reached: Sequence[Tensor]) -> None:
        """Note gradients to which a pass added with and without a scale."""
        self._partly_scaled += [Gradient.of(param) for param in reached if param.grad is not None]

    def _note_by_hand(self, begun: Pass) -> None:
        """Note the parameters whose gradients a pass returns, instead of adding to ``grad``."""
        given, masters = {*map(id, begun.call.inputs)}, self.owner.masters
        begun.entry.has_arrived |= not given.isdisjoint(map(id, self.owner.model_parameters()))
        if begun.call.create_graph:  # that of a penalty, which is part of a loss
            return
        if not self._starts_afresh(begun) and self.from_last_step:
            self._keep_all_left()
        models = {} if masters is None else masters.models
        for group in self.owner.inner.param_groups:
            for param in group["params"]:
                model = models.get(id(param), param)
                if id(model) in given:
                    holders = [model] if model is param else [model, param]
                    result = (begun.task, id(model))
                    self._by_hand += [ByHand(begun.scaling, one, result, is_master=one is not model) for one in holders]

    def _look_for_unobserved(self, begun: Pass, other: Scaling) -> None:
        """Look for gradients that were set by hand from an earlier loss of another scale."""
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
        """Bring what a pass adds to the scale of existing gradients."""
        masters, findings = self.owner.masters, self.owner.findings
        if self.model_scaling is not None and masters is not None:
            is_mixed = masters.are_torn() or not all(map(self._is_alike, self._added_by_hand()))
            self._give_back(masters, self.model_scaling)
            if is_mixed:
                self._refuse_what_is_there(mixed=True)
        if other.scaler not in self.contributors and self.contributors and other.scaler in self.owner.scaler.all():
            # an overflow until here is not one of the other loss
            gradients = Gradients([{"params": self.owner.model_parameters()}])
            if gradients:
                findings.note(gradients.test(), self.contributors)
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

        params = [param for param in self.owner.model_parameters() if param.requires_grad]
        begun.handles += [param.register_hook(bring) for param in params]  # type: ignore[no-untyped-call]

    @torch.no_grad()
    def _give_back(self, masters: MasterWeights, scaling: Scaling) -> None:
        """Scale all gradients again as the model's were, and copy what changed in the masters' to the model's."""
        masters.give_back(scaling.factor)
        own = set(map(id, masters.model))
        for param in self.owner.model_parameters():
            if id(param) not in own and param.grad is not None:  # float32 beside 16 bits: it was divided in place
                param.grad.mul_(scaling.factor)
        self.scaling, self.model_scaling, self.is_unscaled = scaling, None, False
        for one in self._by_hand:
            one.accept()
            one.is_written = one.is_written and not one.is_master  # what was added to a master is in the model's now

    def note(self, param: Tensor, task: int) -> None:
        """Note a pass that has just added to the gradient of ``param``, its first parameter."""
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
        elif begun is not None and self.from_last_step and self in begun.onto_left:
            self._faults.add("left")
        elif scaling is None:
            self._faults.add("mixed")
        else:
            self._note_scaled_loss(scaling, is_marked=begun is not None)
        self.from_last_step = []
        if begun is None or begun.task != task:
            # after other callbacks, as in `Pass`
            until_backward_ends(partial(until_backward_ends, self.accept_writes))

    def _note_unscaled_loss(self, param: Tensor, *, is_new: bool) -> None:
        if is_new:  # somebody set the gradients to None
            self.owner.findings.forget_cleared(filled=False)
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
        """Return whether a pass continues from representations, by which the optimizer's loss was differentiated.

        The graph does not show that, so all passes of a window have to start in the same way: from gradients of
        representations, or from losses that hold these.
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

    def end_of(self, ended: Pass) -> None:
        """Look at the gradients after a pass."""
        if self.task == ended.task:
            self.accept_writes()
            return
        for one in self._by_hand if ended.call.accumulates else ():
            one.accept()

    def add(self, params: Sequence[Tensor]) -> None:
        """Observe parameters that may have gradients already."""
        if any(param.grad is not None for param in params):
            self._refuse_what_is_there()
        self.watch(params)

    def _refuse_what_is_there(self, *, mixed: bool = False) -> None:
        """Refuse the existing gradients, unless they are zeros, until they are cleared."""
        param = self.owner.first_with_gradient()
        if param is not None and self._is_filled():
            self._latest_gradient = Gradient.of(param)
            self._faults.add("mixed" if mixed else "unscaled")

    def _filled(self) -> bool | Tensor:
        return are_filled([param.grad for param in self.owner.model_parameters() if param.grad is not None])

    def _is_filled(self) -> bool:
        return bool(self._filled())  # one wait for the device

    def _is_untouched(self) -> bool:
        """Return whether nobody has written to the latest gradient since the pass that made it."""
        return self._latest_gradient is not None and self._latest_gradient.is_untouched()


def _hook(owner: weakref.ref[WrappedOptimizer], witness: weakref.ref[Witness]) -> Callable[[Tensor], None]:
    """Return the hook of parameters. It is short, since it runs for each of them in each pass."""

    @not_traced
    def seen(param: Tensor) -> None:
        alive, one, task = owner(), witness(), running_task()  # the witness needs its owner
        if alive is not None and one is not None and (one.task != task or task == -1):
            one.note(param, task)

    return seen
