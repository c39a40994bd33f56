"""`apex.amp` on polyamp: the functions that NVIDIA's Apex had until 2025, for programs that still call them.

    initialize    `polyamp.autocast` (O1) or `polyamp.convert` (O2, O3), and `attach` for each optimizer
    scale_loss    `LossScaledOptimizer.scale`, and `unscale_` when the block ends
    step          the wrapper's step: an overflow in any block since the last step skips it

It runs on all devices, and differs from Apex where polyamp promises more: a static loss scale also skips an overflow,
a loss that is not finite skips the step, and a step on an unscaled loss is refused.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from polyamp.backends.torch.apex_casts import (
    AmpHandle,
    casts_off,
    float_function,
    half_function,
    promote_function,
    register_float_function,
    register_half_function,
    register_promote_function,
)
from polyamp.backends.torch.apex_losses import (
    Properties,
    ShownScaler,
    _amp_state,
    load_state_dict,
    master_params,
    scale_loss,
    state_dict,
)
from polyamp.backends.torch.attached import Attached, attach, wrapper_of
from polyamp.backends.torch.casting import cast_tensor, cast_to
from polyamp.backends.torch.convert import convert
from polyamp.backends.torch.dtypes import SIXTEEN_BIT
from polyamp.backends.torch.optimizer import LossScaledOptimizer
from polyamp.backends.torch.scale import LossScaler
from polyamp.errors import (
    InvalidTypeError,
    InvalidValueError,
    UsageError,
    no_optimizer,
    shown,
    unreported,
    warn_deprecated,
    wrapped_already,
)
from polyamp.policies import policy
from polyamp.run import current, found
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

_FORMATS = {torch.float16: "float16", torch.bfloat16: "bfloat16", torch.float32: "float32"}

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
    "cast_model_type": ((*_FORMATS, False), "O2 or O3", (False, torch.float32)),
    "patch_torch_functions": (_FLAGS, "O1", (False,)),
    "keep_batchnorm_fp32": ((*_FLAGS, "True", "False"), "O2 or O3", ()),
    "master_weights": (_FLAGS, "O2 or O3", ()),
}


def _properties(opt_level: Any, loss_scale: Any, options: dict[str, Any]) -> Properties:
    """Return the options of a level with those that were passed and are not None."""
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
    return InvalidValueError(
        "wrong value of an option", where=f"amp.initialize({option}=)", found=repr(value), allowed=allowed
    )


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
    found("apex.amp.initialize")
    warn_deprecated(
        f'apex.amp.initialize(model, opt, opt_level="{opt_level}")', _INSTEAD.get(opt_level, _INSTEAD["O1"])
    )
    if not enabled:
        _amp_state.opt_properties = Properties()
        return models if optimizers is None else (models, optimizers)
    replacing: dict[str, Any] = {"cast_model_type": cast_model_type, "patch_torch_functions": patch_torch_functions}
    replacing |= {"keep_batchnorm_fp32": keep_batchnorm_fp32, "master_weights": master_weights}
    properties = _properties(opt_level, loss_scale, replacing)
    if cast_model_outputs not in (None, *_FORMATS):
        raise _wrong("cast_model_outputs", cast_model_outputs, ", ".join(map(str, _FORMATS)))
    if not isinstance(num_losses, int) or num_losses < 1:
        raise _wrong("num_losses", num_losses, "1 or more")
    settings = _settings(properties.loss_scale, min_loss_scale, max_loss_scale)
    some_models = models if isinstance(models, list) else [models]
    some_optimizers = optimizers if isinstance(optimizers, list) else [optimizers] if optimizers is not None else []
    for model in some_models:
        _check_model(model)
    for optimizer in some_optimizers:
        _check_optimizer(optimizer)
    _amp_state.opt_properties = properties
    for model in some_models:
        _cast(model, properties, cast_model_outputs)
    _share_scales(properties, settings, num_losses, some_optimizers)
    if properties.patch_torch_functions:
        _turn_on(some_models)
    return models if not some_optimizers else (models, optimizers)


def _settings(loss_scale: Any, least: float | None, most: float) -> LossScale:
    if loss_scale != "dynamic":
        return LossScale.fixed(loss_scale)
    init = max(least or 0.0, min(most, LossScale.like("apex").init))
    limits = {"max": most, "init": init, "min": least}
    return LossScale.like("apex", **{name: value for name, value in limits.items() if value})


def _check_model(model: Any) -> None:
    """Refuse what is not a model, is wrapped for several devices already, or has 16-bit parameters."""
    if not isinstance(model, nn.Module):
        raise InvalidTypeError(
            "this is not a model",
            where="amp.initialize(models)",
            found=shown(model),
            allowed="a torch.nn.Module, or a list of them",
        )
    if isinstance(model, nn.parallel.DistributedDataParallel | nn.DataParallel):
        raise UsageError(
            "the model is wrapped for several devices already",
            where="amp.initialize(models)",
            found=type(model).__name__,
            fix=f"call amp.initialize first, then {type(model).__name__}(model)",
        )
    values = (*model.named_parameters(), *model.named_buffers())
    low = [f"{name} of {value.dtype}" for name, value in values if value.dtype in SIXTEEN_BIT]
    if low:
        raise UsageError(
            "the model has 16-bit parameters or buffers",
            where="amp.initialize",
            found=low[0],
            fix="pass the float32 model, without .half(): amp.initialize casts what has to be cast",
        )


def _check_optimizer(optimizer: Any) -> None:
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise no_optimizer(optimizer, allowed="a plain torch.optim.Optimizer, a list of them, or None")
    if wrapper_of(optimizer) is not None or isinstance(optimizer, LossScaledOptimizer):
        raise wrapped_already(type(optimizer).__name__, fix="pass each plain optimizer to amp.initialize once")


def _cast(model: nn.Module, properties: Properties, outputs: torch.dtype | None) -> None:
    """Cast a model as the options want, and its inputs and outputs on every call."""
    dtype = properties.cast_model_type
    if dtype:  # all layers, except batch norms if they are kept
        rules = {**({"batch_norm": "inner"} if properties.keep_batchnorm_fp32 else {}), "*_norm": "lower"}
        form, output = _FORMATS[dtype], _FORMATS[outputs or torch.float32]
        with unreported():  # a model without norms is not a mistake
            convert(model, policy(param=form, compute=form, output=output, rules=rules))
        for module in model.modules():
            module.register_state_dict_post_hook(_show_float32)  # type: ignore[no-untyped-call]
    elif outputs is not None:
        model.register_forward_hook(lambda _, __, out: cast_to(out, outputs, modules=False))


def _show_float32(module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
    """Replace 16-bit values of a state dict by float32 ones."""
    for key, value in state.items():
        if key.startswith(prefix) and isinstance(value, Tensor) and value.dtype in SIXTEEN_BIT:
            state[key] = cast_tensor(value, torch.float32)


def _share_scales(
    properties: Properties, settings: LossScale, count: int, optimizers: Iterable[torch.optim.Optimizer]
) -> None:
    """Start the loss scales anew, also for the optimizers of earlier calls, as in Apex, and attach the new ones."""
    dtype = torch.float16 if properties.patch_torch_functions else properties.cast_model_type or torch.float32
    shared = _amp_state.scaler
    LossScaler.__init__(shared, settings, _FORMATS[dtype])
    _amp_state.loss_scalers = [ShownScaler(shared, loss_id) for loss_id in range(count)]
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


def _turn_on(models: Iterable[nn.Module]) -> None:
    """Enter O1 here and in the calls of the models. Models of several calls share one handle while it is active."""
    handle = _amp_state.handle
    if handle is None or not handle.is_open:
        handle = _amp_state.handle = AmpHandle()
    handle.enter()
    for model in models:
        handle.watch(model)
    if (session := current()) is not None:
        session.callback(handle._deactivate)


class _Initialized(Attached):
    """An optimizer of `initialize`: its step is made as it is written, and `state_dict` has the loss scales."""

    polyamp_saves_scale = False

    @staticmethod
    def polyamp_step(wrapper: LossScaledOptimizer, closure: Any, **kwargs: Any) -> Any:
        with casts_off() if closure is None else nullcontext():  # a closure, which calls the model, has O1's formats
            return wrapper.step(closure, **kwargs)
