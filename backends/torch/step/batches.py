"""The tensors that polyamp's operators get from an inner optimizer: parameters, gradients, moments, sorted into calls.

An operator steps many parameters in one call if they are on one device, of one dtype, and have the same moments. For
an `AdamW` with float32 parameters and bfloat16 parameters on one GPU, a step is two calls:

    adam_step_  float32 params             their grads  exp_avg  exp_avg_sq  step
    adam_step_  bfloat16 params, masters   their grads  exp_avg  exp_avg_sq  step

A `Place` is one parameter, a `Batch` is one call, and `Calls` reuses the calls of the last step for the next one.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from polyamp.backends.torch.dtypes import SIXTEEN_BIT
from polyamp.backends.torch.kernels.optimizers import UpdateRule
from polyamp.backends.torch.step.gradients import local
from polyamp.backends.torch.step.ranks import layout_of
from polyamp.backends.torch.unstable import local_shard

Masters = Mapping[int, Tensor]
"""The model's parameters by the ids of their masters, which an optimizer's groups have."""

NO_MASTERS: Masters = MappingProxyType({})


class Place(NamedTuple):
    """One parameter of an inner optimizer."""

    key: Tensor  # the parameter as the optimizer knows it, the key of its state
    param: Tensor  # the tensor that an operator updates: the model's own, if ``key`` is its float32 master
    group: int  # the number of its group

    @property
    def written(self) -> list[Tensor]:
        """The parameter, and its master if it has one."""
        return [self.param] if self.param is self.key else [self.param, self.key]

    @property
    def is_supported(self) -> bool:
        """Whether operators support the parameter."""
        # It has to be whole or distributed, float32 or with a master, without overlapping memory, and both in the same
        # memory order.
        if type(self.key) not in (Tensor, Parameter) and not hasattr(self.key, "to_local"):
            return False
        of_master = self.param is not self.key and self.param.dtype in SIXTEEN_BIT
        if not (of_master or self.param.dtype == torch.float32):
            return False
        written = [*map(local, self.written)]
        return all(is_dense(tensor) and _dimensions(tensor) == _dimensions(written[0]) for tensor in written)


def is_dense(tensor: Tensor) -> bool:
    """Return whether the elements fill one block of memory, each exactly once, in any order of dimensions."""
    expected = 1
    for stride, size in sorted((stride, size) for size, stride in _dimensions(tensor)):
        if stride != expected:
            return False
        expected *= size
    return tensor.layout == torch.strided


def _dimensions(tensor: Tensor) -> list[tuple[int, int]]:
    if tensor.numel() < 2:
        return []
    return [(size, stride) for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size > 1]


def like(param: Tensor, other: Tensor) -> Tensor:
    """Return ``other``, or a copy of it, with the elements in the memory order of ``param``."""
    if other.stride() == param.stride() or _dimensions(other) == _dimensions(param):
        return other
    return torch.empty_like(param, dtype=other.dtype).copy_(other)


class Batch:
    """The tensors of one call of an operator: one device, all with masters or none, the same moments."""

    # Missing optimizer state is created as the optimizer would create it: zeros. Steps are counted on the device.

    def __init__(self, rule: UpdateRule, optimizer: torch.optim.Optimizer, places: Sequence[Place]) -> None:
        self.places = places
        self.numbers = sorted({place.group for place in places})
        self.params = [local(place.param).detach() for place in places]
        self.masters = [local(place.key).detach() for place in places if place.param is not place.key]
        self.groups = torch.tensor([place.group for place in places], dtype=torch.int64, device="cpu")
        self.written = [tensor for place in places for tensor in place.written]
        self._are_plain = {type(tensor) for tensor in self.written} <= {Tensor, Parameter}
        self._strides = [param.stride() for param in self.params]
        self._pointers = self._where()
        self.made: list[tuple[dict[str, Any], str]] = []
        self._optimizer = optimizer
        self._state: list[tuple[dict[str, Any], str, Tensor]] = []
        names = rule.moments(optimizer.param_groups[places[0].group])
        self._lists = [[self._moment(place, name) for place in places] for name in names]
        if rule.counts:
            self._lists.append([self._count(place) for place in places])
        self._lists += [[] for _ in range(rule.lists - len(self._lists))]

    @property
    def device(self) -> torch.device:
        """The device of all tensors."""
        return self.params[0].device

    def is_current(self) -> bool:
        """Return whether the parameters' addresses and the state's tensors are unchanged since this batch was made."""
        if self._where() != self._pointers:
            return False
        return all(state.get(name) is value for state, name, value in self._state)

    def grads(self) -> list[Tensor]:
        """Return the parameters' gradients, in the parameters' memory order."""
        stored: list[Any] = [place.param.grad for place in self.places]
        grads = [grad if type(grad) is Tensor else local(grad) for grad in stored]
        if [*map(Tensor.stride, grads)] == self._strides:
            return grads
        return [
            grad if grad.stride() == stride else like(param, grad)
            for param, grad, stride in zip(self.params, grads, self._strides, strict=True)
        ]

    def tensors(self, grads: Sequence[Tensor]) -> tuple[Sequence[Tensor], ...]:
        """Return the first arguments of the operator."""
        return self.params, self.masters, grads, *self._lists

    def unmake(self) -> None:
        """Remove the state that was created for a step that was skipped."""
        for state, name in self.made:
            del state[name]
        for place in self.places:
            if not self._optimizer.state.get(place.key, True):
                del self._optimizer.state[place.key]
        self.made.clear()

    def _where(self) -> list[int]:
        # asking a plain tensor is several times as fast
        return [*map(Tensor.data_ptr, self.written if self._are_plain else map(local_shard, self.written))]

    def _moment(self, place: Place, name: str) -> Tensor:
        state = self._optimizer.state[place.key]
        moment = state.get(name)
        if moment is None:
            self.made.append((state, name))
            moment = torch.zeros_like(place.param, dtype=torch.float32, requires_grad=False)
        fitting = like(local(place.param), local(moment).float())
        if fitting is not local(moment) and not hasattr(moment, "to_local"):
            moment = fitting
        return self._keep(state, name, moment)

    def _count(self, place: Place) -> Tensor:
        state, device = self._optimizer.state[place.key], local(place.param).device
        if "step" not in state:
            self.made.append((state, "step"))
        count = state.get("step", 0.0)
        if not isinstance(count, Tensor):
            count = torch.full((), float(count), dtype=torch.float32, device=device)
        return self._keep(state, "step", count.to(device, torch.float32, non_blocking=True))

    def _keep(self, state: dict[str, Any], name: str, value: Tensor) -> Tensor:
        state[name] = value
        self._state.append((state, name, value))
        return local(value)


class Calls:
    """The calls of the last step, reused for the next one as long as parameters and state are the same."""

    def __init__(self) -> None:
        self._keys: list[Tensor] = []
        self._kinds: list[tuple[int, tuple[str, ...]]] = []  # per group: its size and the names of its moments
        self._masters = NO_MASTERS
        self._places: list[Place] = []
        self._params: list[Tensor] = []  # of the places
        self.layouts: set[Any] = set()  # of all parameters, with gradients or without
        self._supported: list[bool] = []
        self._found: tuple[list[bool], list[bool]] | None = None  # which have gradients, and which groups are covered
        self._batches: list[Batch] | None = []
        self._states: list[int] = []

    def of(
        self,
        inner: torch.optim.Optimizer,
        rule: UpdateRule,
        masters: Masters,
        is_for: Callable[[torch.device], bool],
    ) -> list[Batch] | None:
        """Return the calls; None if operators do not support a gradient or parameter."""
        kinds = [(len(group["params"]), rule.moments(group)) for group in inner.param_groups]
        if not (kinds == self._kinds and self._are_current(inner, masters)):
            self._look(inner, masters, is_for)
            self._kinds = kinds
        covered = [rule.numbers(group) is not None for group in inner.param_groups]
        grads = [param.grad for param in self._params]
        if not _all_fit(grads, self._params):
            return None
        found = [grad is not None for grad in grads], covered
        if found != self._found:
            self._found, self._batches = found, None
            sorts: dict[Any, list[Place]] = {}
            for place, supported, there in zip(self._places, self._supported, found[0], strict=True):
                if there:
                    if not (supported and covered[place.group]):
                        return None
                    key = place.param.device, place.param.dtype, kinds[place.group][1]
                    sorts.setdefault(key, []).append(place)
            self._batches = [Batch(rule, inner, places) for places in sorts.values()]
            self._states = [*map(id, inner.state.values())]  # these objects live as long as the batches
        return self._batches

    def _are_current(self, inner: torch.optim.Optimizer, masters: Masters) -> bool:
        """Return whether the optimizer still has these parameters, at the same addresses, with the same state."""
        return (
            masters is self._masters
            and _same(_keys(inner), self._keys)
            and [*map(id, inner.state.values())] == self._states
            and all(batch.is_current() for batch in self._batches or ())
        )

    def _look(self, inner: torch.optim.Optimizer, masters: Masters, is_for: Callable[[torch.device], bool]) -> None:
        self._found = None
        self._keys, self._masters = _keys(inner), masters
        self._places = [
            Place(key, masters.get(id(key), key), number)
            for number, group in enumerate(inner.param_groups)
            for key in group["params"]
        ]
        self._params = [place.param for place in self._places]
        self.layouts = {*map(layout_of, self._params)}
        self._supported = [place.is_supported and is_for(place.param.device) for place in self._places]


def _keys(inner: torch.optim.Optimizer) -> list[Tensor]:
    return [key for group in inner.param_groups for key in group["params"]]


def _same(one: Sequence[object], other: Sequence[object]) -> bool:
    """Return whether two lists hold the same objects; ``==`` of tensors would compare elements."""
    return len(one) == len(other) and all(map(operator.is_, one, other))


def _all_fit(grads: Sequence[Tensor | None], params: Sequence[Tensor]) -> bool:
    """Return whether operators can read all gradients, with one test for the usual case, since they are many."""
    sorts = {
        (type(grad), grad.layout, grad.dtype, param.dtype)
        for grad, param in zip(grads, params, strict=True)
        if grad is not None
    }
    if all(kind is Tensor and layout is torch.strided and one is other for kind, layout, one, other in sorts):
        return True
    return all(_fits(grad, param) for grad, param in zip(grads, params, strict=True) if grad is not None)


def _fits(grad: Tensor, param: Tensor) -> bool:
    """Return whether operators can read a gradient: strided, of the parameter's dtype, summed over ranks."""
    if type(grad) is not Tensor and getattr(grad, "placements", None) != getattr(param, "placements", None):
        return False
    return grad.layout is torch.strided and grad.dtype is param.dtype
