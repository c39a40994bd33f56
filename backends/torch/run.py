"""`polyamp run` for PyTorch: the removed ``torch.cuda.amp`` for scripts that have it, a policy for others.

Under a policy, three parts of torch are replaced until the run ends:

    nn.Module.__call__         the outermost module runs in autocast; its outputs are float32 again
    Optimizer.__init__         an optimizer is attached to a wrapper where it is made, and stays the same object
    torch.autograd.backward    the loss is scaled, and hooks on the leaves that it reaches unscale their gradients

So the script only sees float32 losses and unscaled gradients. What is not finite becomes NaN, which survives clipping
and adding, and the step is skipped. bfloat16 has a scale of 1. A script for which this is wrong is refused.
"""

from __future__ import annotations

import threading
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
from polyamp.backends.torch import unstable
from polyamp.backends.torch.casting import leaves, map_leaves
from polyamp.backends.torch.compat import cuda_amp
from polyamp.backends.torch.compat.attached import Attached, attach
from polyamp.backends.torch.dtypes import SIXTEEN_BIT
from polyamp.backends.torch.step.optimizer import LossScaledOptimizer
from polyamp.backends.torch.step.passes import parts_of
from polyamp.backends.torch.step.provenance import ALIVE
from polyamp.policies import Policy
from polyamp.run import Session, current, note_own_precision

_BFLOAT16 = "use --policy mixed_bfloat16, which scales nothing"

# Calls by which a script has mixed precision of its own, also through Lightning and accelerate.
_OWN_PRECISION: list[tuple[Any, str]] = [
    *((kind, "__init__") for kind in (torch.autocast, torch.amp.GradScaler)),
    *((nn.Module, name) for name in ("half", "bfloat16")),
    *((polyamp, name) for name in ("autocast", "wrap_optimizer")),
]
_SEE_GRADIENTS: list[tuple[Any, str]] = [
    *((Tensor, name) for name in ("register_hook", "retain_grad")),
    *((nn.Module, f"register_{kind}") for kind in ("backward_hook", "full_backward_hook", "full_backward_pre_hook")),
]


def begin(session: Session) -> None:
    """Supply the removed ``torch.cuda.amp``, and turn mixed precision on if the session has a policy."""
    cuda_amp.install(session)
    policy = session.policy
    if policy is None or policy.compute not in ("float16", "bfloat16"):
        return
    if policy.param != "float32":
        what = "this policy stores parameters in another format, which a script cannot be given from outside"
        session.refuse(what, found=policy, fix="use mixed_float16 or mixed_bfloat16, or polyamp.convert in the script")
    for owner, name in _OWN_PRECISION:
        session.refuse_call(owner, name, unless_by="torch")
    for owner, name in _SEE_GRADIENTS if policy.loss_scale.scales else ():
        what = "this looks at gradients inside the backward pass, where they are scaled"
        fix = f"{_BFLOAT16}; or look at them after backward()"
        session.refuse_call(owner, name, unless_by="torch", what=what, fix=fix)
    _run_models_under(session, policy)
    if policy.loss_scale.check:
        _attach_optimizers(session, policy)
        _scale_losses(session, policy)


def _is_low(value: object) -> bool:
    return isinstance(value, Tensor) and value.dtype in SIXTEEN_BIT


def _run_models_under(session: Session, policy: Policy) -> None:
    """Run the outermost call of each module with parameters in autocast, and return its outputs in float32."""
    # Code after the model, such as the loss, was written for float32. A module without parameters, such as a criterion,
    # has nothing to gain, and autocast would refuse nn.BCELoss. A checkpointed module that runs again has its region.
    original: Callable[..., Any] = nn.Module.__call__
    here = threading.local()

    @wraps(original)
    def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        is_inner = torch.compiler.is_compiling() or getattr(here, "is_inside", False) or unstable.running_task() != -1
        if is_inner or next(module.parameters(), None) is None:
            return original(module, *args, **kwargs)
        return in_a_region(module, args, kwargs)

    @unstable.never_compiled
    def in_a_region(module: nn.Module, args: Any, kwargs: Any) -> Any:
        if any(map(_is_low, (*leaves((args, kwargs)), next(module.parameters())))):
            note_own_precision("parameters or inputs of a model in 16 bits")
        session.is_applied = here.is_inside = True
        try:
            with polyamp.autocast(policy, backend="torch"):
                out = original(module, *args, **kwargs)
        finally:
            here.is_inside = False
        return map_leaves(lambda leaf: leaf.float() if _is_low(leaf) else leaf, out, others=refuse_hidden)

    def refuse_hidden(leaf: Any) -> None:
        if any(map(_is_low, getattr(leaf, "__dict__", {}).values())):
            what = "a module returns 16-bit tensors in an object, and the script expects float32"
            session.refuse(what, found=type(leaf).__name__, fix="return tensors, or make the object outside the module")

    session.replace(nn.Module, "__call__", call)


class _Unscaled(Attached):
    """A script's optimizer, which steps from gradients that are unscaled already."""

    @staticmethod
    def polyamp_step(wrapper: LossScaledOptimizer, closure: Any, **kwargs: Any) -> Any:
        if (session := current()) is not None:
            wrapper.scaler = session.holders[0].scaler  # a copied optimizer has another
        if closure is None and not wrapper.may_have_gradients:
            return None
        wrapper.forget_gradients()  # which a script need not do: it may step twice from the same gradients
        return wrapper.step(closure, scaled=False, **kwargs)


def _attach_optimizers(session: Session, policy: Policy) -> None:
    """Attach each optimizer as it is made, with the loss scale of the first; refuse steps of any other optimizer."""

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

    kinds: list[type] = [Optimizer]
    for kind in kinds:
        kinds += kind.__subclasses__()
        watch(kind)
    init_subclass = Optimizer.__init_subclass__
    session.replace(Optimizer, "__init_subclass__", classmethod(watch_subclass))
    session.callback(register_optimizer_step_pre_hook(partial(_check_step, session)).remove)


def _attach(optimizer: Any, session: Session, policy: Policy) -> None:
    if policy.loss_scale.scales and any(isinstance(one, Optimizer) for one in vars(optimizer).values()):
        what = "this optimizer steps another one, so that a skipped step cannot be undone as a whole"
        session.refuse(what, found=type(optimizer).__name__, fix=_BFLOAT16)
    wrapper = attach(optimizer, policy, kind=_Unscaled)
    session.holders = session.holders or [wrapper]
    wrapper.share_scales(session.holders[0])


def _check_step(session: Session, optimizer: Optimizer, *_: Any) -> None:
    if not hasattr(optimizer, "polyamp_hidden"):
        what = "this optimizer was not made by its class in the script, so nothing can skip its steps"
        session.refuse(what, found=type(optimizer).__name__, fix="make it in the script and load its state_dict")


def _scale_losses(session: Session, policy: Policy) -> None:
    """Scale the losses of backward passes, and unscale the gradients of the leaves that they reach."""
    original: Callable[..., None] = torch.autograd.backward
    lock, hooked = threading.Lock(), set[Tensor]()

    @wraps(original)
    def backward(tensors: Any, *args: Any, inputs: Any = None, **kwargs: Any) -> None:
        losses = checked(tensors, inputs)
        scale, is_inner = float(session.holders[0].scaler.state.scale), unstable.running_task() != -1
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

    def checked(*given: Any) -> list[Any]:
        losses, wanted = ([one] if isinstance(one, Tensor | GradientEdge) else list(one or ()) for one in given)
        if not session.holders:
            what = "a backward pass before any optimizer exists, so nothing can skip an update in which it overflows"
            session.refuse(what, fix="make the torch.optim.Optimizer first")
        others = [one for one in wanted if isinstance(one, GradientEdge) or not one.is_leaf]
        if any(isinstance(one, GradientEdge) for one in losses) or (others and policy.loss_scale.scales):
            what = (
                "this backward pass starts from an edge, or asks for gradients of what is not a leaf: they stay scaled"
            )
            session.refuse(what, fix=f"start it from the loss, and ask for leaves; or {_BFLOAT16}")
        return losses

    session.replace(torch.autograd, "backward", backward)
