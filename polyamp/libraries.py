"""Other libraries' loss scales, a row each: the rule as our settings, the names of its parts, and how it is saved.

`LossScale.like` takes a row's settings. `read` finds the library that saved a state and returns its fields under our
names, and `write` is its opposite. For example, a ``scale`` of 512 after 3 ``good_steps`` is, for Apex,
``{"loss_scaler0": {"loss_scale": 512.0, "unskipped": 3}}``. To add a library, add a row.

Settings are a mapping from the fields of `polyamp.LossScale` to their values; a state is one from the fields of
`polyamp.LossScaleState`. Some libraries have no limit, so that their scale can reach 0 or inf and stay there. Their
row's limit is the last power of two that float32 can divide by; up to there every update is the library's own.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Hashable, Mapping
from typing import Any, NamedTuple

from polyamp.errors import InvalidValueError, StateError, did_you_mean, reading, shown, warn_once
from polyamp.formats import in_single

KIND = "polyamp.loss_scale"
LARGEST_COUNT = 2**31 - 1
_LOWEST = 2.0**-126  # the smallest normal float32
_HIGHEST = 2.0**127  # the largest power of two in float32

Fields = Mapping[str, Any]
Form = dict[str, Any]


class Library(NamedTuple):
    """How one library scales the loss, and how it saves the scale."""

    source: str  # where the rule and the names come from
    settings: Fields  # the rule, where it differs from the defaults of `LossScale`
    options: Mapping[str, str]  # the library's names of settings, and ours
    keys: Mapping[str, str]  # the fields of our state that the library saves, and its keys for them
    loads: str  # what loads the result of `write`
    saved_options: tuple[str, ...] = ()  # the options that are saved with the state
    finish: Callable[[Fields, Fields, Form], Form] = lambda settings, state, form: form  # what a table cannot state


def _torch(settings: Fields, state: Fields, form: Form) -> Form:
    return form if _scales(settings) else {}  # the state of a disabled scaler


def _apex(settings: Fields, state: Fields, form: Form) -> Form:
    return {"loss_scaler0": form}


def _jmp(settings: Fields, state: Fields, form: Form) -> Form:
    if not _is_dynamic(settings):
        return {"loss_scale": form["loss_scale"]}
    return form | {"factor": int(form["factor"]) if form["factor"].is_integer() else form["factor"]}


def _deepspeed(settings: Fields, state: Fields, form: Form) -> Form:
    """Return the fields of FP16_Optimizer.state_dict; for a dynamic scale, also those of a DynamicLossScaler."""
    saved = {"dynamic_loss_scale": _is_dynamic(settings), "cur_scale": form["cur_scale"], "cur_iter": state["steps"]}
    if not _is_dynamic(settings):
        return saved
    # DeepSpeed counts from the step of the last overflow; see `_from_deepspeed`.
    last = state["steps"] - (state["good_steps"] + 1) - 1
    # It backs off at a hysteresis of 1, and never counts further down.
    return saved | form | {"last_overflow_iter": last, "cur_hysteresis": max(state["hysteresis"], 1)}


LIBRARIES: dict[str, Library] = {
    "torch": Library(
        "torch.amp.GradScaler and aten _amp_update_scale_, torch 2.13: no minimum, growth to inf refused. Its "
        "state_dict() is also in checkpoints of accelerate and Lightning",
        {"init": 2.0**16, "min": _LOWEST, "max": _HIGHEST},
        {
            "init_scale": "init",
            "growth_factor": "growth",
            "backoff_factor": "backoff",
            "growth_interval": "interval",
        },
        {"scale": "scale", "good_steps": "_growth_tracker"},
        "GradScaler.load_state_dict(saved)",
        ("growth_factor", "backoff_factor", "growth_interval"),
        _torch,
    ),
    "apex": Library(
        "apex/amp/scaler.py LossScaler at b82c6bd (removed in cb65b8ed): clamped to max_loss_scale = 2**24. Saved by "
        "amp.state_dict()",
        {"init": 2.0**16, "min": _LOWEST, "max": 2.0**24},
        {"scale_window": "interval", "min_loss_scale": "min", "max_loss_scale": "max"},
        {"scale": "loss_scale", "good_steps": "unskipped"},
        "amp.load_state_dict(saved)",
        finish=_apex,
    ),
    "keras": Library(
        "keras.optimizers.LossScaleOptimizer, Keras 3.15: no limits",
        {"init": 2.0**15, "min": _LOWEST, "max": _HIGHEST},
        {"initial_scale": "init", "dynamic_growth_steps": "interval"},
        {"scale": "dynamic_scale", "good_steps": "step_counter"},
        "the variables of these names of keras' LossScaleOptimizer",
    ),
    "tensorflow": Library(
        "tf.compat.v1.mixed_precision.DynamicLossScale, TensorFlow 2.21: floor of 1, growth to inf refused",
        {"init": 2.0**15, "min": 1.0, "max": _HIGHEST, "on_min": "ignore"},
        {"initial_loss_scale": "init", "increment_period": "interval", "multiplier": "growth"},
        {"scale": "current_loss_scale", "good_steps": "good_steps"},
        "the variables of DynamicLossScale, by these names",
    ),
    "deepspeed": Library(
        "deepspeed/runtime/fp16/loss_scaler.py DynamicLossScaler, 0.19, with the defaults of the fp16 config block",
        {
            "init": 2.0**16,
            "interval": 1000,
            "hysteresis": 2,
            "min": 1.0,
            "max": _HIGHEST,
            "on_min": "raise",
            "late_growth": "after_overflow",
        },
        {
            "init_scale": "init",
            "scale_factor": "growth",
            "scale_window": "interval",
            "loss_scale_window": "interval",
            "delayed_shift": "hysteresis",
            "consecutive_hysteresis": "consecutive",
            "min_scale": "min",
        },
        {"scale": "cur_scale", "good_steps": "last_overflow_iter", "hysteresis": "cur_hysteresis", "steps": "cur_iter"},
        "vars(DynamicLossScaler).update(saved), or part of what FP16_Optimizer.load_state_dict takes",
        ("scale_factor", "scale_window", "delayed_shift", "consecutive_hysteresis", "min_scale"),
        _deepspeed,
    ),
    "megatron": Library(
        "megatron/core/optimizer/grad_scaler.py DynamicGradScaler, 0.16, with the defaults of Megatron-LM's arguments",
        {"init": 2.0**32, "interval": 1000, "hysteresis": 2, "min": 1.0, "max": _HIGHEST, "on_min": "ignore"},
        {
            "initial_scale": "init",
            "growth_factor": "growth",
            "backoff_factor": "backoff",
            "growth_interval": "interval",
            "hysteresis": "hysteresis",
            "min_scale": "min",
        },
        {"scale": "scale", "good_steps": "growth_tracker", "hysteresis": "hysteresis_tracker"},
        "DynamicGradScaler.load_state_dict(saved), which needs the scale as a tensor of one element",
    ),
    "flax": Library(
        "flax/training/dynamic_scale.py DynamicScale, flax 0.12: clamped to finfo(float32)",
        {"init": 2.0**16, "min": _LOWEST, "max": (2 - 2.0**-23) * 2.0**127, "late_growth": "always"},
        {
            "scale": "init",
            "growth_factor": "growth",
            "backoff_factor": "backoff",
            "growth_interval": "interval",
            "minimum_scale": "min",
        },
        {"good_steps": "fin_steps", "scale": "scale"},
        "flax.serialization.from_state_dict(DynamicScale(), saved)",
    ),
    "jmp": Library(
        "jmp/_src/loss_scale.py DynamicLossScale, jmp 0.0.4, with the initial scale of its README",
        {"init": 2.0**15, "min": 1.0, "max": _HIGHEST, "on_min": "ignore"},
        {"loss_scale": "init", "period": "interval", "factor": "growth", "min_loss_scale": "min"},
        {"scale": "loss_scale", "good_steps": "counter"},
        "jmp.DynamicLossScale(**saved), with arrays for the scales",
        ("period", "factor", "min_loss_scale"),
        _jmp,
    ),
    "fairseq": Library(
        "fairseq/optim/dynamic_loss_scaler.py, 0.12: raises before min_loss_scale = 1e-4, so 2**-13 is the last. Saved "
        "by fp16_optimizer.py; jmp.StaticLossScale has the same form",
        {"init": 2.0**15, "min": 2.0**-13, "max": _HIGHEST, "on_min": "raise"},
        {"init_scale": "init", "scale_factor": "growth", "scale_window": "interval", "min_loss_scale": "min"},
        {"scale": "loss_scale"},
        "FP16Optimizer.load_state_dict",
    ),
}
"""A state is of the first library whose keys it has, so a library that saves the scale alone comes last."""

OTHER_NAMES = {name: ours for row in LIBRARIES.values() for name, ours in row.options.items()} | {"max_scale": "max"}
"""Other libraries' names of settings, and the field of `LossScale` that each one means; for errors."""

_HOLDERS = ("loss_scaler0", "loss_scaler", "grad_scaler", "MixedPrecision", "scaler")
"""Keys under which a checkpoint stores the state of its loss scale: Apex, DeepSpeed, Megatron, Lightning."""


def library(name: object, *, where: str) -> Library:
    """Return a library's row."""
    if isinstance(name, str) and name in LIBRARIES:
        return LIBRARIES[name]
    raise InvalidValueError(
        "unknown loss-scale preset",
        where=where,
        found=shown(name),
        allowed=", ".join(LIBRARIES),
        fix=f"{did_you_mean(name, LIBRARIES)}use one of the names above, or write the settings one by one",
    )


def _is_dynamic(settings: Fields) -> bool:
    return bool(settings["check"] and settings["min"] < settings["max"])


def _scales(settings: Fields) -> bool:
    return bool(settings["check"] and not settings["min"] == settings["max"] == 1)


# --- writing ----------------------------------------------------------------------------------------------------------


def write(settings: Fields, state: Fields, like: str) -> Form:
    """Return a state in the form that another library loads; see `LossScale.to_state_dict`."""
    row = library(like, where="save_loss_scale(like=)")
    # Other libraries count finite steps from 0; see `LossScale.late_growth`.
    counted = {**state, "good_steps": max(state["good_steps"] + (settings["late_growth"] == "always"), 0)}
    form = {key: counted[field] for field, key in row.keys.items()}
    form |= {name: settings[row.options[name]] for name in row.saved_options}
    return row.finish(settings, state, form)


def write_apex_losses(settings: Fields, initial: Fields, states: Mapping[Hashable, Fields]) -> Form:
    """Return several losses' state in Apex's form; its first loss is that with id 0, or without one (None)."""
    # Apex loads its losses by their order, so an id that was never used keeps its place, with the initial state. Ids
    # that are not numbers have no place there, and are reported.
    numbers = [one for one in states if isinstance(one, int) and not isinstance(one, bool) and one >= 0]
    others = [repr(one) for one in states if one is not None and one not in numbers]
    if 0 in numbers and states.get(None, initial) != initial:
        others.append("losses without an id")
    if others:
        warn_once(f"Apex numbers its losses: the loss scales of {', '.join(others)} are lost.")
    order = [0 if 0 in numbers else None, *range(1, max(numbers, default=0) + 1)]
    losses = (write(settings, states.get(loss_id, initial), "apex") for loss_id in order)
    return {f"loss_scaler{number}": loss["loss_scaler0"] for number, loss in enumerate(losses)}


def report_lost(settings: Fields, theirs: Fields, state: Fields, like: str) -> None:
    """Report once what another library has no field or no setting for; ``theirs`` are the settings of its own rule."""
    initial = {"hysteresis": settings["hysteresis"], "good_steps": min(state["good_steps"], 0)}
    has = LIBRARIES[like].keys
    lost = [name for name, value in state.items() if name not in has and value != initial.get(name, 0)]
    other = _other_rule(settings, theirs, like)
    parts = [f"{', '.join(lost)} (lost: no field for them)"] if lost else []
    parts += [f"{', '.join(f'{name}={settings[name]!r}' for name in other)} (no such setting)"] if other else []
    if parts:
        rest = "; where these settings act, the loss scale there differs from polyamp's" if other else ""
        warn_once(f"the form of {like} does not express {' and '.join(parts)}{rest}.")


def _other_rule(settings: Fields, theirs: Fields, like: str) -> list[str]:
    """Return the settings with which the library's rule differs from ours."""
    if like == "torch" and not _scales(settings):
        return []
    if not settings["check"]:
        return ["check"]
    if not _is_dynamic(settings) and like in ("deepspeed", "jmp"):
        return []  # forms of a scale that does not change
    can_set = set(LIBRARIES[like].options.values()) - {"init"}
    values = {**theirs, **{name: settings[name] for name in can_set}}
    if "growth" in can_set and "backoff" not in can_set:
        values["backoff"] = in_single(1 / settings["growth"])
    rule = ["growth", "interval", "backoff", "hysteresis", "consecutive", "min", "max", "late_growth"]
    if settings["hysteresis"] == 1:
        rule.remove("consecutive")
    return [name for name in rule if settings[name] != values[name]]


# --- reading ----------------------------------------------------------------------------------------------------------


def read(settings: Fields, initial: Fields, saved: Any) -> dict[str, Any]:
    """Return the fields of a saved state as Python numbers; see `LossScale.from_state_dict`."""
    values = _values(settings, initial, saved)
    dynamic = _is_dynamic(settings)
    if not dynamic and settings["init"] == 1 and values["scale"] != 1:
        warn_once(
            f"the saved state has a loss scale of {_number(values['scale'], float):g}, and this policy does not scale: "
            "the scale is left out, the counters are kept."
        )
        values |= {"scale": 1.0, "good_steps": initial["good_steps"], "hysteresis": 1}
    elif dynamic and settings["init"] != 1 and _is_ours(saved) and _is_unscaled(settings, values):
        warn_once(
            "the saved state comes from training without a loss scale, as under bfloat16: the loss scale starts at "
            f"init = {settings['init']:g}."
        )
        values |= {name: initial[name] for name in ("scale", "good_steps", "hysteresis")}
    state = {name: _number(values[name], type(first)) for name, first in initial.items()}
    _check(settings, state)
    return state


def apex_losses(saved: Any) -> dict[int, Fields]:
    """Return the states of the losses in a state that Apex saved, by their number; empty for other states."""
    if not isinstance(saved, Mapping) or "kind" in saved:
        return {}
    matches = {re.fullmatch(r"loss_scaler(\d+)", str(key)): state for key, state in saved.items()}
    return {int(match[1]): state for match, state in matches.items() if match}


def _values(settings: Fields, initial: Fields, saved: Any) -> dict[str, Any]:
    """Return the state's fields under our names, not yet checked. Fields that are not saved are as at the start."""
    if _is_ours(saved):
        if saved.get("version", 1) != 1:
            raise _bad_state("a state of another version", f"version {shown(saved['version'])}", "version 1")
        if "scale" not in saved:
            raise _bad_state("incomplete state", f"no scale, but {', '.join(map(str, saved))}", "at least a scale")
        return {**initial, **{name: saved[name] for name in initial if name in saved}}
    if isinstance(saved, Mapping) and "kind" in saved:
        raise _no_state(f"kind {saved['kind']!r}")
    found = _inside(saved)
    if "cur_scale" in found:
        return {**initial, **_from_deepspeed(found)}
    row = next((row for row in LIBRARIES.values() if all(key in found for key in row.keys.values())), None)
    if row is not None:
        return {**initial, **_counted(settings, {name: found[key] for name, key in row.keys.items()})}
    if "scale" in found:  # the fields of LossScaleState, by hand
        return {**initial, **{name: found[name] for name in initial if name in found}}
    raise _no_state(f"kind None, a mapping of {', '.join(map(str, found))}" if found else "kind None, an empty mapping")


def _is_ours(saved: Any) -> bool:
    return isinstance(saved, Mapping) and saved.get("kind") == KIND


def _inside(saved: Any, depth: int = 2) -> Fields:
    """Return the mapping that contains the scale: a part of a checkpoint, or an object's attributes."""
    found = saved if isinstance(saved, Mapping) else _attributes(saved)
    if found is None:
        raise _no_state(shown(saved))
    within = next((found[key] for key in _HOLDERS if found.get(key) is not None), None)
    if within is None or not depth:
        return found
    if len(apex_losses(found)) > 1:
        warn_once(
            "the saved state has several loss scales, of several losses: the first one is taken. A wrapped PyTorch "
            "optimizer takes all of them."
        )
    return _inside(within, depth - 1)


def _attributes(saved: Any) -> Fields | None:
    """Return the attributes of another library's object, such as DeepSpeed's scaler or jmp's loss scale."""
    if isinstance(saved, str | int | float | bytes | list | type(None)):
        return None
    names = {key for row in LIBRARIES.values() for key in row.keys.values()} | {"scale_window"}
    with reading(saved, where="the saved loss scale"):
        found = {name: getattr(saved, name, None) for name in names}
    known = {name: value for name, value in found.items() if value is not None and not callable(value)}
    return known or None


def _counted(settings: Fields, values: dict[str, Any]) -> dict[str, Any]:
    """Convert counters to ours: if growth comes one step late, ours starts at -1 (see `LossScale.late_growth`)."""
    if "good_steps" in values and settings["late_growth"] == "always":
        values["good_steps"] = operator.index(_number(values["good_steps"], int)) - 1
    if "hysteresis" in values:  # Megatron's falls at every overflow, without end; 0 means the same here
        values["hysteresis"] = max(operator.index(_number(values["hysteresis"], int)), 0)
    return values


def _from_deepspeed(found: Fields) -> dict[str, Any]:
    """Convert the state of DeepSpeed 0.19, which saves the step of the last overflow instead of a counter."""
    # It is saved by DynamicLossScaler and FP16_Optimizer. Before a step, ``cur_iter - last_overflow_iter - 1`` finite
    # steps have passed, and the scale grows at multiples of the window. Our counter is one less, since it counts the
    # coming step first.
    values = {"scale": found["cur_scale"]}
    if "cur_hysteresis" in found:
        values["hysteresis"] = found["cur_hysteresis"]
    if {"cur_iter", "last_overflow_iter"} <= set(found):
        behind = _number(found["cur_iter"], int) - _number(found["last_overflow_iter"], int) - 1
        window = max(int(_number(found.get("scale_window", 1000), int)), 1)
        values["good_steps"] = behind - 1 if behind <= window else (behind - 1) % window
    return values


def _is_unscaled(settings: Fields, values: Fields) -> bool:
    """Return whether a state is as under `LossScale.skip_nonfinite` or `none`: its scale is 1 and was never another."""
    names = ("scale", "growths", "skipped", "overflow_scale", "hysteresis")
    scale, growths, skipped, at, hysteresis = (_number(values[name], float) for name in names)
    if scale != 1 or growths:
        return False
    # An overflow at the smallest scale leaves -1. If that is 1 here too, this scale may have come down to it.
    return bool(at == 1 and hysteresis == -1 and settings["min"] < 1) if skipped else bool(at == 0)


def _check(settings: Fields, state: Fields) -> None:
    for name, value in state.items():
        if name == "overflow_scale":
            if not (math.isfinite(value) and value >= 0):
                raise _bad_state(f"the saved {name} is not a loss scale", value, "a finite number")
        elif name != "scale":
            least = -1 if name in ("good_steps", "hysteresis") else 0
            if not least <= value <= LARGEST_COUNT:
                raise _bad_state(f"the saved {name} is not a count of steps", value, f"between {least} and 2**31 - 1")
    least, scale, most = in_single(settings["min"]), in_single(state["scale"]), in_single(settings["max"])
    if not (math.isfinite(state["scale"]) and least <= scale <= most):
        allowed = f"between {settings['min']:g} and {settings['max']:g}"
        raise _bad_state("the saved scale is outside these settings", state["scale"], allowed)


def _number(value: Any, kind: Callable[[Any], Any]) -> Any:
    """Return a scalar of any library as a Python number. Float counters (DeepSpeed's tensors) must be whole."""
    try:
        if isinstance(value, bool):
            raise TypeError(value)
        if kind is float and not isinstance(value, str):
            return float(value)
        is_float = isinstance(value, float) or "float" in str(getattr(value, "dtype", ""))
        whole = value if hasattr(value, "__index__") and not is_float else float(value)
        if isinstance(value, str) or whole != int(whole):
            raise ValueError(value)
        return int(whole)
    except (TypeError, ValueError, OverflowError) as error:
        allowed = "numbers for scale and overflow_scale, and integers"
        raise _bad_state("state of the wrong types", shown(value), allowed) from error


def _no_state(found: str) -> StateError:
    return _bad_state("not a loss-scale state", found, f"kind {KIND!r}, or a state of {', '.join(LIBRARIES)}")


def _bad_state(what: str, found: object, allowed: str) -> StateError:
    """Return the error for a state that cannot be loaded."""
    return StateError(
        what,
        where="LossScale.from_state_dict(saved)",
        found=found,
        allowed=allowed,
        fix="load the result of to_state_dict, of save_loss_scale, or of another library's loss scaler",
    )
