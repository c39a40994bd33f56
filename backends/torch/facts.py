"""PyTorch's part of `polyamp.lint`: facts about a model, an optimizer and one step, whose values do not matter."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from polyamp.backends.torch import unstable
from polyamp.backends.torch.dtypes import SIXTEEN_BIT, name_of
from polyamp.backends.torch.optimizer import LossScaledOptimizer
from polyamp.backends.torch.recording.changes import Changes
from polyamp.backends.torch.recording.mode import Watcher, operator_of
from polyamp.backends.torch.recording.reach import Reach, names_of
from polyamp.backends.torch.recording.record import Run
from polyamp.backends.torch.recording.widening import crosses_16_bits, tensors
from polyamp.backends.torch.tracking import Tracker
from polyamp.backends.torch.user_code import users_line
from polyamp.diagnosis.lint import Arithmetic, ClassLoss, Facts, OptimizerState, Product, UserCast, small_steps
from polyamp.errors import is_number
from polyamp.policies import Policy


def facts(target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], policy: Policy, optimizer: Any) -> Facts:
    """Collect the facts that lint judges; see `polyamp.adapters.Adapter.facts`."""
    # With arguments the target runs once, in float32, and its effects are undone.
    reach = Reach(optimizer, target, args, dict(kwargs))
    low = [param for param in dict.fromkeys(reach.parameters()) if param.dtype in SIXTEEN_BIT]
    survey = _surveyed(target, args, kwargs, policy)
    return Facts(
        "torch",
        policy,
        optimizer=_state_of(optimizer, reach),
        low_parameters=tuple(names_of(reach.modules(), low).values()),
        has_masters=any(one.masters is not None for one in reach.all_of(LossScaledOptimizer)),
        casts=tuple(survey.casts),
        products=tuple(survey.products),
        losses=tuple(survey.losses),
        small_steps=tuple(small_steps(survey.arithmetic)),
    )


def _state_of(optimizer: Any, reach: Reach) -> OptimizerState:
    scalers = any(scaler.is_enabled() for scaler in reach.all_of(torch.amp.GradScaler))
    known = reach.all_of(torch.optim.Optimizer)
    if any(isinstance(one, LossScaledOptimizer) for one in known):
        return "wrapped"
    if scalers:
        return "native scaler"
    return "plain" if known or optimizer is not None else ""


def _takes(target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Return whether the target accepts these arguments; lint also accepts a bare model without them."""
    if args or kwargs:
        return True
    called = target.forward if isinstance(target, nn.Module) else target
    try:
        inspect.signature(called).bind()
    except (TypeError, ValueError):
        return False
    return True


def _surveyed(target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], policy: Policy) -> Survey:
    """Return the survey of a run; empty if there was no run."""
    run = Run(target, args, kwargs, policy, True)
    survey = Survey(run.tracker, run.changes)
    if _takes(target, args, kwargs):
        with run.undone():
            run.forward(survey.entered())
    return survey


class Survey(Watcher):  # type: ignore[no-untyped-call]
    """Observes the forward pass of a step: the sizes of its products and losses, and its casts."""

    def __init__(self, tracker: Tracker, changes: Changes) -> None:
        super().__init__(True, changes)
        self.products: list[Product] = []
        self.losses: list[ClassLoss] = []
        self.casts: list[UserCast] = []
        self.arithmetic: list[Arithmetic] = []
        self._tracker = tracker
        self._values: Any = WeakTensorKeyDictionary()  # a number for each tensor, unlike `id` never used again
        self._numbers = itertools.count()

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Observe operations, and the functions that the user's code calls."""
        with self, _Casts(self._tracker, self.casts):
            yield

    def look(self, op: Any, args: Sequence[Any], out: Any) -> None:
        """Record sizes in the forward pass."""
        native, name = operator_of(op).native, operator_of(op).name
        if unstable.running_node() is not None:
            return
        if name in ("add", "sub", "mul") and isinstance(out, Tensor):
            *inputs, output = (self._values.setdefault(one, next(self._numbers)) for one in tensors([*args, out]))
            place = f"{self._tracker.path} {users_line()}".strip()
            self.arithmetic.append(Arithmetic(name, inputs, output, list(filter(is_number, args)), place))
        if native in _LOSSES:
            self.losses.append(ClassLoss(self._tracker.path, *_size_of_loss(*args)))
        if native in _PRODUCTS:
            format_name = name_of(next(tensors([out])).dtype)
            self.products.append(Product(self._tracker.path, name, format_name, _sizes(native, args)))


class _Casts(TorchFunctionMode):
    """Records casts to and from 16 bits that the user's code makes under autocast."""

    def __init__(self, tracker: Tracker, casts: list[UserCast]) -> None:
        super().__init__()
        self._tracker, self._casts = tracker, casts
        self._before: Any = None  # the function that was called before

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **(kwargs or {}))
        # In ``y.to(x)`` and ``y.to(x.dtype)`` the policy still chooses the format.
        follows, self._before = (isinstance(args[-1], Tensor) and len(args) > 1) or self._before == _DTYPE, function
        if function not in _CASTS or follows:
            return out
        if crosses_16_bits(args[0], out) and torch.is_autocast_enabled(out.device.type):
            line = users_line(directly=True)
            if line:
                where = f"{self._tracker.path} {line}".strip()
                self._casts.append(UserCast(where, f"Tensor.{function.__name__}", name_of(out.dtype)))
        return out


_CASTS = {
    *(Tensor.half, Tensor.bfloat16, Tensor.float, Tensor.double),
    *(Tensor.to, Tensor.type),
}
_DTYPE = Tensor.dtype.__get__  # type: ignore[attr-defined]


_LOSSES = {"nll_loss_forward", "nll_loss2d_forward"}
_SUM = 2  # torch's value of reduction="sum"


def _size_of_loss(logits: Tensor, target: Tensor, weight: Any, reduction: int, *_: Any) -> tuple[int, int]:
    """Return the number of classes, and the divisor of the loss: 1 for a sum, else the number of targets."""
    return logits.shape[-1 if logits.dim() == 1 else 1], 1 if reduction == _SUM else target.numel()


def _sizes(native: str, args: Sequence[Any]) -> tuple[int, ...]:
    """Return the channels of a convolution; else the rows, the contracted dimension and the columns of a product."""
    if native == "convolution":
        weight, groups = args[1], args[-1]
        return weight.shape[1] * groups, weight.shape[0]
    left, right = [one for one in args if isinstance(one, Tensor)][-2:] if "mm" in native else args[:2]
    return left.shape[-2], left.shape[-1], right.shape[-1 if "mm" in native else -2]


_PRODUCTS = {
    *("mm", "bmm", "addmm", "baddbmm", "addbmm", "convolution"),
    *("_scaled_dot_product_flash_attention", "_scaled_dot_product_flash_attention_for_cpu"),
    *("_scaled_dot_product_efficient_attention", "_scaled_dot_product_cudnn_attention"),
}
