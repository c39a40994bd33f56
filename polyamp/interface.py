"""The interface between the core and a framework: the signature of each verb.

An adapter is one object, registered in the entry-point group ``polyamp.backends``. It must have the first verbs of
`Adapter`, and offers each of the others by having an attribute of that name. Any class with these methods is an
adapter; those of polyamp are tables of verbs, `polyamp.adapters.AdapterTable`.

No file of the core imports this one, since it names the types of all others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

if TYPE_CHECKING:
    from polyamp.diagnosis.lint import Holder
    from polyamp.diagnosis.profile import Profiler
    from polyamp.diagnosis.recording import Recording
    from polyamp.plan import Plan
    from polyamp.policies import Policy
    from polyamp.settings import LossScale, LossScaleState

Tree = TypeVar("Tree")


class Adapter(Protocol):
    """Everything that a framework's adapter has: first the required verbs, then the optional ones."""

    name: str  # the framework's name, as in ``backend="torch"``
    # the framework's operation names, each with its canonical name in `polyamp.operations`
    operations: Mapping[str, str]

    def owns(self, obj: object) -> bool:
        """Return whether ``obj`` belongs to this framework, for a type whose module does not tell."""

    def describe(self) -> dict[str, Any]:
        """Return what ``polyamp doctor`` prints, as JSON: ``version``, ``devices`` (name, fast formats), ``notes``.

        ``settings``: the switches of float32 products' precision, by name.
        """

    def cast(self, tree: Tree, format_name: str, /) -> Tree:
        """Return ``tree`` with its floating-point arrays in ``format_name`` and everything else unchanged."""

    def wrap_optimizer(
        self,
        optimizer: Any,
        policy: Policy | None,
        *,
        loss_scale: LossScale,
        max_grad_norm: float | None,
        **options: Any,
    ) -> Any:
        """Return an optimizer of the same kind that unscales, checks, clips, updates or skips, then advances the scale.

        The result has the ``policy`` as an attribute; None if nobody chose one.

        Options are keyword-only parameters: `polyamp.wrap_optimizer` refuses any other option.

        Raises:
            InvalidTypeError: ``optimizer`` is not an optimizer of this framework.
            UsageError: it is wrapped already.
        """

    def scale_loss(self, loss: Tree, holder: Any) -> Tree:
        """Return ``loss`` in float32 times the loss scale of ``holder`` (a wrapped optimizer, or its state)."""

    def loss_scale_of(self, holder: Any) -> tuple[LossScale, LossScaleState]:
        """Return the settings of ``holder`` and its state as Python numbers. Waits if the state is on a device.

        Raises:
            PolyampError: ``holder`` has no loss scale, or several.
        """

    def load_loss_scale(self, holder: Tree, saved: Any) -> Tree:
        """Return ``holder`` with the saved state: the same object if it is mutable, else a new one."""

    # The verbs below are optional. Options are keyword-only parameters, as in `wrap_optimizer`; others are refused
    # before the call.

    # For a framework that has devices of its own, which `polyamp doctor --test` tests.
    def trial(self, operation: str, arrays: tuple[Any, ...], format_name: str, device: str) -> tuple[Any, Any]:
        """Run an operation of `polyamp.selftest` on NumPy arrays, in one format on one device.

        Return the result as a NumPy array, and a function that runs the operation as often as told and then waits.
        ``device`` is the first word of a device's name in `describe`.
        """

    # For a framework that trains in several processes.
    def least_over_ranks(self, numbers: Sequence[float], /) -> list[float]:
        """Return the least of each number over all ranks, which must all call this; one rank gets its own."""

    # For a framework with ambient autocast: operations are cast while a context is active.
    def autocast_context(self, policy: Policy) -> AbstractContextManager[Any]:
        """Return a new context in which operations run under ``policy``, on every device."""

    # For a framework whose compiler traces Python code. While it does, it must be able to trace the first verbs too.
    def is_tracing(self) -> bool:
        """Return whether the framework's compiler is tracing the calling code."""

    # For a framework that transforms functions instead of running them in a context.
    def autocast_function(self, fn: Callable[..., Any], policy: Policy | None, **options: Any) -> Callable[..., Any]:
        """Return ``fn`` with its operations run under ``policy`` (None: the current policy at the call)."""

    # For a framework whose functions or models can be traced and decided operation by operation.
    def rewrite(self, fn: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], policy: Policy, **options: Any) -> Any:
        """Return a replacement for ``fn`` with a ``plan``. The arguments are examples, and can be left out."""

    # For a framework that can plan a function without running it.
    def explain(
        self, fn: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], policy: Policy, **options: Any
    ) -> Plan:
        """Return the plan of ``fn`` for these arguments. A framework with ambient autocast has an option ``engine``."""

    # For a framework whose models store their precision.
    def convert(self, model: Tree, policy: Policy) -> Tree:
        """Return ``model`` itself, with its parameters or layers set to ``policy``."""

    # For a framework that differentiates functions.
    def value_and_grad(
        self, fun: Callable[..., Any], policy: Policy | None, has_aux: bool, *, argnums: int | Sequence[int] = 0
    ) -> Callable[..., Any]:
        """Return a function of ``(opt_state, params, *args)`` that returns the unscaled loss and scaled gradients."""

    # For a framework that writes more than `LossScale.to_state_dict` does: several losses.
    def save_loss_scale(self, holder: Any, *, like: str | None = None) -> dict[str, Any]:
        """Return the loss-scale state of ``holder`` in the form of `LossScale.to_state_dict`."""

    # For a framework whose optimizer states are values: each step returns a new one.
    def holds_loss_scale(self, tree: Any) -> bool:
        """Return whether the state of a wrapped optimizer is in the tree."""

    # For a framework that shards parameters by module, and gathers them in a format of its own.
    def fsdp_policy(self, policy: Policy, *, reduce: str, output: str, cast_forward_inputs: bool) -> Any:
        """Return the framework's object for `Policy.to_fsdp`. ``reduce`` and ``output`` are names of formats."""

    # For a framework whose steps can be recorded, tensor by tensor.
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

        A step that returns a loss is differentiated; a training step is recorded up to its update. ``widened`` computes
        the policy's 16-bit work in float32, so that nothing overflows or is lost. ``scale`` multiplies the loss; None
        keeps the step's own.
        """

    # For a framework that has a profiler.
    def profiler(self, step: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], policy: Policy | None) -> Profiler:
        """Run ``step`` once or twice, and return how it is profiled. What ``step`` changes stays changed.

        If ``policy`` is None, ``step`` runs as it is.
        """

    # For a framework whose steps `polyamp.lint` judges by their plan.
    def holder(
        self, target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], policy: Policy, optimizer: Any
    ) -> Holder:
        """Return what is known about an optimizer, and about the parameters of a step, a loss function or a model.

        It runs no step and changes nothing.
        """
