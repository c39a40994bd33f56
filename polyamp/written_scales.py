"""Writers for saved loss scales in the form of another library, so that training can continue there.

The opposite of `polyamp.saved_scales`. Every library saves the scale, most save a counter of finite steps, and some
save settings. What a library has no field for is lost, which `report_lost` reports.

For example, a ``scale`` of 512 after 3 ``good_steps`` is ``{"loss_scaler0": {"loss_scale": 512.0, "unskipped": 3}}``
for Apex.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import fields
from typing import Any, NamedTuple

from polyamp.errors import warn_once
from polyamp.formats import in_single
from polyamp.presets import preset
from polyamp.saved_scales import Settings

_RULE = ("growth", "interval", "backoff", "hysteresis", "consecutive", "min", "max", "late_growth")
"""The settings that decide how the scale changes."""

State = Mapping[str, Any]


class Form(NamedTuple):
    """The form in which one library loads a loss scale."""

    write: Callable[[Settings, State], dict[str, Any]]  # makes the form from settings and a state
    state: tuple[str, ...]  # the fields of polyamp's state that it has
    settings: tuple[str, ...]  # the settings that the form contains, or that the library's constructor takes
    loads: str  # how the library loads it


def _torch(settings: Settings, state: State) -> dict[str, Any]:
    if not settings.check:
        return {}  # the state of a disabled scaler
    factors = {"growth_factor": settings.growth, "backoff_factor": settings.backoff}
    counts = {"growth_interval": settings.interval, "_growth_tracker": _counter(settings, state)}
    return {"scale": state["scale"], **factors, **counts}


def _apex(settings: Settings, state: State) -> dict[str, Any]:
    return apex_losses([one_apex_loss(settings, state)])


def _keras(settings: Settings, state: State) -> dict[str, Any]:
    return {"dynamic_scale": state["scale"], "step_counter": _counter(settings, state)}


def _tensorflow(settings: Settings, state: State) -> dict[str, Any]:
    return {"current_loss_scale": state["scale"], "good_steps": _counter(settings, state)}


def _deepspeed(settings: Settings, state: State) -> dict[str, Any]:
    """Return the fields that FP16_Optimizer.state_dict and DynamicLossScaler have in common, then the latter's own."""
    # DeepSpeed counts from the step of the last overflow; see `polyamp.saved_scales`.
    saved = {"dynamic_loss_scale": settings.dynamic, "cur_scale": state["scale"], "cur_iter": state["steps"]}
    if not settings.dynamic:
        return saved
    return saved | {
        "last_overflow_iter": state["steps"] - (state["good_steps"] + 1) - 1,
        "scale_factor": settings.growth,
        "scale_window": settings.interval,
        "cur_hysteresis": max(state["hysteresis"], 1),  # it backs off at 1, and never counts further down
        "delayed_shift": settings.hysteresis,
        "consecutive_hysteresis": settings.consecutive,
        "min_scale": settings.min,
    }


def _megatron(settings: Settings, state: State) -> dict[str, Any]:
    counts = {"growth_tracker": _counter(settings, state), "hysteresis_tracker": state["hysteresis"]}
    return {"scale": state["scale"], **counts}


def _flax(settings: Settings, state: State) -> dict[str, Any]:
    return {"fin_steps": _counter(settings, state), "scale": state["scale"]}


def _jmp(settings: Settings, state: State) -> dict[str, Any]:
    if not settings.dynamic:
        return {"loss_scale": state["scale"]}
    limits = {"factor": settings.growth, "min_loss_scale": settings.min}
    return {
        "loss_scale": state["scale"],
        "counter": _counter(settings, state),
        "period": settings.interval,
        "factor": int(limits["factor"]) if float(limits["factor"]).is_integer() else limits["factor"],
        "min_loss_scale": limits["min_loss_scale"],
    }


def _fairseq(settings: Settings, state: State) -> dict[str, Any]:
    return {"loss_scale": state["scale"]}


_COUNTED = ("scale", "good_steps")
_BOTH_FACTORS = ("growth", "backoff", "interval")
_ONE_FACTOR = ("growth", "interval")

FORMS: dict[str, Form] = {
    "torch": Form(_torch, _COUNTED, _BOTH_FACTORS, "GradScaler.load_state_dict(saved)"),
    "apex": Form(_apex, _COUNTED, ("interval", "min", "max"), "amp.load_state_dict(saved)"),
    "keras": Form(_keras, _COUNTED, ("interval",), "the variables of these names of keras' LossScaleOptimizer"),
    "tensorflow": Form(_tensorflow, _COUNTED, _ONE_FACTOR, "the variables of DynamicLossScale, by these names"),
    "deepspeed": Form(
        _deepspeed,
        (*_COUNTED, "hysteresis", "steps"),
        (*_ONE_FACTOR, "hysteresis", "consecutive", "min"),
        "vars(DynamicLossScaler).update(saved), or part of what FP16_Optimizer.load_state_dict takes",
    ),
    "megatron": Form(
        _megatron,
        (*_COUNTED, "hysteresis"),
        (*_BOTH_FACTORS, "hysteresis", "min"),
        "DynamicGradScaler.load_state_dict(saved), which needs the scale as a tensor of one element",
    ),
    "flax": Form(_flax, _COUNTED, (*_BOTH_FACTORS, "min"), "flax.serialization.from_state_dict(DynamicScale(), saved)"),
    "jmp": Form(_jmp, _COUNTED, (*_ONE_FACTOR, "min"), "jmp.DynamicLossScale(**saved), with arrays for the scales"),
    "fairseq": Form(_fairseq, ("scale",), (*_ONE_FACTOR, "min"), "FP16Optimizer.load_state_dict"),
}
"""The form of each library of `LossScale.like`. The sources of the names are in `polyamp.saved_scales`."""


def write(settings: Settings, state: State, like: str) -> dict[str, Any]:
    """Return a state in the form that another library loads; see `LossScale.to_state_dict`."""
    preset(like, where="save_loss_scale(like=)")
    return FORMS[like].write(settings, state)


def one_apex_loss(settings: Settings, state: State) -> dict[str, Any]:
    """Return the entry of one loss in the state of Apex."""
    return {"loss_scale": state["scale"], "unskipped": _counter(settings, state)}


def apex_losses(losses: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the state of Apex for several losses, in the order of their ids."""
    return {f"loss_scaler{index}": loss for index, loss in enumerate(losses)}


def apex_order(loss_ids: list[Hashable]) -> list[Hashable]:
    """Return the ids of losses in the order that Apex numbers them; None is the loss without an id, Apex's first."""
    # Apex loads its losses by their order, so an id that was never used keeps its place.
    #
    # Ids that are not numbers have no place there, and are reported.
    numbers = [one for one in loss_ids if isinstance(one, int) and not isinstance(one, bool) and one >= 0]
    others = [one for one in loss_ids if one is not None and one not in numbers]
    if others:
        warn_once(f"Apex numbers its losses: the loss scales of {', '.join(map(repr, others))} are lost.")
    return [0 if 0 in numbers else None, *range(1, max(numbers, default=0) + 1)]


def report_lost(settings: Settings, state: State, like: str) -> None:
    """Report once what another library has no field or no setting for."""
    form = FORMS[like]
    initial = {"hysteresis": settings.hysteresis, "good_steps": min(state["good_steps"], 0)}
    lost = [name for name, value in state.items() if name not in form.state and value != initial.get(name, 0)]
    other = _other_rule(settings, like)
    parts = [f"{', '.join(lost)} (lost: no field for them)"] if lost else []
    parts += (
        [f"{', '.join(f'{name}={getattr(settings, name)!r}' for name in other)} (no such setting)"] if other else []
    )
    if parts:
        rest = "; where these settings act, the loss scale there differs from polyamp's" if other else ""
        warn_once(f"the form of {like} does not express {' and '.join(parts)}{rest}.", stacklevel=6)


def _other_rule(settings: Settings, like: str) -> list[str]:
    """Return the settings with which the library's rule differs from ours."""
    if not settings.check:
        return [] if like == "torch" else ["check"]
    if not settings.dynamic and like in ("deepspeed", "jmp"):
        return []  # forms of a scale that does not change
    form, theirs = FORMS[like], preset(like, where="save_loss_scale(like=)").settings
    defaults = {field.name: field.default for field in fields(settings)}  # type: ignore[arg-type]
    values = {name: theirs.get(name, defaults[name]) for name in _RULE}
    values |= {name: getattr(settings, name) for name in form.settings}
    if "growth" in form.settings and "backoff" not in form.settings:
        values["backoff"] = in_single(1 / settings.growth)
    return [name for name in _RULE if getattr(settings, name) != values[name] and not _is_unused(name, settings)]


def _is_unused(name: str, settings: Settings) -> bool:
    return name == "consecutive" and settings.hysteresis == 1


def _counter(settings: Settings, state: State) -> int:
    """Return the finite steps as other libraries count them: from 0; see `LossScale.late_growth`."""
    count: int = state["good_steps"] + (settings.late_growth == "always")
    return max(count, 0)
