"""Float32 master weights: the inner optimizer trains them while the model's own parameters have 16 bits.

In 16 bits an update that is small compared to its weight rounds away; in float32 small updates add up (Micikevicius et
al., "Mixed Precision Training", ICLR 2018, section 3.1):

    weight 1.0, update 0.001, 10 steps: bfloat16 alone stays at 1.0; a float32 master reaches 1.01 and rounds to 1.0078

The inner optimizer knows only the masters; forward and backward passes know only the model's parameters. A step of
``SGD(lr=0.1)`` on one bfloat16 weight of 1.0, with a gradient of 0.01:

                            model.weight   its grad   master   its grad
    after backward          1.0            0.01       1.0      None
    take_gradients()        1.0            0.01       1.0      0.01       widened to float32, then unscaled and clipped
    inner.step()            1.0            0.01       0.999    0.01
    update_model()          1.0            0.01       0.999    0.01       0.999 rounds to 1.0 in bfloat16
    release()               1.0            0.01       0.999    0.01       storages that save memory free the master here

If somebody writes to the model, for example by ``load_state_dict``, the masters follow before the next step.
``master_storage.py`` has the ways to keep the masters between steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal

import torch
from torch import Tensor

from polyamp.backends.torch.dtypes import SIXTEEN_BIT
from polyamp.backends.torch.steps.master_storage import InMemory, Remainders, StochasticRounding, Storage, Tensors
from polyamp.errors import InvalidValueError, UnsupportedError, warn_once


class MasterWeights:
    """The 16-bit parameters of a model, each with its float32 master."""

    # A step is `take_gradients`, the inner optimizer's own step, `update_model` if it was applied, and `release`.

    def __init__(self, inner: torch.optim.Optimizer, storage: Storage | None = None) -> None:
        self.model: list[Tensor] = []
        self.masters: list[Tensor] = []
        self._storage: Storage = InMemory() if storage is None else storage
        self._versions: list[int] = []
        self._stored: dict[Tensor, tuple[Tensor, Tensor | None]] = {}
        self._have_gradients = False
        self._storage.check([param for group in inner.param_groups for param in _low(group["params"])])
        for group in inner.param_groups:
            self.adopt(inner, group)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_stored": {}, "_versions": []}  # copied parameters restart their version counters

    @torch.no_grad()
    def adopt(self, inner: torch.optim.Optimizer, group: dict[str, Any]) -> None:
        """Create masters for the 16-bit parameters of one group and put them in their place."""
        params, low = group["params"], _low(group["params"])
        self._refuse_repeated(low)
        self._storage.check(low)
        made = self._storage.adopt(low)
        master_of = dict(zip(low, made, strict=True))
        params[:] = [master_of.get(param, param) for param in params]  # in place: LBFGS keeps a reference to the list
        for param, master in master_of.items():
            if param in inner.state:
                inner.state[master] = {key: _widened(value, param) for key, value in inner.state.pop(param).items()}
        self.model += low
        self.masters += made
        self.note_versions()

    @torch.no_grad()
    def take_gradients(self) -> None:
        """Fill the masters with their values, and with the model's gradients in float32, exactly, even inf and NaN."""
        self._storage.fill(self.model, self.masters, self._changed())
        self.note_versions()
        self._have_gradients = True
        pairs = [(master, param.grad) for param, master in zip(self.model, self.masters, strict=True)]
        wide = iter(_in_float32([grad for _, grad in pairs if grad is not None]))
        for master, grad in pairs:
            master.grad = None if grad is None else next(wide)

    def by_parameter(self) -> dict[int, Tensor]:
        """Return the masters by the ids of their parameters."""
        return dict(zip(map(id, self.model), self.masters, strict=True))

    @torch.no_grad()
    def stored(self) -> dict[Tensor, tuple[Tensor, Tensor | None]]:
        """Return for each master its parameter and what is kept next to it; operators update both in place."""
        # It is the same object until there are more masters. From now on the model's own gradients are used, and the
        # masters have none.
        if self._have_gradients:
            self._have_gradients = False
            for master in self.masters:
                master.grad = None
        self._storage.release()  # a refused step may have left values
        self._follow()
        if len(self._stored) != len(self.masters):
            companions = self._storage.companions(self.model, self.masters)
            self._stored = {
                master: (param, companions[index] if companions else None)
                for index, (master, param) in enumerate(zip(self.masters, self.model, strict=True))
            }
        return self._stored

    def count_in(self, control: Tensor) -> None:
        """Count stochastically rounded steps in ``control``, before a step by operators; see `Storage.count_in`."""
        self._storage.count_in(control)

    @torch.no_grad()
    def update_model(self) -> None:
        """Round the masters into the model's parameters."""
        self._storage.round(self.model, self.masters)
        self.note_versions()

    def release(self) -> None:
        """End a step, applied or not: free what the masters only need during a step."""
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
        """Return the masters' values by index in the optimizer, numbered as in ``torch.optim``'s own state."""
        # With stochastic rounding, which has no values, return the numbers of rounded steps.
        self._follow()
        return self._storage.state(self.model, self.masters)

    def check(self, saved: object) -> None:
        """Raise if saved masters do not fit these parameters."""
        self._storage.check_saved(saved, self.masters)

    @torch.no_grad()
    def load(self, saved: Mapping[Any, Any]) -> None:
        """Resume from a result of `state`, saved under any way to keep masters and any 16-bit format."""
        # Saved masters win: the model is rounded from them. If you load a model afterwards, its values win where they
        # are not those roundings. So load the model first if the format or the way to keep masters has changed.
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
        """Return whether the model was written to since the last call of `note_versions`."""
        return self._versions != [param._version for param in self.model]

    def note_versions(self) -> None:
        """Record the model's versions: later changes are writes by somebody else."""
        self._versions = [param._version for param in self.model]


Kind = bool | Literal["remainder", "stochastic"] | None
"""The values of ``wrap_optimizer(master_weights=)``; see `make_masters`."""

_STORAGES: dict[bool | str, Callable[[], Storage]] = {
    True: InMemory,
    "remainder": Remainders,
    "stochastic": StochasticRounding,
}


def make_masters(inner: torch.optim.Optimizer, wanted: Kind) -> MasterWeights | None:
    """Return the masters for ``wrap_optimizer(master_weights=)``, or None without 16-bit parameters."""
    if wanted not in (*_STORAGES, None, False):
        raise InvalidValueError(
            "unknown way to keep master weights",
            where="wrap_optimizer(master_weights=)",
            found=repr(wanted),
            allowed='True, False, None, "remainder" or "stochastic"',
            fix='leave master_weights= out, or choose "remainder" or "stochastic" to save memory',
        )
    if (wanted is None or wanted) and any(_low(group["params"]) for group in inner.param_groups):
        _check_lists(inner)
        return MasterWeights(inner, _STORAGES[wanted or True]())
    if wanted:
        warn_once(
            "master weights were requested, but no parameter has 16 bits, so there are none. "
            "Convert the model first: polyamp.convert(model, policy), then wrap its optimizer."
        )
    return None


def _low(params: Iterable[Tensor]) -> list[Tensor]:
    return [param for param in params if param.dtype in SIXTEEN_BIT]


def _in_float32(grads: list[Tensor]) -> list[Tensor]:
    plain = all(type(grad) is Tensor for grad in grads) and {grad.layout for grad in grads} <= {torch.strided}
    if not (grads and plain):
        return [grad.float() for grad in grads]  # sparse and distributed ones keep their type
    wide = [torch.empty_like(grad, dtype=torch.float32) for grad in grads]
    torch._foreach_copy_(wide, grads)
    return wide


def _widened(value: Any, param: Tensor) -> Any:
    """Return a moment that an optimizer kept in the parameter's 16-bit dtype in float32, and other values unchanged."""
    return value.float() if isinstance(value, Tensor) and value.dtype == param.dtype else value


def _check_lists(inner: torch.optim.Optimizer) -> None:
    """Refuse an optimizer that leaves its step to another one with other lists, which would never see the masters."""
    lists = {id(group["params"]) for group in inner.param_groups}
    for held in vars(inner).values():
        if not isinstance(held, torch.optim.Optimizer) or held is inner:
            continue
        if any(id(group["params"]) not in lists and _low(group["params"]) for group in held.param_groups):
            raise UnsupportedError(
                "master weights cannot replace the parameters of this optimizer",
                where="wrap_optimizer(master_weights=)",
                found=f"{type(inner).__name__} around {type(held).__name__}, with its own lists of 16-bit parameters",
                allowed="float32 parameters, or an optimizer that has its parameters in one list",
                fix="store parameters in float32 (mixed_float16), shard with fully_shard instead, or give "
                "master_weights=False",
            )
