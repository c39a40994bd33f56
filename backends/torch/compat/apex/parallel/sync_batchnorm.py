"""`SyncBatchNorm`: batch norms with the statistics of all processes, on `torch.nn.SyncBatchNorm`, also on CPUs."""

from __future__ import annotations

from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm

from polyamp.errors import InvalidValueError, warn_deprecated

Module = TypeVar("Module", bound=nn.Module)


class SyncBatchNorm(nn.SyncBatchNorm):
    """A batch norm over the batches of all processes, with Apex's options.

    >>> norm = SyncBatchNorm(2, fuse_relu=True)
    >>> norm(torch.tensor([[1.0, 5.0], [3.0, 5.0]])).detach()
    tensor([[0.0000, 0.0000],
            [1.0000, 0.0000]])

    Args:
        num_features, eps, momentum, affine, track_running_stats, process_group: as in `torch.nn.SyncBatchNorm`.
        channel_last: the features are the input's last dimension.
        fuse_relu: apply ReLU to the output.
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        process_group: Any = None,
        channel_last: bool = False,
        fuse_relu: bool = False,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats, process_group)
        self.channel_last, self.fuse_relu = channel_last, fuse_relu

    def forward(self, input: Tensor, z: Tensor | None = None) -> Tensor:
        """Return the normalised input, plus ``z`` if given, after ReLU if ``fuse_relu``."""
        moved = input.movedim(-1, 1) if self.channel_last and input.dim() > 2 else input
        out = self._normalised(moved)
        out = out.movedim(1, -1) if moved is not input else out
        out = out if z is None else out + z
        return torch.relu(out) if self.fuse_relu else out

    def _normalised(self, input: Tensor) -> Tensor:
        if input.device.type != "cpu":
            return super().forward(input)
        batch = self.training or self.running_mean is None
        alone = not dist.is_initialized() or dist.get_world_size(self.process_group) == 1
        if batch and not alone:
            return self._over_processes(input)
        if self.training and self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
        mean, var = (self.running_mean, self.running_var) if not batch or self.training else (None, None)
        return functional.batch_norm(input, mean, var, self.weight, self.bias, batch, self._share(), self.eps)

    def _share(self) -> float:
        """Return the share of this batch in the running statistics."""
        if self.momentum is not None:
            return self.momentum
        return 0.0 if self.num_batches_tracked is None else 1.0 / max(float(self.num_batches_tracked), 1.0)

    def _over_processes(self, input: Tensor) -> Tensor:
        """Normalise by sums over all processes, in float32; PyTorch's own kernels for this need an accelerator."""
        from torch.distributed.nn.functional import all_reduce

        wide, others = input.float(), [dim for dim in range(input.dim()) if dim != 1]
        count = torch.full((1,), float(wide.numel() // wide.shape[1]))
        total: Tensor = all_reduce(torch.cat([wide.sum(others), count]), group=self._group())  # type: ignore[no-untyped-call]
        number = total[-1].detach()
        shape = [1, -1, *[1] * (input.dim() - 2)]
        mean = total[:-1] / number
        centred = wide - mean.view(shape)
        squares: Tensor = all_reduce(centred.square().sum(others), group=self._group())  # type: ignore[no-untyped-call]
        var = squares / number
        self._track(mean.detach(), var.detach(), number)
        out = centred * (var + self.eps).rsqrt().view(shape)
        if self.weight is not None:
            out = out * self.weight.float().view(shape) + self.bias.float().view(shape)
        return out.to(input.dtype)

    @torch.no_grad()
    def _track(self, mean: Tensor, var: Tensor, number: Tensor) -> None:
        if not self.training or self.running_mean is None or self.running_var is None:
            return
        if self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
        unbiased = var * number / (number - 1).clamp(min=1)
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), self._share())
        self.running_var.lerp_(unbiased.to(self.running_var.dtype), self._share())

    def _group(self) -> Any:
        return dist.group.WORLD if self.process_group is None else self.process_group


def convert_syncbn_model(module: Module, process_group: Any = None, channel_last: bool = False) -> Module:
    """Replace the batch norms of a model by `SyncBatchNorm`, with the same parameters, buffers and mode.

    >>> model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4))
    >>> type(convert_syncbn_model(model)[1]).__name__, len(model.state_dict())
    ('SyncBatchNorm', 7)

    Args:
        module: the model; it is changed in place, unless it is a batch norm itself.
        process_group: the processes that share statistics; None is all.
        channel_last: see `SyncBatchNorm`.

    Warns:
        PolyampDeprecationWarning: at the first use.
    """
    warn_deprecated("apex.parallel.convert_syncbn_model(model)", "torch.nn.SyncBatchNorm.convert_sync_batchnorm(model)")
    converted: Module = _converted(module, process_group, channel_last)
    return converted


def _converted(module: Any, process_group: Any, channel_last: bool) -> Any:
    if isinstance(module, _BatchNorm):
        return _synchronised(module, process_group, channel_last)
    for name, child in module.named_children():
        setattr(module, name, _converted(child, process_group, channel_last))
    return module


def _synchronised(norm: Any, process_group: Any, channel_last: bool) -> SyncBatchNorm:
    options = (norm.num_features, norm.eps, norm.momentum, norm.affine, norm.track_running_stats)
    made = SyncBatchNorm(*options, process_group, channel_last)
    made.weight, made.bias = norm.weight, norm.bias
    made.running_mean, made.running_var = norm.running_mean, norm.running_var
    made.num_batches_tracked = norm.num_batches_tracked
    return made.train(norm.training)


def create_syncbn_process_group(group_size: int) -> Any:
    """Return the group of ``group_size`` processes that this one belongs to; None for 0, which means all of them.

    Every process must call it, since each group is made by all.

    >>> create_syncbn_process_group(0) is None
    True

    Raises:
        InvalidValueError: the number of processes is not a multiple of it.
    """
    if group_size == 0:
        return None
    count = dist.get_world_size()
    if not 0 < group_size <= count or count % group_size:
        raise InvalidValueError(
            "the processes cannot be divided into groups of this size",
            where="create_syncbn_process_group(group_size)",
            found=group_size,
            allowed=f"0, or a number that divides {count}",
            fix="choose such a size",
        )
    starts = range(0, count, group_size)
    groups = [dist.new_group(list(range(start, start + group_size))) for start in starts]
    return groups[dist.get_rank() // group_size]
