"""An optimizer object that acts as its wrapper and stays the same object, for programs that go on using the object.

`polyamp.wrap_optimizer` returns a new object. A program that was not written for it has the plain optimizer in other
places: in schedulers, in lists, in its own classes. `attach` changes the optimizer itself:

    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(sgd, 10)
    wrapper = attach(sgd, "mixed_float16")
    wrapper.backward(loss)
    sgd.step()                                 # the wrapper's step: unscale, test, clip, update or skip
    sgd.zero_grad(), schedule.step()

What was in the object moves to a hidden optimizer of the same class, which the wrapper steps. The object gets a
subclass of its class, and passes everything on:

    sgd (the program's object)  ->  wrapper (`LossScaledOptimizer`)  ->  hidden SGD: param_groups, state, hooks

These references only go one way, so all three are freed with the program's object.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from operator import attrgetter
from typing import Any

import torch

import polyamp
from polyamp.backends.torch.steps.optimizer import LossScaledOptimizer
from polyamp.backends.torch.steps.saving import is_plain
from polyamp.backends.torch.unstable import note_step
from polyamp.errors import no_optimizer, unreported, wrapped_already
from polyamp.policies import Policy
from polyamp.scale import LossScale

Around = Callable[[LossScaledOptimizer, Any], AbstractContextManager[None]]

_WRAPPER, _SAVES_SCALE, _AROUND = "polyamp_wrapper", "polyamp_saves_scale", "polyamp_around"
_METHODS = {"step", "zero_grad", "add_param_group", "state_dict", "load_state_dict"}
_OWN = frozenset({_WRAPPER, _SAVES_SCALE, _AROUND, *_METHODS})
_OF_SCALERS = frozenset({"grad_scale", "found_inf"})  # attributes by which torch's scaler passes its scale


class Attached:
    """The part of an attached optimizer's class that passes calls and attributes on; see `attach`."""

    param_groups = property(
        attrgetter(f"{_WRAPPER}.param_groups"),  # without a frame: `asked_by_checkpoint` looks at the caller's
        lambda self, groups: setattr(vars(self)[_WRAPPER], "param_groups", groups),
    )
    state = property(attrgetter(f"{_WRAPPER}.state"), lambda self, state: setattr(vars(self)[_WRAPPER], "state", state))
    _step_supports_amp_scaling = property(attrgetter(f"{_WRAPPER}._step_supports_amp_scaling"))

    def step(self, closure: Any = None, **kwargs: Any) -> Any:
        """Make the wrapper's step; see `LossScaledOptimizer.step`."""
        wrapper = _wrapper(self)
        if wrapper.steps_now:  # a step that another library had replaced on the object
            return type(wrapper.inner).step(wrapper.inner, closure, **kwargs)
        with vars(self)[_AROUND](wrapper, closure):
            result = wrapper.step(closure, **kwargs)
        note_step(wrapper.inner)
        return result

    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]  # a scheduler need not watch it: `note_step` is called

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear all gradients, and start a new window."""
        _wrapper(self).zero_grad(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, with master weights if its parameters have 16 bits."""
        _wrapper(self).add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """Return the wrapper's state; that of the plain optimizer if there is nothing else to save."""
        wrapper = _wrapper(self)
        has_more = vars(self)[_SAVES_SCALE] or wrapper.masters is not None
        return (wrapper if has_more else wrapper.inner).state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a state, also of a plain optimizer: then the loss scale stays as it is."""
        wrapper = _wrapper(self)
        kept = [(scaler, scaler.state) for scaler in wrapper.scalers]
        with unreported() if is_plain(state_dict) else nullcontext():
            wrapper.load_state_dict(state_dict)
        if is_plain(state_dict) or not vars(self)[_SAVES_SCALE]:
            for scaler, state in kept:
                scaler.resume(state)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or _WRAPPER not in vars(self):
            raise AttributeError(name)
        return getattr(_wrapper(self).inner, name)

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
        return _attached, (_wrapper(self), vars(self)[_SAVES_SCALE], vars(self)[_AROUND])


def _nothing_around(wrapper: LossScaledOptimizer, closure: Any) -> AbstractContextManager[None]:
    return nullcontext()


def attach(
    optimizer: torch.optim.Optimizer,
    policy: Policy | str | None = None,
    *,
    loss_scale: LossScale | float | None = None,
    saves_scale: bool = True,
    around: Around = _nothing_around,
    **options: Any,
) -> LossScaledOptimizer:
    """Make an optimizer act as its wrapper, and return the wrapper, which scales the losses."""
    # Without `saves_scale` the program saves the loss scale itself. `around` returns a context manager for each step: a
    # function of a module, so that copies and pickles have it too. The rest is as in `polyamp.wrap_optimizer`.
    if wrapper_of(optimizer) is not None or isinstance(optimizer, LossScaledOptimizer):
        raise wrapped_already(f"{type(optimizer).__name__} with a loss scale", fix="attach it once")
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise no_optimizer(optimizer, allowed="an instance of torch.optim.Optimizer")
    kind = type(optimizer)
    hidden: torch.optim.Optimizer = kind.__new__(kind)
    vars(hidden).update(vars(optimizer))
    if hasattr(vars(hidden).get("step"), "_wrapped_by_lr_sched"):
        del vars(hidden)["step"]  # a scheduler's replacement, which only notes that a step was made
    wrapper: LossScaledOptimizer = polyamp.wrap_optimizer(hidden, policy, loss_scale=loss_scale, **options)
    vars(optimizer).clear()
    _become(optimizer, wrapper, saves_scale, around)
    return wrapper


def wrapper_of(optimizer: object) -> LossScaledOptimizer | None:
    """Return the wrapper that `attach` returned for an optimizer; None for any other object."""
    return _wrapper(optimizer) if isinstance(optimizer, Attached) else None


def detach(optimizer: torch.optim.Optimizer) -> None:
    """Make an attached optimizer a plain one again, with its current groups and state."""
    wrapper = _wrapper(optimizer)
    object.__setattr__(optimizer, "__class__", type(wrapper.inner))
    vars(optimizer).clear()
    vars(optimizer).update(vars(wrapper.inner))


def _become(optimizer: Any, wrapper: LossScaledOptimizer, saves_scale: bool, around: Around) -> None:
    kind: Any = type(wrapper.inner)
    object.__setattr__(optimizer, "__class__", _class_of(kind))
    vars(optimizer).update({_WRAPPER: wrapper, _SAVES_SCALE: saves_scale, _AROUND: around})


def _attached(wrapper: LossScaledOptimizer, saves_scale: bool, around: Around) -> Any:
    """Return a new attached optimizer, for copies and pickles."""
    kind = type(wrapper.inner)
    optimizer = kind.__new__(kind)
    _become(optimizer, wrapper, saves_scale, around)
    return optimizer


@functools.cache
def _class_of(kind: Any) -> type:
    return type(kind.__name__, (Attached, kind), {"__module__": kind.__module__, "__qualname__": kind.__qualname__})


def _wrapper(optimizer: Any) -> LossScaledOptimizer:
    wrapper: LossScaledOptimizer = vars(optimizer)[_WRAPPER]
    return wrapper


def _holder(optimizer: Attached, name: str) -> Any:
    """Return the object that has an attribute. The wrapper has a scaler's, so that its step refuses them."""
    wrapper = _wrapper(optimizer)
    return wrapper if name in _OF_SCALERS else wrapper.inner
