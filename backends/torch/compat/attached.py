"""An optimizer object that acts as its wrapper and stays the same object, for programs that go on using the object.

`polyamp.wrap_optimizer` returns a new object. A program that was not written for it has the plain optimizer in other
places: in schedulers, in lists, in its own classes. `attach` changes the optimizer itself:

    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(sgd, 10)
    wrapper = attach(sgd, "mixed_float16")
    wrapper.backward(loss)
    sgd.step()                                 # the wrapper's step: unscale, test, clip, update or skip
    sgd.zero_grad(), schedule.step()

The object's contents move to a hidden optimizer of the same class, which the wrapper steps. The object's class
becomes a subclass, which passes everything on:

    sgd (the program's object)  ->  wrapper (`LossScaledOptimizer`)  ->  hidden SGD: param_groups, state, hooks

These references only go one way, so all three are freed with the program's object.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from operator import attrgetter
from typing import Any

import torch

import polyamp
from polyamp.backends.torch.step.optimizer import LossScaledOptimizer
from polyamp.backends.torch.unstable import note_step
from polyamp.errors import no_optimizer, wrapped_already
from polyamp.policies import Policy

_OWN = frozenset({"polyamp_wrapper", "step", "zero_grad", "add_param_group", "state_dict", "load_state_dict"})
_OF_SCALERS = frozenset({"grad_scale", "found_inf"})  # attributes by which torch's scaler passes its scale


def _of_wrapper(name: str) -> Any:
    """Return a property for an attribute of the wrapper."""
    # `attrgetter` has no frame: `asked_by_checkpoint` looks at the caller's.
    return property(attrgetter(f"polyamp_wrapper.{name}"), lambda one, value: setattr(one.polyamp_wrapper, name, value))


class Attached:
    """The part of an attached optimizer's class that passes calls and attributes on; see `attach`."""

    polyamp_wrapper: LossScaledOptimizer
    polyamp_saves_scale = True

    param_groups, state = _of_wrapper("param_groups"), _of_wrapper("state")
    _step_supports_amp_scaling = _of_wrapper("_step_supports_amp_scaling")

    def step(self, closure: Any = None, **kwargs: Any) -> Any:
        """Make the wrapper's step; see `LossScaledOptimizer.step`."""
        wrapper = self.polyamp_wrapper
        if wrapper.is_stepping:  # a step that another library had replaced on the object
            return type(wrapper.inner).step(wrapper.inner, closure, **kwargs)
        result = self.polyamp_step(wrapper, closure, **kwargs)
        note_step(wrapper.inner)
        return result

    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]  # a scheduler need not watch it: `note_step` is called

    @staticmethod
    def polyamp_step(wrapper: LossScaledOptimizer, closure: Any, **kwargs: Any) -> Any:
        """Make the wrapper's step; subclasses override this."""
        return wrapper.step(closure, **kwargs)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear all gradients, and start a new window."""
        self.polyamp_wrapper.zero_grad(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, with master weights if its parameters have 16 bits."""
        self.polyamp_wrapper.add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """Return the wrapper's state, or the plain optimizer's if the wrapper adds nothing to it."""
        wrapper = self.polyamp_wrapper
        has_more = self.polyamp_saves_scale or wrapper.masters is not None
        return (wrapper if has_more else wrapper.inner).state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a state; a plain optimizer's state leaves the loss scale as it is."""
        wrapper = self.polyamp_wrapper
        if isinstance(state_dict, Mapping) and not (self.polyamp_saves_scale and "loss_scale" in state_dict):
            own = wrapper.state_dict()
            scales = {name: value for name, value in own.items() if name.startswith("loss_scale")}
            state_dict = {"master_weights": own["master_weights"], **state_dict, **scales}
        wrapper.load_state_dict(state_dict)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "polyamp_wrapper" not in vars(self):
            raise AttributeError(name)
        return getattr(self.polyamp_wrapper.inner, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _OWN or isinstance(getattr(type(self), name, None), property):
            object.__setattr__(self, name, value)
        else:
            setattr(_holder(self, name), name, value)

    def __delattr__(self, name: str) -> None:
        if name in _OWN:
            object.__delattr__(self, name)
        else:
            delattr(_holder(self, name), name)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _attached, (self.polyamp_wrapper, type(self).__bases__[0])


def attach(
    optimizer: torch.optim.Optimizer,
    policy: Policy | str | None = None,
    *,
    kind: type[Attached] = Attached,
    **options: Any,
) -> LossScaledOptimizer:
    """Make an optimizer act as its wrapper, and return the wrapper, which scales the losses."""
    # `kind` is how it steps, and whether it saves the loss scale. The options are those of `polyamp.wrap_optimizer`.
    check_plain(optimizer)
    hidden: torch.optim.Optimizer = type(optimizer).__new__(type(optimizer))
    vars(hidden).update(vars(optimizer))
    if hasattr(vars(hidden).get("step"), "_wrapped_by_lr_sched"):
        del vars(hidden)["step"]  # a scheduler's replacement, which only notes that a step was made
    wrapper: LossScaledOptimizer = polyamp.wrap_optimizer(hidden, policy, **options)
    vars(optimizer).clear()
    _become(optimizer, wrapper, kind)
    return wrapper


def check_plain(optimizer: object) -> None:
    """Refuse what is not an optimizer, or has a loss scale already."""
    if isinstance(optimizer, Attached | LossScaledOptimizer):
        raise wrapped_already(f"{type(optimizer).__name__} with a loss scale", fix="pass each plain optimizer once")
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise no_optimizer(optimizer, allowed="a plain torch.optim.Optimizer")


def wrapper_of(optimizer: object) -> LossScaledOptimizer | None:
    """Return the wrapper that `attach` returned for an optimizer; None for any other object."""
    return optimizer.polyamp_wrapper if isinstance(optimizer, Attached) else None


def _become(optimizer: Any, wrapper: LossScaledOptimizer, kind: Any) -> None:
    plain: Any = type(wrapper.inner)
    object.__setattr__(optimizer, "__class__", _class_of(kind, plain))
    optimizer.polyamp_wrapper = wrapper
    wrapper.inner.polyamp_hidden = True  # type: ignore[attr-defined]


def _attached(wrapper: LossScaledOptimizer, kind: type[Attached]) -> Any:
    """Return a new attached optimizer, for copies and pickles."""
    optimizer = type(wrapper.inner).__new__(type(wrapper.inner))
    _become(optimizer, wrapper, kind)
    return optimizer


@functools.cache
def _class_of(kind: Any, plain: Any) -> type:
    return type(plain.__name__, (kind, plain), {"__module__": plain.__module__, "__qualname__": plain.__qualname__})


def _holder(optimizer: Attached, name: str) -> Any:
    """Return the wrapper for attributes that scalers set, which its step refuses, else the inner optimizer."""
    wrapper = optimizer.polyamp_wrapper
    return wrapper if name in _OF_SCALERS else wrapper.inner
