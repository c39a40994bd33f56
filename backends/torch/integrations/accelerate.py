"""Hugging Face accelerate: an `Accelerator` that trains under a policy.

`prepare` changes one accelerator in place. The rest of a training script stays accelerate's own:

    accelerator = prepare(Accelerator(), "mixed_float16")
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for x, y in loader:
        loss = loss_fn(model(x), y)                           # the forward pass runs under the policy
        accelerator.backward(loss)                            # multiplied by the loss scale
        accelerator.clip_grad_norm_(model.parameters(), 1.0)  # unscaled first
        optimizer.step()                                      # tested; updates or skips
        optimizer.zero_grad()

Each prepared optimizer is an `AcceleratedOptimizer` around a `LossScaledOptimizer`, and all share one loss scale.
accelerate's code sees a scaler too, `SharedScaler`, through which it scales losses and saves the loss scale.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import wraps
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from polyamp import convert, wrap_optimizer
from polyamp.backends.torch.autocast.context import autocast
from polyamp.backends.torch.compat.grad_scaler import GradScaler, unscale_once
from polyamp.backends.torch.step.optimizer import LossScaledOptimizer
from polyamp.errors import InvalidTypeError, UnsupportedError, UsageError, kind_of, missing_trainer, wrapped_already
from polyamp.policies import Policy
from polyamp.policies import policy as make_policy

try:
    import accelerate
    from accelerate.optimizer import AcceleratedOptimizer
except ModuleNotFoundError as error:
    raise missing_trainer(error, where=__name__) from error


def prepare(
    accelerator: accelerate.Accelerator, policy: Policy | str | None = None, **options: Any
) -> accelerate.Accelerator:
    """Change an accelerator in place so that it trains under a policy, and return it.

    Call it before ``accelerator.prepare``. That method then wraps the optimizers, and runs the forward passes of models
    in an autocast region with outputs in ``policy.output``. It converts models first if the policy stores parameters in
    16 bits.

    >>> accelerator = prepare(accelerate.Accelerator(cpu=True), "mixed_float16", loss_scale=1024.0)
    >>> model = torch.nn.Linear(2, 1)
    >>> model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    >>> accelerator.backward(model(torch.ones(4, 2)).mean())
    >>> optimizer.step()
    >>> optimizer.step_was_skipped, accelerator.scaler.get_scale()
    (False, 1024.0)

    Args:
        accelerator: made without ``mixed_precision``.
        policy: a policy or its name; None is the current policy.
        **options: options of `polyamp.wrap_optimizer`.

    Raises:
        InvalidTypeError: ``accelerator`` is not an `accelerate.Accelerator`.
        UsageError: it has a precision of its own, or has prepared something already.
        UnsupportedError: a plugin scales losses itself (DeepSpeed, Megatron-LM), or it runs on XLA devices.
    """
    _check(accelerator)
    kind = type(accelerator)
    accelerator.__class__ = type(kind.__name__, (_UnderPolicy, kind), {})
    accelerator.policy, accelerator.wrap_options = make_policy(policy), options
    accelerator.scaler = SharedScaler(accelerator)
    return accelerator


class SharedScaler(GradScaler):
    """The loss scale of all optimizers that an accelerator has prepared, in the form that accelerate's code expects."""

    def __init__(self, accelerator: Any) -> None:
        super().__init__("cpu", enabled=False)  # the state is the optimizers'
        self._accelerator = accelerator

    @property
    def optimizers(self) -> list[LossScaledOptimizer]:
        """The wrapped optimizers. They share their loss scales."""
        return [each.optimizer for each in self._accelerator._optimizers if isinstance(each, _Optimizer)]

    def scale(self, outputs: Any) -> Any:
        """Return the loss in float32 (float64 stays) times the loss scale.

        Raises:
            UsageError: no optimizer was prepared, and the policy scales losses.
        """
        if self._accelerator.policy.loss_scale.scales and not self.optimizers:
            raise UsageError(
                "no optimizer was prepared",
                where="accelerator.backward(loss)",
                allowed="a call after accelerator.prepare(model, optimizer)",
                fix="prepare the optimizer with the same accelerator first",
            )
        return super().scale(outputs)

    def _lazy_init_scale_growth_tracker(self, device: object) -> None:
        """Do nothing: the state exists from the start. accelerate calls this before it loads a state for FSDP."""


class _Optimizer(AcceleratedOptimizer):
    """An `AcceleratedOptimizer` around a `LossScaledOptimizer`, which unscales and skips by itself."""

    @property
    def step_was_skipped(self) -> bool:
        """Whether the last step was skipped; if a device decided, reading this waits for the device."""
        return bool(self.optimizer.step_was_skipped)


class _UnderPolicy(accelerate.Accelerator):
    """The methods of `accelerate.Accelerator` that differ under a policy."""

    policy: Policy
    wrap_options: dict[str, Any]
    _is_preparing = False

    def prepare(self, *args: Any, **kwargs: Any) -> Any:
        for model in args:
            if isinstance(model, nn.Module):
                _apply(self.policy, model)  # here, since accelerate does not call `prepare_model` for FSDP2
        self._is_preparing = True
        try:
            prepared = super().prepare(*args, **kwargs)
        finally:
            self._is_preparing = False
        self._wrap_optimizers()  # now the models are on their devices, and `fully_shard` has replaced parameters
        return prepared

    def prepare_model(self, model: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        _apply(self.policy, model)
        prepared: nn.Module = super().prepare_model(model, *args, **kwargs)
        return prepared

    def prepare_optimizer(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        if isinstance(optimizer, LossScaledOptimizer):
            raise wrapped_already(f"a LossScaledOptimizer around {type(optimizer.inner).__name__}")
        prepared = super().prepare_optimizer(optimizer, *args, **kwargs)
        if not self._is_preparing:
            self._wrap_optimizers()
        return prepared

    def prepare_scheduler(self, scheduler: Any) -> Any:
        prepared = super().prepare_scheduler(scheduler)
        for optimizer in self._optimizers:  # accelerate looks for the plain optimizer, which is wrapped now
            if getattr(optimizer.optimizer, "inner", None) is getattr(scheduler, "optimizer", scheduler):
                prepared.optimizers = [optimizer]
        return prepared

    def unscale_gradients(self, optimizer: Any = None) -> None:
        chosen = self._optimizers if optimizer is None else optimizer
        for each in chosen if isinstance(chosen, list | tuple) else [chosen]:
            unscale_once(each.optimizer)

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2) -> Any:
        clipped = self._unscaled(parameters)
        if self.distributed_type.name == "FSDP" and all(one.masters is None for one in self.scaler.optimizers):
            return super().clip_grad_norm_(clipped, max_norm, norm_type)
        return nn.utils.clip_grad_norm_(clipped, max_norm, norm_type)

    def clip_grad_value_(self, parameters: Any, clip_value: float) -> None:
        if self.distributed_type.name == "FSDP":
            super().clip_grad_value_(parameters, clip_value)  # which refuses it
        nn.utils.clip_grad_value_(self._unscaled(parameters), clip_value)

    @contextmanager
    def autocast(self, autocast_handler: Any = None) -> Iterator[None]:
        handler = self.autocast_handler if autocast_handler is None else autocast_handler
        with autocast(self.policy if handler is None or handler.enabled else "float32"):
            yield

    def _wrap_optimizers(self) -> None:
        for prepared in self._optimizers:
            if not isinstance(prepared, _Optimizer):
                first = next(iter(self.scaler.optimizers), None)
                prepared.optimizer = wrap_optimizer(prepared.optimizer, self.policy, **self.wrap_options)
                if first is not None:
                    prepared.optimizer.share_scales(first)
                prepared.__class__, prepared.scaler = _Optimizer, None

    def _unscaled(self, parameters: Tensor | Iterable[Tensor]) -> list[Tensor]:
        """Unscale the parameters' gradients; return the parameters. torch's clipping finds the masters itself."""
        params = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        wanted = set(map(id, params))
        for optimizer in self.scaler.optimizers:
            if not wanted.isdisjoint(map(id, optimizer.model_parameters())):
                unscale_once(optimizer)
        return params


def _apply(policy: Policy, model: Any) -> None:
    """Convert a model if the policy has 16-bit parameters, and replace its forward pass by one in autocast.

    accelerate's ``unwrap_model`` undoes the replacement. A pass that is replaced already stays as it is.
    """
    if "_original_forward" in vars(model):
        return
    if policy.needs_master_weights:
        convert(model, policy)
    model._original_forward = own = model.forward
    function = getattr(own, "__func__", own)

    @wraps(function)
    def forward(*args: Any, **kwargs: Any) -> Any:
        with autocast(policy):
            outputs = function(*args, **kwargs)
        return policy.cast_to_output(outputs)

    model.forward = forward if function is own else MethodType(forward, model)


_OWN_SCALES = ("DEEPSPEED", "MEGATRON_LM", "XLA")  # of these no step passes through an optimizer's own `step`


def _check(accelerator: object) -> None:
    where = "prepare(accelerator, policy)"
    if not isinstance(accelerator, accelerate.Accelerator):
        raise InvalidTypeError(
            "the accelerator is not one of accelerate's",
            where=where,
            found=kind_of(accelerator),
            allowed="an accelerate.Accelerator",
            fix="prepare(Accelerator(), policy)",
        )
    if accelerator.distributed_type.name in _OWN_SCALES:
        raise UnsupportedError(
            "this plugin of accelerate steps by itself, outside of the optimizer",
            where=where,
            found=f"an Accelerator for {accelerator.distributed_type.value}",
            allowed="one process, DistributedDataParallel or FSDP",
            fix="choose precision in that plugin's own settings, or train with FSDP",
        )
    if accelerator.mixed_precision != "no":
        raise UsageError(
            "the accelerator has a precision of its own",
            where=where,
            found=f"mixed_precision={accelerator.mixed_precision!r}",
            allowed="mixed_precision='no': the policy is the precision",
            fix="leave out mixed_precision=, also in `accelerate config` (in a Trainer, set fp16=False and bf16=False)",
        )
    if isinstance(accelerator, _UnderPolicy) or accelerator._models or accelerator._optimizers:
        raise UsageError(
            "the accelerator has prepared something already",
            where=where,
            found="a prepared model or optimizer, or an earlier call with a policy",
            allowed="an accelerator that is new",
            fix="call prepare(Accelerator(), policy) before accelerator.prepare(model, optimizer)",
        )
