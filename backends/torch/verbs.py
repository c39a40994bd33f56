"""The verbs of `polyamp` on PyTorch's optimizers: wrap one, scale a loss, and read, save and load a loss scale.

`why_not_fused` is PyTorch's alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from polyamp.backends.torch.devices import report_slow
from polyamp.backends.torch.step.optimizer import LossScaledOptimizer
from polyamp.backends.torch.step.refusals import named_tensors
from polyamp.backends.torch.step.scale import LossScaler
from polyamp.errors import no_loss_scale, warn_once, wrong_type
from polyamp.libraries import apex_losses, report_lost, write_apex_losses
from polyamp.policies import Policy
from polyamp.scale import on_host
from polyamp.settings import LossScale, LossScaleState


def wrap_optimizer(
    optimizer: Any,
    policy: Policy | None,
    *,
    loss_scale: LossScale,
    max_grad_norm: float | None,
    master_weights: bool | None = None,
    fused_step: bool | None = None,
    process_group: Any = None,
    norm_group: Any = None,
    named_parameters: Iterable[tuple[str, torch.Tensor]] = (),
) -> Any:
    """Return a `LossScaledOptimizer`; for a list of optimizers, a list of wrapped ones that share their loss scales.

    See `LossScaledOptimizer` for the options and errors.
    """
    report_slow("float32" if policy is None else policy.compute)
    options: dict[str, Any] = {"max_grad_norm": max_grad_norm, "master_weights": master_weights}
    options |= {"fused_step": fused_step, "process_group": process_group, "norm_group": norm_group}
    if not isinstance(optimizer, list | tuple):
        return _wrap(optimizer, policy, loss_scale, named_parameters=named_parameters, **options)
    named = named_tensors(named_parameters)
    wrapped = [_wrap(one, policy, loss_scale, named_parameters=named.items(), **options) for one in optimizer]
    for other in wrapped[1:]:
        other.share_scales(wrapped[0])
    return wrapped


def _wrap(optimizer: Any, policy: Policy | None, loss_scale: LossScale, **options: Any) -> LossScaledOptimizer:
    wrapped = LossScaledOptimizer(optimizer, loss_scale, policy=policy, **options)
    if policy and policy.needs_master_weights and options["master_weights"] is None and wrapped.masters is None:
        warn_once(
            f"policy {policy} stores parameters in {policy.param}, and these parameters are not: "
            "call polyamp.convert(model, policy) before its optimizer is wrapped."
        )
    return wrapped


def scale_loss(loss: Any, holder: Any) -> Any:
    """Return the loss in float32 times the loss scale; see `LossScaledOptimizer.scale`."""
    _scaler_of(holder, "scale_loss(holder)")
    return holder.scale(loss)


def loss_scale_of(holder: Any) -> tuple[LossScale, LossScaleState]:
    """Return the settings of a `LossScaledOptimizer` or a polyamp `GradScaler`, and its state on the host."""
    scaler = _scaler_of(holder, "loss_scale_of(holder)")
    return scaler.settings, on_host(scaler.state)


def save_loss_scale(holder: Any, *, like: str | None = None) -> dict[str, Any]:
    """Return the loss-scale state as JSON values; for Apex, the states of all losses of an optimizer."""
    settings, state = loss_scale_of(holder)
    if like == "apex" and isinstance(holder, LossScaledOptimizer):
        others = {loss_id: on_host(scaler.state)._asdict() for loss_id, scaler in holder.scaler.others.items()}
        fields = vars(settings)
        report_lost(fields, vars(LossScale.like("apex")), state._asdict(), "apex")
        return write_apex_losses(fields, settings.initial_state()._asdict(), {None: state._asdict(), **others})
    saved = settings.to_state_dict(state, like=like)
    return saved | {"scale": torch.tensor([saved["scale"]])} if like == "megatron" else saved


def load_loss_scale(holder: Any, saved: Mapping[str, Any]) -> Any:
    """Return the same `LossScaledOptimizer` or polyamp `GradScaler`, with the saved state."""
    # An optimizer takes all losses of a state that Apex saved, in which number 0 is the loss without an id; a scaler
    # has one. Nothing is changed unless all states fit.
    scaler = _scaler_of(holder, "load_loss_scale(holder)")
    losses = apex_losses(saved) if isinstance(holder, LossScaledOptimizer) else {}
    if len(losses) < 2:
        scaler.resume(scaler.settings.from_state_dict(saved))
        return holder
    states = {number: scaler.settings.from_state_dict(state) for number, state in losses.items()}
    if 0 in states:
        scaler.resume(states[0])
    for number, state in states.items():
        if number or number in scaler.others:
            scaler.of(number).resume(state)
    return holder


def why_not_fused(optimizer: object) -> str | None:
    """Return why an optimizer's last step was not made by polyamp's operators, as a sentence; None if it was.

    >>> from polyamp import wrap_optimizer
    >>> weight = torch.ones(2, requires_grad=True)
    >>> opt = wrap_optimizer(torch.optim.NAdam([weight]), "mixed_float16", fused_step=True)
    >>> opt.backward(weight.sum())
    >>> opt.step()
    >>> why_not_fused(opt)
    'NAdam has no operator: Adam, AdamW, SGD have one, unless something changes their step.'

    Args:
        optimizer: one optimizer that `polyamp.wrap_optimizer` returned.

    Raises:
        InvalidTypeError: it is something else.
    """
    from polyamp.backends.torch.step.fused import why_not_on  # other programs do not load the operators

    if not isinstance(optimizer, LossScaledOptimizer):
        allowed, fix = "one optimizer that polyamp.wrap_optimizer returned", "give that one; of a list, each by itself"
        raise wrong_type(optimizer, where="why_not_fused(optimizer)", allowed=allowed, fix=fix)
    if optimizer.fused_step is False:
        return "fused_step=False was given."
    first = next(optimizer.model_parameters(), None)
    if first is None:
        return "It has no parameters."
    if optimizer.fused_step is None and (why := why_not_on(first.device)) is not None:
        return why
    return "It has made no step yet." if optimizer._fused is None else optimizer._fused.why_not


def _scaler_of(holder: Any, where: str) -> LossScaler:
    scaler = getattr(holder, "scaler", None)
    if not isinstance(scaler, LossScaler):
        allowed = "the result of polyamp.wrap_optimizer, or polyamp's GradScaler"
        raise no_loss_scale(holder, where=where, allowed=allowed)
    return scaler
