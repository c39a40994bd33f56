"""The interface between the core and a framework.

An adapter is one object, registered in the entry-point group ``polyamp.backends``. It must have everything in
`Adapter`, and offers each other verb of `FullAdapter` by having an attribute of that name. Any class with these methods
is an adapter. The adapters of polyamp are tables of verbs instead::

    adapter = AdapterTable(
        "torch",
        OPERATIONS,
        owns=(torch.Tensor, torch.nn.Module),
        verbs={"cast": cast, "record": "polyamp.backends.torch.recording.record:record", ...},
    )

`polyamp.testing.Conformance` tests all of it, in both forms.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from importlib import import_module
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from polyamp.registry import Registered, Tree

if TYPE_CHECKING:
    from polyamp.diagnosis.facts import Facts
    from polyamp.diagnosis.recording import Recording
    from polyamp.loss_scale import LossScale, LossScaleState
    from polyamp.plan import Plan
    from polyamp.policies import Policy


UPDATE_SCOPE = "polyamp_update"
"""The name scope of unscaling, clipping and the optimizer's arithmetic. A rewrite leaves them as written.

>>> f"train/{UPDATE_SCOPE}/adam/mul".split("/")
['train', 'polyamp_update', 'adam', 'mul']
"""

FINITE = "polyamp_finite"
"""The name of the scalar boolean that decides whether a step is applied."""


@runtime_checkable
class Adapter(Registered, Protocol):
    """Everything that a framework's adapter must have; see `polyamp.registry.Registered` for the rest."""

    def wrap_optimizer(
        self, optimizer: Any, policy: Policy, *, loss_scale: LossScale, max_grad_norm: float | None, **options: Any
    ) -> Any:
        """Return an optimizer of the same kind that unscales, checks, clips, updates or skips, then advances the scale.

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


class FullAdapter(Adapter, Protocol):
    """Everything that an adapter may offer: each method below is an optional verb."""

    # An adapter offers a verb by having an attribute of that name. Options are keyword-only parameters, as in
    # `Adapter.wrap_optimizer`; others are refused before the call.

    # For a framework with ambient autocast: operations are cast while a context is active.
    def autocast_context(self, policy: Policy) -> AbstractContextManager[Any]:
        """Return a new context in which operations run under ``policy``, on every device."""

    # For a framework whose compiler traces the Python code that enters a region.
    def traced_context(self, policy: Policy) -> AbstractContextManager[Any] | None:
        """Return a context that the compiler can trace if it is tracing the caller now; None otherwise."""

    # For a framework that transforms functions instead of running them in a context.
    def autocast_function(self, fn: Callable[..., Any], policy: Policy | None, **options: Any) -> Callable[..., Any]:
        """Return ``fn`` with its operations run under ``policy`` (None: the current policy at the call)."""

    # For a framework whose functions or models can be traced and decided operation by operation.
    def rewrite(self, fn: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], policy: Policy, **options: Any) -> Any:
        """Return a replacement for ``fn`` with a ``plan``. The arguments are examples and may be missing."""

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

    # For a framework whose ambient autocast other frameworks may run in.
    def is_lowering(self) -> bool:
        """Return whether operations that run now are lowered."""

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

        Args:
            step: a function that returns a loss, which is then differentiated; or a training step, recorded up to its
                update.
            args, kwargs: its arguments.
            policy: the policy it runs under.
            widened: compute the policy's 16-bit work in float32, so that nothing overflows or is lost.
            scale: the factor that multiplies the loss; None keeps the step's own.
        """

    # For a framework that can report facts about a step before it runs.
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


class AdapterTable:
    """An adapter as a table: the name of each verb, and the function that does it.

    >>> table = AdapterTable("mine", {}, owns=complex, verbs={"describe": dict, "record": "polyamp.report:plural"})
    >>> table.owns(1j), table.describe(), table.record(2, "step"), hasattr(table, "rewrite")
    (True, {}, '2 steps', False)

    Args:
        name: the framework's name, as in ``backend="torch"``.
        operations: the framework's operation names, each with its canonical name in `polyamp.operations`.
        owns: the types of the framework's objects, or a function that returns whether an object is the framework's.
        verbs: for each verb the function; or, if training does not need it, ``"module:function"``, which is imported
            when it is first called.
        instead: for verbs that the framework does not have, the advice in the error.
        runs_on: the name of the framework that this one runs on.
        rewrites_unseen: whether ``rewrite`` needs no example arguments.
    """

    def __init__(
        self,
        name: str,
        operations: Mapping[str, str],
        *,
        owns: type | tuple[type, ...] | Callable[[object], bool],
        verbs: Mapping[str, Callable[..., Any] | str],
        instead: Mapping[str, str] | None = None,
        runs_on: str | None = None,
        rewrites_unseen: bool = False,
    ) -> None:
        self.name = name
        self.operations = operations
        self.owns = (lambda obj: isinstance(obj, owns)) if isinstance(owns, type | tuple) else owns
        self.instead = instead or {}
        self.runs_on = runs_on
        self.rewrites_unseen = rewrites_unseen
        for verb, function in verbs.items():
            setattr(self, verb, Later(function) if isinstance(function, str) else function)

    def __repr__(self) -> str:
        return f"<polyamp adapter {self.name}>"


class Later:
    """A function that is imported when it is first called or inspected.

    >>> import inspect
    >>> plural = Later("polyamp.report:plural")
    >>> plural(2, "cast"), list(inspect.signature(plural).parameters)
    ('2 casts', ['count', 'noun', 'ending'])

    Args:
        place: its module and its name, as in an entry point: ``"package.module:function"``.
    """

    def __init__(self, place: str) -> None:
        self.place = place
        self._function: Callable[..., Any] | None = None

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        """Return the function itself; `inspect.signature` reads it here."""
        if self._function is None:
            module, _, name = self.place.partition(":")
            self._function = getattr(import_module(module), name)
        return self._function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.__wrapped__(*args, **kwargs)
