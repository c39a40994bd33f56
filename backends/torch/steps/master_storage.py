"""Ways to keep the float32 values of master weights between steps; `MasterWeights` uses one of them.

`InMemory` keeps the masters. The two other ways save memory: their masters have values only during a step. They are in
the inner optimizer's groups all the time, since its state is keyed by them, but between steps all their elements read
as NaN, and copying to them is an error. For one bfloat16 parameter, with Adam's two float32 moments:

    InMemory            2 + 4 bytes of weight, 8 of state: 14 between steps
    Remainders          2 + 2 bytes of weight, 8 of state: 12, with the same masters, bit for bit
    StochasticRounding  2 bytes of weight,     8 of state: 10, and each update is rounded up or down at random
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from polyamp.backends.torch.kernels.control import DRAWS
from polyamp.backends.torch.kernels.rounding import add_remainder_, round_stochastically, split
from polyamp.backends.torch.steps.refusals import bad_state
from polyamp.backends.torch.unstable import local_shard
from polyamp.errors import InvalidValueError, warn_once

Tensors = Sequence[Tensor]

_ALIGNMENT = 16  # elements; kernels load 16 bytes at once, even of 16-bit values
_LARGEST = 2**26  # elements of a block of several parameters: rounding needs that memory a second time


class Storage(Protocol):
    """A way to keep the float32 values of masters between steps."""

    # ``model`` and ``masters`` are always all pairs, in the order in which they were adopted.

    def check(self, params: Tensors) -> None:
        """Raise if parameters cannot be kept in this way."""

    def adopt(self, params: Tensors) -> Tensors:
        """Return masters for more parameters."""

    def fill(self, model: Tensors, masters: Tensors, changed: bool) -> None:
        """Fill the masters with their values before a step. ``changed``: the model has changed since the last step."""

    def follow(self, model: Tensors, masters: Tensors) -> None:
        """Update the values that are kept next to the model, after somebody wrote to the model."""

    def count_in(self, control: Tensor) -> None:
        """Let polyamp's operators count stochastically rounded steps in ``control``; see ``control.py``."""

    def companions(self, model: Tensors, masters: Tensors) -> Tensors:
        """Return the tensors that polyamp's operators update in place next to each parameter; may be empty."""

    def round(self, model: Tensors, masters: Tensors) -> None:
        """Round the masters into the model's parameters."""

    def release(self) -> None:
        """Free memory that is only needed during a step, after the step was applied or skipped."""

    def state(self, model: Tensors, masters: Tensors) -> dict[Any, Any]:
        """Return the state that `load` resumes from."""

    def check_saved(self, saved: object, masters: Tensors) -> None:
        """Raise if `load` cannot resume from a saved state."""

    def load(self, saved: Mapping[Any, Any], model: Tensors, masters: Tensors) -> None:
        """Resume from a saved state, and update the model's parameters to it."""


class InMemory:
    """Masters that stay in memory: 4 more bytes for each 16-bit parameter."""

    def check(self, params: Tensors) -> None:
        """Accept all 16-bit parameters."""

    def adopt(self, params: Tensors) -> Tensors:
        """Return new float32 masters with the values of the parameters."""
        return [nn.Parameter(param.detach().float(), requires_grad=param.requires_grad) for param in params]

    def fill(self, model: Tensors, masters: Tensors, changed: bool) -> None:
        """Update the masters if the model changed; else they have the right values already."""
        if changed:
            self.follow(model, masters)

    def follow(self, model: Tensors, masters: Tensors) -> None:
        """Update masters after a write to the model (``model.load_state_dict``); unchanged elements keep all bits."""
        for param, master in zip(shards(model), shards(masters), strict=True):
            master.copy_(torch.where(param == master.to(param.dtype), master, param.float()))

    def count_in(self, control: Tensor) -> None:
        """Do nothing, since nothing is rounded stochastically."""

    def companions(self, model: Tensors, masters: Tensors) -> Tensors:
        """Return the masters."""
        return masters

    def round(self, model: Tensors, masters: Tensors) -> None:
        """Round the masters into the model, to nearest, ties to even."""
        if model:
            torch._foreach_copy_(shards(model), shards(masters))

    def release(self) -> None:
        """Do nothing, since the masters stay in memory."""

    def state(self, model: Tensors, masters: Tensors) -> dict[Any, Any]:
        """Return the masters themselves."""
        return dict(enumerate(masters))

    def check_saved(self, saved: object, masters: Tensors) -> None:
        """Raise if the saved masters do not fit these."""
        check_masters(saved, masters)

    def load(self, saved: Mapping[Any, Any], model: Tensors, masters: Tensors) -> None:
        """Copy the saved masters, and round them into the model."""
        for master, value in zip(masters, saved.values(), strict=True):
            master.copy_(value)
        self.round(model, masters)


def shards(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Return the tensors, with this rank's shard in place of a distributed tensor, in the same memory."""
    return [tensor.to_local() if hasattr(tensor, "to_local") else tensor for tensor in tensors]


class Block:
    """Parameters of one device and dtype whose float32 values, while they exist, are in one contiguous tensor."""

    def __init__(self, params: Tensors) -> None:
        self.params = params
        self.masters = [_without_values(param) for param in params]
        local = shards(params)
        self.device, self.dtype = local[0].device, local[0].dtype
        self.size = sum(map(_room, local))
        self.values: Tensor | None = None
        self._places = list(_places(local))
        self._placeholders = _placeholders(local)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "values": None, "_placeholders": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._placeholders = _placeholders(shards(self.params))
        self.release()

    def views(self, flat: Tensor) -> list[Tensor]:
        """Return the part of each parameter in a tensor of `size` elements, in its shape."""
        return [flat.as_strided(*place) for place in self._places]

    @torch.no_grad()
    def fill(self) -> Tensor:
        """Fill the masters with the parameters' values, and return all values as one tensor."""
        values = self.values = torch.zeros(self.size, dtype=torch.float32, device=self.device)
        views = self.views(values)
        torch._foreach_copy_(views, shards(self.params))
        for master, view in zip(self.masters, views, strict=True):
            local_shard(master).data = view
        return values

    def write(self, rounded: Tensor) -> None:
        """Write 16-bit values, in the layout of `values`, into the parameters."""
        torch._foreach_copy_(shards(self.params), self.views(rounded))

    def release(self) -> None:
        """Free the masters' values. Their gradients stay until `zero_grad`."""
        self.values = None
        for master, placeholder in zip(self.masters, self._placeholders, strict=True):
            local_shard(master).data = placeholder


class Remainders:
    """Masters in the memory of bfloat16 parameters and 16 more bits, instead of 32."""

    # With Adam each parameter needs 12 bytes between steps, when activations need memory, and 16 during a step; with
    # masters in memory it needs 14 all the time. The values are bitwise the same. The parameters are rounded to
    # nearest, but ties away from zero instead of to even; see `split` in ``rounding.py``.
    #
    # If somebody writes to the model, masters follow and keep their remainder: they still round to the parameter.

    def __init__(self) -> None:
        self._blocks: list[tuple[Block, Tensor]] = []

    def check(self, params: Tensors) -> None:
        """Raise for float16, whose bits are not the upper half of a float32's."""
        if any(param.dtype != torch.bfloat16 for param in params):
            raise InvalidValueError(
                "only bfloat16 parameters can keep their masters as remainders",
                where='wrap_optimizer(master_weights="remainder")',
                found="parameters of torch.float16",
                allowed="torch.bfloat16 wherever parameters have 16 bits",
                fix='use master_weights=True or "stochastic", or convert the model to bfloat16',
            )

    def adopt(self, params: Tensors) -> Tensors:
        """Return new masters, equal to their parameters: the remainders are zero."""
        blocks = _blocks(params)
        self._blocks += [(block, torch.zeros(block.size, dtype=torch.int16, device=block.device)) for block in blocks]
        return _masters(blocks, params)

    def fill(self, model: Tensors, masters: Tensors, changed: bool) -> None:
        """Join parameters and remainders."""
        for block, remainder in self._blocks:
            if changed or block.values is None:
                add_remainder_(block.fill(), remainder)

    def follow(self, model: Tensors, masters: Tensors) -> None:
        """Do nothing, since masters keep their remainder."""

    def count_in(self, control: Tensor) -> None:
        """Do nothing, since nothing is rounded stochastically."""

    def companions(self, model: Tensors, masters: Tensors) -> Tensors:
        """Return the remainders."""
        views = {
            param: view
            for block, remainder in self._blocks
            for param, view in zip(block.params, block.views(remainder), strict=True)
        }
        return [views[param] for param in model]

    def round(self, model: Tensors, masters: Tensors) -> None:
        """Split the masters into parameters and remainders."""
        for block, remainder in self._blocks:
            if block.values is not None:
                rounded, left_over = split(block.values)
                remainder.copy_(left_over)
                block.write(rounded)

    def release(self) -> None:
        """Free the values, if there are any."""
        for block, _ in self._blocks:
            if block.values is not None:
                block.release()

    def state(self, model: Tensors, masters: Tensors) -> dict[Any, Any]:
        """Return the float32 masters, in the saved form of masters that stay in memory."""
        values = {param: param.detach().float() for param in model}
        for block, remainder in self._blocks:
            for param, left_over in zip(block.params, block.views(remainder), strict=True):
                add_remainder_(local_shard(values[param]), left_over)
        return dict(enumerate(values.values()))

    def check_saved(self, saved: object, masters: Tensors) -> None:
        """Raise if the saved masters do not fit these."""
        check_masters(saved, masters)

    def load(self, saved: Mapping[Any, Any], model: Tensors, masters: Tensors) -> None:
        """Split the saved masters into parameters and remainders."""
        values = dict(zip(model, saved.values(), strict=True))
        for block, remainder in self._blocks:
            for param, left_over in zip(block.params, block.views(remainder), strict=True):
                rounded, rest = split(local_shard(values[param]).to(block.device, torch.float32))
                local_shard(param).detach().copy_(rounded)
                left_over.copy_(rest)
        self.release()


class StochasticRounding:
    """No masters between steps: each step widens the parameters, updates them in float32, and rounds stochastically."""

    # With Adam each parameter needs 10 bytes between steps. `round_stochastically` in ``rounding.py`` has the rule. The
    # random numbers of a step depend only on the seed and on the number of steps before it, so they are the same on
    # every rank, which keeps replicas equal, and in every run; and a saved state is two numbers, whatever the shards
    # are.
    #
    # A step that the host skips is not counted. A step that a fused optimizer skips on the device is counted, without
    # effect: the parameters, rounded from their own values, keep their bits.

    def __init__(self, seed: int = 0) -> None:
        self._seed = seed
        self._blocks: list[Block] = []
        self._generators: dict[torch.device, torch.Generator] = {}
        self._rounds = 0  # steps rounded here
        self._draws: Tensor | int = 0  # steps rounded by polyamp's operators, which draw other random numbers

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_draws": int(self._draws)}

    def check(self, params: Tensors) -> None:
        """Accept all 16-bit parameters."""

    def adopt(self, params: Tensors) -> Tensors:
        """Return masters that hold values only during steps."""
        blocks = _blocks(params)
        self._blocks += blocks
        for block in blocks:
            if block.device not in self._generators:
                self._generators[block.device] = torch.Generator(block.device)
        return _masters(blocks, params)

    def fill(self, model: Tensors, masters: Tensors, changed: bool) -> None:
        """Widen the parameters."""
        for block in self._blocks:
            if changed or block.values is None:
                block.fill()

    def follow(self, model: Tensors, masters: Tensors) -> None:
        """Do nothing, since nothing is kept next to the model."""

    def count_in(self, control: Tensor) -> None:
        """Continue counting stochastically rounded steps in a loss scale's ``control``, starting from our count."""
        if isinstance(self._draws, int):
            self._draws = control[DRAWS].clamp_(min=self._draws)

    def companions(self, model: Tensors, masters: Tensors) -> Tensors:
        """Return nothing."""
        return []

    def round(self, model: Tensors, masters: Tensors) -> None:
        """Round the masters into the parameters stochastically."""
        filled = [(block, block.values) for block in self._blocks if block.values is not None]
        if filled:
            for generator in self._generators.values():
                generator.manual_seed(self._seed + self._rounds)
            self._rounds += 1
        for block, values in filled:
            block.write(round_stochastically(values, block.dtype, self._generators[block.device]))

    def release(self) -> None:
        """Free the values, if there are any."""
        for block in self._blocks:
            if block.values is not None:
                block.release()

    def state(self, model: Tensors, masters: Tensors) -> dict[Any, Any]:
        """Return the numbers of rounded steps, which determine the random numbers of the next step."""
        return {"rounds": self._rounds, "draws": int(self._draws)}

    def check_saved(self, saved: object, masters: Tensors) -> None:
        """Raise if these are neither numbers of steps nor these parameters' masters."""
        if not is_counted(saved):
            check_masters(saved, masters)

    def load(self, saved: Mapping[Any, Any], model: Tensors, masters: Tensors) -> None:
        """Restore the numbers of steps; or round saved masters to nearest, and start again at step 0."""
        if not is_counted(saved):
            for param, value in zip(model, saved.values(), strict=True):
                param.copy_(value)
            warn_once("the saved state has masters: they are rounded to nearest, and stochastic rounding starts again.")
            saved = {"rounds": 0, "draws": 0}
        self._rounds, draws = saved["rounds"], saved["draws"]
        self._draws = self._draws.fill_(draws) if isinstance(self._draws, Tensor) else draws
        self.release()


def is_counted(saved: object) -> bool:
    """Return whether a saved state is that of `StochasticRounding`."""
    return isinstance(saved, Mapping) and all(type(saved.get(key)) is int for key in ("rounds", "draws"))


def _blocks(params: Tensors) -> list[Block]:
    by_kind: dict[Any, list[list[Tensor]]] = {}
    for param, shard in zip(params, shards(params), strict=True):
        runs = by_kind.setdefault((shard.device, shard.dtype), [[]])
        if runs[-1] and sum(map(_room, shards(runs[-1]))) + _room(shard) > _LARGEST:
            runs.append([])
        runs[-1].append(param)
    return [Block(run) for runs in by_kind.values() for run in runs]


def _masters(blocks: Iterable[Block], params: Tensors) -> Tensors:
    """Return the masters of ``params``, in their order."""
    made = {param: master for block in blocks for param, master in zip(block.params, block.masters, strict=True)}
    return [made[param] for param in params]


def _room(shard: Tensor) -> int:
    return -(-shard.numel() // _ALIGNMENT) * _ALIGNMENT


def _places(local: Tensors) -> Iterator[tuple[Sequence[int], Sequence[int], int]]:
    """Yield shape, strides and offset of each tensor in a flat tensor."""
    offset = 0
    for shard in local:
        yield shard.shape, torch.empty_like(shard, device="meta").stride(), offset
        offset += _room(shard)


def _without_values(param: Tensor) -> nn.Parameter:
    master = nn.Parameter(param.detach().float(), requires_grad=param.requires_grad)
    local_shard(master).data = _placeholders(shards([param]))[0]
    return master


def _placeholders(local: Tensors) -> list[Tensor]:
    """Return one NaN expanded to all elements. An empty storage instead would let freed memory be read."""
    nothing = torch.full((), math.nan, device=local[0].device)
    return [nothing.expand(shard.shape) for shard in local]


def check_masters(saved: object, masters: Sequence[Tensor]) -> None:
    """Raise if saved masters do not fit these."""
    own, found = _layouts(masters), None
    if isinstance(saved, Mapping) and all(isinstance(master, Tensor) for master in saved.values()):
        found = _layouts(saved.values())
    if found != own:
        raise bad_state(
            "the saved master weights are not those of this optimizer",
            'none, key "master_weights"' if found is None else f"{len(found)} tensors of shapes {found}",
            f"{len(own)} tensors of shapes {own}",
            "convert the model, and wrap its optimizer, as they were when the state was saved",
        )


def _layouts(tensors: Iterable[Tensor]) -> list[Any]:
    """Return shapes, and for distributed tensors also their placements over ranks."""
    return [
        (tuple(tensor.shape), tensor.placements) if hasattr(tensor, "placements") else tuple(tensor.shape)
        for tensor in tensors
    ]
