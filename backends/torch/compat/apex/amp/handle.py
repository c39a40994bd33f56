"""The handle of O1, and the interface that Apex had before `initialize`: ``handle = amp.init()``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor

from polyamp.backends.torch.autocast.weights import forget_casts
from polyamp.backends.torch.compat.apex.amp._amp_state import _amp_state
from polyamp.backends.torch.compat.apex.amp.functions import replace_registered
from polyamp.backends.torch.compat.apex.amp.regions import Regions, is_here, turned_off
from polyamp.backends.torch.compat.attached import attach
from polyamp.backends.torch.steps.optimizer import LossScaledOptimizer
from polyamp.errors import UnsupportedError, UsageError, warn_deprecated
from polyamp.loss_scale import LossScale
from polyamp.scripts.session import found


class BannedFunctionError(UnsupportedError, NotImplementedError):
    """Raised for a function that Apex refuses on float16 inputs."""


class AmpHandle:
    """What turns O1 off again.

    >>> handle, x = AmpHandle(), torch.ones(2, 2)
    >>> handle.is_active(), (x @ x).dtype, handle._deactivate(), (x @ x).dtype
    (True, torch.float16, None, torch.float32)

    Args:
        allow_banned: run ``binary_cross_entropy`` of float16 inputs in float32 instead of refusing it.
        verbose: not used.
    """

    has_cache = True

    def __init__(self, *, allow_banned: bool = False, verbose: bool = False) -> None:
        self.verbose = verbose
        self.cache: dict[Any, Any] = {}
        self.regions = Regions()
        self._replaced: list[tuple[Any, str, Any]] = []
        self.replace_functions()
        if not allow_banned:
            self._replaced.append(_ban(torch.nn.functional, "binary_cross_entropy"))
        self.regions.enter_here()

    def replace_functions(self) -> None:
        """Replace the functions that were registered since the last call, until the handle is deactivated."""
        self._replaced += replace_registered()

    def is_active(self) -> bool:
        """Return whether operations have the formats of O1 here."""
        return self.regions.is_open and is_here()

    def wrap_optimizer(self, optimizer: torch.optim.Optimizer, num_loss: int = 1) -> OptimWrapper:
        """Return an optimizer with a ``scale_loss`` of its own, and a loss scale for each of its losses."""
        return OptimWrapper(optimizer, num_loss)

    def scale_loss(self, loss: Tensor, optimizer: torch.optim.Optimizer) -> AbstractContextManager[Tensor]:
        """Raise, as Apex does.

        Raises:
            UsageError: always.
        """
        raise UsageError(
            "the handle does not scale losses",
            where="handle.scale_loss",
            fix="use amp.initialize and amp.scale_loss(loss, optimizer); or optimizer.scale_loss(loss) after "
            "optimizer = handle.wrap_optimizer(optimizer)",
        )

    def _deactivate(self) -> None:
        self.regions.close()
        for owner, name, original in reversed(self._replaced):
            setattr(owner, name, original)
        self._replaced = []

    def _clear_cache(self) -> None:
        forget_casts()

    def _disable_casts(self) -> AbstractContextManager[None]:
        return turned_off()

    def remove_cache(self, param: Tensor) -> None:
        """Drop the casts of weights."""
        forget_casts()


class NoOpHandle:
    """The handle of ``amp.init(enabled=False)``, which does nothing."""

    has_cache = verbose = False

    def is_active(self) -> bool:
        """Return False."""
        return False

    def wrap_optimizer(self, optimizer: torch.optim.Optimizer, num_loss: int = 1) -> OptimWrapper:
        """Return an optimizer whose ``scale_loss`` leaves the loss as it is."""
        return OptimWrapper(optimizer, num_loss, enabled=False)

    @contextmanager
    def scale_loss(self, loss: Tensor, optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
        """Leave the loss as it is."""
        yield loss

    @contextmanager
    def _disable_casts(self) -> Iterator[None]:
        yield

    def _clear_cache(self) -> None:
        """Do nothing."""

    def _deactivate(self) -> None:
        """Do nothing."""


class OptimWrapper:
    """An optimizer with ``scale_loss``, which is called once for each of its losses before a step.

    >>> weight = torch.ones(1, requires_grad=True)
    >>> optimizer = OptimWrapper(torch.optim.SGD([weight], lr=0.5), num_loss=2)
    >>> for loss in (weight.sum(), 3 * weight.sum()):
    ...     with optimizer.scale_loss(loss) as scaled:
    ...         scaled.backward()
    >>> optimizer.step()
    >>> weight.detach()
    tensor([-1.])

    Args:
        optimizer: the optimizer, which acts as its wrapper from then on.
        num_loss: number of losses before a step.
        enabled: False leaves optimizer and losses as they are.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, num_loss: int, *, enabled: bool = True) -> None:
        self._optimizer, self._num_loss, self._loss_idx = optimizer, num_loss, 0
        scale = LossScale.like("apex")
        self._wrapper = attach(optimizer, "mixed_float16", loss_scale=scale, around=around_step) if enabled else None

    @contextmanager
    def scale_loss(self, loss: Tensor) -> Iterator[Tensor]:
        """Multiply the next loss of this step by its scale, and unscale the gradients when the block ends.

        Raises:
            UsageError: there were as many losses as ``num_loss`` since the last step.
        """
        wrapper = self._wrapper
        if wrapper is None:
            yield loss
            return
        if self._loss_idx >= self._num_loss:
            raise UsageError(
                "there are more losses than the optimizer was wrapped for",
                where="optimizer.scale_loss(loss)",
                allowed=f"{self._num_loss} before each step",
                fix="handle.wrap_optimizer(optimizer, num_loss=)",
            )
        yield wrapper.scale(loss, self._loss_idx or None)
        wrapper.unscale_()
        self._loss_idx += 1

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Make the optimizer's step, or skip it.

        Raises:
            UsageError: there is a closure.
        """
        if closure is not None and self._wrapper is not None:
            raise UsageError(
                "a wrapped optimizer of the old interface takes no closure", where="optimizer.step(closure)"
            )
        self._loss_idx = 0
        return self._optimizer.step() if closure is None else self._optimizer.step(closure)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._optimizer, name)

    def __repr__(self) -> str:
        return repr(self._optimizer)


def init(
    enabled: bool = True,
    loss_scale: Any = "dynamic",
    enable_caching: bool = True,
    verbose: bool = False,
    allow_banned: bool = False,
) -> AmpHandle | NoOpHandle:
    """Turn O1 on until ``handle._deactivate()``, without models and optimizers.

    Args:
        enabled: False does nothing.
        loss_scale: not used: an optimizer gets its loss scale by ``handle.wrap_optimizer``.
        enable_caching: not used: casts of weights are only kept during calls of a model of `initialize`.
        verbose: not used.
        allow_banned: see `AmpHandle`.
    """
    found("apex.amp.init")
    warn_deprecated("apex.amp.init()", 'with polyamp.autocast("mixed_float16"):')
    if not enabled:
        return NoOpHandle()
    return turn_on(allow_banned=allow_banned, verbose=verbose)


def turn_on(**options: Any) -> AmpHandle:
    """Return a new handle, which replaces the last one."""
    last = getattr(_amp_state, "handle", None)
    if last is not None:
        last._deactivate()
    _amp_state.handle = handle = AmpHandle(**options)
    return handle


def turned_on() -> AmpHandle:
    """Return the last handle if it is active, so that models of several calls share one; else a new one."""
    handle: AmpHandle | None = getattr(_amp_state, "handle", None)
    if handle is None or not handle.regions.is_open:
        return turn_on()
    handle.replace_functions()
    handle.regions.enter_here()
    return handle


@contextmanager
def disable_casts() -> Iterator[None]:
    """Run operations as they are written, in the middle of O1."""
    warn_deprecated("apex.amp.disable_casts()", 'with polyamp.autocast("float32"):', stacklevel=4)
    with turned_off():
        yield


@contextmanager
def around_step(wrapper: LossScaledOptimizer, closure: Any) -> Iterator[None]:
    """Make an optimizer's step as it is written. A closure, which calls the model, has the formats of O1."""
    if closure is not None:
        yield
        return
    with turned_off():
        yield


def _ban(owner: Any, name: str) -> tuple[Any, str, Any]:
    original = getattr(owner, name)

    def banned(*args: Any, **kwargs: Any) -> Any:
        tensors = [one for one in (*args, *kwargs.values()) if isinstance(one, Tensor)]
        if is_here() and any(one.dtype == torch.float16 for one in tensors):
            raise BannedFunctionError(
                f"apex.amp refuses {name} of float16 inputs, whose rounding it would amplify",
                where=f"torch.nn.functional.{name}",
                found="an input of torch.float16",
                fix="use binary_cross_entropy_with_logits (BCEWithLogitsLoss) in place of a sigmoid and this loss; or "
                'call amp.register_float_function(torch, "sigmoid") before amp.initialize',
            )
        return original(*args, **kwargs)

    setattr(owner, name, banned)
    return owner, name, original
