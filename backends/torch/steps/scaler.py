"""The loss scale of one optimizer: multiplies losses, and advances by `polyamp.advance`.

The state is Python numbers while the host decides, and scalar tensors once the device decides.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from polyamp.backends.torch.casting import leaves, map_leaves
from polyamp.backends.torch.kernels.control import (
    SIZE,
    applied_flag,
    decode,
    is_captured,
    kept,
    on_device,
    pack_,
    report_of,
    unpack,
    where,
)
from polyamp.backends.torch.recording.reach import is_recorded
from polyamp.backends.torch.steps import refusals
from polyamp.errors import InvalidTypeError, no_loss, non_finite_loss, shown
from polyamp.scale import LossScale, LossScaleState, advance, on_host, report_limits, report_nonfinite_loss

_WIDE = (torch.float32, torch.float64)
_STACKLEVEL = 8  # of a warning: from where it is issued to the user's call


class LossScaler:
    """A `LossScale` in use: its settings, its state, and the losses that it multiplies."""

    def __init__(self, settings: LossScale, compute: str | None = None) -> None:
        self.settings = settings.in_float32()  # so that host and device use the same scales
        self.compute = compute
        self.state = self.settings.initial_state()
        self._round = _Round(self.state)
        self._factors = (0.0, torch.empty(0), torch.empty(0))  # a host scale; the scale and its inverse as tensors
        self._late = LateValues()
        self._control: Tensor | None = None  # a copy of the state that polyamp's operators change

    def __getstate__(self) -> dict[str, Any]:
        return {"settings": self.settings, "compute": self.compute, "state": on_host(self.state)}

    def __setstate__(self, saved: dict[str, Any]) -> None:
        LossScaler.__init__(self, saved["settings"], saved["compute"])
        self.state = saved["state"]
        self._round = _Round(self.state)

    @property
    def multiplies(self) -> bool:
        """Whether a scaled loss can differ from an unscaled one."""
        return self.settings.check and not self.settings.min == self.settings.max == 1

    def scale(self, loss: Any) -> Any:
        """Return a loss, or losses in containers, in float32 (float64 stays) times the loss scale."""
        _losses(loss)
        self._round.is_over = True
        if self._control is not None and is_captured():
            self.state = unpack(self._control.clone())  # the value that the graph reads at every replay
        return map_leaves(self._multiply, loss)

    def suspects(self, loss: Any, *, alone: bool = True, stacklevel: int = _STACKLEVEL) -> list[Tensor]:
        """Return the losses that may be inf or NaN, which skips their step."""
        # On the CPU a loss is tested at once. On other devices a test would make the host wait, so all are returned.
        if not self.settings.check or torch.compiler.is_compiling():
            return []
        found = [one.detach() for one in _losses(loss) if one.device.type != "cpu" or not is_finite(one)]
        if any(one.device.type == "cpu" for one in found):
            self.report_loss(found[0], alone=alone, where="scaling the loss", stacklevel=stacklevel)
        return found

    def report_loss(self, found: object, *, alone: bool, where: str, stacklevel: int = _STACKLEVEL) -> None:
        """Warn or raise because a loss was inf or NaN; see `suspects`. A step that is only observed ends here."""
        if is_recorded():
            raise non_finite_loss(found, where=where)
        settings = self.settings if alone else replace(self.settings, nonfinite_loss="skip")
        was_half = isinstance(found, Tensor) and found.dtype == torch.float16
        compute = "float16" if was_half and self.compute is None else self.compute
        report_nonfinite_loss(settings, compute=compute, where=where, found=found, stacklevel=stacklevel)

    def inverse_scale(self, state: LossScaleState | None = None) -> Tensor:
        """Return the factor for gradients: float32 scalar, the correctly rounded inverse of the scale."""
        scale = (self.state if state is None else state).scale
        if not isinstance(scale, Tensor):
            return self._host_factors(scale)[2]
        return scale.double().reciprocal().float() if scale.device.type != "mps" else scale.reciprocal()

    def advance(self, finite: bool | Tensor, reporter: object = None, losses: Sequence[Tensor] = ()) -> None:
        """Advance the state: on the host for a bool, else by tensors alone on the device of ``finite``."""
        # If several optimizers step on the gradients of one loss, each reports its own result, and the state advances
        # once: by whether all gradients were finite.
        if not self._round.takes(reporter):
            self._round = _Round(self.state)
        before, finite = self._round.before, self._round.add(finite, reporter)
        if isinstance(finite, bool):
            state = before if isinstance(before.scale, float) else on_host(before)
            self._become(advance(self.settings, state, finite))
        else:
            self.take_over(advance(self.settings, on_device(before, finite.device), finite, where), finite, losses)

    def take_over(self, state: LossScaleState, finite: Tensor, losses: Sequence[Tensor] = ()) -> None:
        """Become a state of tensors, the result of a step, and send the step's report to the host."""
        self._become(state)
        if not self._late.is_under_way:
            self._late.send(self._report_of_state(finite, losses))

    def opens_round(self, reporter: object) -> bool:
        """Return whether the next report is the first for its loss, so that an operator may advance the state."""
        return not self._round.takes(reporter)

    def control_on(self, device: torch.device) -> Tensor:
        """Return the state as a tensor that operators change in place; see ``control.py``. Always the same tensor."""
        if self._control is None or self._control.device != device:
            refusals.check_first_use(captured=is_captured())
            self._control = torch.zeros(SIZE, dtype=torch.int32, device=device)
            pack_(self._control, self.state)
        return self._control

    def advanced(self, report: Tensor, reporter: object) -> None:
        """Record that an operator has advanced the state in `control_on`, and its report; see `advance`."""
        self._round = _Round(self.state)
        self._round.add(applied_flag(report), reporter)
        self.state = unpack(report)
        self._late.send(report)

    def holders(self) -> Iterator[Any]:
        """Yield the objects that hold data about losses and reports, for `hooks.keep`."""
        yield from (self, self._round)

    def set(self, scale: object, *, where: str) -> None:
        """Change the scale; counters stay unchanged."""
        state = on_host(self.state)
        self.resume(state._replace(scale=refusals.checked_scale(self.settings, scale, where=where)))

    def load(self, saved: Mapping[str, Any]) -> None:
        """Resume from a result of `LossScale.to_state_dict`; see there for the errors."""
        self.resume(self.settings.from_state_dict(saved))

    def resume(self, state: LossScaleState) -> None:
        """Resume from a state."""
        self._become(state)
        self._round = _Round(state)

    def report(self, explain: Callable[[], str] | None) -> None:
        """Report on a step that was skipped, from the numbers on the host."""
        if isinstance(self.state.scale, float) and self.state.skipped_in_a_row:
            report_limits(self.settings, self.state, explain)

    @property
    def awaits_report(self) -> bool:
        """Whether the report of an earlier step has not been read yet."""
        return self._late.is_under_way

    def report_earlier_step(self, explain: Callable[[], str], *, alone: bool = True) -> None:
        """Report what has arrived from the device since the last step, before a step and without waiting."""
        arrived = self._late.receive()
        if arrived is None:
            return
        state, losses_were_finite = decode(arrived)
        if not losses_were_finite:
            self.report_loss("inf or NaN", alone=alone, where="scaling the loss of an earlier step")
        report_limits(self.settings, state, explain)

    def _multiply(self, loss: Tensor) -> Tensor:
        if not self.settings.check:
            return loss
        wide = loss if loss.dtype in _WIDE else loss.float()  # before the product: in 16 bits it would overflow
        scale = self.state.scale
        return wide * (scale.to(loss.device) if isinstance(scale, Tensor) else self._host_factors(scale)[1])

    def _host_factors(self, scale: float) -> tuple[float, Tensor, Tensor]:
        """Return scalars on the CPU, which torch accepts together with tensors of any device. Cached for one scale."""
        if scale != self._factors[0]:
            pair = torch.tensor([scale, 1.0 / scale], dtype=torch.float32, device="cpu")
            self._factors = (scale, pair[0], pair[1])
        return self._factors

    def _become(self, state: LossScaleState) -> None:
        if self._control is not None and state is not self.state:
            pack_(self._control, state)
        self.state = state

    def _report_of_state(self, finite: Tensor, losses: Sequence[Tensor]) -> Tensor:
        """Return the report of a step, in the form of polyamp's operators."""
        device = finite.device
        losses_finite = non_finite(losses, device) == 0 if losses else kept(1, torch.int32, device)
        return report_of(self.state, finite, losses_finite)


class _Round:
    """The reports on one scaled loss, or on several accumulated losses, until the next loss is scaled."""

    def __init__(self, before: LossScaleState) -> None:
        self.before = before
        self.is_over = False
        self._reporters: set[int] = set()
        self._finite: bool | Tensor = True

    def takes(self, reporter: object) -> bool:
        """Return whether a report belongs to this round; a second report of the same optimizer starts a new one."""
        return bool(self._reporters) and not (self.is_over or reporter is None or id(reporter) in self._reporters)

    def add(self, finite: bool | Tensor, reporter: object) -> bool | Tensor:
        """Add a report, and return whether all reports so far were of finite gradients."""
        self._reporters.add(id(reporter))
        if isinstance(finite, Tensor) and isinstance(self._finite, Tensor):
            finite = finite.to(self._finite.device)
        self._finite = finite if self._finite is True else self._finite & finite
        return self._finite


class LateValues:
    """A queue for one small tensor, which is copied to the host without a sync on devices with streams (CUDA, XPU)."""

    def __init__(self) -> None:
        self._copy: Tensor | None = None
        self._arrival: Any = None

    @property
    def is_under_way(self) -> bool:
        """Whether values were sent and not yet received."""
        return self._copy is not None

    def send(self, values: Tensor) -> None:
        """Start the copy, unless an earlier one is still under way or a CUDA graph is captured."""
        # While a graph is captured the host does not read values.
        if self.is_under_way or is_captured():
            return
        current_stream = _streams_of(values.device)
        self._copy = values.to("cpu", non_blocking=current_stream is not None)
        self._arrival = current_stream and current_stream(values.device).record_event()

    def receive(self) -> list[Any] | None:
        """Return the values if they have arrived, and forget them; else return None."""
        if self._copy is None or is_captured():
            return None
        if self._arrival is not None and not self._arrival.query():
            return None
        values: list[Any] = self._copy.tolist()
        self._copy = self._arrival = None
        return values


def _streams_of(device: torch.device) -> Any:
    """Return the function for a device's current stream, whose events report arrivals; None without streams."""
    return None if device.type == "cpu" else getattr(torch.get_device_module(device), "current_stream", None)


def is_finite(loss: Tensor) -> bool:
    """Return whether all elements of a loss are finite. Waits for the device."""
    return math.isfinite(loss.item()) if loss.dim() == 0 else bool(loss.isfinite().all())


def non_finite(losses: Sequence[Tensor], device: torch.device) -> Tensor:
    """Return a float32 scalar: 1.0 if an element of these losses (at least one) is inf or NaN, else 0.0."""
    flags = [loss.isfinite().all().to(device) for loss in losses]
    return (torch.stack(flags).all() if len(flags) > 1 else flags[0]).logical_not().float()


def _losses(loss: Any) -> list[Tensor]:
    """Return the losses of a container, each a floating-point tensor."""
    found = [loss] if isinstance(loss, Tensor) else list(leaves(loss))
    if not found:
        raise _no_loss(loss)
    for one in found:
        if not (isinstance(one, Tensor) and one.is_floating_point()):
            raise _no_loss(one)
    return found


def _no_loss(found: object) -> InvalidTypeError:
    kind = f"a tensor of {found.dtype}" if isinstance(found, Tensor) else shown(found)
    return no_loss(kind, allowed="a floating torch.Tensor, or such tensors in lists, tuples and dicts")
