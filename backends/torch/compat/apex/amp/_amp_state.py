"""The state of `apex.amp` in this process. Programs read it as ``apex.amp._amp_state``, or import this module.

Apex has a module and an object of this name, so here they are one: the module in ``sys.modules`` is the `AmpState`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from polyamp.backends.torch.compat.apex.amp.options import Properties
from polyamp.backends.torch.steps.losses import LossScalers
from polyamp.backends.torch.steps.scaler import LossScaler
from polyamp.errors import UsageError, warn_deprecated
from polyamp.loss_scale import LossScale


class AmpState(ModuleType):
    """What `initialize` decided, and the loss scales, which all its optimizers share.

    Attributes:
        opt_properties: the options; missing before the first call of `initialize`.
        loss_scalers: one `ShownScaler` for each loss id.
        verbosity: whether lines about overflows are printed.
        allow_incoming_model_not_fp32: whether `initialize` accepts 16-bit parameters.
        hard_override: whether it prints a warning where it would refuse a model.
        handle: the last `AmpHandle`; missing before the first.
        scalers: the loss scales.
    """

    opt_properties: Properties
    handle: Any

    def __init__(self) -> None:
        super().__init__(__name__)
        self.hard_override = self.allow_incoming_model_not_fp32 = False
        self.verbosity = 1
        self.loss_scalers: list[ShownScaler] = []
        self.scalers = LossScalers(LossScale.like("apex"))

    def start_scales(self, settings: LossScale, compute: str, count: int) -> None:
        """Start the loss scales anew. Optimizers of earlier calls of `initialize` use them too, as in Apex."""
        self.scalers.main = LossScaler(settings, compute)
        self.scalers.others.clear()
        self.loss_scalers = [ShownScaler(self.scalers, loss_id) for loss_id in range(count)]


class ShownScaler:
    """A loss scale under Apex's names.

    >>> shown = ShownScaler(LossScalers(LossScale.like("apex")), 1)
    >>> shown._loss_scale = 4.0
    >>> shown.loss_scale(), shown._unskipped, shown.dynamic
    (4.0, 0, True)

    Args:
        scalers: the loss scales.
        loss_id: number of the loss. Losses without an id in polyamp have number 0 here.
    """

    def __init__(self, scalers: LossScalers, loss_id: int) -> None:
        self._scalers = scalers
        self.key = loss_id or None

    @property
    def scaler(self) -> LossScaler:
        """Polyamp's loss scaler."""
        return self._scalers[self.key]

    @property
    def dynamic(self) -> bool:
        """Whether the scale changes."""
        return self.scaler.settings.dynamic

    def loss_scale(self) -> float:
        """Return the scale. Waits for the device if it is on one."""
        return float(self.scaler.state.scale)

    @property
    def _loss_scale(self) -> float:
        return self.loss_scale()

    @_loss_scale.setter
    def _loss_scale(self, scale: float) -> None:
        if self.dynamic:
            self.scaler.set(scale, where="loss_scaler._loss_scale = scale")
            return
        fixed = LossScaler(LossScale.fixed(scale), self.scaler.compute)
        if self.key is None:
            self._scalers.main = fixed
        else:
            self._scalers.others[self.key] = fixed

    @property
    def _unskipped(self) -> int:
        return int(self.scaler.state.good_steps)

    @_unskipped.setter
    def _unskipped(self, steps: int) -> None:
        self.scaler.resume(self.scaler.state._replace(good_steps=steps))


_amp_state = AmpState()


def warn_or_err(message: str, *, found: object = None, fix: str | None = None) -> None:
    """Print a warning if ``_amp_state.hard_override`` is set.

    Raises:
        UsageError: it is not set.
    """
    if not _amp_state.hard_override:
        raise UsageError(message, where="amp.initialize", found=found, fix=fix)
    print("Warning:  " + message)


def maybe_print(message: str, rank0: bool = False) -> None:
    """Print a message if ``_amp_state.verbosity`` is above 0; with ``rank0`` on the first rank only.

    >>> maybe_print("a line")
    a line
    """
    distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    if _amp_state.verbosity > 0 and not (rank0 and distributed and torch.distributed.get_rank() != 0):
        print(message)


def master_params(optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    """Yield the parameters that an optimizer trains: master weights in place of 16-bit parameters.

    >>> [param.shape for param in master_params(torch.optim.SGD([torch.ones(2)], lr=0.1))]
    [torch.Size([2])]
    """
    warn_deprecated("apex.amp.master_params(opt)", "opt.clip_grad_norm_(max_norm), or opt.param_groups")
    for group in optimizer.param_groups:
        yield from group["params"]


vars(_amp_state).update(globals())
sys.modules[__name__] = _amp_state
