"""Lightning: a precision plugin for its `Trainer`, and one for `Fabric`.

A module and a script stay as they are; the plugin wraps the optimizers that ``configure_optimizers`` returns:

    trainer = lightning.Trainer(plugins=MixedPrecision("mixed_float16"), gradient_clip_val=1.0)
    trainer.fit(module)

For each batch, the trainer calls the plugin in this order:

    train_step_context   autocast under the policy, around ``training_step``
    pre_backward         the loss times the loss scale
    optimizer_step       the gradients are unscaled and tested; then come ``on_before_optimizer_step`` and the
                         trainer's clipping; then the update, or a skip
    HeldScheduler.step   a schedule with ``interval: step`` does not move after a skip

All optimizers of a trainer share one loss scale. It is saved with their states, as are master weights.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from polyamp.adapters import check_options
from polyamp.backends.torch.autocast.context import autocast_context
from polyamp.backends.torch.casting import cast_to
from polyamp.backends.torch.compat.grad_scaler import unscale_once
from polyamp.backends.torch.convert import convert
from polyamp.backends.torch.dtypes import DTYPES, SIXTEEN_BIT
from polyamp.backends.torch.step.optimizer import LossScaledOptimizer
from polyamp.backends.torch.step.provenance import ALIVE
from polyamp.backends.torch.step.refusals import different_loss_scales
from polyamp.backends.torch.verbs import loss_scale_of, wrap_optimizer
from polyamp.errors import UnsupportedError, UsageError, missing_trainer, norm_limit
from polyamp.libraries import write
from polyamp.policies import Policy
from polyamp.policies import policy as policy_of
from polyamp.settings import LossScale

try:
    if "pytorch_lightning" in sys.modules and "lightning" not in sys.modules:  # the same code under its older names
        from lightning_fabric.plugins import Precision as BaseOfFabric
        from pytorch_lightning.plugins import Precision as BaseOfTrainer
    else:
        from lightning.fabric.plugins import Precision as BaseOfFabric
        from lightning.pytorch.plugins import Precision as BaseOfTrainer
except ModuleNotFoundError as error:
    raise missing_trainer(error, where=__name__) from error

__all__ = ["FabricPrecision", "HeldScheduler", "MixedPrecision"]

_MIXED = {"float16": "16-mixed", "bfloat16": "bf16-mixed"}
_TRUE = {"float16": "16-true", "bfloat16": "bf16-true", "float64": "64-true"}


class _Precision(BaseOfFabric):
    """The part that does not depend on who drives the loop: formats, conversion and wrapping.

    Args:
        policy: a policy or its name; None is the current policy.
        loss_scale: overrides the policy's; a number is a fixed scale.
        max_grad_norm: see `polyamp.wrap_optimizer`.
        **options: options of `polyamp.wrap_optimizer` on PyTorch, such as ``master_weights``.
    """

    def __init__(
        self,
        policy: Policy | str | None = None,
        *,
        loss_scale: LossScale | float | None = None,
        max_grad_norm: float | None = None,
        **options: Any,
    ) -> None:
        where = type(self).__name__
        check_options(wrap_optimizer, options, where=f"{where}(policy)")
        self.policy = policy_of(policy)
        self.precision = _TRUE.get(self.policy.param) or _MIXED.get(self.policy.compute, "32-true")
        scale = (
            self.policy.loss_scale if loss_scale is None else LossScale.of(loss_scale, where=f"{where}(loss_scale=)")
        )
        self._options = {"loss_scale": scale, "max_grad_norm": norm_limit(max_grad_norm), **options}
        self._dtype = DTYPES[self.policy.param]
        self.optimizers: list[LossScaledOptimizer] = []

    def forward_context(self) -> AbstractContextManager[None]:
        """Return an autocast region under the policy."""
        return autocast_context(self.policy)

    def convert_module(self, module: nn.Module) -> nn.Module:
        """Store the parameters in 16 bits if the policy does, by `polyamp.convert`."""
        return convert(module, self.policy) if self._dtype in SIXTEEN_BIT else module

    def convert_input(self, data: Any) -> Any:
        """Cast a batch's floating tensors to 16 bits if the parameters have 16 bits; autocast handles the others."""
        return cast_to(data, DTYPES[self.policy.compute], modules=False) if self._dtype in SIXTEEN_BIT else data

    def tensor_init_context(self) -> AbstractContextManager[None]:
        """Return a context in which new floating tensors have the parameters' format."""
        return _default_dtype(self._dtype)

    def module_init_context(self) -> AbstractContextManager[None]:
        """Return a context in which new modules have the parameters' format."""
        return _default_dtype(self._dtype)

    def _wrap(self, optimizer: torch.optim.Optimizer) -> LossScaledOptimizer:
        """Return the optimizer wrapped, unless it already is; all optimizers share the loss scale of the first."""
        first = self.optimizers[0] if self.optimizers else None
        known = (one for one in ALIVE if isinstance(one, LossScaledOptimizer) and optimizer in (one, one.inner))
        wrapped = next(known, None)  # by hand, or for an earlier fit
        if wrapped is None:
            wrapped = wrap_optimizer(optimizer, self.policy, **self._options)
            if first is not None:
                wrapped.share_scales(first)
            # Callbacks name learning rates by the name of the optimizer's class.
            wrapped.__class__ = type(type(optimizer).__name__, (LossScaledOptimizer,), {})
        if first is not None and wrapped.scaler is not first.scaler:
            fix = "leave them plain, or wrap them with polyamp.wrap_optimizer([first, second], policy)"
            raise different_loss_scales(where=type(self).__name__, fix=fix)
        self.optimizers.append(wrapped)
        return wrapped


class MixedPrecision(_Precision, BaseOfTrainer):
    """A precision plugin for Lightning's `Trainer` that trains under a policy.

    >>> from lightning.pytorch import Trainer
    >>> trainer = Trainer(accelerator="cpu", logger=False, plugins=MixedPrecision("mixed_float16"))
    >>> trainer.precision
    '16-mixed'

    Optimizers from ``configure_optimizers`` are wrapped, unless they are already; `polyamp.health` and `last_step` take
    ``module.optimizers(use_pl_optimizer=False)``. In manual optimization, ``self.manual_backward(loss)`` scales the
    loss, and ``self.clip_gradients(optimizer, ...)`` unscales before it clips. With master weights, unscaled gradients
    are those of ``optimizer.param_groups``.

    Args:
        policy: a policy or its name; None is the current policy.
        loss_scale: overrides the policy's; a number is a fixed scale.
        max_grad_norm: clip to this norm in each step; it does the same as the trainer's ``gradient_clip_val``.
        **options: options of `polyamp.wrap_optimizer` on PyTorch, such as ``master_weights``.

    Raises:
        UnsupportedError: an option does not exist, or the strategy is DeepSpeed's, which scales the loss itself.
        UsageError: optimizers were wrapped with different loss scales, or this is a plugin of `Fabric`.
    """

    _aside: Sequence[tuple[Tensor, Tensor | None]] = ()

    def connect(
        self, model: nn.Module, optimizers: list[torch.optim.Optimizer], lr_schedulers: list[Any]
    ) -> tuple[nn.Module, list[torch.optim.Optimizer], list[Any]]:
        """Wrap the optimizers, and make the schedules that step with them stand still at a skipped step."""
        self.optimizers = []
        wrapped = [self._wrap(optimizer) if optimizer.param_groups else optimizer for optimizer in optimizers]
        for config in lr_schedulers:
            owner = next(
                (one for one in self.optimizers if getattr(config.scheduler, "optimizer", None) is one.inner), None
            )
            if owner is not None:
                held = config.interval == "step" and not config.reduce_on_plateau
                config.scheduler = HeldScheduler(config.scheduler, owner, held=held)
        return model, wrapped, lr_schedulers

    def convert_module(self, module: nn.Module) -> nn.Module:
        """Store the parameters in 16 bits if the policy does; refuse DeepSpeed's strategy, and Fabric."""
        trainer = getattr(module, "_trainer", None)
        if trainer is None:
            raise UsageError(
                "this plugin is for Lightning's Trainer",
                where="Fabric(plugins=)",
                found=type(self).__name__,
                allowed=FabricPrecision.__name__,
                fix=f"Fabric(plugins={FabricPrecision.__name__}({str(self.policy)!r}))",
            )
        strategy = type(trainer.strategy)
        if any(kind.__name__ == "DeepSpeedStrategy" for kind in strategy.__mro__):
            raise UnsupportedError(
                "DeepSpeed scales the loss and steps in 16 bits itself",
                where="Trainer(strategy=)",
                found=strategy.__name__,
                allowed="one device, DDPStrategy or ModelParallelStrategy",
                fix='leave the plugin out and use Trainer(precision="16-mixed"), or take another strategy',
            )
        return super().convert_module(module)

    def pre_backward(self, tensor: Tensor, module: Any) -> Tensor:
        """Call the hooks ``on_before_backward`` with the loss, and return it times the loss scale."""
        loss: Tensor = super().pre_backward(tensor, module)
        self._aside = [(param, param.grad) for param in self._toggled_off()]
        for param, _ in self._aside:
            param.grad = None
        if self.optimizers:
            loss = self.optimizers[0].scale(loss)
        return loss

    def post_backward(self, tensor: Tensor, module: Any) -> Tensor:
        """Drop the gradients of toggled-off optimizers, and call the hooks ``on_after_backward``."""
        for param, gradient in self._aside:
            param.grad = gradient
        loss: Tensor = super().post_backward(tensor, module)
        return loss

    def optimizer_step(self, optimizer: Any, model: Any, closure: Callable[[], Any], **kwargs: Any) -> Any:
        """Run the closure, unscale, call the hooks ``on_before_optimizer_step``, clip, and update or skip."""
        if not isinstance(optimizer, LossScaledOptimizer) or isinstance(optimizer.inner, torch.optim.LBFGS):
            return super().optimizer_step(optimizer, model=model, closure=closure, **kwargs)
        result = closure()
        if model.automatic_optimization and (result is None or optimizer.witness.is_consumed):
            return result  # ``training_step`` left this batch out, or a callback the backward pass
        if optimizer.may_have_gradients:
            self._after_closure(model, optimizer)
            optimizer.step(**kwargs)
        return result

    def _after_closure(self, model: Any, optimizer: Any) -> None:
        if isinstance(optimizer, LossScaledOptimizer):
            unscale_once(optimizer)
        super()._after_closure(model, optimizer)

    def clip_grad_by_value(self, optimizer: Any, clip_val: float) -> None:
        """Unscale if necessary, then clip each element."""
        unscale_once(optimizer)
        super().clip_grad_by_value(optimizer, clip_val)

    def clip_grad_by_norm(self, optimizer: Any, clip_val: float) -> None:
        """Unscale if necessary, then clip to the global norm over all ranks."""
        optimizer.clip_grad_norm_(clip_val)

    def state_dict(self) -> dict[str, Any]:
        """Return the loss scale as `torch.amp.GradScaler` saves it, for Lightning's own plugin.

        polyamp's own state is part of the optimizers' states.
        """
        if not self.optimizers:
            return {}
        settings, state = loss_scale_of(self.optimizers[0])
        return write(vars(settings), state._asdict(), "torch")  # nothing is lost: the optimizers' states have the rest

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Put the loss scale that Lightning's own plugin saved into the states of optimizers not wrapped then."""
        scale = checkpoint.get("MixedPrecision")
        states = checkpoint.get("optimizer_states", [])
        for index, (optimizer, saved) in enumerate(zip(self.optimizers, states, strict=False)):
            if scale and "loss_scale" not in saved:
                masters = None if optimizer.masters is None else optimizer.masters.state()
                states[index] = {**saved, "loss_scale": scale, "master_weights": masters}

    def _toggled_off(self) -> Iterator[Tensor]:
        """Yield the parameters whose masters were switched off by ``toggle_optimizer``, which knows only masters."""
        for optimizer in self.optimizers:
            if (masters := optimizer.masters) is not None:
                pairs = zip(masters.model, masters.masters, strict=True)
                yield from (param for param, master in pairs if param.requires_grad and not master.requires_grad)


class HeldScheduler:
    """A learning-rate scheduler that does not step after a skipped update, and otherwise acts as ``scheduler``.

    Args:
        scheduler: the scheduler.
        optimizer: the wrapped optimizer whose learning rate is set; callbacks read it as ``optimizer``.
        held: whether the scheduler waits at a skipped update; false if it steps by epochs or by a metric.
    """

    def __init__(self, scheduler: Any, optimizer: LossScaledOptimizer, *, held: bool) -> None:
        self.scheduler, self.optimizer, self.held = scheduler, optimizer, held

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        """The scheduler's class, for callbacks that test or report it."""
        return type(self.scheduler)

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Step the scheduler if the last update was applied. Waits for the device if the device decided."""
        if not (self.held and self.optimizer.step_was_skipped):
            self.scheduler.step(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name == "scheduler":  # copying and unpickling start without one
            raise AttributeError(name)
        return getattr(self.scheduler, name)


class FabricPrecision(_Precision):
    """A precision plugin for `lightning.Fabric` that trains under a policy.

    Fabric does not show its plugin the optimizers, so the script wraps them:

    >>> import torch
    >>> from lightning.fabric import Fabric
    >>> precision = FabricPrecision("mixed_float16", loss_scale=1024.0)
    >>> fabric = Fabric(accelerator="cpu", devices=1, plugins=precision)
    >>> model = fabric.setup_module(torch.nn.Linear(2, 1))
    >>> plain = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> optimizer = fabric.setup_optimizers(precision.wrap_optimizer(plain))
    >>> fabric.backward(model(torch.ones(3, 2)).mean())
    >>> fabric.clip_gradients(model, optimizer, clip_val=0.5)
    >>> optimizer.step()
    >>> bool(optimizer.last_step), optimizer.loss_scale
    (True, 1024.0)

    Args:
        policy: a policy or its name; None is the current policy.
        loss_scale: overrides the policy's; a number is a fixed scale.
        max_grad_norm: clip to this norm in each step.
        **options: options of `polyamp.wrap_optimizer` on PyTorch, such as ``master_weights``.

    Raises:
        UnsupportedError: an option does not exist.
    """

    def wrap_optimizer(self, optimizer: torch.optim.Optimizer) -> LossScaledOptimizer:
        """Return the optimizer wrapped under the policy; all optimizers of this plugin share one loss scale.

        A policy that stores parameters in 16 bits needs ``fabric.setup_module(model)`` first.
        """
        return self._wrap(optimizer)

    def convert_output(self, data: Any) -> Any:
        """Cast floating outputs to the policy's output format."""
        return cast_to(data, DTYPES[self.policy.output], modules=False)

    def backward(self, tensor: Tensor, model: nn.Module | None, *args: Any, **kwargs: Any) -> None:
        """Run the backward pass of the scaled loss."""
        if not self.optimizers:
            raise _not_wrapped("fabric.backward(loss)")
        self.optimizers[0].scale(tensor).backward(*args, **kwargs)

    def optimizer_step(self, optimizer: Any, **kwargs: Any) -> Any:
        """Unscale, test, clip, and update or skip."""
        if not isinstance(optimizer, LossScaledOptimizer):
            raise _not_wrapped("optimizer.step()", type(optimizer).__name__)
        return optimizer.step(**kwargs)

    def unscale_gradients(self, optimizer: Any) -> None:
        """Unscale if necessary, before Fabric clips."""
        unscale_once(optimizer)


def _not_wrapped(where: str, found: str | None = None) -> UsageError:
    return UsageError(
        "the optimizer is not wrapped",
        where=where,
        found=found,
        allowed="an optimizer from FabricPrecision.wrap_optimizer",
        fix="fabric.setup_optimizers(precision.wrap_optimizer(optimizer))",
    )


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
