"""The options of `initialize`: what each level implies, and which options contradict each other."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch

from polyamp.errors import InvalidValueError

FORMATS = {torch.float16: "float16", torch.bfloat16: "bfloat16", torch.float32: "float32"}


@dataclass
class Properties:
    """The options in force, under Apex's names. Programs read them as ``_amp_state.opt_properties.master_weights``.

    >>> level("O2").loss_scale, level("O1").master_weights
    ('dynamic', None)

    Attributes:
        enabled: whether `initialize` did anything.
        opt_level: "O0" to "O3".
        cast_model_type: the dtype of the model's parameters; None or False leaves them.
        patch_torch_functions: whether operations run in the formats of autocast.
        keep_batchnorm_fp32: whether batch norms stay in float32 in a model that is cast to 16 bits.
        master_weights: whether 16-bit parameters get float32 masters.
        loss_scale: "dynamic", or a number.
    """

    enabled: bool = False
    opt_level: str | None = None
    cast_model_type: Any = None
    patch_torch_functions: bool = False
    keep_batchnorm_fp32: bool | None = None
    master_weights: bool | None = None
    loss_scale: Any = 1.0

    @property
    def options(self) -> dict[str, Any]:
        """All of them, by name."""
        return asdict(self)

    @property
    def computes_in(self) -> str:
        """The format of matrix products, as polyamp names it."""
        return FORMATS[torch.float16 if self.patch_torch_functions else self.cast_model_type or torch.float32]


_LEVELS = {
    "O0": Properties(True, "O0", torch.float32, False, None, False, 1.0),
    "O1": Properties(True, "O1", None, True, None, None, "dynamic"),
    "O2": Properties(True, "O2", torch.float16, False, True, True, "dynamic"),
    "O3": Properties(True, "O3", torch.float16, False, False, False, 1.0),
}


def level(name: Any) -> Properties:
    """Return the options of a level.

    Raises:
        InvalidValueError: there is no such level.
    """
    if name not in _LEVELS:
        raise InvalidValueError(
            "unknown optimization level",
            where="amp.initialize(opt_level=)",
            found=repr(name),
            allowed=", ".join(_LEVELS),
            fix="write the letter O, not the digit 0",
        )
    return Properties(**asdict(_LEVELS[name]))


def chosen(opt_level: Any, **given: Any) -> Properties:
    """Return the options of a level with those that were given and are not None.

    >>> chosen("O2", keep_batchnorm_fp32="False", loss_scale="128.0").options["loss_scale"]
    128.0

    Raises:
        InvalidValueError: an option has a wrong value, or contradicts the level.
    """
    properties = level(opt_level)
    for name, value in given.items():
        if value is not None:
            setattr(properties, name, _READ[name](properties, value))
    return properties


def _model_type(properties: Properties, value: Any) -> Any:
    if value is not False and value not in FORMATS:
        raise _wrong("cast_model_type", value, "torch.float16, torch.bfloat16, torch.float32, or False to leave it")
    if properties.opt_level == "O1" and value not in (False, torch.float32):
        raise _contradiction("cast_model_type", value, "casts the model", "O2 or O3")
    return value


def _patching(properties: Properties, value: Any) -> bool:
    if not isinstance(value, bool):
        raise _wrong("patch_torch_functions", value, "True or False")
    if properties.opt_level != "O1" and value:
        raise _contradiction("patch_torch_functions", value, "casts around operations", "O1")
    return value


def _batch_norms(properties: Properties, value: Any) -> bool:
    if properties.opt_level == "O1":
        raise _contradiction("keep_batchnorm_fp32", value, "keeps layers of a cast model in float32", "O2 or O3")
    read = {"True": True, "False": False, True: True, False: False}.get(value if isinstance(value, str | bool) else "")
    if read is None:
        raise _wrong("keep_batchnorm_fp32", value, 'True, False, "True" or "False"')
    return read


def _masters(properties: Properties, value: Any) -> bool:
    if not isinstance(value, bool):
        raise _wrong("master_weights", value, "True or False")
    if properties.opt_level == "O1":
        raise _contradiction("master_weights", value, "keeps copies of 16-bit parameters", "O2 or O3")
    return value


def _scale(properties: Properties, value: Any) -> Any:
    if value == "dynamic":
        return value
    try:
        return float(value)
    except (TypeError, ValueError):
        raise _wrong("loss_scale", value, '"dynamic", a number, or a number in a string') from None


_READ = {
    "cast_model_type": _model_type,
    "patch_torch_functions": _patching,
    "keep_batchnorm_fp32": _batch_norms,
    "master_weights": _masters,
    "loss_scale": _scale,
}


def _wrong(name: str, value: Any, allowed: str) -> InvalidValueError:
    return InvalidValueError(
        "wrong value of an option", where=f"amp.initialize({name}=)", found=repr(value), allowed=allowed
    )


def _contradiction(name: str, value: Any, does: str, levels: str) -> InvalidValueError:
    return InvalidValueError(
        f"this option {does}, which the optimization level does not do",
        where=f"amp.initialize({name}=)",
        found=repr(value),
        allowed=f"with {levels}",
        fix=f"leave {name}= out, or choose opt_level {levels}",
    )
