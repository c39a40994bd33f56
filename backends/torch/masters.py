"""Float32 master weights: what the inner optimizer trains while the model's own parameters have 16 bits.

In 16 bits an update that is small beside its weight rounds away; in float32 it adds up (Micikevicius et al., "Mixed
Precision Training", ICLR 2018, section 3.1).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from polyamp.backends.torch.dtypes import SIXTEEN_BIT
from polyamp.errors import InvalidValueError, StateError


class MasterWeights:
    """The 16-bit parameters of a model, each beside its float32 master.

    >>> weight = torch.nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
    >>> inner = torch.optim.SGD([weight], lr=0.1)
    >>> masters = MasterWeights(inner)
    >>> inner.param_groups[0]["params"][0].dtype, masters.model[0] is weight
    (torch.float32, True)

    Args:
        inner: its groups, and its state if it has any, are re-pointed at the masters in place.
    """

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.model: list[Tensor] = []
        self.masters: list[Tensor] = []
        self._versions: list[int] = []
        for group in inner.param_groups:
            self.adopt(inner, group)

    def adopt(self, inner: torch.optim.Optimizer, group: dict[str, Any]) -> None:
        """Make masters for the 16-bit parameters of one group and put them in their place."""
        params = group["params"]
        for index, param in enumerate(params):
            if param.dtype not in SIXTEEN_BIT:
                continue
            master = nn.Parameter(param.detach().float(), requires_grad=param.requires_grad)
            if param in inner.state:
                inner.state[master] = {key: _widened(value, param) for key, value in inner.state.pop(param).items()}
            params[index] = master  # in place: LBFGS keeps a second reference to this list
            self.model.append(param)
            self.masters.append(master)
        self._versions = [param._version for param in self.model]

    def refuse_repeated(self, params: Iterable[Tensor]) -> None:
        """The inner optimizer's own test for repeated parameters cannot see that a master stands for one.

        Raises:
            InvalidValueError: one of ``params`` has a master already.
        """
        if not {id(param) for param in self.model}.isdisjoint(map(id, params)):
            raise InvalidValueError(
                "some parameters appear in more than one parameter group",
                where="add_param_group(param_group)",
                fix="give each parameter once",
            )

    @torch.no_grad()
    def take_gradients(self) -> None:
        """Copy the model's gradients to the masters, in float32: exact, inf and NaN included."""
        self._follow_model()
        for param, master in zip(self.model, self.masters, strict=True):
            master.grad = None if param.grad is None else param.grad.float()

    @torch.no_grad()
    def update_model(self) -> None:
        """Round the masters into the model's parameters."""
        if self.model:
            torch._foreach_copy_(self.model, self.masters)
            self._versions = [param._version for param in self.model]

    def zero_grad(self, set_to_none: bool) -> None:
        """Clear the model's own gradients."""
        for param in self.model:
            if set_to_none:
                param.grad = None
            elif param.grad is not None:
                param.grad.detach_().zero_()

    def state(self) -> dict[int, Tensor]:
        """The masters by their place in the optimizer, as ``torch.optim`` numbers its state."""
        return dict(enumerate(self.masters))

    def check(self, saved: object) -> None:
        """Refuse saved masters that are not these parameters'.

        Raises:
            StateError: they are missing, or of other number or shapes.
        """
        shapes = [tuple(master.shape) for master in self.masters]
        found = [tuple(master.shape) for master in saved.values()] if isinstance(saved, Mapping) else None
        if found != shapes:
            raise StateError(
                "the saved master weights are not those of this optimizer",
                where='load_state_dict(saved), key "master_weights"',
                found="none" if found is None else f"{len(found)} tensors of shapes {found}",
                allowed=f"{len(shapes)} tensors of shapes {shapes}",
                fix="convert the model, and wrap its optimizer, as they were when the state was saved",
            )

    @torch.no_grad()
    def load(self, saved: Mapping[int, Tensor]) -> None:
        """Continue from what `state` gave."""
        for master, value in zip(self.masters, saved.values(), strict=True):
            master.copy_(value)
        self.update_model()

    def _follow_model(self) -> None:
        """Where somebody wrote to the model (``model.load_state_dict``), masters follow; the rest keeps its bits."""
        versions = [param._version for param in self.model]
        if versions == self._versions:
            return
        for param, master in zip(self.model, self.masters, strict=True):
            master.copy_(torch.where(param == master.to(param.dtype), master, param.float()))
        self._versions = versions


def _widened(value: Any, param: Tensor) -> Any:
    """A moment that an optimizer kept in the parameter's 16 bits, in float32."""
    return value.float() if isinstance(value, Tensor) and value.dtype == param.dtype else value
