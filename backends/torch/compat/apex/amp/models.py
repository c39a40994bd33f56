"""What `initialize` does to models: tests them, casts them, and lets their state be float32."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import nn

from polyamp.backends.torch.casting import cast_tensor, cast_to
from polyamp.backends.torch.compat.apex.amp._amp_state import _amp_state, warn_or_err
from polyamp.backends.torch.compat.apex.amp.options import FORMATS, Properties
from polyamp.backends.torch.convert import convert
from polyamp.backends.torch.dtypes import SIXTEEN_BIT
from polyamp.errors import InvalidValueError, UsageError, unreported
from polyamp.policies import policy

_PARALLEL = (nn.parallel.DistributedDataParallel, nn.DataParallel)


def check(models: Iterable[nn.Module]) -> None:
    """Refuse models that `initialize` cannot change.

    Raises:
        UsageError: a model is wrapped for several devices already, or has 16-bit parameters.
    """
    for model in models:
        if isinstance(model, _PARALLEL):
            raise UsageError(
                "the model is wrapped for several devices already",
                where="amp.initialize(models)",
                found=type(model).__name__,
                fix=f"call amp.initialize first, then {type(model).__name__}(model)",
            )
        if _amp_state.allow_incoming_model_not_fp32:
            continue
        for name, value in (*model.named_parameters(), *model.named_buffers()):
            if value.dtype in SIXTEEN_BIT:
                warn_or_err(
                    "the model has 16-bit parameters or buffers",
                    found=f"{name} of {value.dtype}",
                    fix="pass the float32 model, without .half(): amp.initialize casts what has to be cast",
                )


def cast(model: nn.Module, properties: Properties, outputs: torch.dtype | None) -> None:
    """Cast a model as the options want, and its inputs and outputs on every call.

    Raises:
        InvalidValueError: the outputs are to have a type that polyamp does not cast to.
    """
    dtype = properties.cast_model_type
    if outputs is not None and outputs not in FORMATS:
        allowed = ", ".join(map(str, FORMATS))
        raise InvalidValueError(
            "unknown type of outputs", where="amp.initialize(cast_model_outputs=)", found=repr(outputs), allowed=allowed
        )
    if dtype in SIXTEEN_BIT:
        _to_16_bits(model, FORMATS[dtype], FORMATS[outputs or torch.float32], bool(properties.keep_batchnorm_fp32))
    elif dtype:
        model.to(dtype)
        model.register_forward_pre_hook(partial(_cast_inputs, dtype=dtype), with_kwargs=True)
        model.register_forward_hook(partial(_cast_outputs, dtype=outputs or torch.float32))
    elif outputs is not None:
        model.register_forward_hook(partial(_cast_outputs, dtype=outputs))
    if dtype:
        for module in model.modules():
            module.register_state_dict_post_hook(_show_float32)  # type: ignore[no-untyped-call]


def _to_16_bits(model: nn.Module, compute: str, output: str, keep_batch_norms: bool) -> None:
    """Convert by rules: all layers to 16 bits, except batch norms if they are kept."""
    kept = {"batch_norm": "inner"} if keep_batch_norms else {}
    rules = {**kept, "*_norm": "lower"}
    with unreported():  # a model without norms is not a mistake
        convert(model, policy(param=compute, compute=compute, output=output, rules=rules))


def _cast_inputs(_: nn.Module, args: Any, kwargs: Any, *, dtype: torch.dtype) -> Any:
    return cast_to(args, dtype, modules=False), cast_to(kwargs, dtype, modules=False)


def _cast_outputs(_: nn.Module, __: Any, outputs: Any, *, dtype: torch.dtype) -> Any:
    return cast_to(outputs, dtype, modules=False)


def _show_float32(module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
    """Replace 16-bit values of a state dict by float32 ones."""
    for key, value in state.items():
        if key.startswith(prefix) and isinstance(value, torch.Tensor) and value.dtype in SIXTEEN_BIT:
            state[key] = cast_tensor(value, torch.float32)
