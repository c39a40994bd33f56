"""Readers for saved loss scales: polyamp's own state, or that of another library.

Every library saves the scale and a counter of finite steps, under its own names. `read` detects which library saved a
state and returns its fields under our names. Fields that a library does not save keep their initial value.

For example, Apex saves ``{"loss_scaler0": {"loss_scale": 512.0, "unskipped": 3}}``, which is read as a ``scale`` of 512
and 3 ``good_steps``.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

from polyamp.errors import StateError, warn_once
from polyamp.formats import in_single
from polyamp.validation import shown

KIND = "polyamp.loss_scale"
LARGEST_COUNT = 2**31 - 1


class Settings(Protocol):
    """The settings of a loss scale, as far as reading and writing a state need them; see `polyamp.LossScale`."""

    @property
    def init(self) -> float: ...
    @property
    def min(self) -> float: ...
    @property
    def max(self) -> float: ...
    @property
    def growth(self) -> float: ...
    @property
    def interval(self) -> int: ...
    @property
    def backoff(self) -> float: ...
    @property
    def hysteresis(self) -> int: ...
    @property
    def consecutive(self) -> bool: ...
    @property
    def late_growth(self) -> str: ...
    @property
    def check(self) -> bool: ...
    @property
    def dynamic(self) -> bool: ...


class Dialect(NamedTuple):
    """The names that one library uses for the parts of a saved loss scale."""

    library: str  # the library that saves this state
    source: str  # the source of its names
    keys: Mapping[str, str]  # the library's key for each field of polyamp's state. All keys must be present


DIALECTS: tuple[Dialect, ...] = (
    Dialect(
        "torch",
        "torch.amp.GradScaler.state_dict(), also in checkpoints of accelerate and Lightning",
        {"scale": "scale", "good_steps": "_growth_tracker"},
    ),
    Dialect(
        "megatron",
        "megatron/core/optimizer/grad_scaler.py DynamicGradScaler.state_dict()",
        {"scale": "scale", "good_steps": "growth_tracker", "hysteresis": "hysteresis_tracker"},
    ),
    Dialect("flax", "flax.training.dynamic_scale.DynamicScale", {"scale": "scale", "good_steps": "fin_steps"}),
    Dialect("apex", "apex.amp.state_dict()", {"scale": "loss_scale", "good_steps": "unskipped"}),
    Dialect("jmp", "jmp.DynamicLossScale", {"scale": "loss_scale", "good_steps": "counter"}),
    Dialect("keras", "keras.optimizers.LossScaleOptimizer", {"scale": "dynamic_scale", "good_steps": "step_counter"}),
    Dialect(
        "tensorflow",
        "tf.compat.v1.mixed_precision.DynamicLossScale",
        {"scale": "current_loss_scale", "good_steps": "good_steps"},
    ),
    Dialect("polyamp", "the fields of LossScaleState, by hand", {"scale": "scale"}),
    Dialect("fairseq", "fairseq/optim/fp16_optimizer.py; also jmp.StaticLossScale", {"scale": "loss_scale"}),
)
"""The first one whose keys are all present is used, so those with more keys come first."""

_HOLDERS = ("loss_scaler0", "loss_scaler", "grad_scaler", "MixedPrecision", "scaler")
"""Keys under which a checkpoint stores the state of its loss scale: Apex, DeepSpeed, Megatron, Lightning."""


_DEEPSPEED = {"cur_scale", "cur_iter", "last_overflow_iter", "scale_window", "cur_hysteresis"}


def read(settings: Settings, initial: Mapping[str, float], saved: Any) -> dict[str, Any]:
    """Return the fields of a saved state as Python numbers; see `LossScale.from_state_dict`."""
    values = _values(settings, initial, saved)
    if not settings.dynamic and settings.init == 1 and values["scale"] != 1:
        warn_once(
            f"the saved state has a loss scale of {_shown(values['scale'])}, and this policy does not scale: the scale "
            "is left out, the counters are kept."
        )
        values["scale"], values["good_steps"], values["hysteresis"] = 1.0, initial["good_steps"], 1
    elif settings.dynamic and settings.init != 1 and _is_ours(saved) and _is_unscaled(values):
        warn_once(
            "the saved state comes from training without a loss scale, as under bfloat16: the loss scale starts at "
            f"init = {settings.init:g}."
        )
        values["scale"] = settings.init
    return _checked(settings, {name: _number(values[name], type(first)) for name, first in initial.items()})


def apex_losses(saved: Any) -> dict[int, Mapping[str, Any]]:
    """Return the states of the losses in a state that Apex saved, by their number; empty for other states."""
    if not isinstance(saved, Mapping) or "kind" in saved:
        return {}
    matches = {re.fullmatch(r"loss_scaler(\d+)", str(key)): state for key, state in saved.items()}
    return {int(match[1]): state for match, state in matches.items() if match}


def _values(settings: Settings, initial: Mapping[str, float], saved: Any) -> dict[str, Any]:
    """Return the state's fields under our names, not yet checked."""
    if _is_ours(saved):
        if "scale" not in saved:
            raise _bad_state("incomplete state", f"no scale, but {', '.join(map(str, saved))}", "at least a scale")
        return {**initial, **{name: saved[name] for name in initial if name in saved}}
    if isinstance(saved, Mapping) and "kind" in saved:
        raise _no_state(f"kind {saved['kind']!r}")
    found = _inside(saved)
    if "cur_scale" in found:
        return {**initial, **_deepspeed(found)}
    for dialect in DIALECTS:
        if all(key in found for key in dialect.keys.values()):
            own = {name: found[name] for name in initial if name in found} if dialect.library == "polyamp" else {}
            theirs = {name: found[key] for name, key in dialect.keys.items()}
            return {**initial, **own, **_counted(settings, theirs)}
    raise _no_state(f"kind None, a mapping of {', '.join(map(str, found))}" if found else "kind None, an empty mapping")


def _is_ours(saved: Any) -> bool:
    return isinstance(saved, Mapping) and saved.get("kind") == KIND


def _inside(saved: Any, depth: int = 2) -> Mapping[str, Any]:
    """Return the mapping that contains the scale: a part of a checkpoint, or an object's attributes."""
    found = saved if isinstance(saved, Mapping) else _attributes(saved)
    if not isinstance(found, Mapping):
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


def _attributes(saved: Any) -> Mapping[str, Any] | None:
    """Return the attributes of another library's object, such as DeepSpeed's scaler or jmp's loss scale."""
    if isinstance(saved, str | int | float | bytes | list | type(None)):
        return None
    names = {key for dialect in DIALECTS for key in dialect.keys.values()} | _DEEPSPEED
    found = {name: getattr(saved, name, None) for name in names}
    known = {name: value for name, value in found.items() if value is not None and not callable(value)}
    return known or None


def _counted(settings: Settings, values: dict[str, Any]) -> dict[str, Any]:
    """Convert counters to ours: if growth comes one step late, ours starts at -1 (see `LossScale.late_growth`)."""
    if "good_steps" in values and settings.late_growth == "always":
        values["good_steps"] = operator.index(_number(values["good_steps"], int)) - 1
    if "hysteresis" in values:  # Megatron's falls at every overflow, without end; 0 means the same here
        values["hysteresis"] = max(operator.index(_number(values["hysteresis"], int)), 0)
    return values


def _deepspeed(found: Mapping[str, Any]) -> dict[str, Any]:
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


def _is_unscaled(values: Mapping[str, Any]) -> bool:
    """Return whether a state is as under `LossScale.none`: the scale stays 1 and nothing is counted."""
    return all(_number(value, float) == (name in ("scale", "hysteresis")) for name, value in values.items())


def _checked(settings: Settings, state: dict[str, Any]) -> dict[str, Any]:
    for name, value in state.items():
        _check_count(name, value)
    least, most = in_single(settings.min), in_single(settings.max)
    if not (math.isfinite(state["scale"]) and least <= in_single(state["scale"]) <= most):
        allowed = f"between {settings.min:g} and {settings.max:g}"
        raise _bad_state("the saved scale is outside these settings", state["scale"], allowed)
    return state


def _check_count(name: str, value: float) -> None:
    if name == "overflow_scale":
        if not (math.isfinite(value) and value >= 0):
            raise _bad_state(f"the saved {name} is not a loss scale", value, "a finite number")
    elif name != "scale" and not -1 <= value <= LARGEST_COUNT:
        raise _bad_state(f"the saved {name} is not a count of steps", value, "between -1 and 2**31 - 1")


def _number(value: Any, kind: Callable[[Any], Any]) -> Any:
    """Return a scalar of any library as a Python number. Float counters (DeepSpeed's tensors) must be whole."""
    try:
        if kind is float and not isinstance(value, str):
            return float(value)
        whole = value if hasattr(value, "__index__") and not _is_float(value) else float(value)
        if isinstance(value, str) or whole != int(whole):
            raise ValueError(value)
        return int(whole)
    except (TypeError, ValueError, OverflowError) as error:
        allowed = "numbers for scale and overflow_scale, and integers"
        raise _bad_state("state of the wrong types", repr(value)[:200], allowed) from error


def _is_float(value: Any) -> bool:
    return isinstance(value, float) or "float" in str(getattr(value, "dtype", ""))


def _shown(value: Any) -> str:
    return f"{_number(value, float):g}"


def _no_state(found: str) -> StateError:
    libraries = ", ".join(dict.fromkeys(dialect.library for dialect in DIALECTS if dialect.library != "polyamp"))
    return _bad_state("not a loss-scale state", found, f"kind {KIND!r}, or a state of {libraries}, deepspeed")


def _bad_state(what: str, found: object, allowed: str) -> StateError:
    """Return the error for a state that cannot be loaded."""
    return StateError(
        what,
        where="LossScale.from_state_dict(saved)",
        found=found,
        allowed=allowed,
        fix="load the result of to_state_dict, of save_loss_scale, or of another library's loss scaler",
    )
