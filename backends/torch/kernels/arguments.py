"""The numbers that the operators ``torch.ops.polyamp.*`` take besides parameters, as tensors on the CPU.

They are tensors because that is the only kind of list that every binding of PyTorch passes without cost.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from torch import Tensor

from polyamp.settings import LossScale

DECOUPLED, MAXIMIZE = 1, 2  # the flags of Adam's rules
NESTEROV = 1  # of SGD's rules, with MAXIMIZE


class Settings(NamedTuple):
    """The numbers of ``settings``, in their order."""

    # The others are those of `LossScale`; ``restart`` and ``after_growth`` encode ``late_growth`` as values of
    # ``good_steps``, -1 or 0.

    max_norm: float  # clip to this global L2 norm; inf does not clip
    advance: float  # whether this call, the last one of a step, advances the loss scale
    growth: float
    backoff: float
    min: float
    max: float
    interval: float
    hysteresis: float
    restart: float
    after_growth: float
    consecutive: float

    @classmethod
    def of(cls, config: LossScale, *, max_norm: float = math.inf, advance: bool = True) -> Settings:
        """Build from a `LossScale`."""
        restart = 0.0 if config.late_growth == "never" else -1.0
        after_growth = -1.0 if config.late_growth == "always" else 0.0
        numbers = (config.growth, config.backoff, config.min, config.max, config.interval, config.hysteresis)
        return cls(max_norm, advance, *numbers, restart, after_growth, config.consecutive)

    @property
    def config(self) -> LossScale:
        """The loss scale settings that these came from, as far as the update rule uses them."""
        late = {(0, 0): "never", (-1, 0): "after_overflow", (-1, -1): "always"}
        return LossScale(
            init=self.min,
            min=self.min,
            max=self.max,
            growth=self.growth,
            backoff=self.backoff,
            interval=int(self.interval),
            hysteresis=int(self.hysteresis),
            consecutive=bool(self.consecutive),
            late_growth=late[self.restart, self.after_growth],  # type: ignore[arg-type, index]
        )


class Adam(NamedTuple):
    """The numbers of one group in ``rules`` of ``adam_step_``."""

    lr: float | Tensor
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    flags: float


class SGD(NamedTuple):
    """The numbers of one group in ``rules`` of ``sgd_step_``, which has two more unused ones."""

    lr: float | Tensor
    momentum: float
    weight_decay: float
    flags: float
