"""`DistributedDataParallel` and `Reducer`, on `torch.nn.parallel.DistributedDataParallel` and `torch.distributed`."""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from polyamp.errors import InvalidTypeError, warn_deprecated, warn_once

_WITHOUT_EFFECT = {
    "allreduce_trigger_params": None,
    "retain_allreduce_buffers": False,
    "num_allreduce_streams": 1,
    "allreduce_communicators": None,
    "gradient_average_split_factor": None,
    "prof": False,
}
_OF_PYTORCH = inspect.signature(nn.parallel.DistributedDataParallel.__init__).parameters
_LOCAL_BUFFERS: dict[str, Any] = {
    "forward_sync_buffers" if "forward_sync_buffers" in _OF_PYTORCH else "broadcast_buffers": False
}
_BYTES = 4  # of an element of a bucket, in Apex's count of elements


class DistributedDataParallel(nn.parallel.DistributedDataParallel):
    """Average gradients over processes in the backward pass, with Apex's options, by PyTorch's own module.

    As in Apex, parameters are the first process's at the start, and buffers are not sent again in every forward pass.

    Args:
        module: the module, on the device of this process.
        message_size: elements in a bucket of gradients.
        delay_allreduce: allow parameters that get no gradient. Gradients are still sent during the backward pass.
        allreduce_always_fp32: add 16-bit gradients up in float32.
        gradient_average: False adds gradients up instead.
        gradient_predivide_factor: divide gradients by it before they are added up, instead of by the number of
            processes after that; the rest is divided afterwards.
        shared_param: is refused, as by Apex: shared parameters need no option.
        device_ids, output_device, process_group, find_unused_parameters, static_graph: as in PyTorch.
        **without_effect: Apex's other options, which never change a number: ``allreduce_trigger_params``,
            ``retain_allreduce_buffers``, ``num_allreduce_streams``, ``allreduce_communicators``, ``prof`` and
            ``gradient_average_split_factor``.

    Raises:
        InvalidTypeError: an option that neither Apex nor PyTorch has, or ``shared_param``.

    Warns:
        PolyampDeprecationWarning: at the first use.
        PolyampWarning: at the first use of options without effect.
    """

    def __init__(
        self,
        module: nn.Module,
        message_size: int = 10_000_000,
        delay_allreduce: bool = False,
        shared_param: Any = None,
        allreduce_always_fp32: bool = False,
        gradient_average: bool = True,
        gradient_predivide_factor: float = 1.0,
        *,
        device_ids: Sequence[Any] | None = None,
        output_device: Any = None,
        process_group: Any = None,
        find_unused_parameters: bool | None = None,
        static_graph: bool = False,
        **without_effect: Any,
    ) -> None:
        warn_deprecated(
            "apex.parallel.DistributedDataParallel(model)", "torch.nn.parallel.DistributedDataParallel(model)"
        )
        _check(shared_param, without_effect)
        super().__init__(
            module,
            device_ids=device_ids,
            output_device=output_device,
            process_group=process_group,
            **_LOCAL_BUFFERS,
            bucket_cap_mb=max(message_size * _BYTES / 2**20, 2**-10),
            find_unused_parameters=delay_allreduce if find_unused_parameters is None else find_unused_parameters,
            static_graph=static_graph,
        )
        if allreduce_always_fp32 or not gradient_average or gradient_predivide_factor != 1:
            after = gradient_predivide_factor / dist.get_world_size(process_group) if gradient_average else 1.0
            how = _Sum(allreduce_always_fp32, 1 / gradient_predivide_factor, after, process_group)
            self.register_comm_hook(how, lambda how, bucket: _all_reduce(how, bucket))  # refuses other annotations

    def enable_allreduce(self) -> None:
        """Send gradients again, from the next forward pass on."""
        self.require_backward_grad_sync = True

    def disable_allreduce(self) -> None:
        """Keep gradients in this process from the next forward pass on; PyTorch's way is ``with model.no_sync():``."""
        self.require_backward_grad_sync = False


class _Sum:
    """How a bucket of gradients is added up: the type, the factors before and after, and the processes."""

    def __init__(self, wide: bool, before: float, after: float, group: Any) -> None:
        self.wide, self.before, self.after, self.group = wide, before, after, group


def _all_reduce(how: _Sum, bucket: Any) -> torch.futures.Future[Tensor]:
    buffer = bucket.buffer()
    sent = buffer.float() if how.wide else buffer
    if how.before != 1:
        sent = sent.mul_(how.before)
    work = dist.all_reduce(sent, group=how.group, async_op=True)
    future: torch.futures.Future[Any] = work.get_future()

    def received(done: torch.futures.Future[Any]) -> Tensor:
        value = done.value()
        total: Tensor = value[0] if isinstance(value, list | tuple) else value
        averaged: Tensor = buffer.copy_(total.mul_(how.after) if how.after != 1 else total)
        return averaged

    return future.then(received)


def _check(shared_param: Any, without_effect: dict[str, Any]) -> None:
    unknown = sorted(set(without_effect) - set(_WITHOUT_EFFECT))
    if unknown or shared_param is not None:
        raise InvalidTypeError(
            "an option that this DistributedDataParallel does not have",
            where="apex.parallel.DistributedDataParallel(module, ...)",
            found=", ".join(unknown) or "shared_param",
            allowed="message_size, delay_allreduce, allreduce_always_fp32, gradient_average, "
            f"gradient_predivide_factor, {', '.join(_WITHOUT_EFFECT)}, and device_ids of PyTorch",
            fix="leave it out; parameters may be shared without an option",
        )
    ignored = [name for name, value in without_effect.items() if value != _WITHOUT_EFFECT[name]]
    if ignored:
        warn_once(
            f"apex.parallel.DistributedDataParallel: {', '.join(ignored)} have no effect here. They change when "
            "gradients are sent, and no number.",
            stacklevel=4,
        )


class Reducer:
    """Average parameters at the start, and gradients when `reduce` is called, over all processes.

    Args:
        module_or_grads_list: a module, whose parameters become the first process's; or gradients.

    Raises:
        InvalidTypeError: neither of these.

    Warns:
        PolyampDeprecationWarning: at the first use.
    """

    def __init__(self, module_or_grads_list: nn.Module | Iterable[Any]) -> None:
        warn_deprecated("apex.parallel.Reducer(model)", "torch.nn.parallel.DistributedDataParallel(model)")
        self.module = module_or_grads_list if isinstance(module_or_grads_list, nn.Module) else None
        if self.module is not None:
            with torch.no_grad():
                for parameter in self.module.parameters():
                    dist.broadcast(parameter, 0)
        else:
            self.grads: list[Tensor] = list(_tensors(module_or_grads_list))

    def reduce(self) -> None:
        """Average the gradients over all processes, in place."""
        grads = self.grads if self.module is None else [one.grad for one in self.module.parameters()]
        by_type: dict[Any, list[Tensor]] = defaultdict(list)
        for grad in grads:
            if grad is not None:
                by_type[grad.dtype, grad.device].append(grad)
        with torch.no_grad():
            for alike in by_type.values():
                flat = torch.cat([grad.reshape(-1) for grad in alike])
                dist.all_reduce(flat)
                flat.div_(dist.get_world_size())
                parts = torch.split(flat, [grad.numel() for grad in alike])
                for grad, part in zip(alike, parts, strict=True):
                    grad.copy_(part.view_as(grad))


def _tensors(held: Any) -> Iterable[Tensor]:
    if isinstance(held, Tensor):
        yield held
    elif isinstance(held, Iterable):
        for item in held:
            yield from _tensors(item)
    else:
        raise InvalidTypeError(
            "not gradients",
            where="Reducer(module_or_grads_list)",
            found=type(held).__name__,
            allowed="a module, or lists of tensors",
            fix="pass the model",
        )
