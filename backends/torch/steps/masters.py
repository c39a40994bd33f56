"""Float32 master weights: what the inner optimizer trains while the model's own parameters have 16 bits.

In 16 bits an update that is small beside its weight rounds away; in float32 it adds up (Micikevicius et al., "Mixed
Precision Training", ICLR 2018, section 3.1).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn

from polyamp.backends.torch.dtypes import SIXTEEN_BIT
from polyamp.backends.torch.steps.saving import check_masters
from polyamp.backends.torch.steps.temporary import Remainders, StochasticRounding, Tensors, shards
from polyamp.errors import InvalidValueError, warn_once


class Storage(Protocol):
    """Where the float32 values of masters are between steps.

    ``model`` and ``masters`` are always all the pairs there are, in the order in which they were adopted.
    """

    def check(self, params: Tensors) -> None:
        """Refuse parameters that cannot be kept in this way."""

    def adopt(self, params: Tensors) -> Tensors:
        """Make the masters of more parameters."""

    def fill(self, model: Tensors, masters: Tensors, changed: bool) -> None:
        """Before a step: give the masters their values. ``changed``: somebody wrote to the model since the last."""

    def follow(self, model: Tensors, masters: Tensors) -> None:
        """Somebody wrote to the model: bring to it what is kept beside it."""

    def count_in(self, control: Tensor) -> None:
        """Let polyamp's operators count the steps that they round by chance in ``control``; see ``control.py``."""

    def beside(self, model: Tensors, masters: Tensors) -> Tensors:
        """What polyamp's operators update where it is, beside each parameter; empty where that is nothing."""

    def round(self, model: Tensors, masters: Tensors) -> None:
        """Round the masters into the model's parameters."""

    def release(self) -> None:
        """After a step, applied or not: free what is needed during it only."""

    def state(self, model: Tensors, masters: Tensors) -> dict[Any, Any]:
        """What `load` continues from."""

    def check_saved(self, saved: object, masters: Tensors) -> None:
        """Refuse what `load` cannot continue from."""

    def load(self, saved: Mapping[Any, Any], model: Tensors, masters: Tensors) -> None:
        """Continue from a saved state, and bring the model's parameters to it."""


class MasterWeights:
    """The 16-bit parameters of a model, each beside its float32 master.

    >>> weight = torch.nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
    >>> inner = torch.optim.SGD([weight], lr=0.1)
    >>> masters = MasterWeights(inner)
    >>> inner.param_groups[0]["params"][0].dtype, masters.model[0] is weight
    (torch.float32, True)

    A step is `take_gradients`, the inner optimizer's own, `update_model` if it was applied, and `release`.

    Args:
        inner: its groups, and its state if it has any, are re-pointed at the masters in place.
        storage: how the masters are kept between steps; None keeps them as they are.

    Raises:
        InvalidValueError: parameters that cannot be kept so; nothing is changed.
    """

    def __init__(self, inner: torch.optim.Optimizer, storage: Storage | None = None) -> None:
        self.model: list[Tensor] = []
        self.masters: list[Tensor] = []
        self._storage: Storage = InMemory() if storage is None else storage
        self._versions: list[int] = []
        self._standing: dict[Tensor, tuple[Tensor, Tensor | None]] = {}
        self._have_gradients = False
        self._storage.check([param for group in inner.param_groups for param in _low(group["params"])])
        for group in inner.param_groups:
            self.adopt(inner, group)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_standing": {}, "_versions": []}  # copies of parameters count theirs anew

    @torch.no_grad()
    def adopt(self, inner: torch.optim.Optimizer, group: dict[str, Any]) -> None:
        """Make masters for the 16-bit parameters of one group and put them in their place.

        Raises:
            InvalidValueError: one of them has a master already, which torch's own test for repeated parameters cannot
                see, or cannot have one of this kind; nothing is changed.
        """
        params, low = group["params"], _low(group["params"])
        self._refuse_repeated(low)
        self._storage.check(low)
        made = self._storage.adopt(low)
        standing = dict(zip(low, made, strict=True))
        params[:] = [standing.get(param, param) for param in params]  # in place: LBFGS keeps a second reference to it
        for param, master in standing.items():
            if param in inner.state:
                inner.state[master] = {key: _widened(value, param) for key, value in inner.state.pop(param).items()}
        self.model += low
        self.masters += made
        self.note_versions()

    @torch.no_grad()
    def take_gradients(self) -> None:
        """Give the masters their values, and the model's gradients in float32: exact, inf and NaN included."""
        self._storage.fill(self.model, self.masters, self._changed())
        self.note_versions()
        self._have_gradients = True
        pairs = [(master, param.grad) for param, master in zip(self.model, self.masters, strict=True)]
        wide = iter(_in_float32([grad for _, grad in pairs if grad is not None]))
        for master, grad in pairs:
            master.grad = None if grad is None else next(wide)

    @torch.no_grad()
    def standing(self) -> dict[Tensor, tuple[Tensor, Tensor | None]]:
        """For each master the parameter that it stands for, and what is kept beside that, both of which polyamp's
        operators update where they are. The same object until there are more masters. The model's own gradients count
        from now on, and the masters have none."""
        if self._have_gradients:
            self._have_gradients = False
            for master in self.masters:
                master.grad = None
        self._storage.release()  # what a refused step may have left
        self._follow()
        if len(self._standing) != len(self.masters):
            beside = self._storage.beside(self.model, self.masters)
            self._standing = {
                master: (param, beside[index] if beside else None)
                for index, (master, param) in enumerate(zip(self.masters, self.model, strict=True))
            }
        return self._standing

    def count_in(self, control: Tensor) -> None:
        """Before a step by polyamp's operators; see `Storage.count_in`."""
        self._storage.count_in(control)

    @torch.no_grad()
    def update_model(self) -> None:
        """Round the masters into the model's parameters."""
        self._storage.round(self.model, self.masters)
        self.note_versions()

    def release(self) -> None:
        """End a step, applied or not: free what the masters need during it only."""
        self._storage.release()

    def zero_grad(self, set_to_none: bool) -> None:
        """Clear the model's own gradients, which may be views of DistributedDataParallel's buckets."""
        for param in self.model:
            if set_to_none:
                param.grad = None
            elif (grad := param.grad) is not None:
                (grad.requires_grad_(False) if grad.grad_fn is None else grad.detach_()).zero_()

    @torch.no_grad()
    def state(self) -> dict[Any, Any]:
        """The masters' values by their place in the optimizer, as ``torch.optim`` numbers its state; where there are
        none (stochastic rounding), the generators' states."""
        self._follow()
        return self._storage.state(self.model, self.masters)

    def check(self, saved: object) -> None:
        """Refuse saved masters that are not these parameters'.

        Raises:
            StateError: they are missing, or of other number or shapes.
        """
        self._storage.check_saved(saved, self.masters)

    @torch.no_grad()
    def load(self, saved: Mapping[Any, Any]) -> None:
        """Continue from what `state` gave, in whatever way and 16-bit format masters were kept then.

        They decide, and the model is rounded from them. A model that is loaded later decides in its turn where its
        values are not those roundings, so across formats and ways load the model first.
        """
        self._storage.load(saved, self.model, self.masters)
        self.note_versions()

    def _refuse_repeated(self, params: Tensors) -> None:
        if not {id(param) for param in self.model}.isdisjoint(map(id, params)):
            raise InvalidValueError(
                "some parameters appear in more than one parameter group",
                where="add_param_group(param_group)",
                fix="give each parameter once",
            )

    def _follow(self) -> None:
        if self._changed():
            self._storage.follow(self.model, self.masters)
            self.note_versions()

    def _changed(self) -> bool:
        """Whether somebody wrote to the model."""
        return self._versions != [param._version for param in self.model]

    def note_versions(self) -> None:
        """What is written to the model from now on is somebody else's."""
        self._versions = [param._version for param in self.model]


class InMemory:
    """Masters that stay in memory: 4 bytes beside each 16-bit parameter."""

    def check(self, params: Tensors) -> None:
        """All 16-bit parameters can have them."""

    def adopt(self, params: Tensors) -> Tensors:
        """Their values in float32."""
        return [nn.Parameter(param.detach().float(), requires_grad=param.requires_grad) for param in params]

    def fill(self, model: Tensors, masters: Tensors, changed: bool) -> None:
        """They have them."""
        if changed:
            self.follow(model, masters)

    def follow(self, model: Tensors, masters: Tensors) -> None:
        """Where somebody wrote to the model (``model.load_state_dict``), masters follow; the rest keeps its bits."""
        for param, master in zip(shards(model), shards(masters), strict=True):
            master.copy_(torch.where(param == master.to(param.dtype), master, param.float()))

    def count_in(self, control: Tensor) -> None:
        """Nothing is left to chance."""

    def beside(self, model: Tensors, masters: Tensors) -> Tensors:
        """The masters."""
        return masters

    def round(self, model: Tensors, masters: Tensors) -> None:
        """To nearest, at a tie to even."""
        if model:
            torch._foreach_copy_(shards(model), shards(masters))

    def release(self) -> None:
        """They stay."""

    def state(self, model: Tensors, masters: Tensors) -> dict[Any, Any]:
        """The masters themselves."""
        return dict(enumerate(masters))

    def check_saved(self, saved: object, masters: Tensors) -> None:
        """Refuse other masters."""
        check_masters(saved, masters)

    def load(self, saved: Mapping[Any, Any], model: Tensors, masters: Tensors) -> None:
        """Copy them."""
        for master, value in zip(masters, saved.values(), strict=True):
            master.copy_(value)
        self.round(model, masters)


Kind = bool | Literal["remainder", "stochastic"] | None
"""What ``wrap_optimizer(master_weights=)`` takes; see `make_masters`."""

_STORAGES: dict[bool | str, Callable[[], Storage]] = {
    True: InMemory,
    "remainder": Remainders,
    "stochastic": StochasticRounding,
}


def make_masters(inner: torch.optim.Optimizer, wanted: Kind) -> MasterWeights | None:
    """The masters that ``wrap_optimizer(master_weights=)`` asks for, or None without 16-bit parameters.

    >>> weight = torch.nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
    >>> make_masters(torch.optim.SGD([weight], lr=0.1), False) is None
    True

    Args:
        inner: as for `MasterWeights`.
        wanted: None and True keep float32 masters in memory, None without a word where no parameter has 16 bits;
            "remainder" keeps `Remainders`, "stochastic" none but `StochasticRounding`; False makes none.

    Raises:
        InvalidValueError: another value, or parameters that cannot be kept so.
    """
    if wanted not in (*_STORAGES, None, False):
        raise InvalidValueError(
            "unknown way to keep master weights",
            where="wrap_optimizer(master_weights=)",
            found=repr(wanted),
            allowed='True, False, None, "remainder" or "stochastic"',
            fix='leave master_weights= out, or choose "remainder" or "stochastic" to save memory',
        )
    if (wanted is None or wanted) and any(_low(group["params"]) for group in inner.param_groups):
        return MasterWeights(inner, _STORAGES[wanted or True]())
    if wanted:
        warn_once(
            "master weights were asked for, and no parameter has 16 bits, so there are none. "
            "Convert the model first: polyamp.convert(model, policy), then wrap its optimizer."
        )
    return None


def _low(params: Iterable[Tensor]) -> list[Tensor]:
    return [param for param in params if param.dtype in SIXTEEN_BIT]


def _in_float32(grads: list[Tensor]) -> list[Tensor]:
    plain = all(type(grad) is Tensor for grad in grads) and {grad.layout for grad in grads} <= {torch.strided}
    if not (grads and plain):
        return [grad.float() for grad in grads]  # sparse and distributed ones keep their kind
    wide = [torch.empty_like(grad, dtype=torch.float32) for grad in grads]
    torch._foreach_copy_(wide, grads)
    return wide


def _widened(value: Any, param: Tensor) -> Any:
    """A moment that an optimizer kept in the parameter's 16 bits, in float32."""
    return value.float() if isinstance(value, Tensor) and value.dtype == param.dtype else value
