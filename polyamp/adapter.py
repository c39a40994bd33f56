"""The interface between the core and a framework.

An adapter is a final class; its instance is registered in the entry-point group ``polyamp.backends``. Every adapter has
the methods of `Adapter`. The other protocols are optional verbs: an adapter offers a verb by having its method.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol, TypeVar, runtime_checkable

from polyamp.diagnosis.facts import Facts
from polyamp.diagnosis.recording import Recording
from polyamp.loss_scale import LossScale, LossScaleState
from polyamp.plan import Plan
from polyamp.policy import Policy

Tree = TypeVar("Tree")


@runtime_checkable
class Adapter(Protocol):
    """The methods that every framework's adapter must have.

    Attributes:
        name: the framework's name, as in ``backend="torch"``.
        operations: the framework's operation names, each with its canonical name in `polyamp.operations`.
    """

    name: str
    operations: Mapping[str, str]

    def owns(self, obj: object) -> bool:
        """Return whether ``obj`` belongs to this framework although the module of its type does not show it."""

    def describe(self) -> dict[str, Any]:
        """Return what ``polyamp doctor`` prints, as JSON: ``version``, ``devices`` (name, fast formats), ``notes``."""

    def cast(self, tree: Tree, format_name: str, /) -> Tree:
        """Return ``tree`` with its floating-point arrays in ``format_name`` and everything else unchanged."""

    def wrap_optimizer(
        self, optimizer: Any, policy: Policy, *, loss_scale: LossScale, max_grad_norm: float | None, **options: Any
    ) -> Any:
        """Return an optimizer of the same kind that unscales, checks, clips, updates or skips, then advances the scale.

        Options are keyword-only parameters: `polyamp.wrap_optimizer` refuses any other option.

        Raises:
            InvalidTypeError: ``optimizer`` is not an optimizer of this framework.
            UsageError: it is wrapped already.
        """

    def scale_loss(self, loss: Any, holder: Any) -> Any:
        """Return ``loss`` in float32 times the loss scale of ``holder`` (a wrapped optimizer, or its state)."""

    def save_loss_scale(self, holder: Any) -> dict[str, Any]:
        """Return the loss-scale state of ``holder`` in the form of `LossScale.to_state_dict`."""

    def load_loss_scale(self, holder: Any, saved: Mapping[str, Any]) -> Any:
        """Return ``holder`` with the saved state: the same object if it is mutable, else a new one."""


class AutocastContext(Protocol):
    """A framework with ambient autocast: operations are cast while a context is active."""

    def autocast_context(self, policy: Policy) -> AbstractContextManager[Any]:
        """Return a new context in which operations run under ``policy``, on every device."""


class AutocastFunction(Protocol):
    """A framework that transforms functions instead of running them in a context."""

    def autocast_function(self, fn: Callable[..., Any], policy: Policy | None) -> Callable[..., Any]:
        """Return ``fn`` with its operations run under ``policy`` (None: the current policy at the call)."""


class Rewrite(Protocol):
    """A framework whose functions or models can be traced and decided operation by operation."""

    def rewrite(self, fn: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], policy: Policy, **options: Any) -> Any:
        """Return a replacement for ``fn`` with a ``plan``. The arguments are examples and may be missing.

        Options are keyword-only parameters, as in `Adapter.wrap_optimizer`; others are refused before this method is
        called.
        """

    def explain(
        self, fn: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], policy: Policy, **options: Any
    ) -> Plan:
        """Return the plan of ``fn`` for these arguments. A framework with ambient autocast has an option ``engine``."""


class Convert(Protocol):
    """A framework whose models store their precision."""

    def convert(self, model: Any, policy: Policy) -> Any:
        """Return ``model`` itself, with its parameters or layers set to ``policy``."""


class ValueAndGrad(Protocol):
    """A framework that differentiates functions."""

    def value_and_grad(
        self, fun: Callable[..., Any], policy: Policy | None, has_aux: bool, *, argnums: int | Sequence[int] = 0
    ) -> Callable[..., Any]:
        """Return a function of ``(opt_state, params, *args)`` that returns the unscaled loss and scaled gradients."""


class Counts(Protocol):
    """A framework whose loss scales and their counters can be read, for `polyamp.health`."""

    def loss_scale_of(self, holder: Any) -> tuple[LossScale, LossScaleState]:
        """Return the settings of ``holder`` and its state as Python numbers. Waits if the state is on a device.

        Raises:
            PolyampError: ``holder`` has no loss scale, or several.
        """


class Record(Protocol):
    """A framework whose steps can be recorded, tensor by tensor."""

    def record(
        self,
        step: Any,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        policy: Policy,
        *,
        widened: bool,
        scale: float | None = None,
    ) -> Recording:
        """Run ``step`` once, forward and backward, and record it. Nothing is changed.

        Args:
            step: a function that returns a loss, which is then differentiated; or a training step, recorded up to its
                update.
            args, kwargs: its arguments.
            policy: the policy it runs under.
            widened: compute the policy's 16-bit work in float32, so that nothing overflows or is lost.
            scale: the factor that multiplies the loss; None keeps what the step itself does.
        """


class KnowFacts(Protocol):
    """A framework that can report facts about a step before it runs."""

    def facts(
        self, target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], policy: Policy, optimizer: Any
    ) -> Facts:
        """Collect the facts that `polyamp.lint` judges. Runs no step and changes nothing.

        Args:
            target: a step, a loss function or a model.
            args, kwargs: its arguments; without them, everything that needs a trace is left out.
            policy: the policy it will train under.
            optimizer: the optimizer it is trained with; None if none was passed.
        """


class TrainDigits(Protocol):
    """A framework that ``polyamp demo`` can show."""

    def train_digits(self, task: Any) -> Any:
        """Train `polyamp.demo`'s classifier for one ``task``; see `polyamp.demo.Task`."""
