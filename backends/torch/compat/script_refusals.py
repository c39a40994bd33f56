"""Scripts that cannot be trained under a policy from outside: what their source shows, and what they do to torch."""

from __future__ import annotations

import ast
import functools
import sys
from collections.abc import Callable
from fnmatch import fnmatch
from typing import Any

import torch
from torch import Tensor, nn

from polyamp.backends.torch.dtypes import SIXTEEN_BIT
from polyamp.backends.torch.user_code import is_users
from polyamp.scripts.session import Session
from polyamp.scripts.sources import Call, calls_in, dotted, imported_in

__polyamp_run__ = True
"""Frames of this file are left out of a script's tracebacks; see `polyamp.scripts.runner`."""

OWN = (
    "torch.autocast",
    "torch.amp.*",
    "torch.cuda.amp.*",
    "torch.cpu.amp.*",
    "apex.amp.*",
    "apex.fp16_utils.*",
    "polyamp.*",
)
"""Functions with which a script has mixed precision of its own; ``enabled=False`` turns them off."""

HARMLESS = ("*.custom_fwd", "*.custom_bwd", "*.is_autocast_available")

_LOW = {*map(str, SIXTEEN_BIT), "torch.half", "torch.HalfTensor", "torch.BFloat16Tensor", "torch.cuda.HalfTensor"}
_CASTING = (".half", ".bfloat16")

TRAINERS = {
    "lightning": "polyamp.backends.torch.integrations.lightning",
    "pytorch_lightning": "polyamp.backends.torch.integrations.lightning",
    "lightning_fabric": "polyamp.backends.torch.integrations.lightning",
    "accelerate": "polyamp.backends.torch.integrations.accelerate",
    "transformers.Trainer": "polyamp.backends.torch.integrations.transformers",
    "transformers.Seq2SeqTrainer": "polyamp.backends.torch.integrations.transformers",
    "deepspeed": "",
    "composer": "",
    "fairscale": "",
    "ignite": "",
    "colossalai": "",
}
"""Trainers that run the loop and choose the precision themselves, each with the plugin that serves it."""


def check_sources(session: Session) -> None:
    """Refuse a script whose source, or a local module's, uses mixed precision or a trainer. Nothing has run yet.

    Raises:
        UsageError: with the file and line.
    """
    for file in session.sources:
        for name, where in imported_in(file):
            _check_trainer(session, name, where)
        for call in calls_in(file):
            _check_trainer(session, call.name, call.where)
            if is_own_precision(call):
                session.refuse(
                    "the script has mixed precision of its own",
                    found=call.name.lstrip(".") + "()",
                    where=call.where,
                    fix="leave out --policy: polyamp run then only supplies what the script lacks; or remove this line",
                )


def is_own_precision(call: Call) -> bool:
    """Return whether a call chooses a 16-bit format: a region, a loss scaler, a cast of a model or of tensors.

    >>> from pathlib import Path
    >>> from tempfile import TemporaryDirectory
    >>> with TemporaryDirectory() as folder:
    ...     file = Path(folder, "train.py")
    ...     _ = file.write_text("import torch\\nmodel.to(torch.half)\\nmodel.to('cuda')")
    ...     [is_own_precision(call) for call in calls_in(file)]
    [True, False]
    """
    if any(fnmatch(call.name, pattern) for pattern in OWN):
        return not (_is_off(call) or any(fnmatch(call.name, pattern) for pattern in HARMLESS))
    if call.name.endswith(_CASTING):
        return not call.node.args
    return call.name in _LOW or any(dotted(value, call.names) in _LOW for _, value in call.arguments())


def _is_off(call: Call) -> bool:
    values = [value for name, value in call.arguments() if name == "enabled"]
    return any(isinstance(value, ast.Constant) and not value.value for value in values)


def _check_trainer(session: Session, name: str, where: str) -> None:
    trainer = next((one for one in TRAINERS if f"{name}.".startswith(f"{one}.")), None)
    if trainer is None:
        return
    plugin = TRAINERS[trainer]
    session.refuse(
        f"{trainer} runs the training loop and chooses the precision itself",
        found=name,
        where=where,
        fix=f"use {plugin}" if plugin else "use its own setting for precision, without --policy",
    )


def refuse_unsafe(session: Session, *, scales: bool) -> None:
    """Watch torch until the run ends, and refuse what would be wrong under the policy, before it has an effect.

    Args:
        session: the run.
        scales: whether losses are scaled: hooks on gradients would then see scaled ones.
    """
    _watch_precision(session)
    if scales:
        for owner, name in _SEEING_GRADIENTS:
            _watch_gradients(session, owner, name)


def _watch_precision(session: Session) -> None:
    """Report regions, scalers and casts of modules that installed packages make; the source shows the script's own."""
    _before(session, torch.autocast, "__init__", _found_region(session))
    _before(session, torch.amp.GradScaler, "__init__", _found_scaler(session))
    for name in ("half", "bfloat16"):
        _before(session, nn.Module, name, lambda *_, name=name, **__: session.found(f"torch.nn.Module.{name}"))
    _before(session, nn.Module, "to", _found_cast(session))


def _found_region(session: Session) -> Callable[..., None]:
    def check(_: Any, device_type: str, dtype: Any = None, enabled: bool = True, *__: Any, **___: Any) -> None:
        if enabled and is_users(sys._getframe(2).f_code.co_filename):
            session.found("torch.autocast")

    return check


def _found_scaler(session: Session) -> Callable[..., None]:
    def check(_: Any, *args: Any, enabled: bool = True, **__: Any) -> None:
        if enabled and is_users(sys._getframe(2).f_code.co_filename):
            session.found("torch.amp.GradScaler")

    return check


def _found_cast(session: Session) -> Callable[..., None]:
    def check(_: nn.Module, *args: Any, **kwargs: Any) -> None:
        if any(isinstance(one, torch.dtype) and one in SIXTEEN_BIT for one in (*args, *kwargs.values())):
            session.found("torch.nn.Module.to(dtype)")

    return check


_SEEING_GRADIENTS = (
    (Tensor, "register_hook"),
    (Tensor, "register_post_accumulate_grad_hook"),
    (Tensor, "retain_grad"),
    (nn.Module, "register_backward_hook"),
    (nn.Module, "register_full_backward_hook"),
    (nn.Module, "register_full_backward_pre_hook"),
)


def _watch_gradients(session: Session, owner: type, name: str) -> None:
    def check(*_: Any, **__: Any) -> None:
        if is_users(sys._getframe(2).f_code.co_filename):
            session.refuse(
                f"{name} looks at gradients inside the backward pass, where they are scaled",
                found=f"{owner.__name__}.{name}",
                fix="use --policy mixed_bfloat16, which needs no loss scale; or look at them after backward()",
            )

    _before(session, owner, name, check)


def _before(session: Session, owner: type, name: str, check: Callable[..., None]) -> None:
    original = getattr(owner, name)

    @functools.wraps(original)
    def checked(*args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling():
            check(*args, **kwargs)
        return original(*args, **kwargs)

    session.replace(owner, name, checked)
