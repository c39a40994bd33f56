"""`polyamp run` for PyTorch: Apex and the removed ``torch.cuda.amp`` for scripts that have them, a policy for others.

Under a policy, three parts of torch are replaced until the run ends:

    nn.Module.__call__         the outermost module runs in autocast; its outputs are float32 again
    Optimizer.__init__         an optimizer is attached to a wrapper where it is made, and stays the same object
    torch.autograd.backward    the loss is scaled, and hooks on the leaves that it reaches unscale their gradients

So the script only sees float32 losses and unscaled gradients. What is not finite becomes NaN, which survives clipping
and adding, and the step is skipped. bfloat16 has a scale of 1. What this would be wrong for is refused.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial, wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

import polyamp
from polyamp.backends.torch import cuda_amp, unstable
from polyamp.backends.torch.attached import Attached, attach, detach
from polyamp.backends.torch.casting import leaves, map_leaves
from polyamp.backends.torch.dtypes import SIXTEEN_BIT, name_of
from polyamp.backends.torch.optimizer import ALIVE, LossScaledOptimizer
from polyamp.backends.torch.provenance import parts_of
from polyamp.backends.torch.recording.mode import operator_of
from polyamp.backends.torch.scale import LossScaler
from polyamp.backends.torch.user_code import is_users
from polyamp.policies import Policy
from polyamp.run import Session, current

_MOST_MODULES = 8  # outermost modules whose first forward pass is recorded
_BFLOAT16 = "use --policy mixed_bfloat16, which scales nothing"

_OWN_PRECISION: list[tuple[Any, str, str]] = [
    (torch.autocast, "__init__", "torch.amp.autocast"),
    (torch.amp.GradScaler, "__init__", "torch.amp.GradScaler"),
    (nn.Module, "half", "Module.half"),
    (nn.Module, "bfloat16", "Module.bfloat16"),
    (polyamp, "autocast", "polyamp.autocast"),
    (polyamp, "wrap_optimizer", "polyamp.wrap_optimizer"),
]
_SEE_GRADIENTS: dict[Any, tuple[str, ...]] = {
    Tensor: ("register_hook", "retain_grad"),
    nn.Module: ("register_backward_hook", "register_full_backward_hook", "register_full_backward_pre_hook"),
}


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
    for owner, name, interface in _OWN_PRECISION:
        session.check_calls(owner, name, partial(_find, session, interface), by=is_users)
    _run_models_under(session, policy)
    for owner, names in _SEE_GRADIENTS.items() if policy.loss_scale.scales else ():
        session.refuse_calls(
            owner,
            *names,
            what="this looks at gradients inside the backward pass, where they are scaled",
            fix=f"{_BFLOAT16}; or look at them after backward()",
            by=is_users,
        )
    if policy.loss_scale.check:
        _attach_optimizers(session, policy)
        _scale_losses(session, policy)


def _find(session: Session, interface: str, *_: Any, enabled: bool = True, **__: Any) -> None:
    if enabled:
        session.note_own_precision(interface)


def _is_low(value: object) -> bool:
    return isinstance(value, Tensor) and value.dtype in SIXTEEN_BIT


def _run_models_under(session: Session, policy: Policy) -> None:
    """Run the outermost call of each module with parameters in autocast, and return its outputs in float32."""
    # Code after the model, such as the loss, was written for float32. A module without parameters, such as a criterion,
    # has nothing to gain, and autocast would refuse nn.BCELoss. A checkpointed module that runs again has its region.
    original: Callable[..., Any] = nn.Module.__call__
    here, recorded = threading.local(), set[int]()

    @wraps(original)
    def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        is_inner = torch.compiler.is_compiling() or getattr(here, "is_inside", False) or unstable.running_task() != -1
        if is_inner or next(module.parameters(), None) is None:
            return original(module, *args, **kwargs)
        return in_a_region(module, args, kwargs)

    @unstable.never_compiled
    def in_a_region(module: nn.Module, args: Any, kwargs: Any) -> Any:
        session.check()
        if any(map(_is_low, leaves((args, kwargs)))):
            session.note_own_precision("inputs of a model in 16 bits")
        with ExitStack() as stack:
            here.is_inside = True
            stack.callback(setattr, here, "is_inside", False)
            if id(module) not in recorded and len(recorded) < _MOST_MODULES:
                recorded.add(id(module))
                if any(map(_is_low, module.parameters())):
                    session.note_own_precision("parameters in 16 bits")
                if "torch._dynamo" in sys.modules:  # compiled modules run eagerly once, so that operations are seen
                    stack.enter_context(torch.compiler.set_stance("force_eager"))
                stack.enter_context(_Recorder(session.operations))
            stack.enter_context(polyamp.autocast(policy, backend="torch"))
            out = original(module, *args, **kwargs)
        others = partial(refuse_hidden, type(module).__name__)
        return map_leaves(lambda leaf: leaf.float() if _is_low(leaf) else leaf, out, others=others)

    def refuse_hidden(name: str, leaf: Any) -> None:
        if any(map(_is_low, getattr(leaf, "__dict__", {}).values())):
            session.refuse(
                f"{name} returns 16-bit tensors in an object, and the script expects float32",
                found=f"{type(leaf).__module__}.{type(leaf).__qualname__}",
                fix="return tensors, or make the object outside the module",
            )

    session.replace(nn.Module, "__call__", call)


class _Recorder(unstable.EagerDispatchMode):  # type: ignore[no-untyped-call]
    """Records the operations that run, with the formats of their results."""

    def __init__(self, operations: dict[str, Counter[str]]) -> None:
        super().__init__()
        self._operations = operations

    @unstable.never_compiled
    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = op(*args, **(kwargs or {}))
        operator = operator_of(op)
        made = [one for one in leaves(out) if isinstance(one, Tensor) and one.is_floating_point()]
        if made and operator.computes:
            self._operations[operator.name][name_of(made[0].dtype)] += 1
        return out


class _Unscaled(Attached):
    """An optimizer of a script that steps from gradients that are unscaled already."""

    @staticmethod
    def polyamp_step(wrapper: LossScaledOptimizer, closure: Any, **kwargs: Any) -> Any:
        if (session := current()) is not None:
            session.check()
            wrapper.scaler = _scaler(session) or wrapper.scaler  # a copied optimizer has others
        if closure is None and not wrapper.may_have_gradients:
            return None
        wrapper.forget_gradients()  # which a script need not do: it may step twice from the same gradients
        return wrapper.step(closure, scaled=False, **kwargs)


def _scaler(session: Session) -> LossScaler | None:
    """Return the loss scale that all optimizers of the script share; None before the first one."""
    return next((one.scaler for one in session.holders if isinstance(one, LossScaledOptimizer)), None)


def _attach_optimizers(session: Session, policy: Policy) -> None:
    """Attach every optimizer where it is made, and refuse the steps of others."""

    def watch(kind: type) -> None:
        original = vars(kind).get("__init__")
        if original is None or issubclass(kind, LossScaledOptimizer | Attached):
            return

        @wraps(original)
        def init(optimizer: Any, *args: Any, **kwargs: Any) -> None:
            original(optimizer, *args, **kwargs)
            if type(optimizer).__init__ is init:  # the constructors of bases come before it
                _attach(optimizer, session, policy)

        session.replace(kind, "__init__", init)

    def watch_subclass(cls: type, /, **kwargs: Any) -> None:
        init_subclass(**kwargs)
        watch(cls)

    def check_step(optimizer: Optimizer, *_: Any) -> None:
        if not hasattr(optimizer, "polyamp_hidden"):
            session.refuse(
                "this optimizer was not made by its class in the script, so nothing can skip its steps",
                found=type(optimizer).__name__,
                fix="make it in the script and load its state_dict",
            )

    kinds: list[type] = [Optimizer]
    for kind in kinds:
        kinds += kind.__subclasses__()
        watch(kind)
    init_subclass = Optimizer.__init_subclass__
    session.replace(Optimizer, "__init_subclass__", classmethod(watch_subclass))
    session.callback(register_optimizer_step_pre_hook(check_step).remove)


def _attach(optimizer: Any, session: Session, policy: Policy) -> None:
    held = [type(one).__name__ for one in vars(optimizer).values() if isinstance(one, Optimizer)]
    if held and policy.loss_scale.scales:
        session.refuse(
            "this optimizer steps another one, so that a skipped step cannot be undone as a whole",
            found=f"{type(optimizer).__name__} around {held[0]}",
            fix=_BFLOAT16,
        )
    wrapper = attach(optimizer, policy, kind=_Unscaled)
    weak = weakref.ref(optimizer)
    session.callback(lambda: detach(weak()))
    if (shared := _scaler(session)) is None:
        session.holders.append(wrapper)
    else:
        wrapper.scaler = shared


def _scale_losses(session: Session, policy: Policy) -> None:
    """Scale the losses of backward passes, and unscale the gradients of the leaves that they reach."""
    original: Callable[..., None] = torch.autograd.backward
    lock, hooked = threading.Lock(), set[Tensor]()

    @wraps(original)
    def backward(tensors: Any, *args: Any, inputs: Any = None, **kwargs: Any) -> None:
        losses: list[Any] = [tensors] if isinstance(tensors, Tensor | GradientEdge) else list(tensors)
        session.check()
        if any(isinstance(loss, GradientEdge) for loss in losses):
            session.refuse("backward starts from a GradientEdge, which cannot be scaled", fix="start it from the loss")
        scale, is_inner = scale_for(inputs), unstable.running_task() != -1
        with ExitStack() as stack:
            if not is_inner:
                stack.enter_context(lock)
            alone = {loss for loss in losses if loss.is_leaf and loss.requires_grad}
            reached: set[Any] = alone.union(parts_of(losses)[1].values()) - hooked
            if is_inner:  # a checkpoint passes the gradients of its own copies of inputs on to the outer pass
                owned = {param for optimizer in ALIVE for param in optimizer.model_parameters()}
                reached = {leaf for leaf in reached if isinstance(leaf, nn.Parameter) or leaf in owned}
            hooked.update(reached)
            stack.callback(hooked.difference_update, reached)
            for leaf in reached:
                stack.callback(leaf.register_hook(lambda grad: grad / scale + grad * 0).remove)  # inf * 0 is NaN
            if not is_inner:  # else it is checkpointing's, whose leaves the outer pass does not reach
                losses = [loss * torch.where(loss.isfinite().all(), scale, float("inf")) for loss in losses]
            original(losses, *args, inputs=inputs, **kwargs)

    def scale_for(inputs: Any) -> float:
        shared = _scaler(session)
        wanted = [inputs] if isinstance(inputs, Tensor | GradientEdge) else list(inputs or ())
        are_leaves = [one.is_leaf if isinstance(one, Tensor) else hasattr(one.node, "variable") for one in wanted]
        if policy.loss_scale.scales and not all(are_leaves):
            session.refuse(
                "backward(inputs=) asks for gradients of tensors that are not leaves, and would leave them scaled",
                fix=_BFLOAT16,
            )
        if shared is None:
            why = "a backward pass before any optimizer exists, so nothing can skip an update in which it overflows"
            session.leave_unchecked(why, fix=f"make the torch.optim.Optimizer first, or {_BFLOAT16}")
        return 1.0 if shared is None else float(shared.state.scale)

    session.replace(torch.autograd, "backward", backward)
