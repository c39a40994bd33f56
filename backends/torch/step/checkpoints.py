"""The view of a wrapped optimizer for `torch.distributed.checkpoint`, which only knows plain optimizers.

Torch's ``get_state_dict`` and ``set_state_dict`` use the names of the model's parameters, and save only the entries
"state" and "param_groups" of an optimizer's state:

    {"state": {"layer.weight": {"exp_avg": ..., "polyamp_master": the float32 master}},
     "param_groups": [{"lr": 0.1, "params": ["layer.weight"], "polyamp": the loss scales, as JSON}]}

So the view has the model's own parameters in place of masters. The masters are one more state of each parameter,
sharded and gathered like moments, and the rest is one more option of the first group. A plain optimizer accepts such a
state too and ignores these entries.

A checkpoint is read into a state of the same structure. So a parameter that has no state yet, for example because all
steps were skipped, is shown with the state that its first step would create; the entry "polyamp" records that it had
none.
"""

from __future__ import annotations

import ast
import inspect
import json
import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from polyamp.backends.torch.step import saving
from polyamp.backends.torch.step.provenance import WrappedOptimizer
from polyamp.errors import warn_once

MASTER, NOTHING, REST = "polyamp_master", "polyamp_no_master", "polyamp"

Saved = dict[str, Any]


class StateNames:
    """A mapping from the model's parameters to the names of their state, all that torch reads of ``state``."""

    def __init__(self, optimizer: WrappedOptimizer) -> None:
        self._optimizer = optimizer

    def __bool__(self) -> bool:  # false would mean that a step has to create the state
        return True

    def __getitem__(self, param: Tensor) -> list[str]:
        names = _names.setdefault(self._optimizer, {})
        if id(param) not in names:
            names.update((id(each), list(state)) for each, state in model_states(self._optimizer).items())
        return names[id(param)]


_names: weakref.WeakKeyDictionary[WrappedOptimizer, dict[int, list[str]]] = weakref.WeakKeyDictionary()


def param_groups(optimizer: WrappedOptimizer) -> list[dict[str, Any]]:
    """Return the parameter groups, with the model's own parameters."""
    models = iter(list(optimizer.model_parameters()))
    groups = [{**group, "params": [next(models) for _ in group["params"]]} for group in optimizer.inner.param_groups]
    groups[0].update(_rest(optimizer))
    return groups


def model_states(optimizer: WrappedOptimizer) -> dict[Tensor, Saved]:
    """Return each of the model's own parameters with its state."""
    keys = [param for group in optimizer.inner.param_groups for param in group["params"]]
    kept = {**_initial_states(optimizer), **optimizer.inner.state}
    masters = _masters(optimizer)
    states: dict[Tensor, Saved] = {}
    for key, param in zip(keys, optimizer.model_parameters(), strict=True):
        known = {**kept.get(key, {}), **({MASTER: masters[id(param)]} if id(param) in masters else {})}
        states[param] = known or {NOTHING: torch.zeros(1, device=param.device)}  # a parameter without state is an error
    return states


def state_dict(optimizer: WrappedOptimizer) -> Saved:
    """Return the state dict, in torch's own form."""
    numbers = {id(param): number for number, param in enumerate(optimizer.model_parameters())}
    groups = param_groups(optimizer)
    for group in groups:
        group["params"] = [numbers[id(param)] for param in group["params"]]
    return {
        "state": {numbers[id(param)]: state for param, state in model_states(optimizer).items()},
        "param_groups": groups,
    }


def is_checkpoint(saved: Any) -> bool:
    """Return whether a state was made by `state_dict`."""
    groups = saved.get("param_groups") if isinstance(saved, Mapping) else None
    return isinstance(groups, list | tuple) and any(isinstance(one, Mapping) and REST in one for one in groups)


def read(optimizer: WrappedOptimizer, saved: Mapping[str, Any]) -> Saved:
    """Return a result of `state_dict` in the form of `LossScaledOptimizer.state_dict`."""
    # A frozen parameter has no state in it, so its master keeps its value, which is the parameter's.
    groups = [{key: value for key, value in group.items() if key != REST} for group in saved["param_groups"]]
    rest = next(group[REST] for group in saved["param_groups"] if REST in group)
    try:
        kept = json.loads(rest)
        numbers = [number for group in groups for number in group["params"]]
        states = {number: _without_gaps(saved["state"].get(number, {})) for number in numbers}
        for place in kept["without_state"]:
            states[numbers[place]] = {k: v for k, v in states[numbers[place]].items() if k == MASTER}
        masters = _read_masters(optimizer, [state.pop(MASTER, None) for state in states.values()])
        scales = {ast.literal_eval(loss_id): scale for loss_id, scale in kept["loss_scales"].items()}
        ours: Saved = {
            "loss_scale": kept["loss_scale"],
            **({"loss_scales": scales} if scales else {}),
            "master_weights": masters or None,
            **({"policy": kept["policy"]} if kept.get("policy") else {}),
        }
    except (TypeError, LookupError, ValueError, SyntaxError) as error:
        what = f'"{REST}" in a parameter group'
        raise saving.bad_state(
            "the saved state is not a wrapped optimizer's", what, "a result of get_state_dict", "load that"
        ) from error
    return {"state": {number: state for number, state in states.items() if state}, "param_groups": groups, **ours}


def _initial_states(optimizer: WrappedOptimizer) -> dict[Tensor, Saved]:
    """Return the states that the inner optimizer would create for parameters that have none, and change nothing."""
    # They come from a step on gradients of zero, with learning rate zero. Optimizers that need a closure cannot make
    # it.
    inner, masters = optimizer.inner, optimizer.masters
    params = [param for group in inner.param_groups for param in group["params"]]
    new = [param for param in params if param.requires_grad and not inner.state.get(param)]
    if not new or _needs_closure(inner) or optimizer.witness.is_unscaled:  # gradients have to stay
        return {}
    options, gradients = [{**group} for group in inner.param_groups], [param.grad for param in params]
    try:
        if masters is not None:
            masters.follow()
        for param in params:
            param.grad = None
        for param in new:
            param.grad = torch.zeros_like(param)
        for group in inner.param_groups:
            if "lr" in group:
                group["lr"] = torch.zeros_like(group["lr"]) if isinstance(group["lr"], Tensor) else 0.0
        optimizer.is_stepping = True
        inner.step()
        return {param: inner.state.pop(param) for param in new if param in inner.state}
    finally:
        optimizer.is_stepping = False
        for group, option in zip(inner.param_groups, options, strict=True):
            group.clear()
            group.update(option)
        for param, gradient in zip(params, gradients, strict=True):
            param.grad = gradient


def report_lost_state(optimizer: WrappedOptimizer) -> None:
    """Warn once if a loaded state counts applied steps, but the optimizer's own state of them is missing."""
    scale, inner = optimizer.scaler.state, optimizer.inner
    if scale.steps <= scale.skipped or any(inner.state.values()) or hasattr(inner, "join_hook"):
        return  # optimizers that take part in `Join` shard their state, and their steps wait for other ranks
    made = _initial_states(optimizer).values()
    if any(value is not None for state in made for value in state.values()):
        warn_once(_LOST)


_LOST = (
    "the loaded state has made steps and has no moments, or whatever else the optimizer keeps: they start anew. "
    "torch.distributed.checkpoint reads only entries that it is given, and a new optimizer's state_dict() has none: "
    "use get_state_dict(model, optimizer) of torch.distributed.checkpoint.state_dict, and set_state_dict."
)


def _needs_closure(inner: torch.optim.Optimizer) -> bool:
    closure = inspect.signature(inner.step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty


def _masters(optimizer: WrappedOptimizer) -> dict[int, Tensor]:
    """Return the masters by the ids of their parameters."""
    masters = optimizer.masters
    if masters is None:
        return {}
    return {id(param): value.detach() for param, value in zip(masters.model, masters.state().values(), strict=True)}


def _rest(optimizer: WrappedOptimizer) -> dict[str, str]:
    """Return, as text to be saved and gathered unchanged, the entries that belong to no single parameter."""
    # They are the same on every rank, since files keep one value per name.
    saved = saving.own_part(optimizer)
    keys = [param for group in optimizer.inner.param_groups for param in group["params"]]
    rest = {
        "loss_scale": saved["loss_scale"],
        "loss_scales": {repr(loss_id): scale for loss_id, scale in saved.get("loss_scales", {}).items()},
        "policy": saved.get("policy"),
        "without_state": [place for place, key in enumerate(keys) if not optimizer.inner.state.get(key)],
    }
    return {REST: json.dumps(rest)}


def _without_gaps(state: Mapping[str, Any]) -> Saved:
    """Return a state without placeholders. Where states were flattened, an empty mapping is a placeholder too."""
    return {key: value for key, value in state.items() if key != NOTHING and value != {}}


def _read_masters(optimizer: WrappedOptimizer, found: list[Any]) -> dict[int, Tensor]:
    """Return the masters found by number; a frozen parameter without one keeps its own."""
    own = _masters(optimizer)
    read = (
        master if master is not None or param.requires_grad else own.get(id(param))
        for param, master in zip(optimizer.model_parameters(), found, strict=False)
    )
    return dict(enumerate(master for master in read if master is not None))
