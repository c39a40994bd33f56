"""`apex.amp` on polyamp: the functions that NVIDIA's Apex had until 2025, for programs that still call them.

    initialize    `polyamp.autocast` (O1) or `polyamp.convert` (O2, O3), and `attach` for each optimizer
    scale_loss    `LossScaledOptimizer.scale`, and `unscale_` when the block ends
    step          the wrapper's step: an overflow in any block since the last step skips it

All optimizers share the loss scales, one for each loss. It runs on all devices, and differs from Apex where polyamp
promises more: a static loss scale also skips an overflow, a loss that is not finite skips the step, and a step on an
unscaled loss is refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from polyamp.backends.torch.autocast.weights import forget_casts
from polyamp.backends.torch.compat.apex_casts import (
    FORMATS,
    HANDLE,
    cast_model,
    casts_off,
    float_function,
    half_function,
    promote_function,
    register_float_function,
    register_half_function,
    register_promote_function,
)
from polyamp.backends.torch.compat.attached import Attached, attach, check_plain, wrapper_of
from polyamp.backends.torch.compat.grad_scaler import unscale_once
from polyamp.backends.torch.dtypes import SIXTEEN_BIT
from polyamp.backends.torch.step.optimizer import LossScaledOptimizer
from polyamp.backends.torch.step.scale import LossScaler
from polyamp.errors import InvalidValueError, StateError, UsageError, shown, warn_deprecated, wrong_type
from polyamp.libraries import apex_losses
from polyamp.policies import policy
from polyamp.run import current, note_own_precision
from polyamp.settings import LossScale

__all__ = [
    "_amp_state",
    "float_function",
    "half_function",
    "initialize",
    "load_state_dict",
    "master_params",
    "promote_function",
    "register_float_function",
    "register_half_function",
    "register_promote_function",
    "scale_loss",
    "state_dict",
]


@dataclass
class Properties:
    """The options in force, under Apex' names. Programs read them as ``_amp_state.opt_properties.master_weights``."""

    enabled: bool = False
    opt_level: str | None = None
    cast_model_type: Any = None
    patch_torch_functions: bool = False
    keep_batchnorm_fp32: bool | None = None
    master_weights: bool | None = None
    loss_scale: Any = 1.0


class ShownScaler(LossScaler):
    """A loss scale that has Apex' names too."""

    def loss_scale(self) -> float:
        """Return the scale. Waits for the device if it is on one."""
        return float(self.state.scale)

    def _set(self, scale: float) -> None:
        if not self.settings.dynamic:
            self.settings = LossScale.fixed(scale).in_float32()
        self.set(scale, where="loss_scaler._loss_scale = scale")

    _loss_scale = property(loss_scale, _set)
    _unskipped = property(lambda self: int(self.state.good_steps))


class AmpState(ModuleType):
    """The decisions of `initialize`, and the loss scales that its optimizers share."""

    # Apex has a module and an object of the name ``_amp_state``. Here they are one.
    opt_properties: Properties  # missing before the first call of `initialize`

    def __init__(self) -> None:
        super().__init__("apex.amp._amp_state")
        self.handle = HANDLE
        self.loss_scalers: list[ShownScaler] = []
        self.scaler = ShownScaler(LossScale.like("apex"))
        self._amp_state = self


_amp_state = AmpState()


_INSTEAD = {
    "O0": "no line: a plain optimizer trains in float32",
    "O1": 'opt = polyamp.wrap_optimizer(opt, "mixed_float16"), and with polyamp.autocast("mixed_float16"): around the '
    "forward pass",
    "O2": 'polyamp.convert(model, "O2"); opt = polyamp.wrap_optimizer(opt, "O2")',
    "O3": 'polyamp.convert(model, "O3"); opt = polyamp.wrap_optimizer(opt, "O3", master_weights=False)',
}

_LEVELS = {
    "O0": Properties(True, "O0", torch.float32, False, None, False, 1.0),
    "O1": Properties(True, "O1", None, True, None, None, "dynamic"),
    "O2": Properties(True, "O2", torch.float16, False, True, True, "dynamic"),
    "O3": Properties(True, "O3", torch.float16, False, False, False, 1.0),
}

# The values of an option, the levels that it is for, and the values that change nothing at the others.
_FLAGS = (True, False)
_OPTIONS: dict[str, tuple[tuple[Any, ...], str, tuple[Any, ...]]] = {
    "cast_model_type": ((*FORMATS, False), "O2 or O3", (False, torch.float32)),
    "patch_torch_functions": (_FLAGS, "O1", (False,)),
    "keep_batchnorm_fp32": ((*_FLAGS, "True", "False"), "O2 or O3", ()),
    "master_weights": (_FLAGS, "O2 or O3", ()),
}


def _properties(opt_level: Any, loss_scale: Any, options: dict[str, Any]) -> Properties:
    """Return a level's options, replaced by those passed that are not None."""
    if opt_level not in _LEVELS:
        raise _wrong("opt_level", opt_level, f"{', '.join(_LEVELS)}, with the letter O")
    given = {name: value for name, value in options.items() if value is not None}
    for name, value in given.items():
        allowed, levels, harmless = _OPTIONS[name]
        if value not in allowed:
            raise _wrong(name, value, ", ".join(map(repr, allowed)))
        if (levels == "O1") != (opt_level == "O1") and value not in harmless:
            raise _wrong(name, value, f"this option with opt_level {levels} only: leave it out here")
        given[name] = value == "True" if isinstance(value, str) else value
    try:
        if loss_scale is not None:
            given["loss_scale"] = loss_scale if loss_scale == "dynamic" else float(loss_scale)
    except (TypeError, ValueError):
        raise _wrong("loss_scale", loss_scale, '"dynamic", a number, or a number in a string') from None
    return replace(_LEVELS[opt_level], **given)


def _wrong(option: str, value: object, allowed: str) -> InvalidValueError:
    where, found = f"amp.initialize({option}=)", repr(value)
    return InvalidValueError("wrong value of an option", where=where, found=found, allowed=allowed)


def initialize(
    models: Any,
    optimizers: Any = None,
    enabled: bool = True,
    opt_level: str = "O1",
    cast_model_type: torch.dtype | bool | None = None,
    patch_torch_functions: bool | None = None,
    keep_batchnorm_fp32: bool | str | None = None,
    master_weights: bool | None = None,
    loss_scale: float | str | None = None,
    cast_model_outputs: torch.dtype | None = None,
    num_losses: int = 1,
    verbosity: int = 1,
    min_loss_scale: float | None = None,
    max_loss_scale: float = 2.0**24,
) -> Any:
    """Prepare models and optimizers for mixed precision, as Apex does; return the same objects.

    O0 is float32. O1 runs operations in the formats of autocast, from here until ``_amp_state.handle._deactivate()``.
    O2 stores the model in float16, with float32 batch norms and master weights; O3 stores all of it in float16.

    Args:
        models: a module, or a list of them.
        optimizers: an optimizer, a list of them, or None for inference. They act as their wrappers from then on.
        enabled: False changes nothing, here and in `scale_loss`.
        opt_level: "O0", "O1", "O2" or "O3". The next five options replace what it implies; see Apex.
        cast_model_outputs: dtype of the model's outputs; None is float32 where the model is cast.
        num_losses: number of losses with scales of their own; see ``loss_id`` of `scale_loss`.
        verbosity: not used: nothing is printed. The optimizer's ``last_step`` reports why a step was skipped.
        min_loss_scale, max_loss_scale: limits of the dynamic scale.

    Returns:
        What was passed: models, or models and optimizers; each a list if it was one.

    Raises:
        InvalidTypeError: these are not modules or not optimizers.
        InvalidValueError: an option has a wrong value, or contradicts the level.
        UsageError: a model has 16-bit parameters, or is wrapped for several devices; or an optimizer was passed before.
    """
    note_own_precision("apex.amp.initialize")
    instead = _INSTEAD.get(opt_level, _INSTEAD["O1"])
    warn_deprecated(f'apex.amp.initialize(model, opt, opt_level="{opt_level}")', instead)
    if not enabled:
        _amp_state.opt_properties = Properties()
        return models if optimizers is None else (models, optimizers)
    replacing: dict[str, Any] = {"cast_model_type": cast_model_type, "patch_torch_functions": patch_torch_functions}
    replacing |= {"keep_batchnorm_fp32": keep_batchnorm_fp32, "master_weights": master_weights}
    properties = _properties(opt_level, loss_scale, replacing)
    if cast_model_outputs not in (None, *FORMATS):
        raise _wrong("cast_model_outputs", cast_model_outputs, ", ".join(map(str, FORMATS)))
    if not isinstance(num_losses, int) or num_losses < 1:
        raise _wrong("num_losses", num_losses, "1 or more")
    settings = _settings(properties.loss_scale, min_loss_scale, max_loss_scale)
    some_models = models if isinstance(models, list) else [models]
    some_optimizers = optimizers if isinstance(optimizers, list) else [optimizers] if optimizers is not None else []
    for model in some_models:
        _check_model(model)
    for optimizer in some_optimizers:
        check_plain(optimizer)
    _amp_state.opt_properties = properties
    for model in some_models:
        cast_model(model, properties.cast_model_type, properties.keep_batchnorm_fp32, cast_model_outputs)
    _share_scales(properties, settings, num_losses, some_optimizers)
    if properties.patch_torch_functions:
        HANDLE.activate(some_models)
    return models if not some_optimizers else (models, optimizers)


def _settings(loss_scale: Any, least: float | None, most: float) -> LossScale:
    if loss_scale != "dynamic":
        return LossScale.fixed(loss_scale)
    apex = LossScale.like("apex")
    init = max(least or 0.0, min(most, apex.init))
    return LossScale.like("apex", min=least or apex.min, max=most or apex.max, init=init)


def _check_model(model: Any) -> None:
    """Refuse what is not a model, is wrapped for several devices already, or has 16-bit parameters."""
    where = "amp.initialize(models)"
    if not isinstance(model, nn.Module):
        what, fix = "this is not a model", "pass the model, or models in a list"
        raise wrong_type(model, where=where, allowed="a torch.nn.Module, or a list of them", fix=fix, what=what)
    if isinstance(model, nn.parallel.DistributedDataParallel | nn.DataParallel):
        kind = type(model).__name__
        fix = f"call amp.initialize first, then {kind}(model)"
        raise UsageError("the model is wrapped for several devices already", where=where, found=kind, fix=fix)
    for name, value in (*model.named_parameters(), *model.named_buffers()):
        if value.dtype in SIXTEEN_BIT:
            found, fix = f"{name} of {value.dtype}", "pass the float32 model, without .half(): what has to be is cast"
            raise UsageError("the model has 16-bit parameters or buffers", where=where, found=found, fix=fix)


def _share_scales(
    properties: Properties, settings: LossScale, count: int, optimizers: Iterable[torch.optim.Optimizer]
) -> None:
    """Restart the loss scales, as in Apex also for optimizers of earlier calls, and attach these optimizers."""
    dtype = torch.float16 if properties.patch_torch_functions else properties.cast_model_type or torch.float32
    shared = _amp_state.scaler
    LossScaler.__init__(shared, settings, policy("O0" if dtype == torch.float32 else f"mixed_{FORMATS[dtype]}"))
    _amp_state.loss_scalers = [shared.of(loss_id or None) for loss_id in range(count)]  # polyamp's first has no id
    for optimizer in optimizers:
        if properties.cast_model_type and not properties.master_weights:
            optimizer.load_state_dict(optimizer.state_dict())  # which casts moments to the dtype of their parameters
        wrapper = attach(
            optimizer,
            "float32" if dtype == torch.float32 else "mixed_float16",  # Apex scales losses of bfloat16 too
            loss_scale=settings,
            master_weights=None if properties.master_weights else False,
            kind=_Initialized,
        )
        wrapper.scaler = shared
        if (session := current()) is not None:
            session.holders.append(wrapper)


class _Initialized(Attached):
    """An optimizer of `initialize`: O1 does not cast its step, and ``amp.state_dict`` has the loss scales."""

    polyamp_saves_scale = False

    @staticmethod
    def polyamp_step(wrapper: LossScaledOptimizer, closure: Any, **kwargs: Any) -> Any:
        with casts_off() if closure is None else nullcontext():  # a closure, which calls the model, has O1's formats
            return wrapper.step(closure, **kwargs)


def master_params(optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    """Yield the parameters that an optimizer trains: master weights in place of 16-bit parameters.

    >>> [param.shape for param in master_params(torch.optim.SGD([torch.ones(2)], lr=0.1))]
    [torch.Size([2])]
    """
    warn_deprecated("apex.amp.master_params(opt)", "opt.clip_grad_norm_(max_norm), or opt.param_groups")
    for group in optimizer.param_groups:
        yield from group["params"]


@contextmanager
def scale_loss(
    loss: Any,
    optimizers: Any,
    loss_id: int = 0,
    model: Any = None,
    delay_unscale: bool = False,
    delay_overflow_check: bool = False,
) -> Iterator[Any]:
    """Multiply a loss by its scale, for the backward pass of the block, and unscale the gradients when the block ends.

    Blocks before one step add up, also with other optimizers and losses. An overflow in any of them skips the step.

    Args:
        loss: floating-point tensor.
        optimizers: an optimizer of `initialize`, or several.
        loss_id: number of the loss, below ``num_losses``: each has its own scale.
        model: not used.
        delay_unscale: leave the gradients scaled: a later block, or the step, unscales them.
        delay_overflow_check: not used.

    Raises:
        UsageError: `initialize` was not called, or not with these optimizers; the backward pass was not that of the
            scaled loss; or the gradients of the last step were not cleared.
        InvalidValueError: there is no such loss.
    """
    warn_deprecated("with apex.amp.scale_loss(loss, opt) as scaled: scaled.backward()", "opt.backward(loss)")
    if not getattr(_amp_state, "opt_properties", _LEVELS["O0"]).enabled:
        yield loss
        return
    wrapped, scalers = _wrapped(optimizers), _amp_state.loss_scalers
    if not 0 <= loss_id < len(scalers):
        where, fix = "amp.scale_loss(loss_id=)", "pass num_losses= to amp.initialize"
        allowed = f"0 to {len(scalers) - 1}"
        raise InvalidValueError("there is no loss of this number", where=where, found=loss_id, allowed=allowed, fix=fix)
    yield wrapped[0].scale(loss, loss_id or None)
    if not delay_unscale:
        for one in wrapped:
            unscale_once(one)
        flags = [flag for one in wrapped if (flag := one.findings.flags.get(scalers[loss_id])) is not None]
        for one in wrapped if len(flags) > 1 else ():  # all skip if the block made one of them skip, as in Apex
            one.findings.skip_with(torch.stack([flag.to(flags[0].device) for flag in flags]).amax())
    forget_casts()


def _wrapped(optimizers: Any) -> list[LossScaledOptimizer]:
    given = [optimizers] if isinstance(optimizers, torch.optim.Optimizer) else list(optimizers)
    known = [one for one in map(wrapper_of, given) if one is not None]
    if not known or len(known) < len(given):
        where, found = "amp.scale_loss(loss, optimizers)", ", ".join(map(shown, given)) or "no optimizer"
        fix = "model, optimizer = amp.initialize(model, optimizer, opt_level=...)"
        raise UsageError("the optimizer did not go through amp.initialize", where=where, found=found, fix=fix)
    return known


def state_dict(destination: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return the loss scales as ``{"loss_scaler0": {"loss_scale": ..., "unskipped": ...}, ...}``.

    The state of an optimizer has them too, with everything else that it needs to resume bit for bit.
    """
    warn_deprecated(
        "apex.amp.state_dict()", "opt.state_dict(), which has the loss scale, or polyamp.save_loss_scale(opt)"
    )
    destination = {} if destination is None else destination
    for number, scaler in enumerate(_amp_state.loss_scalers):
        destination[f"loss_scaler{number}"] = {"loss_scale": scaler.loss_scale(), "unskipped": scaler._unskipped}
    return destination


def load_state_dict(state_dict: Mapping[str, Any]) -> None:
    """Resume the loss scales from a result of polyamp's or Apex' `state_dict`.

    Losses in the state beyond ``num_losses`` are left out, as in Apex.

    Raises:
        StateError: it is another kind of state, or a scale is outside the settings; nothing is changed.
    """
    warn_deprecated(
        "apex.amp.load_state_dict(saved)", "opt.load_state_dict(saved), or polyamp.load_loss_scale(opt, saved)"
    )
    keys = {"loss_scale", "unskipped"}
    losses = [one for one in apex_losses(state_dict).values() if isinstance(one, Mapping) and keys <= one.keys()]
    if not losses or len(losses) < len(state_dict):
        where, found = "amp.load_state_dict(saved)", shown(state_dict)
        allowed, fix = "loss_scaler0, ..., each with loss_scale and unskipped", "pass what amp.state_dict() returned"
        raise StateError("this is not a state of apex.amp", where=where, found=found, allowed=allowed, fix=fix)
    loaded = []
    for scaler, saved in zip(_amp_state.loss_scalers, losses, strict=False):
        settings = scaler.settings if scaler.settings.dynamic else LossScale.fixed(saved["loss_scale"])  # any number
        loaded.append((scaler, settings, settings.from_state_dict(saved)))
    for scaler, settings, state in loaded:
        scaler.settings = settings
        scaler.resume(state)
