"""The adapter: what `polyamp`'s verbs do with PyTorch objects."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, final

import torch

from polyamp.backends.torch.autocast.context import autocast
from polyamp.backends.torch.building import extension
from polyamp.backends.torch.casting import cast
from polyamp.backends.torch.convert import convert
from polyamp.backends.torch.graphs.explain import explain
from polyamp.backends.torch.graphs.rewrite import rewrite
from polyamp.backends.torch.operations import OPERATIONS
from polyamp.backends.torch.steps.grad_scaler import GradScaler
from polyamp.backends.torch.steps.masters import Kind
from polyamp.backends.torch.steps.optimizer import LossScaledOptimizer
from polyamp.backends.torch.steps.refusals import named_tensors
from polyamp.devices import fast_on_gpu, report_slow_format, why_not_fast
from polyamp.errors import warn_once
from polyamp.loss_scale import LossScale, LossScaleState, on_host
from polyamp.plan import Plan
from polyamp.policy import Policy
from polyamp.refusals import no_loss_scale

if TYPE_CHECKING:
    from polyamp.demo import Task, Trace
    from polyamp.diagnosis.facts import Facts
    from polyamp.diagnosis.recording import Recording


@final
class TorchAdapter:
    """PyTorch behind `polyamp.adapter.Adapter`, with ambient autocast, module conversion and the demo."""

    name = "torch"
    operations: Mapping[str, str] = OPERATIONS

    def owns(self, obj: object) -> bool:
        """Whether ``obj`` is a tensor, module or optimizer."""
        return isinstance(obj, torch.Tensor | torch.nn.Module | torch.optim.Optimizer)

    def describe(self) -> dict[str, Any]:
        """Version, devices with the formats that are fast there, the compiled extension, and notes.

        >>> adapter.describe()["devices"][0]["name"][:3]
        'cpu'
        """
        accelerators = [_describe_cuda(index) for index in range(torch.cuda.device_count())]
        notes = [] if accelerators else ["no CUDA device: no Tensor Cores"]
        notes += [why_not_fast(each["name"], each["capability"]) for each in accelerators if not each["fast"]]
        compiled = extension.status()
        return {
            "version": torch.__version__,
            "devices": [*accelerators, _describe_cpu()],
            "extension": compiled.as_dict(),
            "notes": [*notes, str(compiled)],
        }

    def cast(self, tree: Any, format_name: str, /) -> Any:
        """See `polyamp.backends.torch.casting.cast`."""
        return cast(tree, format_name)

    def wrap_optimizer(
        self,
        optimizer: Any,
        policy: Policy,
        *,
        loss_scale: LossScale,
        max_grad_norm: float | None,
        master_weights: Kind = None,
        skip_on_device: bool | None = None,
        fused_step: bool | None = None,
        process_group: Any = None,
        named_parameters: Iterable[tuple[str, torch.Tensor]] = (),
        share: LossScaledOptimizer | None = None,
    ) -> Any:
        """A `LossScaledOptimizer`; of several optimizers in a list, a list of those, which share their loss scales.

        See `LossScaledOptimizer` for the options and errors.
        """
        _report_slow(policy)
        options: dict[str, Any] = {}
        options |= {"master_weights": master_weights, "skip_on_device": skip_on_device, "fused_step": fused_step}
        options |= {"process_group": process_group, "named_parameters": named_parameters, "share": share}
        if isinstance(optimizer, list | tuple):
            return _wrap_all(optimizer, policy, loss_scale=loss_scale, max_grad_norm=max_grad_norm, **options)
        wrapped = LossScaledOptimizer(
            optimizer, loss_scale, max_grad_norm=max_grad_norm, compute=policy.compute, **options
        )
        if policy.needs_master_weights and master_weights is None and wrapped.masters is None:
            warn_once(
                f"policy {policy} stores parameters in {policy.param}, and these parameters are not: "
                "call polyamp.convert(model, policy) before its optimizer is wrapped."
            )
        return wrapped

    def scale_loss(self, loss: Any, holder: Any) -> Any:
        """See `LossScaledOptimizer.scale`."""
        return _wrapped(holder, "scale_loss(holder)").scale(loss)

    def loss_scale_of(self, holder: Any) -> tuple[LossScale, LossScaleState]:
        """The settings of a `LossScaledOptimizer` or a polyamp `GradScaler`, and its state on the host."""
        if isinstance(holder, GradScaler):
            return holder.settings_and_state()
        scaler = _wrapped(holder, "loss_scale_of(holder)").scaler
        return scaler.config, on_host(scaler.state)

    def save_loss_scale(self, holder: Any) -> dict[str, Any]:
        """The loss-scale state of a `LossScaledOptimizer` or a polyamp `GradScaler`."""
        config, state = self.loss_scale_of(holder)
        return config.to_state_dict(state)

    def load_loss_scale(self, holder: Any, saved: Mapping[str, Any]) -> Any:
        """The same `LossScaledOptimizer` or polyamp `GradScaler`, with that state."""
        if isinstance(holder, GradScaler):
            holder.resume(holder.config.from_state_dict(saved))
        else:
            _wrapped(holder, "load_loss_scale(holder)").scaler.load(saved)
        return holder

    def autocast_context(self, policy: Policy) -> AbstractContextManager[None]:
        """A fresh `polyamp.backends.torch.autocast`."""
        _report_slow(policy)
        return autocast(policy)

    def convert(self, model: Any, policy: Policy) -> Any:
        """See `polyamp.backends.torch.convert`."""
        return convert(model, policy)

    def rewrite(self, fn: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], policy: Policy) -> Any:
        """See `polyamp.backends.torch.rewrite`."""
        return rewrite(fn, *args, policy=policy, **kwargs)

    def explain(
        self, fn: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], policy: Policy, *, engine: str | None = None
    ) -> Plan:
        """See `polyamp.backends.torch.explain`."""
        return explain(fn, *args, policy=policy, engine=engine, **kwargs)

    def record(
        self,
        step: Any,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        policy: Policy,
        *,
        widened: bool,
        scale: float | None = None,
    ) -> Recording:
        """See `polyamp.backends.torch.recording.record.record`."""
        from polyamp.backends.torch.recording.record import record  # nothing of it is needed to train

        return record(step, args, kwargs, policy, widened=widened, scale=scale)

    def facts(
        self, target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], policy: Policy, optimizer: Any
    ) -> Facts:
        """See `polyamp.backends.torch.facts.facts`."""
        from polyamp.backends.torch.facts import facts

        return facts(target, args, kwargs, policy, optimizer, self.describe()["devices"])

    def train_digits(self, task: Task) -> Trace:
        """Train the classifier of ``polyamp demo``."""
        from polyamp.backends.torch.demo import train  # brings NumPy, which training itself does not need

        return train(task)


adapter = TorchAdapter()


def _wrap_all(optimizers: Sequence[Any], policy: Policy, **options: Any) -> list[LossScaledOptimizer]:
    wrapped: list[LossScaledOptimizer] = []
    named = named_tensors(options.pop("named_parameters", ()))
    for optimizer in optimizers:
        options |= {"share": wrapped[0] if wrapped else options.get("share"), "named_parameters": named.items()}
        wrapped.append(adapter.wrap_optimizer(optimizer, policy, **options))
    return wrapped


def _wrapped(holder: Any, where: str) -> LossScaledOptimizer:
    if not isinstance(holder, LossScaledOptimizer):
        raise no_loss_scale(holder, where=where, allowed="what polyamp.wrap_optimizer gave, or polyamp's GradScaler")
    return holder


_reported: set[str] = set()


def _report_slow(policy: Policy) -> None:
    """At the first use of a compute format: say which GPUs here are slow in it."""
    if policy.compute not in _reported:
        _reported.add(policy.compute)
        for index in range(torch.cuda.device_count()):
            report_slow_format(_describe_cuda(index), policy.compute, stacklevel=6)


def _describe_cuda(index: int) -> dict[str, Any]:
    name, capability = torch.cuda.get_device_name(index), torch.cuda.get_device_capability(index)
    return {
        "name": f"cuda:{index} {name}",
        "capability": ".".join(map(str, capability)),
        "fast": fast_on_gpu(name, capability),
    }


def _describe_cpu() -> dict[str, Any]:
    able = torch.cpu.get_capabilities() if hasattr(torch.cpu, "get_capabilities") else {}  # torch 2.10 has it not
    fast = {"bfloat16": ("avx512_bf16", "amx_bf16"), "float16": ("avx512_fp16", "amx_fp16")}
    return {
        "name": f"cpu ({torch.backends.cpu.get_cpu_capability()})",
        "fast": [name for name, flags in fast.items() if any(able.get(flag) for flag in flags)],
    }
