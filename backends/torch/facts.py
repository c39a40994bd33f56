"""PyTorch's part of `polyamp.lint`: facts about a model, an optimizer and one step, whose values do not matter."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from polyamp.agreement import Disagreement, disagreement
from polyamp.backends.torch import unstable
from polyamp.backends.torch.devices import devices
from polyamp.backends.torch.dtypes import SIXTEEN_BIT
from polyamp.backends.torch.graphs.explain import captured_plan
from polyamp.backends.torch.recording.changes import Changes
from polyamp.backends.torch.recording.mode import Watcher
from polyamp.backends.torch.recording.operators import operator_of
from polyamp.backends.torch.recording.reach import Reach, names_of
from polyamp.backends.torch.recording.running import Run
from polyamp.backends.torch.recording.widening import tensors
from polyamp.backends.torch.steps.optimizer import LossScaledOptimizer
from polyamp.backends.torch.tracking import Tracker
from polyamp.backends.torch.user_code import calling_line
from polyamp.diagnosis.facts import ClassLoss, Facts, OptimizerState, Product, UserCast
from polyamp.errors import PolyampError
from polyamp.plan import Plan
from polyamp.policies import Policy


def facts(target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], policy: Policy, optimizer: Any) -> Facts:
    """Collect the facts that lint judges; see `polyamp.adapter.CollectFacts`."""
    # With arguments the target runs once, in float32, and its effects are undone.
    reach = Reach(optimizer, target, args, dict(kwargs))
    low = [param for param in dict.fromkeys(reach.parameters()) if param.dtype in SIXTEEN_BIT]
    survey, differentiates = _surveyed(target, args, kwargs, policy)
    return Facts(
        "torch",
        policy,
        None if differentiates else _plan(target, args, kwargs, policy),
        optimizer=_state_of(optimizer, reach),
        low_parameters=tuple(names_of(reach.modules(), low).values()),
        has_masters=any(one.masters is not None for one in reach.all_of(LossScaledOptimizer)),
        casts=tuple(survey.casts),
        products=tuple(survey.products),
        losses=tuple(survey.losses),
        devices=devices(),
        disagreement=_disagreement(reach.all_of(LossScaledOptimizer), policy),
    )


def _disagreement(optimizers: Iterable[LossScaledOptimizer], policy: Policy) -> Disagreement | None:
    scalers = (one.scaler for one in optimizers)
    return next(filter(None, (disagreement(one.settings, one.compute, policy) for one in scalers)), None)


def _state_of(optimizer: Any, reach: Reach) -> OptimizerState:
    scalers = any(scaler.is_enabled() for scaler in reach.all_of(torch.amp.GradScaler))
    known = reach.all_of(torch.optim.Optimizer)
    if any(isinstance(one, LossScaledOptimizer) for one in known):
        return "wrapped twice" if scalers else "wrapped"
    if scalers:
        return "native scaler"
    return "plain" if known or optimizer is not None else ""


def _plan(target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], policy: Policy) -> Plan | None:
    """Return the plan, or None if the code cannot be captured."""
    if not _takes(target, args, kwargs):
        return None
    try:
        return captured_plan(target, args, kwargs, policy)
    except PolyampError:
        return None


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


def _surveyed(target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], policy: Policy) -> tuple[Survey, bool]:
    """Return the survey of a run, and whether the target computes gradients itself. It is empty if there was no run."""
    run = Run(target, args, kwargs, policy, True)
    survey = Survey(run.tracker, run.changes)
    if _takes(target, args, kwargs):
        with run.undone():
            run.forward(survey.entered(), lambda leaf, grad: None)
    return survey, run.differentiates


class Survey(Watcher):  # type: ignore[no-untyped-call]
    """Observes the forward pass of a step: the sizes of its products and losses, and its casts."""

    def __init__(self, tracker: Tracker, changes: Changes) -> None:
        super().__init__(True, changes)
        self.products: list[Product] = []
        self.losses: list[ClassLoss] = []
        self.casts: list[UserCast] = []
        self._tracker = tracker

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Observe operations, and the functions that the user's code calls."""
        with self, _Casts(self._tracker, self.casts):
            yield

    def look(self, op: Any, args: Sequence[Any], out: Any) -> None:
        """Record sizes in the forward pass."""
        native = operator_of(op).native
        if unstable.running_node() is not None:
            return
        if native in _LOSSES:
            self.losses.append(ClassLoss(self._tracker.path, *_size_of_loss(*args)))
        sizes = _SIZES.get(native)
        if sizes is not None:
            format_name = str(next(tensors([out])).dtype).removeprefix("torch.")
            for one in sizes(*args):
                self.products.append(Product(self._tracker.path, operator_of(op).name, format_name, one))


class _Casts(TorchFunctionMode):
    """Records casts to and from 16 bits that the user's code makes under autocast."""

    def __init__(self, tracker: Tracker, casts: list[UserCast]) -> None:
        super().__init__()
        self._tracker, self._casts = tracker, casts

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **(kwargs or {}))
        if function in _CASTS and _crosses_16_bits(args[0], out) and torch.is_autocast_enabled(out.device.type):
            line = calling_line()
            if line:
                where = f"{self._tracker.path} {line}".strip()
                format_name = str(out.dtype).removeprefix("torch.")
                self._casts.append(UserCast(where, f"Tensor.{function.__name__}", format_name))
        return out


_CASTS = {
    *(Tensor.half, Tensor.bfloat16, Tensor.float, Tensor.double),
    *(Tensor.to, Tensor.type, Tensor.type_as),
}


def _crosses_16_bits(before: Any, after: Any) -> bool:
    if not (isinstance(before, Tensor) and isinstance(after, Tensor) and before.is_floating_point()):
        return False
    return before.dtype != after.dtype and not SIXTEEN_BIT.isdisjoint((before.dtype, after.dtype))


# Sizes.

_LOSSES = {"nll_loss_forward", "nll_loss2d_forward"}
_SUM = 2  # torch's value of reduction="sum"


def _size_of_loss(logits: Tensor, target: Tensor, weight: Any, reduction: int, *_: Any) -> tuple[int, int]:
    """Return the number of classes, and of rows that the loss is divided by; without reduction, its row count."""
    return logits.shape[-1 if logits.dim() == 1 else 1], 1 if reduction == _SUM else target.numel()


def _matrices(left: Tensor, right: Tensor, *_: Any) -> Iterable[dict[str, int]]:
    return [{"m": left.shape[-2], "n": right.shape[-1], "k": left.shape[-1]}]


def _added(_: Any, left: Tensor, right: Tensor, *__: Any) -> Iterable[dict[str, int]]:
    return _matrices(left, right)


def _attention(query: Tensor, key: Tensor, *_: Any) -> Iterable[dict[str, int]]:
    return [{"m": query.shape[-2], "n": key.shape[-2], "k": query.shape[-1]}]


def _recurrent(x: Tensor, from_input: Tensor, from_state: Tensor, *_: Any) -> Iterable[dict[str, int]]:
    return [{"m": x.shape[1], "n": weight.shape[0], "k": weight.shape[1]} for weight in (from_input, from_state)]


def _convolution(
    x: Tensor, weight: Tensor, bias: Any, stride: Any, padding: Any, dilation: Any, transposed: bool, *rest: Any
) -> Iterable[dict[str, int]]:
    groups = rest[-1]
    outer, inner = weight.shape[0], weight.shape[1] * groups
    channels = (outer, inner) if transposed else (inner, outer)
    return [dict(zip(("in_channels", "out_channels"), channels, strict=True))]


_SIZES: dict[str, Callable[..., Iterable[dict[str, int]]]] = {
    "mm": _matrices,
    "bmm": _matrices,
    "addmm": _added,
    "baddbmm": _added,
    "addbmm": _added,
    "convolution": _convolution,
    "mkldnn_rnn_layer": _recurrent,
    "_scaled_dot_product_flash_attention": _attention,
    "_scaled_dot_product_flash_attention_for_cpu": _attention,
    "_scaled_dot_product_efficient_attention": _attention,
    "_scaled_dot_product_cudnn_attention": _attention,
}
