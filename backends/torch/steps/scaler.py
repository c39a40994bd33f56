"""The loss scale of one optimizer: multiplies losses, and moves by `polyamp.advance`.

Its state is Python numbers while decisions are made on the host, and scalar tensors once they are made on the device.
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
from polyamp.backends.torch.steps import refusals
from polyamp.backends.torch.steps.late import LateValues
from polyamp.backends.torch.steps.onlookers import are_looking
from polyamp.errors import InvalidTypeError
from polyamp.limits import report_limits, report_nonfinite_loss
from polyamp.loss_scale import LossScale, LossScaleState, advance, on_host
from polyamp.refusals import no_loss, non_finite_loss

_WIDE = (torch.float32, torch.float64)


class LossScaler:
    """Holds a `LossScale`'s state and applies it to torch tensors.

    >>> scaler = LossScaler(LossScale(init=8.0))
    >>> scaler.scale(torch.tensor(2.0))
    tensor(16.)
    >>> scaler.advance(torch.tensor(True))
    >>> scaler.state.scale
    tensor(8.)

    Args:
        config: the settings.
        compute: the format that forward passes compute in, for what is said of losses that are not finite.
    """

    def __init__(self, config: LossScale, compute: str | None = None) -> None:
        self.config = config.in_float32()  # so that host and device go through the same scales
        self.compute = compute
        self.state = self.config.initial_state()
        self._round = _Round(self.state)
        self._factors = (0.0, torch.empty(0), torch.empty(0))  # a host scale, and it and its inverse as tensors
        self._late = LateValues()
        self._control: Tensor | None = None  # the state again, where polyamp's operators change it

    def __getstate__(self) -> dict[str, Any]:
        return {"config": self.config, "compute": self.compute, "state": on_host(self.state)}

    def __setstate__(self, saved: dict[str, Any]) -> None:
        LossScaler.__init__(self, saved["config"], saved["compute"])
        self.state = saved["state"]
        self._round = _Round(self.state)

    @property
    def multiplies(self) -> bool:
        """Whether a loss that was scaled can differ from one that was not."""
        return self.config.check and not self.config.min == self.config.max == 1

    def scale(self, loss: Any) -> Any:
        """A loss, or losses in containers, in float32 (float64 stays) times the loss scale.

        Raises:
            InvalidTypeError: no floating tensor.
        """
        _losses(loss)
        self._round.is_over = True
        if self._control is not None and is_captured():
            self.state = unpack(self._control.clone())  # what the graph reads at every replay
        return map_leaves(self._multiply, loss)

    def suspects(self, loss: Any, *, alone: bool = True) -> list[Tensor]:
        """Those of the losses that may be inf or NaN, which skips their step: on the CPU those that are, and on other
        devices, where looking would stop the device, all.

        Args:
            loss: what `scale` takes.
            alone: whether no other rank waits for this one, which an error here would leave waiting.

        Raises:
            InvalidTypeError: no floating tensor.
            NonFiniteLossError: under ``nonfinite_loss="raise"``, one on the CPU that is.
        """
        if not self.config.check or torch.compiler.is_compiling():
            return []
        found = [one.detach() for one in _losses(loss) if one.device.type != "cpu" or not is_finite(one)]
        if any(one.device.type == "cpu" for one in found):
            self.report_loss(found[0], alone=alone, where="scaling the loss")
        return found

    def report_loss(self, found: object, *, alone: bool, where: str) -> None:
        """Warn, or raise, since a loss was inf or NaN; see `suspects`. A step that is only looked at ends there."""
        if are_looking():
            raise non_finite_loss(found, where=where)
        config = self.config if alone else replace(self.config, nonfinite_loss="skip")
        was_half = isinstance(found, Tensor) and found.dtype == torch.float16
        compute = "float16" if was_half and self.compute is None else self.compute
        report_nonfinite_loss(config, compute=compute, where=where, found=found, stacklevel=_STACKLEVEL)

    def inverse_scale(self, state: LossScaleState | None = None) -> Tensor:
        """What gradients are multiplied by: float32 scalar, the correctly rounded inverse of the scale.

        Args:
            state: the state that the loss was scaled under; None is the present one.
        """
        scale = (self.state if state is None else state).scale
        if not isinstance(scale, Tensor):
            return self._host_factors(scale)[2]
        return scale.double().reciprocal().float() if scale.device.type != "mps" else scale.reciprocal()

    def advance(self, finite: bool | Tensor, reporter: object = None, losses: Sequence[Tensor] = ()) -> None:
        """Advance the state: on the host for a bool, else by tensors alone on the device of ``finite``.

        Where several optimizers step on the gradients of one loss, each reports what it found in its own, and the state
        advances once: by whether all were finite.

        >>> scaler = LossScaler(LossScale(init=8.0))
        >>> for optimizer, finite in (("a", False), ("b", True), ("c", False)):
        ...     scaler.advance(finite, reporter=optimizer)
        >>> scaler.state.scale
        4.0

        Args:
            finite: whether the step was made.
            reporter: the optimizer.
            losses: on devices, for the report that arrives later.
        """
        if not self._round.takes(reporter):
            self._round = _Round(self.state)
        before, finite = self._round.before, self._round.add(finite, reporter)
        if isinstance(finite, bool):
            state = before if isinstance(before.scale, float) else on_host(before)
            self._become(advance(self.config, state, finite))
        else:
            self._become(advance(self.config, on_device(before, finite.device), finite, where))
            if not self._late.is_under_way:
                self._late.send(self._report_of_state(finite, losses))

    def opens_round(self, reporter: object) -> bool:
        """Whether the next report is the first on its loss, so that an operator may move the state; see `advance`."""
        return not self._round.takes(reporter)

    def control_on(self, device: torch.device) -> Tensor:
        """The state as polyamp's operators change it in place; see ``control.py``. It stays the same tensor."""
        if self._control is None or self._control.device != device:
            refusals.check_first_use(captured=is_captured())
            self._control = torch.zeros(SIZE, dtype=torch.int32, device=device)
            pack_(self._control, self.state)
        return self._control

    def advanced(self, report: Tensor, reporter: object) -> None:
        """An operator has advanced the state in `control_on`, and reported; see `advance`."""
        self._round = _Round(self.state)
        self._round.add(applied_flag(report), reporter)
        self.state = unpack(report)
        self._late.send(report)

    def holders(self) -> Iterator[Any]:
        """The objects that hold what this knows of losses and reports, for `keeping.keep`."""
        yield from (self, self._round)

    def set(self, scale: object, *, where: str) -> None:
        """Go on with another scale; what is counted stays as it is.

        Raises:
            InvalidTypeError: no number.
            InvalidValueError: a number outside of the settings.
        """
        state = on_host(self.state)
        self.resume(state._replace(scale=refusals.checked_scale(self.config, scale, where=where)))

    def load(self, saved: Mapping[str, Any]) -> None:
        """Continue from `LossScale.to_state_dict`; see there for the errors."""
        self.resume(self.config.from_state_dict(saved))

    def resume(self, state: LossScaleState) -> None:
        """Continue from a state."""
        self._become(state)
        self._round = _Round(state)

    def report(self, explain: Callable[[], str]) -> None:
        """After a step: say what the host knows.

        Args:
            explain: what was not finite, for the error.

        Raises:
            LossScaleError: by `polyamp.limits.report_limits`.
        """
        if isinstance(self.state.scale, float):
            report_limits(self.config, self.state, explain)

    def report_earlier_step(self, explain: Callable[[], str], *, alone: bool = True) -> None:
        """Before a step: say what has arrived from the device since the last one, without waiting.

        Args:
            explain: what is not finite now, for the error.
            alone: as of `suspects`.

        Raises:
            LossScaleError: by `polyamp.limits.report_limits`.
            NonFiniteLossError: under ``nonfinite_loss="raise"``, a loss was inf or NaN.
        """
        arrived = self._late.receive()
        if arrived is None:
            return
        state, losses_were_finite = decode(arrived)
        if not losses_were_finite:
            self.report_loss("inf or NaN", alone=alone, where="scaling the loss of an earlier step")
        report_limits(self.config, state, explain)

    def _multiply(self, loss: Tensor) -> Tensor:
        if not self.config.check:
            return loss
        wide = loss if loss.dtype in _WIDE else loss.float()  # before the product: 16 bits overflow at once
        scale = self.state.scale
        return wide * (scale.to(loss.device) if isinstance(scale, Tensor) else self._host_factors(scale)[1])

    def _host_factors(self, scale: float) -> tuple[float, Tensor, Tensor]:
        """Scalars on the CPU, which torch takes as numbers beside tensors of any device. Kept while the scale stays."""
        if scale != self._factors[0]:
            pair = torch.tensor([scale, 1.0 / scale], dtype=torch.float32, device="cpu")
            self._factors = (scale, pair[0], pair[1])
        return self._factors

    def _become(self, state: LossScaleState) -> None:
        if self._control is not None and state is not self.state:
            pack_(self._control, state)
        self.state = state

    def _report_of_state(self, finite: Tensor, losses: Sequence[Tensor]) -> Tensor:
        """What polyamp's operators report of a step."""
        device = finite.device
        losses_finite = non_finite(losses, device) == 0 if losses else kept(1, torch.int32, device)
        return report_of(self.state, finite, losses_finite)


class _Round:
    """The reports on one scaled loss, or on several that were added up, until the next one is scaled."""

    def __init__(self, before: LossScaleState) -> None:
        self.before = before
        self.is_over = False
        self._reporters: set[int] = set()
        self._finite: bool | Tensor = True

    def takes(self, reporter: object) -> bool:
        """Whether a report belongs to this round; one that reports again has begun a new one."""
        return bool(self._reporters) and not (self.is_over or reporter is None or id(reporter) in self._reporters)

    def add(self, finite: bool | Tensor, reporter: object) -> bool | Tensor:
        """Whether all reports were of finite gradients, this one included."""
        self._reporters.add(id(reporter))
        if isinstance(finite, Tensor) and isinstance(self._finite, Tensor):
            finite = finite.to(self._finite.device)
        self._finite = finite if self._finite is True else self._finite & finite
        return self._finite


_STACKLEVEL = 8  # of a warning, from where it is given to the user's call


def is_finite(loss: Tensor) -> bool:
    """Whether all elements of a loss are. Waits for the device."""
    return math.isfinite(loss.item()) if loss.dim() == 0 else bool(loss.isfinite().all())


def non_finite(losses: Sequence[Tensor], device: torch.device) -> Tensor:
    """Float32 scalar: 1.0 where an element of any of these losses, of which there is one, is inf or NaN, else 0.0.

    >>> non_finite([torch.ones(2), torch.tensor(math.inf)], torch.device("cpu"))
    tensor(1.)
    """
    flags = [loss.isfinite().all().to(device) for loss in losses]
    return (torch.stack(flags).all() if len(flags) > 1 else flags[0]).logical_not().float()


def _losses(loss: Any) -> list[Tensor]:
    """The losses of a container, each a floating tensor."""
    found = [loss] if isinstance(loss, Tensor) else list(leaves(loss))
    if not found:
        raise _no_loss(loss)
    for one in found:
        if not (isinstance(one, Tensor) and one.is_floating_point()):
            raise _no_loss(one)
    return found


def _no_loss(found: object) -> InvalidTypeError:
    shown = f"a tensor of {found.dtype}" if isinstance(found, Tensor) else f"{found!r} ({type(found).__name__})"
    return no_loss(shown, allowed="a floating torch.Tensor, or such tensors in lists, tuples and dicts")
