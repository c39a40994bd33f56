"""The forward pass of a whole script: the outermost module runs in autocast, and its outputs are float32 again."""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from polyamp.backends.torch import unstable
from polyamp.backends.torch.autocast.context import Entered
from polyamp.backends.torch.casting import leaves, map_leaves
from polyamp.backends.torch.containers import hides_tensors
from polyamp.backends.torch.devices import report_slow
from polyamp.backends.torch.dtypes import SIXTEEN_BIT
from polyamp.backends.torch.recording.operators import operator_of
from polyamp.backends.torch.user_code import users_line
from polyamp.plan import Plan, PlannedOperation
from polyamp.policies import Policy
from polyamp.scripts.session import Session

__polyamp_run__ = True
"""Frames of this file are left out of a script's tracebacks; see `polyamp.scripts.runner`."""

_ENGINE = "autocast, the first forward pass of each model"
_MOST_MODULES = 8
"""Outermost modules whose first forward pass is recorded."""


class Regions:
    """Autocast around the outermost module's calls.

    Code after the model, such as the loss, was written for float32 and gets float32. A module without parameters, such
    as a criterion, has no products of weights to gain from and runs as it is: autocast would refuse `nn.BCELoss`.

    Args:
        session: the run.
        policy: the policy of the regions.
    """

    def __init__(self, session: Session, policy: Policy) -> None:
        self._session, self._policy = session, policy
        self._running = _Running()
        self._plan = _FirstForwards(session, policy)

    def install(self) -> None:
        """Replace ``nn.Module.__call__`` until the run ends."""
        original: Callable[..., Any] = nn.Module.__call__

        @functools.wraps(original)
        def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling() or self._running.inside or not self._is_model(module):
                return original(module, *args, **kwargs)
            return self._call(original, module, args, kwargs)

        report_slow(self._policy.compute)
        self._session.replace(nn.Module, "__call__", call)

    def _is_model(self, module: nn.Module) -> bool:
        """Return whether a module gets a region. A checkpointed one that runs again in a backward pass has its own."""
        return not unstable.backward_runs() and next(module.parameters(), None) is not None

    @unstable.never_compiled
    def _call(self, original: Callable[..., Any], module: nn.Module, args: Any, kwargs: Any) -> Any:
        self._session.check()
        with self._running.entered(), self._plan.recorded(module), Entered(self._policy):
            out = original(module, *args, **kwargs)
        return self._in_float32(module, out)

    def _in_float32(self, module: nn.Module, out: Any) -> Any:
        def widen(leaf: Any) -> Any:
            if isinstance(leaf, Tensor) and leaf.dtype in SIXTEEN_BIT:
                self._session.has_low = True
                return leaf.float()
            return leaf

        return map_leaves(widen, out, others=functools.partial(self._check_hidden, module))

    def _check_hidden(self, module: nn.Module, leaf: Any) -> None:
        """Refuse an output that keeps 16-bit tensors where they cannot be replaced, such as a distribution."""
        if hides_tensors(leaf):
            hidden = [one for one in vars(leaf).values() if isinstance(one, Tensor)]
            if any(one.dtype in SIXTEEN_BIT for one in hidden):
                self._session.refuse(
                    f"{type(module).__name__} returns 16-bit tensors in an object, and the script expects float32",
                    found=f"{type(leaf).__module__}.{type(leaf).__qualname__}",
                    fix="return tensors, or make the object outside the module",
                )


class _Running(threading.local):
    """Whether this thread runs an outermost module."""

    inside = False

    @contextmanager
    def entered(self) -> Iterator[None]:
        self.inside = True
        try:
            yield
        finally:
            self.inside = False


class _FirstForwards:
    """Records the first forward pass of each outermost module that is trained, as one plan of the session."""

    def __init__(self, session: Session, policy: Policy) -> None:
        self._session, self._policy = session, policy
        self._seen: set[int] = set()
        self._operations: list[PlannedOperation] = []

    def recorded(self, module: nn.Module) -> AbstractContextManager[None]:
        """Return a context that records a module's first forward pass with gradients; later ones cost nothing."""
        is_first = torch.is_grad_enabled() and id(module) not in self._seen and len(self._seen) < _MOST_MODULES
        return self._recording(module) if is_first else nullcontext()

    @contextmanager
    def _recording(self, module: nn.Module) -> Iterator[None]:
        self._seen.add(id(module))
        with _eagerly(), _Recorder(self._policy, self._operations):
            yield
        plan = Plan(str(self._policy), tuple(self._operations), engine=_ENGINE)
        earlier = [one for one in self._session.plans if one.engine != _ENGINE]
        self._session.plans[:] = earlier
        self._session.ran(plan)


def _eagerly() -> AbstractContextManager[Any]:
    """Return a context in which compiled modules run eagerly, so that their operations are seen."""
    if "torch._dynamo" not in sys.modules:
        return nullcontext()
    eager: AbstractContextManager[Any] = torch.compiler.set_stance("force_eager")
    return eager


class _Recorder(unstable.EagerDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, policy: Policy, operations: list[PlannedOperation]) -> None:
        super().__init__()
        self._policy, self._operations = policy, operations

    @unstable.never_compiled
    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = op(*args, **(kwargs or {}))
        operator = operator_of(op)
        made = [one for one in leaves(out) if isinstance(one, Tensor) and one.is_floating_point()]
        if made and operator.computes:
            name = str(made[0].dtype).removeprefix("torch.")
            decision = self._policy.decide(operator.name, "")
            self._operations.append(
                PlannedOperation(operator.name, operator.native, users_line(), decision.op_class, name, decision.reason)
            )
        return out
