"""`amp.initialize`: prepares models and optimizers for an optimization level, and returns the same objects."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from polyamp.backends.torch.compat.apex.amp import models as changes
from polyamp.backends.torch.compat.apex.amp._amp_state import _amp_state
from polyamp.backends.torch.compat.apex.amp.handle import around_step, turned_on
from polyamp.backends.torch.compat.apex.amp.options import Properties, chosen
from polyamp.backends.torch.compat.apex.amp.stash import Stash
from polyamp.backends.torch.compat.attached import attach, wrapper_of
from polyamp.backends.torch.steps.optimizer import LossScaledOptimizer
from polyamp.controls import scale_in_effect
from polyamp.errors import InvalidTypeError, InvalidValueError, UsageError, warn_deprecated
from polyamp.loss_scale import LossScale
from polyamp.scripts.session import current, found
from polyamp.validation import shown

_INSTEAD = {
    "O0": "no line: a plain optimizer trains in float32",
    "O1": 'opt = polyamp.wrap_optimizer(opt, "mixed_float16"), and with polyamp.autocast("mixed_float16"): around the '
    "forward pass",
    "O2": 'polyamp.convert(model, "O2"); opt = polyamp.wrap_optimizer(opt, "O2")',
    "O3": 'polyamp.convert(model, "O3"); opt = polyamp.wrap_optimizer(opt, "O3", master_weights=False)',
}


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
        opt_level: "O0", "O1", "O2" or "O3". The next five options replace what it implies.
        cast_model_type: dtype of the model's parameters, inputs and computations; False leaves them.
        patch_torch_functions: whether operations have the formats of autocast; True with O1 only.
        keep_batchnorm_fp32: whether batch norms of a 16-bit model stay in float32; also "True" and "False".
        master_weights: whether 16-bit parameters get float32 masters.
        loss_scale: "dynamic", or a number, also in a string.
        cast_model_outputs: dtype of the model's outputs; None is float32 where the model is cast.
        num_losses: number of losses with scales of their own; see ``loss_id`` of `scale_loss`.
        verbosity: 0 prints nothing about overflows.
        min_loss_scale: the least dynamic scale.
        max_loss_scale: the largest dynamic scale.

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
        _amp_state.opt_properties, _amp_state.verbosity = Properties(), verbosity
        return models if optimizers is None else (models, optimizers)
    properties = chosen(
        opt_level,
        cast_model_type=cast_model_type,
        patch_torch_functions=patch_torch_functions,
        keep_batchnorm_fp32=keep_batchnorm_fp32,
        master_weights=master_weights,
        loss_scale=loss_scale,
    )
    _check_count(num_losses)
    settings = scale_in_effect(_settings(properties, min_loss_scale, max_loss_scale))
    some_models, some_optimizers = _models(models), _optimizers(optimizers)
    changes.check(some_models)
    _check_new(some_optimizers)
    _amp_state.opt_properties, _amp_state.verbosity = properties, verbosity
    for model in some_models:
        changes.cast(model, properties, cast_model_outputs)
    _amp_state.start_scales(settings, properties.computes_in, num_losses)
    for optimizer in some_optimizers:
        _attach(optimizer, properties, settings)
    if properties.patch_torch_functions:
        handle = turned_on()
        _at_end_of_run(handle._deactivate)
        for model in some_models:
            handle.regions.watch(model)
    return models if optimizers is None or optimizers == [] else (models, optimizers)


def _settings(properties: Properties, least: float | None, most: float) -> LossScale:
    if properties.loss_scale != "dynamic":
        return LossScale.fixed(properties.loss_scale)
    limits: dict[str, Any] = {"max": most, "init": min(most, LossScale.like("apex").init)}
    if least:
        limits |= {"min": least, "init": max(least, limits["init"])}
    return LossScale.like("apex", **limits)


def _attach(optimizer: torch.optim.Optimizer, properties: Properties, settings: LossScale) -> None:
    """Attach one optimizer to the loss scales that all share, and recast its state if the model was cast."""
    if properties.cast_model_type and not properties.master_weights:
        optimizer.load_state_dict(optimizer.state_dict())  # which casts moments to the dtype of their parameters
    masters = None if properties.master_weights else False
    name = "float32" if properties.computes_in == "float32" else "mixed_float16"  # Apex scales losses of bfloat16 too
    wrapper = attach(optimizer, name, loss_scale=settings, master_weights=masters, saves="masters", around=around_step)
    wrapper.scalers = _amp_state.scalers
    wrapper.scalers.join(wrapper)
    wrapper.inner._amp_stash = Stash(wrapper)  # type: ignore[attr-defined]
    session = current()
    if session is not None:
        session.add(wrapper)


def _at_end_of_run(undo: Callable[[], object]) -> None:
    session = current()
    if session is not None:
        session.at_end(undo)


def _models(given: Any) -> list[nn.Module]:
    some = given if isinstance(given, list) else [given]
    for one in some:
        if not isinstance(one, nn.Module):
            raise _wrong("models", one, "a torch.nn.Module, or a list of them")
    return some


def _optimizers(given: Any) -> list[torch.optim.Optimizer]:
    some: Sequence[Any] = given if isinstance(given, list) else [] if given is None else [given]
    for one in some:
        if not isinstance(one, torch.optim.Optimizer) or hasattr(one, "update_master_grads"):
            raise _wrong("optimizers", one, "a plain torch.optim.Optimizer, a list of them, or None")
    return list(some)


def _check_new(optimizers: Sequence[torch.optim.Optimizer]) -> None:
    for one in optimizers:
        if wrapper_of(one) is not None or isinstance(one, LossScaledOptimizer):
            raise UsageError(
                "the optimizer is wrapped already",
                where="amp.initialize(optimizers)",
                found=type(one).__name__,
                fix="pass each optimizer to amp.initialize once, and do not wrap it by polyamp.wrap_optimizer",
            )


def _check_count(num_losses: object) -> None:
    if not isinstance(num_losses, int) or num_losses < 1:
        raise InvalidValueError(
            "there must be at least one loss",
            where="amp.initialize(num_losses=)",
            found=num_losses,
            allowed="1 or more",
        )


def _wrong(name: str, value: object, allowed: str) -> InvalidTypeError:
    return InvalidTypeError(
        f"wrong type of {name}", where=f"amp.initialize({name})", found=shown(value), allowed=allowed
    )
