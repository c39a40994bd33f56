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
from typing import Any, Literal, get_args

import torch

import polyamp
from polyamp.backends.torch.steps.optimizer import LossScaledOptimizer
from polyamp.backends.torch.steps.saving import is_plain
from polyamp.backends.torch.unstable import note_step
from polyamp.errors import InvalidValueError, UsageError, unreported
from polyamp.loss_scale import LossScale
from polyamp.policies import Policy
from polyamp.refusals import no_optimizer, wrapped_already
from polyamp.validation import shown

Saves = Literal["all", "masters", "inner"]

Around = Callable[[LossScaledOptimizer, Any], AbstractContextManager[None]]

_WRAPPER, _SAVES, _AROUND = "polyamp_wrapper", "polyamp_saves", "polyamp_around"
_OWN = frozenset({_WRAPPER, _SAVES, _AROUND, "step", "zero_grad", "add_param_group", "state_dict", "load_state_dict"})
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
        """Return the wrapper's state, or the hidden optimizer's; see ``saves`` of `attach`."""
        wrapper, saves = _wrapper(self), vars(self)[_SAVES]
        has_more = saves == "all" or (saves == "masters" and wrapper.masters is not None)
        return (wrapper if has_more else wrapper.inner).state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a state, of a plain optimizer too: then the loss scale stays as it is, as it does without "all"."""
        wrapper = _wrapper(self)
        kept = [(scaler, scaler.state) for scaler in wrapper.scalers]
        with unreported() if is_plain(state_dict) else nullcontext():
            wrapper.load_state_dict(state_dict)
        if is_plain(state_dict) or vars(self)[_SAVES] != "all":
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
        return _attached, (_wrapper(self), vars(self)[_SAVES], vars(self)[_AROUND])


def _nothing_around(wrapper: LossScaledOptimizer, closure: Any) -> AbstractContextManager[None]:
    return nullcontext()


def attach(
    optimizer: torch.optim.Optimizer,
    policy: Policy | str | None = None,
    *,
    loss_scale: LossScale | float | None = None,
    max_grad_norm: float | None = None,
    saves: Saves = "all",
    around: Around = _nothing_around,
    **options: Any,
) -> LossScaledOptimizer:
    """Make an optimizer act as its wrapper, and return the wrapper, which scales the losses.

    From then on ``step``, ``zero_grad``, ``add_param_group``, ``state_dict`` and ``load_state_dict`` of the optimizer
    are the wrapper's. Everything else, such as ``param_groups`` and further attributes, is as before.

    >>> weight = torch.ones(1, requires_grad=True)
    >>> sgd = torch.optim.SGD([weight], lr=0.5)
    >>> wrapper = attach(sgd, "mixed_float16")
    >>> wrapper.backward(weight.sum())
    >>> sgd.step()
    >>> weight.detach(), isinstance(sgd, torch.optim.SGD), wrapper_of(sgd) is wrapper
    (tensor([0.5000]), True, True)

    Args:
        optimizer: a plain optimizer, also one that schedulers and other code have already.
        policy: as in `polyamp.wrap_optimizer`; so are ``loss_scale``, ``max_grad_norm`` and the options.
        loss_scale: see ``policy``.
        max_grad_norm: see ``policy``.
        saves: "all": ``state_dict`` includes loss scale and master weights, to resume bit for bit. "masters": master
            weights if there are any, and the program saves the loss scale itself. "inner": only what the plain
            optimizer saves. `load_state_dict` accepts the states of all three.
        around: returns a context manager for the wrapper and the closure of each step, which runs inside it. A function
            of a module, so that copies and pickles have it too.
        **options: see ``policy``.

    Raises:
        InvalidTypeError: ``optimizer`` is not an optimizer.
        InvalidValueError: ``saves`` is another word.
        UsageError: the optimizer is wrapped already.
    """
    if wrapper_of(optimizer) is not None or isinstance(optimizer, LossScaledOptimizer):
        raise wrapped_already(f"{type(optimizer).__name__} with a loss scale", fix="attach it once")
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise no_optimizer(optimizer, allowed="an instance of torch.optim.Optimizer")
    if saves not in get_args(Saves):
        raise InvalidValueError(
            "unknown part of a state", where="attach(saves=)", found=repr(saves), allowed='"all", "masters" or "inner"'
        )
    kind = type(optimizer)
    hidden: torch.optim.Optimizer = kind.__new__(kind)
    vars(hidden).update(vars(optimizer))
    if hasattr(vars(hidden).get("step"), "_wrapped_by_lr_sched"):
        del vars(hidden)["step"]  # a scheduler's replacement, which only notes that a step was made
    limit: dict[str, Any] = {"loss_scale": loss_scale, "max_grad_norm": max_grad_norm}
    wrapper: LossScaledOptimizer = polyamp.wrap_optimizer(hidden, policy, **limit, **options)
    vars(optimizer).clear()
    _become(optimizer, wrapper, saves, around)
    return wrapper


def wrapper_of(optimizer: object) -> LossScaledOptimizer | None:
    """Return the wrapper that `attach` returned for an optimizer; None for any other object.

    >>> wrapper_of(torch.optim.SGD([torch.ones(1)])) is None
    True
    """
    return _wrapper(optimizer) if isinstance(optimizer, Attached) else None


def detach(optimizer: torch.optim.Optimizer) -> None:
    """Make an attached optimizer a plain one again, with its current groups and state.

    >>> sgd = torch.optim.SGD([torch.ones(1, requires_grad=True)], lr=0.5)
    >>> wrapper = attach(sgd, "mixed_float16")
    >>> detach(sgd), type(sgd) is torch.optim.SGD
    (None, True)

    Raises:
        UsageError: it is not attached, or it trains master weights, which a plain optimizer would not write back.
    """
    wrapper = wrapper_of(optimizer)
    if wrapper is None:
        raise UsageError("the optimizer is not attached", where="detach(optimizer)", found=shown(optimizer))
    if wrapper.masters is not None:
        raise UsageError(
            "the optimizer trains master weights, which a plain optimizer would not round into the model",
            where="detach(optimizer)",
            found=shown(optimizer),
            fix="make a new optimizer for the model",
        )
    object.__setattr__(optimizer, "__class__", type(wrapper.inner))
    vars(optimizer).clear()
    vars(optimizer).update(vars(wrapper.inner))


def _become(optimizer: Any, wrapper: LossScaledOptimizer, saves: Saves, around: Around) -> None:
    kind: Any = type(wrapper.inner)
    object.__setattr__(optimizer, "__class__", _class_of(kind))
    vars(optimizer).update({_WRAPPER: wrapper, _SAVES: saves, _AROUND: around})


def _attached(wrapper: LossScaledOptimizer, saves: Saves, around: Around) -> Any:
    """Return a new attached optimizer, for copies and pickles."""
    kind = type(wrapper.inner)
    optimizer = kind.__new__(kind)
    _become(optimizer, wrapper, saves, around)
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
