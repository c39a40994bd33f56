"""Errors that every adapter raises, with the same wording.

Each function returns the exception; the adapter raises it.
"""

from __future__ import annotations

from collections.abc import Mapping

from polyamp.errors import (
    InvalidTypeError,
    MissingFrameworkError,
    NonFiniteLossError,
    UnsupportedError,
    UnsupportedMethodError,
    UsageError,
)
from polyamp.validation import kind_of

NONFINITE_LOSS = "the loss was not finite before scaling: a smaller scale cannot help"
"""The reason for a step that was skipped because its loss was inf or NaN; used by `StepResult.reason`."""


def missing(package: str, *, extra: str) -> MissingFrameworkError:
    """Return the error for a package that is not installed, with the extra that installs it."""
    return MissingFrameworkError(
        f"{package} is not installed",
        where=f"polyamp's {extra} support",
        found=f"no module named {package!r}",
        allowed=None,
        fix=f'pip install "polyamp[{extra}]"',
    )


def missing_trainer(error: ModuleNotFoundError, *, where: str) -> MissingFrameworkError:
    """Return the error for a plugin whose trainer is not installed."""
    package = str(error.name).partition(".")[0]
    return MissingFrameworkError(
        f"{package} is not installed",
        where=where,
        found=f"no module named {error.name!r}",
        fix=f"pip install {package}",
    )


def non_finite_loss(
    found: object, *, where: str = "scaling the loss", compute: str | None = None
) -> NonFiniteLossError:
    """Return the error for a loss that was inf or NaN before scaling."""
    return NonFiniteLossError(
        NONFINITE_LOSS,
        where=where,
        found=found,
        allowed="a finite loss",
        fix=f"{look_for_nonfinite(compute)}; parameters and optimizer state were not changed",
    )


def look_for_nonfinite(compute: str | None) -> str:
    """Describe where a non-finite loss may come from: float16 overflow, or a cause that float32 has too."""
    elsewhere = "look for inf or NaN in the data and the parameters"
    if compute == "float16":
        return (
            f"float16 may have overflowed in the forward pass: polyamp.diagnose names the operation; else {elsewhere}"
        )
    if compute is None:
        return f"{elsewhere}; under float16 the forward pass may have overflowed: polyamp.diagnose names the operation"
    return f"{compute} has the range of float32, so {elsewhere}" if compute == "bfloat16" else elsewhere


def unscaled_loss(*, where: str, fix: str) -> UsageError:
    """Return the error for a step that would unscale the gradients of a loss that was never scaled."""
    return UsageError(
        "the loss of this step was not scaled",
        where=where,
        found="gradients of a loss that was not multiplied by the loss scale",
        allowed="gradients of a scaled loss: the step divides them by the loss scale",
        fix=fix,
    )


def clipped_scaled(*, where: str, fix: str) -> UsageError:
    """Return the error for gradients that were clipped between the backward pass and unscaling."""
    return UsageError(
        "gradients were clipped while they were scaled",
        where=where,
        found="gradients that were changed between the backward pass and unscaling",
        allowed="clipping of unscaled gradients",
        fix=fix,
    )


def no_loss(found: object, *, allowed: str) -> InvalidTypeError:
    """Return the error for scaling an object that is not a floating-point tensor."""
    return InvalidTypeError(
        "the loss must be a floating-point tensor",
        where="scaling the loss",
        found=found,
        allowed=allowed,
        fix="give the loss itself, for example the mean of the model's errors",
    )


def no_optimizer(found: object, *, allowed: str) -> InvalidTypeError:
    """Return the error for wrapping an object that is not an optimizer of the framework."""
    return InvalidTypeError(
        "not an optimizer of this framework",
        where="wrap_optimizer(optimizer)",
        found=kind_of(found),
        allowed=allowed,
        fix="give the optimizer itself, not its class, its state or a function that makes it",
    )


def wrapped_already(found: object, *, fix: str = "use it as it is, or wrap the plain optimizer") -> UsageError:
    """Return the error for wrapping an object that already scales the loss."""
    return UsageError(
        "the optimizer is wrapped already",
        where="wrap_optimizer(optimizer)",
        found=found,
        allowed="one loss scale",
        fix=fix,
    )


def no_loss_scale(found: object, *, where: str, allowed: str) -> InvalidTypeError:
    """Return the error for an object without a loss scale where one is needed."""
    return InvalidTypeError(
        "this object holds no loss scale",
        where=where,
        found=kind_of(found),
        allowed=allowed,
        fix="wrap the optimizer, and pass the wrapped optimizer",
    )


def no_method(owner: object, name: str, instead: Mapping[str, str]) -> AttributeError:
    """Return the error for an attribute that does not exist, which names the call to make for another framework's."""
    kind = type(owner).__name__
    if name not in instead:
        return AttributeError(f"{kind!r} object has no attribute {name!r}", name=name, obj=owner)
    return UnsupportedMethodError(
        "this framework's wrapped optimizer has no such method",
        where=f"{kind}.{name}",
        found="a method of polyamp's optimizers in PyTorch",
        fix=instead[name],
    )


def not_traced(*, where: str) -> UsageError:
    """Return the error for asking for a plan before there is a graph."""
    return UsageError(
        "the function was not traced yet",
        where=where,
        allowed="a function that was called, or rewritten with example arguments",
        fix="call it once, or give example arguments: rewrite(fn, *args)",
    )


def outside_replicas(strategy: object) -> UsageError:
    """Return the error for a step in the scope of a ``tf.distribute`` strategy, but outside its replicas."""
    return UsageError(
        "the step must run inside the strategy's replicas",
        where=f"the scope of a {type(strategy).__name__}",
        allowed="a function that every replica runs",
        fix="put the gradients and the step into one function, and call strategy.run(function)",
    )


_WITHOUT_COMMON_STEP = {
    "ParameterServerStrategy": "its workers step at different times, so the loss scale may change between the loss of "
    "one and its step",
    "CentralStorageStrategy": "its replicas share one copy of the variables, and cannot decide about a step",
    "TPUStrategy": "a loss scale was never tested on TPUs, which compute in bfloat16",
}


def without_common_step(strategy: object) -> UnsupportedError | None:
    """Return the error for a ``tf.distribute`` strategy whose replicas cannot share a scaled step; None for others."""
    names = [kind.__name__ for kind in type(strategy).__mro__]
    for unsupported, reason in _WITHOUT_COMMON_STEP.items():
        if any(name.startswith(unsupported) for name in names):  # their versions have names that end with V1 and V2
            return UnsupportedError(
                f"loss scaling does not work under a {unsupported}: {reason}",
                where="a step in the strategy's replicas",
                found=names[0],
                allowed="MirroredStrategy, MultiWorkerMirroredStrategy, OneDeviceStrategy",
                fix="use one of these, or a policy without a loss scale, such as mixed_bfloat16",
            )
    return None
