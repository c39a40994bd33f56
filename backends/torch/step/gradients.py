"""Unscales, tests and clips an optimizer's gradients with few calls, for all devices, dtypes and layouts.

`Gradient` recognises a gradient later by its tensor's count of in-place writes, without reading a value.
`WindowFlags` keeps what the tests found until the step: whose gradients were not finite, here and on other ranks.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from polyamp.backends.torch.dtypes import SIXTEEN_BIT
from polyamp.backends.torch.step.ranks import Decision, RankSet, add_shards_, layout_of, shard_group
from polyamp.backends.torch.step.scale import LossScaler, Scaling
from polyamp.backends.torch.unstable import have_flattened

REAL = frozenset({*SIXTEEN_BIT, torch.float32, torch.float64})

Bucket = list[Tensor]
"""Dense real tensors that share the gradients' memory, of one type, device and dtype: the input of one kernel call."""


class Gradients:
    """The current gradients of an optimizer's parameters. Parameters without a gradient are left out."""

    def __init__(
        self, param_groups: Iterable[dict[str, Any]], norm_group: Callable[[Tensor], Any] | None = None
    ) -> None:
        self.parameters: list[Any] = []
        for group in param_groups:
            self.parameters += group["params"]
        self._grads = [grad for param in self.parameters if (grad := param.grad) is not None]
        self._norm_group = shard_group if norm_group is None and have_flattened(self.parameters) else norm_group
        self._buckets: dict[Any, Bucket] | None = None

    def __bool__(self) -> bool:
        return bool(self._grads)

    @property
    def first(self) -> Tensor:
        """The first gradient, whose device decides for operators."""
        first: Tensor = self._grads[0]
        return first

    @property
    def params(self) -> Iterator[Tensor]:
        """The parameters that have these gradients."""
        return (param for param in self.parameters if param.grad is not None)

    def are_simple(self) -> bool:
        """Return whether all parameters, also those without a gradient, are real, whole and on one device; cache it."""
        kinds, dtypes = {*map(type, self.parameters)}, {param.dtype for param in self.parameters}
        return kinds <= {Tensor, Parameter} and dtypes <= REAL and len({param.device for param in self.parameters}) == 1

    def unscale(self, inverse_scale: Tensor, *, simple: bool = False, over_mesh: bool = False) -> Tensor:
        """Multiply gradients in place, in float32 arithmetic; return 1.0 if one was inf or NaN before, else 0.0."""
        with torch.no_grad():
            if simple and self._grads:
                try:  # without testing layouts, which is slow; torch refuses sparse gradients before it writes anything
                    return _unscale(self._grads, inverse_scale)
                except RuntimeError:
                    pass
            buckets = self.buckets() if over_mesh else [[local(grad) for grad in bucket] for bucket in self.buckets()]
            return _any([_unscale(bucket, inverse_scale) for bucket in buckets], self.parameters[0].device)

    def test(self) -> Tensor:
        """Return a float32 scalar: 1.0 if this rank has a gradient that is not finite, else 0.0."""
        with torch.no_grad():
            buckets = [[local(grad) for grad in bucket] for bucket in self.buckets()]
            flags = [
                _has_non_finite(filled) for bucket in buckets if (filled := [one for one in bucket if one.numel()])
            ]
            return _any(flags, self.parameters[0].device)

    def clip(self, max_norm: float, skipped: Tensor | None = None) -> Tensor:
        """Scale the gradients in place so that their global L2 norm is at most ``max_norm``."""
        # The 1e-6 in the divisor is that of ``torch.nn.utils.clip_grad_norm_``: the results are bitwise equal.
        with torch.no_grad():
            buckets, norms = self._sorted(), list[Tensor]()
            if self._norm_group is None and {*map(type, self.parameters)} <= {Tensor, Parameter}:
                for bucket in buckets.values():
                    norms += _norms(bucket)
            else:
                norms += self._norms_of(None)
            if self._norm_group is not None:
                groups = dict.fromkeys(map(self._norm_group, self.parameters))  # in the same order on every rank
                for group in filter(None, groups):
                    squares = self._sum_of_squares(self._norms_of(group))
                    torch.distributed.all_reduce(squares, group=group)
                    norms.append(squares.sqrt().float()[0])
            if not norms:
                return torch.zeros((), device=self.parameters[0].device)
            if len(buckets) > 1:
                norms = [norm.to(norms[0].device) for norm in norms]
            total: Tensor = torch.linalg.vector_norm(torch.stack(norms))
            factor = torch.clamp(max_norm / (total + 1e-6), max=1.0)
            if skipped is not None:
                # not 1.0, which torch would send to the device, and wait
                factor = torch.where(skipped.to(factor.device) == 0, factor, torch.ones_like(factor))
            for bucket in buckets.values():
                if hasattr(bucket[0], "to_local"):  # before torch 2.13 what is written to partial sums is lost
                    bucket = [local(grad) for grad in bucket]
                torch._foreach_mul_(bucket, factor.to(bucket[0].device))
            return total

    def buckets(self) -> list[Bucket]:
        """Return the gradients in buckets, sorted at the first call."""
        return list(self._sorted().values())

    def _sorted(self) -> dict[Any, Bucket]:
        """Return the buckets by the properties that their gradients share; the last property is the norm's group."""
        if self._buckets is not None:
            return self._buckets
        kinds = {(type(grad), grad.device, grad.dtype, grad.layout) for grad in self._grads}
        if self._norm_group is None and len(kinds) == 1 and (kind := kinds.pop())[0] is Tensor and kind[2] in REAL:
            self._buckets = {(None,): self._grads} if kind[3] is torch.strided else None
        if self._buckets is None:
            self._buckets = {}
            for param in self.params:
                grad = dense(param)
                group = None if self._norm_group is None else self._norm_group(param)
                self._buckets.setdefault((*_kind(grad), group), []).append(grad)
        return self._buckets

    def _norms_of(self, group: Any) -> list[Tensor]:
        """Return the norms of one group's gradients; shards of one layout have one norm over all ranks."""
        # Every rank of a mesh takes part for every layout of its parameters, with or without a gradient.
        whole: list[Tensor] = []
        own = (param for param in self.parameters if self._norm_group is None or self._norm_group(param) is group)
        parts: dict[Any, list[Tensor]] = {layout: [] for param in own if (layout := layout_of(param)) is not None}
        for kind, bucket in self._sorted().items():
            if kind[-1] is group:
                layout = layout_of(bucket[0])
                if layout is None:
                    whole += _norms(bucket)
                else:
                    parts.setdefault(layout, []).extend(_norms([local(grad) for grad in bucket]))
        for layout, norms in parts.items():
            total = self._sum_of_squares(norms)
            add_shards_(total, layout)
            whole.append(total.sqrt().float()[0])
        return whole

    def _sum_of_squares(self, norms: Sequence[Tensor]) -> Tensor:
        """Return the sum of squares in float64, as the fused operators of other ranks do."""
        total = torch.zeros(1, dtype=torch.float64, device=self.parameters[0].device)
        return torch.cat([total, *(norm.to(total).view(1) for norm in norms)]).square().sum().view(1)


class Gradient(NamedTuple):
    """A record to recognise a gradient later, without keeping it alive."""

    param: weakref.ref[Tensor]
    grad: weakref.ref[Tensor]
    version: int

    @classmethod
    def of(cls, param: Tensor) -> Gradient:
        """Return the record of a parameter's current gradient."""
        grad: Any = param.grad
        return cls(weakref.ref(param), weakref.ref(grad), grad._version)

    def has_grown(self, *, by: Tensor) -> bool:
        """Return whether only a pass, which has just added to the gradient of ``by``, wrote to this gradient."""
        grad = self.grad()
        if grad is None or not self.is_there():
            return False
        return grad._version == self.version + 1 or (grad._version == self.version and self.param() is not by)

    def is_there(self) -> bool:
        """Return whether the parameter still has this gradient, perhaps with other values."""
        param = self.param()
        return param is not None and param.grad is not None and param.grad is self.grad()

    def is_untouched(self) -> bool:
        """Return whether the parameter still has this gradient, and nobody wrote to it since."""
        grad = self.grad()
        return grad is not None and self.is_there() and grad._version == self.version

    def is_filled(self) -> bool:
        """Return whether the parameter still has this gradient, and it was not set to zeros since."""
        grad = self.grad()
        return grad is not None and self.is_there() and (grad._version == self.version or bool(are_filled([grad])))


class ByHand:
    """A parameter whose scaled gradient `torch.autograd.grad` returned, so that the program may add it by hand."""

    def __init__(self, scaling: Scaling | None, param: Tensor, result: tuple[int, int], *, is_master: bool) -> None:
        self.scaling, self.is_master, self.is_written = scaling, is_master, False
        self.result = result  # the numbers of the pass and of the model's parameter
        self._param = weakref.ref(param)
        self.accept()

    def accept(self) -> None:
        """Accept the gradient: no write so far counts as one by hand."""
        param = self._param()
        self._before = None if param is None or param.grad is None else Gradient.of(param)

    def look(self) -> bool:
        """Note and return whether the gradient holds something written to it since `accept`."""
        param = self._param()
        if param is None or param.grad is None:
            self.is_written = False
        elif self._before is None or not self._before.is_untouched():
            self.is_written = bool(are_filled([param.grad]))
        return self.is_written


class WindowFlags:
    """The flags of a window: for each loss, 1.0 if its gradients were not finite, else 0.0."""

    def __init__(self) -> None:
        self.flags: dict[LossScaler, Tensor] = {}  # of each loss, from when its gradients were tested
        self.losses: dict[LossScaler, Tensor] = {}  # whether the losses themselves were finite
        self.partners: Tensor | None = None  # the flag of optimizers that skip together with this one
        self.decision: Decision | None = None  # of all ranks

    def note(self, bad: Tensor, scalers: Iterable[LossScaler]) -> None:
        """Note ``bad`` for these losses, unless an earlier flag hides it."""
        if self.flags:  # what was not finite before hides the rest
            bad = bad * (self.worst(torch.zeros_like(bad)) == 0)
        for scaler in scalers:
            flag = torch.maximum(self.flags[scaler], bad) if scaler in self.flags else bad
            finite = self.losses.pop(scaler, None)
            self.flags[scaler] = flag if finite is None else torch.maximum(flag, (~finite).to(flag))

    def note_loss(self, finite: bool | Tensor, scaler: LossScaler) -> None:
        """Note whether a loss that reached the gradients was finite, whether or not they are."""
        flag = finite if isinstance(finite, Tensor) else torch.tensor(finite, device="cpu")
        earlier = self.losses.get(scaler)
        self.losses[scaler] = flag if earlier is None else earlier & flag.to(earlier.device)

    def forget_cleared(self, filled: bool | Tensor) -> None:
        """Forget all flags if the gradients were cleared, so that none is ``filled``."""
        if filled is False:
            self.flags, self.losses = {}, {}
        elif filled is not True:
            self.flags = {scaler: flag * filled.to(flag.device) for scaler, flag in self.flags.items()}
            self.losses = {scaler: finite | ~filled.to(finite.device) for scaler, finite in self.losses.items()}

    def worst(self, bad: Tensor) -> Tensor:
        """Return the largest of ``bad`` and this window's earlier flags."""
        earlier = [*self.flags.values(), *(~finite for finite in self.losses.values())]
        return torch.stack([bad, *(flag.to(bad) for flag in earlier)]).amax()

    def skip_with(self, bad: Tensor) -> None:
        """Skip the next step if a flag is not 0, as if a gradient were not finite."""
        self.partners = bad if self.partners is None else torch.maximum(self.partners, bad.to(self.partners.device))

    def note_decision(self, decision: Decision, device: torch.device) -> Tensor:
        """Note the ranks' decision as the flag of all losses, and return the flag."""
        self.decision, bad = decision, decision.flag(device)
        self.flags = dict.fromkeys(self.flags, bad)  # other ranks may have had other losses
        return bad

    @property
    def overflowed(self) -> RankSet | None:
        """The ranks whose gradients were not finite; None without other ranks."""
        return None if self.decision is None else self.decision.overflowed

    def by_loss(self, finite: bool | Tensor) -> list[tuple[LossScaler, bool | Tensor]]:
        """Return for each loss whether its gradients were finite: bools if ``finite`` is a bool."""
        flags = torch.stack(list(self.flags.values())) > 0
        blamed = flags | ~flags.any()  # all, if they became so after they were unscaled
        if isinstance(finite, bool):
            return [(scaler, finite or not one) for scaler, one in zip(self.flags, blamed.tolist(), strict=True)]
        return [(scaler, finite | ~one) for scaler, one in zip(self.flags, blamed.unbind(), strict=True)]


def _unscale(bucket: Bucket, inverse_scale: Tensor) -> Tensor:
    device = bucket[0].device
    flag = torch.zeros((), dtype=torch.float32, device=device)
    # Private in torch, without a public equivalent: torch.amp.GradScaler's own kernel, which reads each gradient once.
    torch._amp_foreach_non_finite_check_and_unscale_(bucket, flag, inverse_scale.to(device, non_blocking=True))
    return flag


def _has_non_finite(bucket: Bucket) -> Tensor:
    return torch.stack(torch._foreach_norm(bucket, math.inf)).isfinite().all().logical_not().float()


def _any(flags: Sequence[Tensor], device: torch.device) -> Tensor:
    """Return the largest of some flags, on the device of the first one."""
    largest = flags[0] if flags else torch.zeros((), device=device)
    for other in flags[1:]:
        largest = torch.maximum(largest, other.to(largest.device, non_blocking=True))
    return largest


def dense(param: Tensor) -> Tensor:
    """Return a dense real view of a gradient. Sparse ones are coalesced first: a sum of duplicates can overflow."""
    grad: Any = param.grad
    if grad.layout == torch.sparse_coo:
        param.grad = grad = grad.coalesce()
    if grad.layout != torch.strided:
        grad = grad.values()
    return torch.view_as_real(grad) if grad.is_complex() else grad


def _kind(grad: Any) -> tuple[Any, ...]:
    """Return the key of a gradient's bucket. For distributed gradients it includes their mesh and placements."""
    return type(grad), grad.device, grad.dtype, getattr(grad, "device_mesh", None), getattr(grad, "placements", None)


def _norms(bucket: Bucket) -> Sequence[Tensor]:
    """Return the norm of each gradient; for distributed gradients not summed yet, one norm of all."""
    # The norm of 16-bit gradients can exceed float16's range although no gradient does.
    wide = torch.float32 if bucket[0].dtype in SIXTEEN_BIT else None
    norms = torch._foreach_norm(bucket, 2.0, dtype=wide)
    if not hasattr(norms[0], "full_tensor"):
        return norms
    total: Any = torch.linalg.vector_norm(torch.stack(norms))
    return [total.full_tensor()]


def are_filled(grads: list[Tensor]) -> bool | Tensor:
    """Return whether a gradient has a value other than 0; True if values cannot be read."""
    if any(type(grad) is not Tensor or grad.layout != torch.strided or grad.is_meta for grad in grads):
        return True
    norms = [norm.to(grads[0].device) for norm in torch._foreach_norm(grads, math.inf)] if grads else []
    return bool(norms) and torch.stack(norms).any()


def local(tensor: Any) -> Tensor:
    """Return this rank's part of a distributed tensor, and any other tensor unchanged."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor  # type: ignore[no-any-return]
