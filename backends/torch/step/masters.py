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

If somebody writes to the model, for example by ``load_state_dict`` or ``param.data.clamp_``, the masters follow before
the next step. The model's gradients stay multiplied by the loss scale. If they are cleared or changed after the
masters took them, the masters take that too.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from polyamp.backends.torch.dtypes import SIXTEEN_BIT
from polyamp.backends.torch.step.gradients import Gradient, local
from polyamp.errors import InvalidValueError, UnsupportedError, check_master_weights, warn_once


class MasterWeights:
    """The 16-bit parameters of a model, each with its float32 master: 4 more bytes for each parameter."""

    # A step is `follow`, `take_gradients`, the inner optimizer's own step, and `update_model` if it was applied.

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.model: list[Tensor] = []
        self.masters: list[Tensor] = []
        self.models: dict[int, Tensor] = {}  # by the ids of their masters; a new one if there are more
        self._taken: list[Gradient | None] = []  # the model's gradients when the masters took them
        self.are_clipped = False  # whether the masters' gradients were clipped since, in place of the model's
        for group in inner.param_groups:
            self.adopt(inner, group)

    def __getstate__(self) -> dict[str, Any]:
        return {"model": self.model, "masters": self.masters}

    def __setstate__(self, saved: dict[str, Any]) -> None:
        models = dict(zip(map(id, saved["masters"]), saved["model"], strict=True))
        self.__dict__.update(saved, models=models, _taken=[], are_clipped=False)

    @torch.no_grad()
    def adopt(self, inner: torch.optim.Optimizer, group: dict[str, Any]) -> None:
        """Replace the 16-bit parameters of one group by new float32 masters."""
        params, low = group["params"], _low(group["params"])
        if not {id(param) for param in self.model}.isdisjoint(map(id, low)):
            raise InvalidValueError(
                "some parameters appear in more than one parameter group",
                where="add_param_group(param_group)",
                fix="give each parameter once",
            )
        made = {param: nn.Parameter(param.detach().float(), requires_grad=param.requires_grad) for param in low}
        params[:] = [made.get(param, param) for param in params]  # in place: LBFGS keeps a reference to the list
        for param, master in made.items():
            if param in inner.state:
                state = inner.state.pop(param)  # in which moments have the parameter's dtype
                moments = {key for key, one in state.items() if isinstance(one, Tensor) and one.dtype == param.dtype}
                inner.state[master] = {key: one.float() if key in moments else one for key, one in state.items()}
        self._taken += [None] * len(low) if self._taken else []
        self.model += low
        self.masters += made.values()
        self.models = dict(zip(map(id, self.masters), self.model, strict=True))

    @torch.no_grad()
    def take_gradients(self, *, remember: bool = False) -> None:
        """Copy the model's gradients to the masters, in float32: exact, even inf and NaN."""
        wide = iter(_in_float32([grad for param in self.model if (grad := param.grad) is not None]))
        for param, master in zip(self.model, self.masters, strict=True):
            master.grad = None if param.grad is None else next(wide)
        self._taken = [None if param.grad is None else Gradient.of(param) for param in self.model] if remember else []
        self.are_clipped = False

    @property
    def have_taken(self) -> bool:
        """Whether changes of the model's gradients after the masters took them can be seen."""
        return bool(self._taken)

    @torch.no_grad()
    def look_again(self, inverse: Tensor) -> None:
        """Bring what changed in the model's gradients since `take_gradients` to the masters, unscaled or cleared."""
        for place, (param, master, taken) in enumerate(zip(self.model, self.masters, self._taken, strict=False)):
            if param.grad is None:
                master.grad = None
            elif taken is None or not taken.is_untouched():
                master.grad = param.grad.float() * inverse.to(param.device)
                self._taken[place] = Gradient.of(param)

    def are_torn(self) -> bool:
        """Return whether the model's gradients were changed, not only cleared, after the masters' were clipped."""
        pairs = zip(self.model, self._taken, strict=False) if self.are_clipped else ()
        return any(
            not (param.grad is None or taken is None or taken.is_untouched()) and bool(param.grad.any())
            for param, taken in pairs
        )

    @torch.no_grad()
    def give_back(self, scale: float | Tensor) -> None:
        """Set the model's gradients to the masters' unscaled ones times the loss scale, rounded."""
        for place, (param, master, taken) in enumerate(zip(self.model, self.masters, self._taken, strict=False)):
            if master.grad is not None and param.grad is not None and taken is not None and taken.is_untouched():
                param.grad.copy_(master.grad * (scale.to(param.device) if isinstance(scale, Tensor) else scale))
                self._taken[place] = Gradient.of(param)
        self.are_clipped = False

    def clear_gradients(self) -> None:
        """Clear the masters' own gradients."""
        self._taken = []
        for master in self.masters:
            master.grad = None

    @torch.no_grad()
    def update_model(self) -> None:
        """Round the masters into the model's parameters, to nearest, ties to even."""
        if self.model:
            torch._foreach_copy_([*map(local, self.model)], [*map(local, self.masters)])

    def zero_grad(self, set_to_none: bool) -> None:
        """Clear the model's own gradients, which may be views of DistributedDataParallel's buckets."""
        self._taken = []
        for param in self.model:
            if set_to_none:
                param.grad = None
            elif (grad := param.grad) is not None:
                (grad.requires_grad_(False) if grad.grad_fn is None else grad.detach_()).zero_()

    @torch.no_grad()
    def state(self) -> dict[int, Tensor]:
        """Return the masters by index in the optimizer, numbered as in ``torch.optim``'s own state."""
        self.follow()
        return dict(enumerate(self.masters))

    @torch.no_grad()
    def load(self, saved: Mapping[Any, Any]) -> None:
        """Resume from a result of `state`, saved under any 16-bit format."""
        # Saved masters win: the model is rounded from them. If you load a model afterwards, its values win where they
        # are not those roundings. So load the model first if the format has changed.
        for master, value in zip(self.masters, saved.values(), strict=True):
            master.copy_(value)
        self.update_model()

    @torch.no_grad()
    def follow(self, *, idle: bool = False) -> None:
        """Update masters of parameters that were written to; if ``idle``, only of those without a gradient."""
        # A write through ``param.data`` leaves no trace but the values, so these are compared. Elements that were not
        # written keep all bits.
        pairs = [*zip(self.model, self.masters, strict=True)]
        pairs = [(local(param), local(master)) for param, master in pairs if not idle or param.grad is None]
        if not pairs:
            return
        model, masters = zip(*pairs, strict=True)
        rounded = [torch.empty_like(param) for param in model]
        torch._foreach_copy_(rounded, masters)
        for param, master, low in zip(model, masters, rounded, strict=True):
            written = is_written(param, low)
            if param.device.type != "cpu" or written.any():  # without waiting for the device
                torch.where(written, param.float(), master, out=master)


def is_written(param: Tensor, rounded: Tensor) -> Tensor:
    """Return which elements of a 16-bit parameter differ in a bit from ``rounded``."""
    return param.view(torch.int16) != rounded.view(torch.int16)  # as integers several times as fast


def make_masters(inner: torch.optim.Optimizer, wanted: bool | None) -> MasterWeights | None:
    """Return the masters for ``wrap_optimizer(master_weights=)``, or None without 16-bit parameters."""
    check_master_weights(wanted)
    if wanted is not False and any(_low(group["params"]) for group in inner.param_groups):
        _check_lists(inner)
        return MasterWeights(inner)
    if wanted:
        warn_once(
            "master weights were requested, but no parameter has 16 bits, so there are none. "
            "Convert the model first: polyamp.convert(model, policy), then wrap its optimizer."
        )
    return None


def _check_lists(inner: torch.optim.Optimizer) -> None:
    """Refuse an optimizer around another one that has its own parameter lists, and so would never get the masters."""
    lists = {id(group["params"]) for group in inner.param_groups}
    for part in vars(inner).values():
        groups = part.param_groups if isinstance(part, torch.optim.Optimizer) and part is not inner else ()
        if any(id(group["params"]) not in lists and _low(group["params"]) for group in groups):
            raise UnsupportedError(
                "master weights cannot replace the parameters of this optimizer",
                where="wrap_optimizer(master_weights=)",
                found=f"{type(inner).__name__} around {type(part).__name__}, with its own lists of 16-bit parameters",
                allowed="float32 parameters, or an optimizer that has its parameters in one list",
                fix="store parameters in float32 (mixed_float16), shard with fully_shard instead, or give "
                "master_weights=False",
            )


def _low(params: Iterable[Tensor]) -> list[Tensor]:
    return [param for param in params if param.dtype in SIXTEEN_BIT]


def _in_float32(grads: list[Tensor]) -> list[Tensor]:
    plain = all(type(grad) is Tensor for grad in grads) and {grad.layout for grad in grads} <= {torch.strided}
    if not (grads and plain):
        return [grad.float() for grad in grads]  # sparse and distributed ones keep their type
    wide = [torch.empty_like(grad, dtype=torch.float32) for grad in grads]
    torch._foreach_copy_(wide, grads)
    return wide
