"""The loss scale of one optimizer, or of several that share it: multiplies losses, and advances by `polyamp.advance`.

The state is Python numbers while the host decides about a step, and scalar tensors once a device decides. A loss that
is inf or NaN is multiplied by inf, so that its gradients are not finite and the step is skipped, also where the loss
itself has a gradient of zero.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from polyamp.agreement import OfPolicy
from polyamp.backends.torch.casting import leaves
from polyamp.backends.torch.kernels.control import (
    LOSSES_FINITE,
    SIZE,
    LateValues,
    applied_flag,
    both,
    check_first_use,
    constant,
    decode,
    is_captured,
    on_device,
    pack_,
    report_of,
    unpack,
    where,
)
from polyamp.backends.torch.step.ranks import Decision, decide, has_peers, report_kept_errors
from polyamp.backends.torch.step.refusals import refused_elsewhere, unlike_scales
from polyamp.errors import InvalidValueError, is_number, no_loss, warn_once, wrong_type
from polyamp.formats import in_single
from polyamp.nesting import check_tree
from polyamp.policies import Policy
from polyamp.scale import advance, on_host
from polyamp.settings import LossScale, LossScaleState
from polyamp.skips import non_finite_loss, report_limits, report_nonfinite_loss


class LossScaler(OfPolicy):
    """A `LossScale` in use: its settings and its state, and a scaler of its own for each loss with an id."""

    def __init__(self, settings: LossScale, policy: Policy | None = None) -> None:
        self.settings = settings.in_float32()  # so that host and device use the same scales
        self.policy = policy
        self.state = self.settings.initial_state()
        self.others: dict[Hashable, Self] = {}  # of losses with an id
        self.loss_was_finite: bool | Tensor | None = None  # of all losses since the last step; None without any
        self._before = self.state  # the state before the votes
        self._votes: dict[int, bool | Tensor] = {}  # by optimizer: whether its gradients of this loss were finite
        self._has_new_loss = True  # whether another loss was scaled since
        self._factors = (0.0, torch.empty(0), torch.empty(0))  # a host scale; the scale and its inverse as tensors
        self.late = LateValues()  # what the device has to report
        self.decisions, self._late_group = LateValues(), None  # what ranks have decided on a device, and which ranks
        self._control: Tensor | None = None  # a copy of the state that polyamp's operators change

    def __getstate__(self) -> dict[str, Any]:
        state = on_host(self.state)
        return {"settings": self.settings, "policy": self.policy, "state": state, "others": self.others}

    def __setstate__(self, saved: dict[str, Any]) -> None:
        LossScaler.__init__(self, saved["settings"], saved["policy"])
        self.others = saved["others"]
        self.resume(self.settings.from_state_dict(saved["state"]._asdict()))

    def of(self, loss_id: Hashable, process_group: Any = False) -> Self:
        """Return the scaler of a loss id: this one for None, and for every id if there are several ranks."""
        if loss_id is None:
            return self
        if not isinstance(loss_id, Hashable):
            raise wrong_type(
                loss_id,
                where="scale(loss, loss_id=)",
                allowed="anything hashable",
                fix="give a string or a number",
            )
        if has_peers(process_group):  # which may have other losses, whose gradients are averaged with this one's
            if self.multiplies:
                warn_once(_ONE_SCALE)
            return self
        if loss_id not in self.others:
            self.others[loss_id] = type(self)(self.settings, self.policy)
        return self.others[loss_id]

    def all(self) -> list[Self]:
        """Return this scaler, and those of losses with an id."""
        return [self, *self.others.values()]

    @property
    def multiplies(self) -> bool:
        """Whether a scaled loss can differ from an unscaled one."""
        return self.settings.check and not self.settings.min == self.settings.max == 1

    def note_losses(self, losses: Sequence[Tensor]) -> dict[int, bool | Tensor]:
        """Note whether losses are finite, and return that by ``id(loss)``, or an empty dict in compiled code."""
        if not self._has_new_loss:  # the first loss since a step
            self._has_new_loss, self.loss_was_finite = True, None
        if self._control is not None and is_captured():
            self.state = unpack(self._control.clone())  # the value that the graph reads at every replay
        finite: dict[int, bool | Tensor] = {}
        for one in () if torch.compiler.is_compiling() else losses:
            finite[id(one)] = _is_finite(one)
        if finite:
            are_finite, earlier = functools.reduce(both, finite.values()), self.loss_was_finite
            self.loss_was_finite = are_finite if earlier is None else both(earlier, are_finite)
        return finite

    def multiply(self, loss: Tensor, *, finite: bool = True) -> Tensor:
        """Return one loss in float32 (float64 stays) times the loss scale, or times inf if it is not finite."""
        wide = loss if loss.dtype in (torch.float32, torch.float64) else loss.float()  # 16 bits would overflow
        scale = self.state.scale
        factor = scale.to(loss.device) if isinstance(scale, Tensor) else self._host_factors(scale)[1]
        if not finite:  # by arithmetic: torch.where would send its numbers to the device, and wait
            factor = factor + (wide.detach() * 0).nan_to_num(nan=math.inf)
        return wide * factor

    def report_loss(self, found: object, *, process_group: Any, where: str) -> None:
        """Warn or raise because a loss was inf or NaN."""
        if self.settings.nonfinite_loss == "raise" and has_peers(process_group):
            return  # the step raises it on all ranks; see `decide`
        was_half = isinstance(found, Tensor) and found.dtype == torch.float16
        compute = "float16" if was_half and self.compute is None else self.compute
        report_nonfinite_loss(self.settings, compute=compute, where=where, found=found)

    def decide(self, bad: Tensor, process_group: Any, *, refuses: bool = False) -> Decision:
        """Decide about a step together with the other ranks; see `ranks.decide`.

        Raises:
            PolyampError: on every rank, if `_check` refuses; for a decision on a device, at a later step.
        """
        finite = self.loss_was_finite if self._has_new_loss else None
        decision = decide(bad, self.state, loss_was_finite=finite, refuses=refuses, process_group=process_group)
        if refuses:
            return decision
        if (device := decision.words.device).type == "cpu":
            if decision.flag(device):
                self._check(decision)
        else:
            self._late_group = process_group
            self.decisions.send(lambda: decision.words)
        return decision

    def _check(self, decision: Decision) -> None:
        """Refuse a step that another rank refuses, or that ranks with loss scales in different states would take."""
        if decision.refusing:
            raise refused_elsewhere(str(decision.refusing))
        if not decision.agree():
            raise unlike_scales(on_host(self.state))
        if self.settings.nonfinite_loss == "raise" and decision.of_bad_losses:
            self._has_new_loss = False  # a later loss has to be looked at by itself
            raise non_finite_loss(f"inf or NaN on {decision.of_bad_losses}", compute=self.compute)

    def advance(self, finite: bool | Tensor, voter: object = None) -> None:
        """Advance the state: on the host for a bool, else by tensors alone on the device of ``finite``."""
        # Several optimizers that step on the gradients of one loss vote, and the state advances once.
        finite = self._vote(finite, voter)
        if isinstance(finite, bool):
            self._become(advance(self.settings, on_host(self._before), finite))
        else:
            self._become(advance(self.settings, on_device(self._before, finite.device), finite, where))
            self.late.send(functools.partial(self._report, finite))

    def _report(self, finite: Tensor) -> Tensor:
        """Return a step's report in the form that polyamp's operators write."""
        known, device = self.loss_was_finite, finite.device
        number = constant(int(known is not False), torch.int32, device)
        return report_of(self.state, finite, known.to(device) if isinstance(known, Tensor) else number)

    @property
    def has_losses(self) -> bool:
        """Whether a loss was scaled since the last step."""
        return self.loss_was_finite is not None and self._has_new_loss

    def opens_round(self, voter: object) -> bool:
        """Return whether the next vote is the first for its loss; only then can an operator advance the state."""
        return self._has_new_loss or not self._votes or id(voter) in self._votes

    def _vote(self, finite: bool | Tensor, voter: object) -> bool | Tensor:
        if self.opens_round(voter):
            self._before, self._votes, self._has_new_loss = self.state, {}, False
        for other in self._votes.values():
            finite = both(other, finite)
        self._votes[id(voter)] = finite
        return finite

    def control_on(self, device: torch.device) -> Tensor:
        """Return the state as a tensor that operators change in place; see ``control.py``. Always the same tensor."""
        if self._control is None or self._control.device != device:
            check_first_use()
            self._control = torch.zeros(SIZE, dtype=torch.int32, device=device)
            pack_(self._control, self.state)
        return self._control

    def advanced(self, report: Tensor, voter: object) -> None:
        """Take over the state that an operator has advanced, from the operator's report; see `advance`."""
        self._vote(applied_flag(report), voter)
        self.state = unpack(report)
        self.late.send(functools.partial(self._with_loss, report))

    def _with_loss(self, report: Tensor) -> Tensor:
        if self.loss_was_finite is None or self.loss_was_finite is True:
            return report
        noted = report.clone()
        noted[LOSSES_FINITE] = self.loss_was_finite
        return noted

    def set(self, scale: object, *, where: str) -> None:
        """Change the scale, rounded to float32, if it is within the settings' limits; counters stay unchanged."""
        least, most, fix = self.settings.min, self.settings.max, "give a number within LossScale(min=..., max=...)"
        if not is_number(scale):
            raise wrong_type(scale, where=where, allowed="a number", fix=fix, what="the loss scale must be a number")
        if not least <= scale <= most:
            allowed, what = f"between {least:g} and {most:g}", "the loss scale is outside its limits"
            raise InvalidValueError(what, where=where, found=scale, allowed=allowed, fix=fix)
        self.resume(on_host(self.state)._replace(scale=in_single(float(scale))))

    def resume(self, state: LossScaleState) -> None:
        """Resume from a state."""
        self._become(state)
        self._has_new_loss = True

    def _become(self, state: LossScaleState) -> None:
        if self._control is not None and state is not self.state:
            pack_(self._control, state)
        self.state = state

    def report_step(self, explain: Callable[[], str] | None) -> None:
        """Report on a step that was skipped, from the numbers on the host."""
        if isinstance(self.state.scale, float) and self.state.skipped_in_a_row:
            report_kept_errors(self.state.skipped_in_a_row)
            report_limits(self.settings, self.state, explain)

    def report_earlier_step(self, explain: Callable[[], str], *, process_group: Any = False) -> None:
        """Report, before a step, what has arrived from the device since the last one, without waiting."""
        if (words := self.decisions.receive()) is not None:
            self._check(Decision(torch.tensor(words), self._late_group))
        arrived = self.late.receive()
        if arrived is None:
            return
        state, losses_were_finite = decode(arrived)
        if not losses_were_finite:
            self.report_loss("inf or NaN", process_group=process_group, where="scaling the loss of an earlier step")
        report_kept_errors(state.skipped_in_a_row)
        report_limits(self.settings, state, explain)

    def _host_factors(self, scale: float) -> tuple[float, Tensor, Tensor]:
        """Return a scale, and the scale and its inverse as CPU scalars, which torch mixes with any device's tensors."""
        if scale != self._factors[0]:
            pair = torch.tensor([scale, 1.0 / scale], dtype=torch.float32, device="cpu")
            self._factors = (scale, pair[0], pair[1])
        return self._factors

    def inverse(self, scale: float | Tensor) -> Tensor:
        """Return the factor that undoes a scale: float32 scalar, the correctly rounded inverse."""
        if not isinstance(scale, Tensor):
            return self._host_factors(scale)[2]
        return scale.double().reciprocal().float() if scale.device.type != "mps" else scale.reciprocal()


class Scaling(NamedTuple):
    """How a loss was multiplied: by whose loss scale, and by which factor."""

    scaler: LossScaler
    factor: float | Tensor
    by: int | None = None  # the id of the witness of the optimizer whose method was called
    finite: bool | Tensor = True  # whether the loss was, as far as this is known

    def with_finite(self, other: Scaling) -> Scaling:
        """Return this scaling, finite only if both are."""
        return self if other.finite is True else self._replace(finite=both(self.finite, other.finite))

    def is_like(self, other: Scaling) -> bool:
        """Return whether gradients of both scalings can be added. Factors on a device must be one tensor."""
        one, two = self.factor, other.factor
        if one is two:
            return True
        if isinstance(one, float) and isinstance(two, float):
            return one == two
        return not (self.scaler.multiplies or other.scaler.multiplies)  # both are 1


_ONE_SCALE = (
    "loss_id= has no effect where several ranks train together: all losses have one loss scale, since gradients of a "
    "loss can be averaged with those of another loss on another rank."
)


def _is_finite(loss: Tensor) -> bool | Tensor:
    """Return whether a loss is finite: a bool on the CPU; on other devices a tensor, since a bool would wait."""
    if loss.device.type == "cpu":
        return math.isfinite(loss.item()) if loss.dim() == 0 else bool(loss.isfinite().all())
    finite = loss.detach() * 0 == 0  # two kernels fewer than isfinite
    return finite.all() if loss.dim() else finite


def losses_in(loss: Any) -> list[Tensor]:
    """Return the losses of a container, each a floating-point tensor."""
    if not isinstance(loss, Tensor) and not torch.compiler.is_compiling():
        check_tree(loss, "scale(loss)", deepest=200)
    losses = [loss] if isinstance(loss, Tensor) else list(leaves(loss))
    for one in losses or [loss]:
        if not (isinstance(one, Tensor) and one.is_floating_point()):
            raise no_loss(one, allowed="a floating torch.Tensor, or such tensors in lists, tuples and dicts")
    return losses
