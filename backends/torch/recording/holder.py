"""What `polyamp.lint` judges in addition to a plan: the optimizer that a step can reach, and its 16-bit parameters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from polyamp.backends.torch.dtypes import SIXTEEN_BIT
from polyamp.backends.torch.recording.reach import Reach, names_of
from polyamp.backends.torch.step.optimizer import LossScaledOptimizer
from polyamp.diagnosis.lint import Holder, Kind
from polyamp.policies import Policy


def holder(target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], policy: Policy, optimizer: Any) -> Holder:
    """Return what lint judges in addition to a plan; see `polyamp.interface.Adapter.holder`."""
    reach = Reach(optimizer, target, args, dict(kwargs))
    wrapped = reach.all_of(LossScaledOptimizer)
    is_scaled = any(scaler.is_enabled() for scaler in reach.all_of(torch.amp.GradScaler))
    is_plain = optimizer is not None or reach.all_of(torch.optim.Optimizer)
    kind: Kind = "wrapped" if wrapped else "native scaler" if is_scaled else "plain" if is_plain else ""
    low = [param for param in dict.fromkeys(reach.parameters()) if param.dtype in SIXTEEN_BIT]
    names = tuple(names_of(reach.modules(), low).values())
    return Holder("torch", kind, names, has_masters=any(one.masters is not None for one in wrapped))
