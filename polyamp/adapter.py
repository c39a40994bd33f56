"""The one interface between the core and a framework.

An adapter is a final class; its instance is named in the entry-point group ``polyamp.backends``. `Adapter` is what
every adapter has. The verbs after it are what some frameworks have: an adapter offers one by having that method.
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
    """What polyamp asks of every framework.

    Attributes:
        name: the framework's name, as in ``backend="torch"``.
        operations: the framework's operation names, each with its canonical name in `polyamp.operations`.
    """

    name: str
    operations: Mapping[str, str]

    def owns(self, obj: object) -> bool:
        """Whether ``obj`` is a container or array of this framework although its type's module does not say so."""

    def describe(self) -> dict[str, Any]:
        """What ``polyamp doctor`` prints: ``version``, ``devices`` (name, formats that are fast), ``notes``; JSON."""

    def cast(self, tree: Tree, format_name: str, /) -> Tree:
        """``tree`` with its floating arrays in ``format_name``, and everything else as it was."""

    def wrap_optimizer(
        self, optimizer: Any, policy: Policy, *, loss_scale: LossScale, max_grad_norm: float | None, **options: Any
    ) -> Any:
        """An optimizer of the same kind that unscales, checks, clips, skips and updates the loss scale, in that order.

        Options are keyword-only parameters: `polyamp.wrap_optimizer` refuses what is none of them.

        Raises:
            InvalidTypeError: ``optimizer`` is no optimizer of this framework.
            UsageError: it is wrapped already.
        """

    def scale_loss(self, loss: Any, holder: Any) -> Any:
        """``loss`` in float32 times the loss scale that ``holder`` (a wrapped optimizer, or its state) has."""

    def save_loss_scale(self, holder: Any) -> dict[str, Any]:
        """The loss-scale state of ``holder`` as `LossScale.to_state_dict` gives it."""

    def load_loss_scale(self, holder: Any, saved: Mapping[str, Any]) -> Any:
        """``holder`` with that state: the same object where it is mutable, else a new one."""


class AutocastContext(Protocol):
    """A framework with ambient autocast: operations are cast while a context is entered."""

    def autocast_context(self, policy: Policy) -> AbstractContextManager[Any]:
        """A fresh context in which operations run as ``policy`` says, on every device."""


class AutocastFunction(Protocol):
    """A framework whose functions are transformed rather than run in a context."""

    def autocast_function(self, fn: Callable[..., Any], policy: Policy | None) -> Callable[..., Any]:
        """``fn`` with its operations run as ``policy`` (None: the current one at the call) says."""


class Rewrite(Protocol):
    """A framework whose functions or models can be traced and decided operation by operation."""

    def rewrite(self, fn: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], policy: Policy, **options: Any) -> Any:
        """What is called in the place of ``fn``, with its ``plan``; the arguments are examples, and may be absent.

        Options are keyword-only parameters, as in `Adapter.wrap_optimizer`: others are refused before this is called.
        """

    def explain(
        self, fn: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], policy: Policy, **options: Any
    ) -> Plan:
        """The plan of ``fn`` for these arguments. A framework with ambient autocast has an option ``engine``."""


class Convert(Protocol):
    """A framework whose models hold their precision."""

    def convert(self, model: Any, policy: Policy) -> Any:
        """``model`` itself, its parameters or layers set as ``policy`` says."""


class ValueAndGrad(Protocol):
    """A framework that differentiates functions."""

    def value_and_grad(
        self, fun: Callable[..., Any], policy: Policy | None, has_aux: bool, *, argnums: int | Sequence[int] = 0
    ) -> Callable[..., Any]:
        """A function of ``(opt_state, params, *args)`` that gives the unscaled loss and scaled gradients."""


class Counts(Protocol):
    """A framework whose loss scales can be read, counters and all, for `polyamp.health`."""

    def loss_scale_of(self, holder: Any) -> tuple[LossScale, LossScaleState]:
        """The settings of ``holder``, and its state as Python numbers; waits for the device, if it lives on one.

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
        """One run of ``step``, forward and backward, which changes nothing.

        Args:
            step: a function that returns a loss, which is differentiated; or a training step, up to its update.
            args, kwargs: its arguments.
            policy: what it runs under.
            widened: compute what the policy makes 16-bit in float32, so that nothing overflows or is lost.
            scale: what the loss is multiplied by; None is what the step itself does.
        """


class KnowFacts(Protocol):
    """A framework of whose steps something is known before they run."""

    def facts(
        self, target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], policy: Policy, optimizer: Any
    ) -> Facts:
        """What `polyamp.lint` judges. Runs no step and changes nothing.

        Args:
            target: a step, a loss function or a model.
            args, kwargs: its arguments; without them, what takes a trace is left out.
            policy: what it is to train under.
            optimizer: the one that it is trained with; None where none was given.
        """


class TrainDigits(Protocol):
    """A framework that ``polyamp demo`` can show."""

    def train_digits(self, task: Any) -> Any:
        """Train `polyamp.demo`'s classifier as ``task`` says; see `polyamp.demo.Task`."""
