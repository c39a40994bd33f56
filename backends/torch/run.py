"""`polyamp run` for PyTorch: Apex and the removed ``torch.cuda.amp`` for scripts that have them, a policy for others.

Under a policy, three parts of torch are replaced until the run ends:

    nn.Module.__call__         the outermost module runs in autocast; its outputs are float32 again
    Optimizer.__init__         an optimizer is attached to a wrapper where it is made, and stays the same object
    torch.autograd.backward    the loss is scaled; when it returns, gradients are unscaled

So the script only sees float32 losses and unscaled gradients, and its own clipping, accumulation and logging are right.
If S is the loss scale, a power of two so that nothing is rounded, a backward pass of the script becomes this:

    gradients that exist are multiplied by S    autograd, DDP and FSDP add the new ones to them, as always
    the loss times S is differentiated
    all gradients are tested and divided by S; an optimizer's become NaN if one of them, or the loss, was not finite

NaN survives clipping and adding. The step tests the gradients, and is skipped. What this would be wrong for is refused.
"""

from __future__ import annotations

import functools
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

import polyamp
from polyamp.backends.torch import cuda_amp, unstable
from polyamp.backends.torch.attached import Attached, attach, detach, wrapper_of
from polyamp.backends.torch.autocast.context import Entered
from polyamp.backends.torch.casting import leaves, map_leaves
from polyamp.backends.torch.containers import hides_tensors
from polyamp.backends.torch.devices import report_slow
from polyamp.backends.torch.dtypes import SIXTEEN_BIT
from polyamp.backends.torch.recording.mode import operator_of
from polyamp.backends.torch.steps.closures import evaluates_once
from polyamp.backends.torch.steps.gradients import Gradients
from polyamp.backends.torch.steps.optimizer import ALIVE, LossScaledOptimizer
from polyamp.backends.torch.steps.scaler import non_finite
from polyamp.backends.torch.steps.wrapped import WrappedOptimizer
from polyamp.backends.torch.user_code import is_users, users_line
from polyamp.errors import PolyampError
from polyamp.plan import PlannedOperation
from polyamp.policies import Policy
from polyamp.run import Session

_MOST_MODULES = 8  # outermost modules whose first forward pass is recorded
_BFLOAT16 = "use --policy mixed_bfloat16, which needs no loss scale"

_SEE_GRADIENTS = {
    Tensor: ("register_hook", "register_post_accumulate_grad_hook", "retain_grad"),
    nn.Module: ("register_backward_hook", "register_full_backward_hook", "register_full_backward_pre_hook"),
}


def supply_apex(session: Session) -> dict[str, ModuleType]:
    """Return the modules of Apex that polyamp has, for scripts that import it where it is not installed."""
    from polyamp.backends.torch import apex

    return apex.modules()


def begin(session: Session) -> None:
    """Replace what is deprecated in torch, and turn mixed precision on if the session has a policy."""
    cuda_amp.install(session)
    policy = session.policy
    if policy is None:
        return
    if policy.param != "float32":
        session.refuse(
            "this policy stores parameters in another format, which a script cannot be given from outside",
            found=str(policy),
            fix="use mixed_float16 or mixed_bfloat16, or polyamp.convert in the script",
        )
    if policy.compute not in ("float16", "bfloat16"):
        return
    _refuse_own_regions(session)
    _run_models_under(session, policy)
    steps = _Steps(session, policy)
    session.replace(torch.autograd, "backward", steps.backward(torch.autograd.backward))
    if policy.loss_scale.scales:
        _refuse_readers_of_gradients(session)
        steps.watch_optimizers()


# What is refused.


def _before(session: Session, owner: Any, name: str, check: Callable[..., None]) -> None:
    """Call a check before a method, where neither torch nor polyamp calls it."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def checked(*args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling() and is_users(sys._getframe(1).f_code.co_filename):
            check(*args, **kwargs)
        return original(*args, **kwargs)

    session.replace(owner, name, checked)


def _refuse_own_regions(session: Session) -> None:
    """Refuse regions, scalers and models in 16 bits that the script or a library makes."""
    for owner in (torch.autocast, torch.amp.GradScaler):

        def check(*_: Any, enabled: bool = True, owner: type = owner, **__: Any) -> None:
            if enabled:
                session.found(f"torch.amp.{owner.__name__}")

        _before(session, owner, "__init__", check)
    places: list[tuple[Any, tuple[str, ...]]] = [
        (nn.Module, ("half", "bfloat16")),
        (polyamp, ("autocast", "wrap_optimizer")),
    ]
    for place, names in places:
        for name in names:

            def found(*_: Any, name: str = f"{place.__name__}.{name}", **__: Any) -> None:
                session.found(name)

            _before(session, place, name, found)


def _refuse_low(session: Session, values: Any, what: str) -> None:
    """Refuse 16-bit tensors that the script itself made."""
    if any(isinstance(one, Tensor) and one.dtype in SIXTEEN_BIT for one in values):
        session.found(f"{what} in 16 bits")


def _refuse_readers_of_gradients(session: Session) -> None:
    for owner, names in _SEE_GRADIENTS.items():
        for name in names:

            def check(*_: Any, owner: type = owner, name: str = name, **__: Any) -> None:
                session.refuse(
                    f"{name} looks at gradients inside the backward pass, where they are scaled",
                    found=f"{owner.__name__}.{name}",
                    fix=f"{_BFLOAT16}; or look at them after backward()",
                )

            _before(session, owner, name, check)


# The forward pass.


def _run_models_under(session: Session, policy: Policy) -> None:
    """Run the outermost call of each module with parameters in autocast, and return its outputs in float32."""
    # Code after the model, such as the loss, was written for float32. A module without parameters, such as a criterion,
    # has nothing to gain, and autocast would refuse nn.BCELoss. A checkpointed module that runs again has its region.
    original: Callable[..., Any] = nn.Module.__call__
    here, recorded = threading.local(), set[int]()

    @functools.wraps(original)
    def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        is_inner = torch.compiler.is_compiling() or getattr(here, "is_inside", False) or unstable.backward_runs()
        if is_inner or next(module.parameters(), None) is None:
            return original(module, *args, **kwargs)
        return in_a_region(module, args, kwargs)

    @unstable.never_compiled
    def in_a_region(module: nn.Module, args: Any, kwargs: Any) -> Any:
        session.check()
        _refuse_low(session, leaves((args, kwargs)), "inputs of a model")
        with ExitStack() as stack:
            here.is_inside = True
            stack.callback(setattr, here, "is_inside", False)
            if torch.is_grad_enabled() and id(module) not in recorded and len(recorded) < _MOST_MODULES:
                recorded.add(id(module))
                _refuse_low(session, module.parameters(), "parameters")
                if "torch._dynamo" in sys.modules:  # compiled modules run eagerly once, so that operations are seen
                    stack.enter_context(torch.compiler.set_stance("force_eager"))
                stack.enter_context(_Recorder(session.operations, policy))
            stack.enter_context(Entered(policy))
            out = original(module, *args, **kwargs)
        return map_leaves(widened, out, others=functools.partial(_refuse_hidden, session, module))

    def widened(leaf: Any) -> Any:
        if isinstance(leaf, Tensor) and leaf.dtype in SIXTEEN_BIT:
            session.has_low = True
            return leaf.float()
        return leaf

    report_slow(policy.compute)
    session.looked_at = "the first forward pass of each model"
    session.replace(nn.Module, "__call__", call)


def _refuse_hidden(session: Session, module: nn.Module, leaf: Any) -> None:
    """Refuse an output that keeps 16-bit tensors where they cannot be replaced, such as a distribution."""
    hidden = vars(leaf).values() if hides_tensors(leaf) else ()
    if any(isinstance(one, Tensor) and one.dtype in SIXTEEN_BIT for one in hidden):
        session.refuse(
            f"{type(module).__name__} returns 16-bit tensors in an object, and the script expects float32",
            found=f"{type(leaf).__module__}.{type(leaf).__qualname__}",
            fix="return tensors, or make the object outside the module",
        )


class _Recorder(unstable.EagerDispatchMode):  # type: ignore[no-untyped-call]
    """Records the operations that run, with the formats of their results."""

    def __init__(self, operations: list[PlannedOperation], policy: Policy) -> None:
        super().__init__()
        self._operations, self._policy = operations, policy

    @unstable.never_compiled
    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = op(*args, **(kwargs or {}))
        operator = operator_of(op)
        made = [one for one in leaves(out) if isinstance(one, Tensor) and one.is_floating_point()]
        if made and operator.computes:
            ran_in, decided = str(made[0].dtype).removeprefix("torch."), self._policy.decide(operator.name, "")
            self._operations.append(
                PlannedOperation(operator.name, operator.native, users_line(), decided.op_class, ran_in, decided.reason)
            )
        return out


# Backward passes and steps.


class _Steps:
    """The optimizers of a script, which share one loss scale, and its backward passes."""

    def __init__(self, session: Session, policy: Policy) -> None:
        self._session, self._policy, self._lock = session, policy, threading.Lock()
        self._first: LossScaledOptimizer | None = None
        self._attached: weakref.WeakSet[Optimizer] = weakref.WeakSet()

    def watch_optimizers(self) -> None:
        """Attach every optimizer where it is made, and refuse the steps of those that were made elsewhere."""
        for kind in [Optimizer, *_subclasses(Optimizer)]:
            self._watch(kind)
        init_subclass, watch = Optimizer.__init_subclass__, self._watch

        def watched(cls: type, /, **kwargs: Any) -> None:
            init_subclass(**kwargs)
            watch(cls)

        self._session.replace(Optimizer, "__init_subclass__", classmethod(watched))
        self._session.replace(Attached, "step", self._step(Attached.step))
        self._session.at_end(register_optimizer_step_pre_hook(self._check_step).remove)
        self._session.at_end(self._detach)

    def _watch(self, kind: type) -> None:
        original = vars(kind).get("__init__")
        if original is None or issubclass(kind, WrappedOptimizer | Attached):
            return

        @functools.wraps(original)
        def init(optimizer: Any, *args: Any, **kwargs: Any) -> None:
            original(optimizer, *args, **kwargs)
            if type(optimizer).__init__ is init:  # the constructors of bases come before it
                self._attach(optimizer)

        self._session.replace(kind, "__init__", init)

    def _detach(self) -> None:
        for optimizer in list(self._attached):
            if wrapper_of(optimizer) is not None:
                detach(optimizer)

    def _attach(self, optimizer: Optimizer) -> None:
        name = type(optimizer).__name__
        if held := [one for one in vars(optimizer).values() if isinstance(one, Optimizer)]:
            self._session.refuse(
                f"{name} steps another optimizer, so that a skipped step cannot be undone as a whole",
                found=f"{name} around {type(held[0]).__name__}",
                fix=f"{_BFLOAT16} and skips nothing",
            )
        _refuse_low(
            self._session, [param for group in optimizer.param_groups for param in group["params"]], "parameters"
        )
        try:
            wrapper = attach(optimizer, self._policy)
        except PolyampError as error:
            self._session.refuse("an optimizer of the script cannot be wrapped", found=error, fix="leave out --policy")
        if self._first is None:
            self._first = wrapper
            self._session.add(wrapper)
        else:
            wrapper.share_scales(self._first)
        self._attached.add(optimizer)

    def _check_step(self, optimizer: Optimizer, *_: Any) -> None:
        """Refuse an optimizer that nothing wraps: it would apply what has to be skipped."""
        if not isinstance(optimizer, Attached | WrappedOptimizer) and all(one.inner is not optimizer for one in ALIVE):
            self._session.refuse(
                "this optimizer was not made by its class in the script, so nothing can skip its steps",
                found=type(optimizer).__name__,
                fix="make it in the script and load its state_dict",
            )

    def _step(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Return the step of an attached optimizer, from gradients that are unscaled already."""

        @functools.wraps(original)
        def step(optimizer: Any, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
            wrapper = wrapper_of(optimizer)
            if wrapper is None or self._first is None or wrapper.steps_now or kwargs:
                return original(optimizer, closure, **kwargs)
            self._session.check()
            if wrapper.scalers is not self._first.scalers:  # those of a copied optimizer
                wrapper.share_scales(self._first)
            loss = None
            if closure is not None and evaluates_once(wrapper.inner):
                with torch.enable_grad():
                    loss, closure = closure(), None
            if closure is None and wrapper.is_alone and not wrapper.may_have_gradients:
                unstable.note_step(wrapper.inner)  # nothing to update; schedulers look whether a step was made
                return loss
            wrapper.open_window()
            result = original(optimizer, closure, scaled=False)
            return result if loss is None else loss

        return step

    def backward(self, original: Callable[..., None]) -> Callable[..., None]:
        """Return ``torch.autograd.backward`` that scales the loss and unscales the gradients."""

        @functools.wraps(original)
        def backward(tensors: Any, grad_tensors: Any = None, *args: Any, **kwargs: Any) -> None:
            losses = [tensors] if isinstance(tensors, Tensor) else list(tensors)
            is_done = unstable.backward_runs() or self._session.is_as_written  # checkpointing; Keras on torch
            if is_done or not any(loss.requires_grad for loss in losses):
                original(tensors, grad_tensors, *args, **kwargs)
                return
            self._session.check()
            if not self._policy.loss_scale.scales:
                original(tensors, grad_tensors, *args, **kwargs)
                return
            first = self._check_options(losses, *args, **kwargs)
            with self._lock, _unscaling(first, losses) as scaled:
                original(scaled, grad_tensors, *args, **kwargs)

        return backward

    def _check_options(
        self,
        losses: list[Tensor],
        retain_graph: bool | None = None,
        create_graph: bool = False,
        grad_variables: Any = None,
        inputs: Any = None,
    ) -> LossScaledOptimizer:
        if create_graph:
            self._session.refuse(
                "backward(create_graph=True) keeps scaled gradients in a graph",
                fix="differentiate with torch.autograd.grad(loss, params, create_graph=True)",
            )
        wanted = [] if inputs is None else [inputs] if isinstance(inputs, Tensor) else list(inputs)
        if not all(isinstance(one, Tensor) and one.is_leaf for one in wanted):
            self._session.refuse(
                "backward(inputs=) asks for gradients of tensors that are not leaves, and would leave them scaled",
                fix=_BFLOAT16,
            )
        if self._first is None:
            self._session.refuse(
                "a backward pass before any optimizer exists: the script may update parameters by itself, and nothing "
                "would skip the updates in which float16 overflows",
                found="no torch.optim.Optimizer",
                fix=f"make the optimizer first, or {_BFLOAT16}",
            )
        _refuse_low(self._session, losses, "a loss")
        return self._first


@contextmanager
def _unscaling(first: LossScaledOptimizer, losses: list[Tensor]) -> Iterator[list[Tensor]]:
    """Yield the scaled losses, and unscale all gradients at the end."""
    scaler = first.scaler
    suspects = scaler.suspects(losses, alone=first.is_alone)
    state, scaled = scaler.state, scaler.scale(losses)
    # Checkpointing and FSDP hide parameters from the graph; no optimizer has the inputs whose gradients are wanted.
    owned = [list(one.model_parameters()) for one in list(ALIVE)]
    known = {id(param) for params in owned for param in params}
    groups = [[{"params": params}] for params in [*owned, [one for one in _leaves_of(losses) if id(one) not in known]]]
    for before in filter(None, map(Gradients, groups)):
        before.unscale(torch.as_tensor(state.scale, dtype=torch.float32))
    yield scaled
    for after in filter(None, map(Gradients, groups)):
        flag = after.unscale(scaler.inverse_scale(state))
        if suspects:
            flag = torch.maximum(flag, non_finite(suspects, flag.device))
        after.unscale(torch.where(flag == 0, 1.0, float("nan")))


def _leaves_of(losses: Sequence[Tensor]) -> list[Tensor]:
    """Return the leaves that a backward pass of these losses reaches, as far as the graph shows them."""
    found = [loss for loss in losses if loss.is_leaf and loss.requires_grad]
    waiting: list[Any] = [loss.grad_fn for loss in losses if loss.grad_fn is not None]
    met = set(waiting)
    while waiting:
        node = waiting.pop()
        if (leaf := getattr(node, "variable", None)) is not None:
            found.append(leaf)
        following = {after for after, _ in node.next_functions} - met - {None}
        met |= following
        waiting += following
    return found


def _subclasses(kind: type) -> Iterator[type]:
    one: type
    for one in kind.__subclasses__():
        yield one
        yield from _subclasses(one)
