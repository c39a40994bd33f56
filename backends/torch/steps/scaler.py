"""The loss scale of one optimizer: multiplies losses, and moves by `polyamp.advance`.

Its state is Python numbers while decisions are made on the host, and scalar tensors once they are made on the device.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
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
from polyamp.backends.torch.steps.late import LateValues
from polyamp.backends.torch.steps.refusals import check_first_use
from polyamp.errors import InvalidTypeError
from polyamp.limits import report_limits
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
    """

    def __init__(self, config: LossScale) -> None:
        self.config = config.in_float32()  # so that host and device go through the same scales
        self.state = self.config.initial_state()
        self._round = _Round(self.state)
        self._factors = (0.0, torch.empty(0), torch.empty(0))  # a host scale, and it and its inverse as tensors
        self._unchecked_losses: list[Tensor] = []
        self._alone = True
        self._late = LateValues()
        self._control: Tensor | None = None  # the state again, where polyamp's operators change it

    def __getstate__(self) -> dict[str, Any]:
        return {"config": self.config, "state": on_host(self.state)}

    def __setstate__(self, saved: dict[str, Any]) -> None:
        LossScaler.__init__(self, saved["config"])
        self.state = saved["state"]
        self._round = _Round(self.state)

    def scale(self, loss: Any, *, alone: bool = True) -> Any:
        """A loss, or losses in containers, in float32 (float64 stays) times the loss scale.

        Args:
            loss: the loss.
            alone: whether no other rank waits for this one. With others an error here would leave them waiting: a loss
                that is not finite skips the step on all, and `StepResult.reason` says why.

        Raises:
            InvalidTypeError: no floating tensor.
            NonFiniteLossError: inf or NaN on the CPU. On other devices looking would stop the device: it is reported
                when that step is skipped, or at a later step where the optimizer skips on the device.
        """
        self._alone = alone
        losses = [loss] if isinstance(loss, Tensor) else list(leaves(loss))
        if not losses:
            raise _no_loss(loss)
        for tensor in losses:
            self._check(tensor)
        self._round.is_over = True
        if self._control is not None and is_captured():
            self.state = unpack(self._control.clone())  # what the graph reads at every replay
        return map_leaves(self._multiply, loss)

    def inverse_scale(self, state: LossScaleState | None = None) -> Tensor:
        """What gradients are multiplied by: float32 scalar, the correctly rounded inverse of the scale.

        Args:
            state: the state that the loss was scaled under; None is the present one.
        """
        scale = (self.state if state is None else state).scale
        if not isinstance(scale, Tensor):
            return self._host_factors(scale)[2]
        return scale.double().reciprocal().float() if scale.device.type != "mps" else scale.reciprocal()

    def advance(self, finite: bool | Tensor, reporter: object = None) -> None:
        """Advance the state: on the host for a bool, else by tensors alone on the device of ``finite``.

        Where several optimizers step on the gradients of one loss, each reports what it found in its own, and the state
        advances once: by whether all were finite.

        >>> scaler = LossScaler(LossScale(init=8.0))
        >>> for optimizer, finite in (("a", False), ("b", True), ("c", False)):
        ...     scaler.advance(finite, reporter=optimizer)
        >>> scaler.state.scale
        4.0
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
                self._late.send(self._report_of_state(finite))
        self._unchecked_losses.clear()

    def opens_round(self, reporter: object) -> bool:
        """Whether the next report is the first on its loss, so that an operator may move the state; see `advance`."""
        return not self._round.takes(reporter)

    def control_on(self, device: torch.device) -> Tensor:
        """The state as polyamp's operators change it in place; see ``control.py``. It stays the same tensor."""
        if self._control is None or self._control.device != device:
            check_first_use(captured=is_captured())
            self._control = torch.zeros(SIZE, dtype=torch.int32, device=device)
            pack_(self._control, self.state)
        return self._control

    def advanced(self, report: Tensor, reporter: object) -> None:
        """An operator has advanced the state in `control_on`, and reported; see `advance`."""
        self._round = _Round(self.state)
        self._round.add(applied_flag(report), reporter)
        self.state = unpack(report)
        self._unchecked_losses.clear()
        self._late.send(report)

    def losses_on(self, device: torch.device) -> list[Tensor]:
        """Those that `scale` did not look at, or of float64 ones what is NaN where they are not finite."""
        losses = [loss - loss if loss.dtype == torch.float64 else loss for loss in self._unchecked_losses]
        return [loss.to(device, torch.float32 if loss.dtype == torch.float64 else loss.dtype) for loss in losses]

    def forget_losses(self) -> None:
        """A window was abandoned: its losses are not to be reported."""
        self._unchecked_losses.clear()

    def holders(self) -> Iterator[Any]:
        """The objects that hold what this knows of losses and reports, for `keeping.keep`."""
        yield from (self, self._round)

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

    def report_earlier_step(self, explain: Callable[[], str]) -> None:
        """Before a step: say what has arrived from the device since the last one, without waiting.

        Args:
            explain: what is not finite now, for the error.

        Raises:
            LossScaleError: by `polyamp.limits.report_limits`.
            NonFiniteLossError: a loss was inf or NaN.
        """
        arrived = self._late.receive()
        if arrived is None:
            return
        state, losses_were_finite = decode(arrived)
        if not losses_were_finite and self._alone:
            raise non_finite_loss("inf or NaN", where="scaling the loss of an earlier step")
        report_limits(self.config, state, explain)

    def losses_were_finite(self) -> bool:
        """Whether the losses were that `scale` did not look at. Waits for the device, and forgets them."""
        finite = all(map(_is_finite, self._unchecked_losses))
        self._unchecked_losses.clear()
        return finite

    def _check(self, loss: Any) -> None:
        if not (isinstance(loss, Tensor) and loss.is_floating_point()):
            raise _no_loss(loss)
        if not self.config.check or torch.compiler.is_compiling():
            return
        if loss.device.type != "cpu" or not self._alone:
            self._unchecked_losses.append(loss.detach())
        elif not _is_finite(loss):
            raise non_finite_loss(loss.detach())

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

    def _report_of_state(self, finite: Tensor) -> Tensor:
        """What polyamp's operators report of a step."""
        device = finite.device
        losses = [loss.isfinite().all().to(device) for loss in self._unchecked_losses]
        losses_finite = torch.stack(losses).all() if losses else kept(1, torch.int32, device)
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


def _is_finite(loss: Tensor) -> bool:
    return math.isfinite(loss.item()) if loss.dim() == 0 else bool(loss.isfinite().all())


def _no_loss(found: object) -> InvalidTypeError:
    shown = f"a tensor of {found.dtype}" if isinstance(found, Tensor) else f"{found!r} ({type(found).__name__})"
    return no_loss(shown, allowed="a floating torch.Tensor, or such tensors in lists, tuples and dicts")
