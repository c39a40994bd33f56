"""Short programs whose steps were once wrong, each beside the same program in plain PyTorch.

Every one runs under float16 and bfloat16, with and without master weights and polyamp's own operators: the format and
options of speed decide nothing. A program that is `right` ends with the same parameters as the plain one; one that
is `right_or_refused` may be refused instead, with nothing changed.
"""

import contextlib
import math
import re
import warnings
from typing import Any

import pytest
import torch
from torch import nn

import polyamp
from polyamp import LossScale
from support.plain_steps import KINDS, Kind, Program, Run, S, outcome, sgd, trained, weights

GROWS = LossScale(init=8.0, interval=1, max=64.0)
RIGHT: list[Program] = []
RIGHT_OR_REFUSED: list[Program] = []


def right(program: Program) -> Program:
    RIGHT.append(program)
    return program


def right_or_refused(program: Program) -> Program:
    RIGHT_OR_REFUSED.append(program)
    return program


def train(opt: Any, loss: torch.Tensor, **options: Any) -> None:
    opt.backward(loss, **options)
    opt.step()
    opt.zero_grad()


def continue_from(opt: Any, *losses: Any) -> None:
    """Differentiate losses from representations whose gradients were cached."""
    cached = torch.ones((), requires_grad=True)
    opt.backward(cached)
    for loss in losses:
        loss.backward(cached.grad)


# --- losses that reach parameters of several optimizers ---------------------------------------------------------------


@right_or_refused
def clips_and_then_differentiates_a_joint_loss_of_another(wrap: Any, p: Any, q: Any) -> None:
    a, b = wrap(sgd(p)), wrap(sgd(q))
    a.backward(S(p))
    a.clip_grad_norm_(10.0)
    b.backward(S(p) + S(q))
    a.step()


@right_or_refused
def clips_and_then_meets_a_joint_loss_that_is_not_finite(wrap: Any, p: Any, q: Any) -> None:
    a, b = wrap(sgd(p)), wrap(sgd(q))
    a.backward(S(p))
    a.clip_grad_norm_(10.0)
    b.backward((S(p) + S(q)) * math.inf)
    a.step()


@right
def steps_on_the_loss_of_another_while_a_third_one_scaled_later(wrap: Any, p: Any, q: Any, r: Any) -> None:
    a, b, c = (wrap(sgd(v), loss_scale=scale) for v, scale in ((p, 8.0), (q, 64.0), (r, 2.0)))
    a.backward(S(p) + S(r))
    b.backward(S(q))
    c.step()


@right_or_refused
def adds_joint_losses_of_optimizers_whose_scales_differ(wrap: Any, p: Any, q: Any) -> None:
    a, b = wrap(sgd(p)), wrap(sgd(q))
    a.backward(S(p) * math.inf)  # a's scale backs off
    a.step()
    a.zero_grad()
    a.backward(S(p) + 2 * S(q))
    b.backward(2 * S(p) + S(q))
    a.step()
    b.step()


@right_or_refused
def leaves_the_gradients_of_a_generators_loss_in_its_discriminator(wrap: Any, p: Any, q: Any) -> None:
    making, judging = wrap(sgd(p), loss_scale=64.0), wrap(sgd(q), loss_scale=16.0)
    making.backward(S(p) + 2 * S(q))
    making.step()
    judging.backward(S(q))
    judging.step()


@right_or_refused
def leaves_them_in_optimizers_wrapped_together(wrap: Any, p: Any, q: Any) -> None:
    making, judging = wrap([sgd(p), sgd(q)], loss_scale=GROWS)
    making.backward(S(p) + 2 * S(q))
    making.step()
    judging.backward(S(q))
    judging.step()


@right_or_refused
def shares_one_parameter_between_optimizers_wrapped_together(wrap: Any, p: Any, q: Any) -> None:
    a, b = wrap([sgd(p, q), sgd(q)])
    a.backward(S(p) + S(q))
    a.step()
    b.step()


@right_or_refused
def shares_one_parameter_between_optimizers_wrapped_apart(wrap: Any, p: Any, q: Any) -> None:
    a, b = wrap(sgd(p, q)), wrap(sgd(q))
    a.backward(S(p) + S(q))
    a.step()
    b.step()


@right_or_refused
def shares_one_parameter_with_an_optimizer_that_does_not_clear(wrap: Any, p: Any, q: Any, r: Any) -> None:
    a, _ = wrap(sgd(p, q), loss_scale=GROWS), wrap(sgd(r, q))
    for loss in (lambda: S(p) + S(r), lambda: S(p) + S(q) + S(r)):
        train(a, loss())


@right_or_refused
def shares_one_parameter_whose_gradient_is_zeros_and_unscaled(wrap: Any, p: Any, q: Any, r: Any) -> None:
    a, _, other = wrap(sgd(p), loss_scale=GROWS), wrap(sgd(q, p), loss_scale=GROWS), wrap(sgd(r), loss_scale=GROWS)
    a.backward(S(p))
    p.grad.zero_()
    a.unscale_()
    other.backward(S(p))
    a.step()


@right_or_refused
def adds_to_a_gradient_by_hand_after_the_scale_is_set(wrap: Any, p: Any) -> None:
    opt = wrap(sgd(p), loss_scale=GROWS)
    p.grad = torch.autograd.grad(opt.scale(S(p)), p)[0].clone()
    opt.loss_scale = 2.0
    opt.backward(S(p))
    opt.step()


@right_or_refused
def adds_a_group_with_a_gradient_after_a_loss_that_was_partly_scaled(wrap: Any, p: Any, q: Any, r: Any) -> None:
    a, b = wrap(sgd(p)), wrap(sgd(q), loss_scale=GROWS)
    S(r).backward()
    (b.scale(S(p)) + S(q)).backward()
    a.add_param_group({"params": [r]})
    a.step()


@right_or_refused
def shares_one_parameter_whose_gradient_is_set_by_hand(wrap: Any, p: Any, q: Any) -> None:
    a, b = wrap(sgd(p), loss_scale=GROWS), wrap(sgd(q, p), loss_scale=GROWS)
    train(a, S(p))
    p.grad = torch.ones_like(p)
    a.step(scaled=False)
    b.step()


@right_or_refused
def shares_one_parameter_and_clears_the_other_by_hand(wrap: Any, p: Any, q: Any, r: Any) -> None:
    a, b = wrap(sgd(p, q), loss_scale=GROWS), wrap(sgd(r, q), loss_scale=GROWS)
    b.backward(S(p) + S(q) + S(r))
    a.step()
    p.grad = None
    b.step()


@right_or_refused
def clears_one_of_two_gradients_that_nobody_scaled(wrap: Any, p: Any, q: Any) -> None:
    opt = wrap(sgd(p, q), loss_scale=GROWS)
    train(opt, S(p) + S(q))
    (S(p) + S(q)).backward()
    p.grad = None
    opt.backward(S(p) + S(q))
    opt.step()


# --- the order of scaling, clearing and differentiating ---------------------------------------------------------------


@right_or_refused
def sums_losses_of_two_scales(wrap: Any, p: Any) -> None:
    opt = wrap(sgd(p), loss_scale=GROWS)
    train(opt, S(p), loss_id="aux")
    (opt.scale(S(p)) + opt.scale(S(p), loss_id="aux")).backward()
    opt.step()


@right_or_refused
def scales_two_losses_before_it_differentiates_either(wrap: Any, p: Any) -> None:
    opt = wrap(sgd(p), loss_scale=GROWS)
    train(opt, S(p), loss_id="aux")
    main, aux = opt.scale(S(p)), opt.scale(S(p), loss_id="aux")
    main.backward()
    aux.backward()
    opt.step()


@right_or_refused
def differentiates_a_loss_that_was_scaled_before_the_last_step(wrap: Any, p: Any) -> None:
    opt = wrap(sgd(p), loss_scale=GROWS)
    earlier = opt.scale(S(p))
    train(opt, S(p))
    earlier.backward()
    opt.backward(S(p))
    opt.step()


@right_or_refused
def clears_between_scaling_and_differentiating_and_adds_another_loss(wrap: Any, p: Any) -> None:
    opt = wrap(sgd(p), loss_scale=GROWS)
    train(opt, S(p), loss_id="aux")
    scaled = opt.scale(S(p))
    opt.zero_grad()
    scaled.backward()
    opt.backward(S(p), loss_id="aux")
    opt.step()


# --- gradients are where the user's code looks for them ---------------------------------------------------------------


CLEARS = {
    "by model": lambda p: nn.ParameterList([p]).zero_grad(),
    "to zero by model": lambda p: nn.ParameterList([p]).zero_grad(set_to_none=False),
    "by hand": lambda p: setattr(p, "grad", None),
    "in place": lambda p: p.grad.zero_(),
}


def gives_up_a_batch_after_unscaling(wrap: Any, p: Any, *, clear: Any) -> None:
    opt = wrap(sgd(p))
    opt.backward(S(p))
    opt.unscale_()
    opt.backward(S(p))
    clear(p)
    opt.backward(S(p))
    opt.step()


def gives_up_a_batch_of_two_losses(wrap: Any, p: Any, *, clear: Any) -> None:
    opt = wrap(sgd(p))
    opt.backward(S(p))
    opt.backward(S(p), loss_id="aux")
    clear(p)
    opt.backward(S(p))
    opt.step()


@right
def loads_a_state_between_two_losses(wrap: Any, p: Any) -> None:
    opt = wrap(sgd(p))
    opt.backward(S(p))
    opt.backward(S(p), loss_id="aux")
    opt.load_state_dict(opt.state_dict())
    opt.backward(S(p))
    opt.step()


@right_or_refused
def unscales_and_differentiates_and_clips_by_torch(wrap: Any, p: Any) -> None:
    opt = wrap(sgd(p))
    opt.backward(S(p))
    opt.unscale_()
    opt.backward(S(p))
    nn.utils.clip_grad_norm_([p], 0.5)
    opt.step()


@right
def clips_every_micro_batch(wrap: Any, p: Any) -> None:
    opt = wrap(sgd(p))
    opt.backward(8 * S(p))
    opt.clip_grad_norm_(2**0.5)
    opt.backward(S(p))
    opt.step()


@right
def changes_unscaled_gradients_and_differentiates_again(wrap: Any, p: Any) -> None:
    opt = wrap(sgd(p))
    opt.backward(S(p))
    opt.unscale_()
    trained(opt)[0].grad.mul_(2)
    opt.backward(S(p))
    opt.step()


@right
def clips_by_torch_after_it_changed_the_models_unscaled_gradients(wrap: Any, p: Any) -> None:
    opt = wrap(sgd(p))
    opt.backward(4 * S(p))
    opt.unscale_()
    p.grad.mul_(0.5)  # of a master, the one that the model has
    opt.clip_grad_norm_(1.0)
    opt.step()


@right_or_refused
def clips_and_then_changes_the_models_own_gradients(wrap: Any, p: Any) -> None:
    opt = wrap(sgd(p))
    opt.backward(4 * S(p))
    opt.clip_grad_norm_(1.0)
    p.grad.mul_(0.5)
    opt.step()


@right_or_refused
def clips_and_changes_and_differentiates_again(wrap: Any, p: Any) -> None:
    opt = wrap(sgd(p))
    opt.backward(4 * S(p))
    opt.clip_grad_norm_(1.0)
    p.grad.mul_(0.5)
    opt.backward(S(p))
    opt.step()


@right
def clips_and_then_clears_the_models_own_gradients(wrap: Any, p: Any) -> None:
    opt = wrap(sgd(p))
    opt.backward(4 * S(p))
    opt.clip_grad_norm_(1.0)
    p.grad.zero_()
    opt.step()


@right
def steps_again_on_what_it_clipped_without_checks(wrap: Any, p: Any) -> None:
    for unscales in (False, True):
        opt = wrap(sgd(p, momentum=0.5), loss_scale=LossScale.none(), max_grad_norm=None if unscales else 1.0)
        opt.backward(4 * S(p))
        if unscales:
            opt.clip_grad_norm_(1.0)
        opt.step()
        opt.step()
        opt.unscale_()
        opt.backward(S(p))
        opt.step()
        opt.zero_grad()
        train(opt, S(p))


# --- tested when it is used -------------------------------------------------------------------------------------------


@right
def divides_unscaled_gradients_by_a_norm_of_zero(wrap: Any, p: Any, q: Any) -> None:
    for param, max_grad_norm in ((p, None), (q, 1.0)):
        opt = wrap(sgd(param), max_grad_norm=max_grad_norm)
        opt.backward(0 * S(param))
        opt.unscale_()
        grad = trained(opt)[0].grad
        grad.div_(grad.norm())
        opt.step()


@right_or_refused
def adds_a_gradient_that_is_not_finite_after_unscaling(wrap: Any, p: Any) -> None:
    opt = wrap(sgd(p))
    opt.backward(S(p))
    opt.unscale_()
    (S(p) * math.inf).backward()
    opt.step()


@right
def clips_and_then_decays_the_weights_by_hand(wrap: Any, p: Any) -> None:
    opt = wrap(sgd(p))
    opt.backward(S(p))
    opt.clip_grad_norm_(10.0)
    with torch.no_grad():
        p.mul_(0.5)
    opt.step()


@right_or_refused
def adds_an_unscaled_loss_after_unscaling(wrap: Any, p: Any) -> None:
    opt = wrap(sgd(p))
    opt.backward(S(p))
    opt.unscale_()
    S(p).backward()
    opt.step()


@right
def clamps_the_weights(wrap: Any, p: Any) -> None:
    opt = wrap(sgd(p))
    for _ in range(2):
        p.data.clamp_(-0.25, 0.25)
        train(opt, S(p))


@right
def copies_into_the_weights(wrap: Any, p: Any) -> None:
    opt = wrap(sgd(p))
    opt.backward(S(p))
    opt.unscale_()
    p.data.copy_(torch.tensor([4.0, 2.0]))
    opt.step()


# --- what a test has found is not forgotten: each program returns an optimizer whose step is skipped ------------------


def overflows_and_unscales_and_cleans(wrap: Any, p: Any, q: Any, clean: Any) -> Any:
    opt = wrap(sgd(p, q))
    opt.backward(S(p) + S(q))
    q.grad[1] = math.inf
    opt.unscale_()
    clean(p, q, *trained(opt))
    opt.step()
    return opt


def unscales_twice_and_cleans_between(wrap: Any, p: Any, q: Any, clean: Any) -> Any:
    opt = wrap(sgd(p, q), max_grad_norm=1.0)
    opt.backward(S(p) + S(q))
    q.grad[1] = math.inf
    opt.unscale_()
    clean(q, trained(opt)[1])
    opt.backward(S(p), loss_id="aux")
    opt.clip_grad_norm_(1.0)
    opt.step()
    return opt


def adds_another_loss_and_cleans(wrap: Any, p: Any, q: Any, clean: Any) -> Any:
    opt = wrap(sgd(p, q))
    opt.backward(S(p) + S(q))
    q.grad[1] = math.inf
    opt.backward(S(p), loss_id="aux")  # which tests the gradients of the other loss
    clean(q)
    opt.step()
    return opt


def loses_a_loss_and_cleans(wrap: Any, p: Any, q: Any, clean: Any) -> Any:
    opt = wrap(sgd(p, q))
    opt.backward(S(p) + S(q) + math.inf)
    clean(p, q)
    opt.step()
    return opt


def loses_a_loss_and_cleans_and_adds_another(wrap: Any, p: Any, q: Any, clean: Any) -> Any:
    opt = wrap(sgd(p, q))
    opt.scale(S(p) + S(q) * math.inf).backward()
    clean(q)
    opt.backward(S(p))
    opt.step()
    return opt


def loses_the_loss_of_another_and_cleans(wrap: Any, p: Any, q: Any, clean: Any) -> Any:
    a, b = wrap(sgd(p)), wrap(sgd(q))
    a.backward(S(p) + S(q) + math.inf)
    clean(q)
    b.step()
    return b


def loses_one_of_two_losses_in_one_pass_and_cleans(wrap: Any, p: Any, q: Any, clean: Any) -> Any:
    opt = wrap(sgd(p, q))
    torch.autograd.backward([opt.scale(S(p)), opt.scale(S(q) * math.nan)])
    clean(p, q)
    opt.step()
    return opt


def loses_a_loss_whose_gradients_are_zeros(wrap: Any, p: Any, q: Any, clean: Any) -> Any:
    opt = wrap(sgd(p, q, weight_decay=0.5))
    opt.backward((p.float() - 5).relu().sum() + math.inf)
    opt.step()
    return opt


LOSES = [
    overflows_and_unscales_and_cleans, unscales_twice_and_cleans_between, adds_another_loss_and_cleans,
    loses_a_loss_and_cleans, loses_a_loss_and_cleans_and_adds_another, loses_the_loss_of_another_and_cleans,
    loses_one_of_two_losses_in_one_pass_and_cleans, loses_a_loss_whose_gradients_are_zeros,
]  # fmt: skip
CLEANS = {
    "nan_to_num_": lambda grad: grad.nan_to_num_(0.5, 0.5, 0.5),
    "zero_": lambda grad: grad.zero_(),
    "another": torch.ones_like,
    "None": lambda grad: None,
}


def abandons_a_loss_that_was_not_finite(wrap: Any, p: Any, *, clear: Any) -> None:
    opt = wrap(sgd(p))
    for unscales in (False, True):
        opt.backward(S(p) * (math.inf if not unscales else 1))
        p.grad[0] = math.inf
        if unscales:
            opt.unscale_()
        clear(p)
        opt.backward(S(p))
        opt.step()
        opt.zero_grad()


# --- optimizers whose parameters get no gradient ----------------------------------------------------------------------


@right
def steps_experts_wrapped_together(wrap: Any, p: Any, q: Any) -> None:
    experts = wrap([sgd(p, momentum=0.5, weight_decay=0.5), sgd(q, momentum=0.5)], loss_scale=GROWS)
    for param in (p, q, q, p):
        experts[0].backward(S(param))
        for opt in experts:
            opt.unscale_()
            opt.clip_grad_norm_(1.0)
            opt.step()
            opt.zero_grad()


@right
def steps_experts_wrapped_apart(wrap: Any, p: Any, q: Any) -> None:
    a, b = wrap(sgd(p), max_grad_norm=1.0), wrap(sgd(q), max_grad_norm=1.0)
    for one, param in ((a, p), (b, q), (a, p)):
        one.backward(S(param))
        for opt in (a, b):
            opt.step()
        for opt in (a, b):
            opt.zero_grad()


@right
def freezes_a_trunk(wrap: Any, p: Any, q: Any) -> None:
    trunk, head = wrap(sgd(p, momentum=0.5)), wrap(sgd(q))
    for frozen in (False, True, True, False):
        p.requires_grad_(not frozen)
        trunk.zero_grad()
        head.zero_grad()
        head.backward(S(p) + S(q))
        trunk.step()
        head.step()


@right
def clears_before_the_step(wrap: Any, p: Any, q: Any) -> None:
    a, b = wrap([sgd(p), sgd(q)])
    a.backward(S(p) + S(q))
    a.zero_grad()
    a.step()
    b.step()
    a.backward(S(p))
    p.grad = None
    a.step()


@right
def unscales_and_sets_the_gradients_to_none(wrap: Any, p: Any) -> None:
    opt = wrap(sgd(p, momentum=0.5))
    for clears in (False, True, False):
        opt.backward(S(p))
        opt.unscale_()
        if clears:
            p.grad = None
        opt.step()
        opt.zero_grad()


@right
def evaluates_a_closure_without_gradients(wrap: Any, p: Any, q: Any) -> None:
    opt, other = wrap(sgd(p)), wrap(sgd(q))

    def closure() -> Any:
        other.backward(S(q))
        return S(q)

    opt.step(closure)
    other.step()


# --- gradients that somebody adds by hand -----------------------------------------------------------------------------


def hand(opt: Any, loss: torch.Tensor, param: torch.Tensor, **options: Any) -> torch.Tensor:
    """Return the gradient of a scaled loss, which is as large as those of a backward pass."""
    return torch.autograd.grad(opt.scale(loss, **options), param)[0].clone()


@right_or_refused
def adds_by_hand_after_unscaling(wrap: Any, p: Any) -> None:
    opt = wrap(sgd(p))
    opt.backward(S(p))
    opt.unscale_()
    p.grad += hand(opt, S(p), p)
    opt.step()


@right_or_refused
def adds_by_hand_to_masters_after_unscaling(wrap: Any, p: Any) -> None:
    opt = wrap(sgd(p))
    opt.backward(S(p))
    opt.clip_grad_norm_(10.0)
    grad = hand(opt, S(p), p)
    trained(opt)[0].grad += grad
    opt.step()


@right_or_refused
def replaces_by_hand_what_was_computed_before_unscaling(wrap: Any, p: Any, q: Any) -> None:
    opt = wrap(sgd(p, q))
    opt.backward(S(p) + S(q))
    grad = hand(opt, S(q), q)
    opt.unscale_()
    q.grad = q.grad + grad
    opt.step()


@right_or_refused
def unscales_again_what_was_added_by_hand(wrap: Any, p: Any) -> None:
    opt = wrap(sgd(p))
    opt.backward(S(p))
    opt.unscale_()
    p.grad += hand(opt, S(p), p)
    opt.unscale_()
    opt.step()


@right_or_refused
def sets_by_hand_beside_gradients_of_another_scale(wrap: Any, p: Any, q: Any) -> None:
    a, b = wrap(sgd(p, q), loss_scale=GROWS), wrap(sgd(torch.ones_like(p, requires_grad=True)), loss_scale=4.0)
    b.backward(S(p))
    q.grad = hand(a, S(q), q)
    a.step()


@right_or_refused
def sets_by_hand_and_adds_a_loss_of_another_scale(wrap: Any, p: Any, q: Any) -> None:
    opt = wrap(sgd(p, q), loss_scale=GROWS)
    train(opt, S(p), loss_id="aux")
    p.grad = hand(opt, S(p), p, loss_id="aux")
    opt.backward(S(p) + S(q))
    q.grad += hand(opt, S(q), q)
    opt.step()


@right_or_refused
def sets_by_hand_and_adds_an_unscaled_loss(wrap: Any, p: Any) -> None:
    opt = wrap(sgd(p))
    p.grad = hand(opt, S(p), p)
    S(p).backward()
    opt.step()


@right_or_refused
def only_looks_at_gradients_by_hand_and_differentiates_an_unscaled_loss(wrap: Any, p: Any) -> None:
    opt = wrap(sgd(p))
    for create_graph in (False, True):
        torch.autograd.grad(opt.scale(S(p)), p, create_graph=create_graph)
        S(p).backward()
        opt.step()


@right_or_refused
def clips_by_torch_what_it_set_by_hand_from_the_loss_of_a_partner(wrap: Any, p: Any, q: Any) -> None:
    a, b = wrap([sgd(p), sgd(q)])
    p.grad = hand(b, S(p), p)
    nn.utils.clip_grad_norm_(trained(a), 1.0)
    a.step()


@right
def sets_by_hand_after_clearing(wrap: Any, p: Any) -> None:
    opt = wrap(sgd(p), loss_scale=GROWS)
    train(opt, S(p), loss_id="aux")  # whose scale is another one from now on
    opt.backward(S(p))
    p.grad = None
    p.grad = hand(opt, S(p), p, loss_id="aux")
    opt.step()


@right
def adds_by_hand_before_unscaling(wrap: Any, p: Any, q: Any) -> None:
    opt = wrap(sgd(p, q))
    opt.backward(S(p))
    p.grad += hand(opt, S(p), p)
    q.grad = hand(opt, S(q), q)
    opt.unscale_()
    trained(opt)[0].grad.mul_(0.5)
    opt.backward(S(q))
    opt.step()


@right
def only_looks_at_gradients_by_hand(wrap: Any, p: Any) -> None:
    opt = wrap(sgd(p))
    for unscales in (False, True):
        hand(opt, S(p), p)
        opt.backward(S(p))
        hand(opt, S(p), p)
        if unscales:
            opt.clip_grad_norm_(1.0)
            nn.utils.clip_grad_norm_(trained(opt), 0.5)
        opt.step()
        opt.zero_grad()


@right
def penalizes_by_hand_and_clamps_unscaled_gradients(wrap: Any, p: Any) -> None:
    """The recipe of PyTorch's own documentation."""
    opt = wrap(sgd(p))
    (grad,) = torch.autograd.grad(opt.scale((p.float() ** 2).sum()), p, create_graph=True)
    opt.backward(S(p) + 0.5 * S(grad / opt.loss_scale))
    opt.unscale_()
    trained(opt)[0].grad.clamp_(-1, 1)
    opt.step()


@right
def caches_representations_in_three_chunks(wrap: Any, p: Any, q: Any, r: Any) -> None:
    opt = wrap(sgd(p, q, r))
    for _ in range(2):
        hidden = [(2 * S(param)).detach().requires_grad_() for param in (p, q, r)]
        opt.backward(torch.stack(hidden).sum())
        for param, one in zip((p, q, r), hidden, strict=True):
            (2 * S(param)).backward(one.grad)
        train_on = (p, q, r)
        for param in train_on:
            S(param).backward(hidden[0].grad)
        opt.step()
        opt.zero_grad()


@right
def caches_representations_after_it_trained(wrap: Any, p: Any, q: Any) -> None:
    opt = wrap(sgd(p, q))
    for _ in range(2):
        train(opt, S(p) + S(q))
        for losses in ((S(p), S(q)), (S(q), S(p)), (S(q),)):
            continue_from(opt, *losses)
            opt.step()
            opt.zero_grad()


@right_or_refused
def adds_an_unscaled_loss_after_chunks_of_cached_representations(wrap: Any, p: Any, q: Any) -> None:
    opt = wrap(sgd(p, q))
    train(opt, S(p) + S(q))
    continue_from(opt, S(p))
    S(q).backward()
    opt.step()


@right_or_refused
def adds_an_unscaled_loss_of_a_second_parameter_before_a_scaled_one_of_the_first(wrap: Any, p: Any, q: Any) -> None:
    opt = wrap(sgd(p, q))
    train(opt, S(p) + S(q))
    S(q).backward()
    opt.backward(S(p))
    opt.step()


@right_or_refused
def adds_an_unscaled_loss_of_a_second_parameter_after_a_scaled_one_of_both(wrap: Any, p: Any, q: Any) -> None:
    opt = wrap(sgd(p, q))
    train(opt, S(p) + S(q))
    opt.backward(S(p) + S(q))
    S(q).backward()
    opt.step()


@right_or_refused
def writes_a_masters_gradient_after_a_loss_that_reached_others(wrap: Any, p: Any, q: Any) -> None:
    opt = wrap(sgd(p))
    opt.backward(S(p))
    opt.unscale_()
    opt.backward(S(q))
    grad = hand(opt, 3 * S(p), p)
    held = trained(opt)[0]
    held.grad = grad.to(held.dtype)
    opt.step()


@right_or_refused
def adds_a_scaled_gradient_to_a_master_and_goes_on(wrap: Any, p: Any) -> None:
    opt = wrap(sgd(p))
    opt.backward(S(p))
    opt.unscale_()
    held = trained(opt)[0]
    held.grad = held.grad + hand(opt, S(p), p).to(held.dtype)
    opt.backward(S(p))
    opt.step()


@right_or_refused
def replaces_a_gradient_after_unscaling_and_clips_the_masters(wrap: Any, p: Any) -> None:
    opt = wrap(sgd(p))
    opt.backward(0.5 * S(p))
    opt.unscale_()
    p.grad = hand(opt, 4 * S(p), p)
    nn.utils.clip_grad_norm_(trained(opt), 1.0)
    opt.step()


@right
def unscales_again_after_the_unscaled_gradients_were_cleared_by_hand(wrap: Any, p: Any) -> None:
    opt = wrap(sgd(p))
    opt.backward(S(p))
    opt.unscale_()
    p.grad = None
    opt.unscale_()
    opt.step()


@right
def forgets_a_pass_that_was_partly_scaled_when_it_is_cleared(wrap: Any, p: Any) -> None:
    opt = wrap(sgd(p))
    (opt.scale(S(p)) + S(p)).backward()
    p.grad.zero_()
    opt.backward(S(p))
    opt.step()


# --- gradients that a step left ---------------------------------------------------------------------------------------


@right_or_refused
def scales_onto_the_gradients_of_the_last_step(wrap: Any, p: Any) -> None:
    opt = wrap(sgd(p))
    opt.backward(S(p))
    opt.step()
    opt.scale(S(p)).backward()
    opt.step()


@right_or_refused
def differentiates_anothers_loss_onto_the_gradients_of_the_last_step(wrap: Any, p: Any, q: Any) -> None:
    a, b = wrap([sgd(p), sgd(q)])
    a.backward(S(p))
    a.step()
    b.backward(S(p) + S(q))
    a.step()


@right_or_refused
def clears_the_first_gradient_of_the_last_step_only(wrap: Any, p: Any, q: Any) -> None:
    opt = wrap(sgd(p, q))
    opt.backward(S(p) + S(q))
    opt.step()
    p.grad.zero_()
    opt.backward(S(p) + S(q))
    opt.step()


@right_or_refused
def adds_to_the_gradients_of_the_last_step_by_hand(wrap: Any, p: Any) -> None:
    opt = wrap(sgd(p))
    opt.backward(S(p))
    opt.step()
    p.grad += torch.autograd.grad(opt.scale(S(p)), p)[0]
    opt.step()


@right_or_refused
def scales_onto_gradients_that_were_declared_unscaled(wrap: Any, p: Any) -> None:
    opt = wrap(sgd(p))
    p.grad = torch.ones_like(p)
    opt.step(scaled=False)
    opt.scale(S(p)).backward()
    opt.step()


@right_or_refused
def scales_onto_the_gradients_of_a_closure(wrap: Any, p: Any) -> None:
    opt = wrap(sgd(p))

    def closure() -> Any:
        opt.zero_grad()
        loss = S(p)
        opt.backward(loss)
        return loss

    opt.step(closure)
    opt.scale(S(p)).backward()
    opt.step()


@right_or_refused
def caches_representations_beside_gradients_that_the_last_step_left(wrap: Any, p: Any, q: Any) -> None:
    opt = wrap(sgd(p, q))
    p.grad, q.grad = torch.ones_like(p), torch.ones_like(q)
    opt.step(scaled=False)
    nn.utils.clip_grad_norm_([p, q], 1.0)
    continue_from(opt, S(p))
    opt.step()


@right_or_refused
def caches_representations_beside_a_later_gradient_that_the_last_step_left(wrap: Any, p: Any, q: Any) -> None:
    opt = wrap(sgd(p, q))
    p.grad, q.grad = torch.ones_like(p), torch.ones_like(q)
    opt.step(scaled=False)
    p.grad = None
    continue_from(opt, S(p))
    opt.step()


@right_or_refused
def caches_representations_and_changes_the_gradients_that_the_last_step_left(wrap: Any, p: Any, q: Any) -> None:
    opt = wrap(sgd(p, q))
    p.grad, q.grad = torch.ones_like(p), torch.ones_like(q)
    opt.step(scaled=False)
    cached = torch.ones((), requires_grad=True)
    opt.backward(cached)
    p.grad.mul_(0.5)
    S(p).backward(cached.grad)
    opt.step()


@right_or_refused
def caches_representations_beside_gradients_of_anothers_loss(wrap: Any, p: Any, q: Any) -> None:
    a, b = wrap(sgd(p), loss_scale=8.0), wrap(sgd(q), loss_scale=2.0)
    a.backward(S(p) - S(q))
    continue_from(b, S(q))
    b.step()


@right_or_refused
def caches_representations_beside_unscaled_gradients(wrap: Any, p: Any) -> None:
    opt = wrap(sgd(p))
    opt.backward(S(p))
    opt.unscale_()
    continue_from(opt, S(p))
    opt.step()


@right_or_refused
def adds_by_hand_to_the_first_gradient_of_the_last_step_only(wrap: Any, p: Any, q: Any) -> None:
    opt = wrap(sgd(p, q))
    opt.backward(S(p) + S(q))
    opt.step()
    grad = hand(opt, S(p), p)
    p.grad = p.grad + grad
    opt.step()


@right_or_refused
def differentiates_a_loss_of_others_beside_a_later_gradient_that_the_last_step_left(
    wrap: Any, p: Any, q: Any, r: Any
) -> None:
    opt = wrap(sgd(p, q))
    opt.backward(S(p) + S(q))
    opt.step()
    p.grad = None
    opt.backward(S(r))
    opt.step()


# --- losses that nobody scaled ----------------------------------------------------------------------------------------


@right_or_refused
def adds_an_unscaled_loss_between_two_losses(wrap: Any, p: Any) -> None:
    opt = wrap(sgd(p))
    opt.backward(S(p))
    S(p).backward()
    opt.backward(S(p), loss_id="aux")
    opt.step()


@right_or_refused
def adds_an_unscaled_loss_before_the_scale_changes(wrap: Any, p: Any) -> None:
    opt = wrap(sgd(p))
    opt.backward(S(p))
    S(p).backward()
    opt.loss_scale = 4.0 if opt.loss_scale > 1 else 1.0
    opt.backward(S(p))
    opt.step()


@right_or_refused
def reaches_the_first_parameter_by_an_unscaled_loss_only(wrap: Any, p: Any, q: Any) -> None:
    opt = wrap(sgd(p, q))
    opt.backward(S(q))
    (S(p) + S(q)).backward()
    opt.step()


@right_or_refused
def adds_an_unscaled_penalty_to_the_scaled_loss(wrap: Any, p: Any) -> None:
    opt = wrap(sgd(p))
    (opt.scale(S(p)) + S(p)).backward()
    opt.step()


@right_or_refused
def differentiates_a_scaled_and_an_unscaled_loss_in_one_pass(wrap: Any, p: Any) -> None:
    opt = wrap(sgd(p))
    torch.autograd.backward([opt.scale(S(p)), S(p)])
    opt.step()


@right_or_refused
def reaches_one_parameter_by_an_unscaled_part_of_a_pass_and_another_by_a_scaled_one(
    wrap: Any, p: Any, q: Any, r: Any
) -> None:
    opt, other = wrap(sgd(p), loss_scale=16.0), wrap(sgd(q, r), loss_scale=LossScale.fixed(1.0))
    torch.autograd.backward([opt.scale(S(r)), S(p) + 2 * S(q)])
    other.step()


@right_or_refused
def reaches_a_later_parameter_by_the_unscaled_part_of_a_pass(wrap: Any, p: Any, q: Any, r: Any) -> None:
    opt, other = wrap(sgd(p, q)), wrap(sgd(r))
    opt.backward(S(p) + S(q))
    opt.step()  # from now on, only the first parameter has a hook
    opt.zero_grad()
    (other.scale(S(r)) + 2 * S(q)).backward()
    opt.backward(S(p) - S(q))
    opt.step()


@right_or_refused
def scales_a_loss_of_anothers_parameter_and_differentiates_an_unscaled_one(wrap: Any, p: Any, q: Any) -> None:
    opt, _other = wrap(sgd(p)), wrap(sgd(q))
    opt.scale(S(q)).backward()
    (-1 * S(p)).backward()
    opt.step()


@right
def skips_for_a_loss_that_the_optimizer_which_scaled_it_does_not_test(wrap: Any, p: Any, q: Any) -> None:
    opt, other = wrap(sgd(p), loss_scale=LossScale.fixed(1.0)), wrap(sgd(q), loss_scale=LossScale.none())
    other.backward((S(p) + S(q)) * math.nan)
    opt.step()


# --- what is not to be refused ----------------------------------------------------------------------------------------


@right
def clears_between_scaling_and_differentiating(wrap: Any, p: Any) -> None:
    opt = wrap(sgd(p))
    for _ in range(2):
        scaled = opt.scale(S(p))
        opt.zero_grad()
        scaled.backward()
        opt.step()


@right
def goes_on_after_a_refusal_without_its_first_parameter(wrap: Any, p: Any, q: Any) -> None:
    opt = wrap(sgd(p, q))
    opt.backward(S(p))
    opt.zero_grad()
    p.requires_grad_(False)
    for _ in range(3):
        train(opt, S(q))


@right
def steps_twice_on_one_gradient_without_checks(wrap: Any, p: Any, q: Any) -> None:
    opt, other = wrap(sgd(p), loss_scale=LossScale.none()), wrap(sgd(q), loss_scale=16.0)
    opt.backward(S(p))
    opt.step()
    other.backward(2 * S(q))
    opt.step()


@right
def steps_twice_on_gradients_by_hand(wrap: Any, p: Any) -> None:
    opt, earlier = wrap(sgd(p)), []
    for value in (1.0, 1.0, 2.0):
        p.grad = torch.full_like(p, value)
        earlier.append(p.grad)
        opt.step(scaled=False)


@right
def unscales_gradients_by_hand_and_adds_a_loss(wrap: Any, p: Any) -> None:
    opt = wrap(sgd(p))
    for scaled in (True, False):
        p.grad = torch.full_like(p, 2.0 * opt.loss_scale if scaled else 2.0)
        opt.unscale_(scaled=scaled)
        train(opt, S(p))


@right
def trains_a_generator_and_a_discriminator_that_clear_before_their_losses(wrap: Any, p: Any, q: Any) -> None:
    making, judging = wrap(sgd(p), loss_scale=GROWS), wrap(sgd(q), loss_scale=16.0)
    for _ in range(3):
        judging.zero_grad()
        judging.backward(S(q))
        judging.step()
        making.zero_grad()
        making.backward(S(p) + 2 * S(q))
        making.step()


@right
def steps_two_optimizers_on_one_loss(wrap: Any, p: Any, q: Any) -> None:
    a, b = wrap(sgd(p), loss_scale=GROWS), wrap(sgd(q), loss_scale=16.0)
    for _ in range(3):
        a.backward(S(p) + 2 * S(q))
        a.step()
        b.step()
        a.zero_grad()
        b.zero_grad()


@right
def steps_two_optimizers_on_the_losses_of_both(wrap: Any, p: Any, q: Any) -> None:
    a, b = wrap([sgd(p), sgd(q)], loss_scale=GROWS)
    for _ in range(3):
        a.backward(S(p) + 2 * S(q))
        b.backward(S(q), loss_id="aux")
        a.step()
        b.step()
        a.zero_grad()
        b.zero_grad()


@right
def accumulates_in_every_form(wrap: Any, p: Any, q: Any) -> None:
    opt = wrap(sgd(p, q))
    for _ in range(2):
        (opt.scale(S(p)) + opt.scale(S(q))).backward()
        torch.autograd.backward([opt.scale(S(p)), opt.scale(S(q))])
        opt.backward(torch.stack([S(p), 2 * S(q)]), gradient=torch.ones(2))
        opt.backward(S(p) + S(q), inputs=[q])
        scaled = opt.scale(S(p))
        scaled.backward(retain_graph=True)
        scaled.backward()
        p.grad.div_(2.0)
        opt.step()
        opt.zero_grad(set_to_none=False)


@right
def unscales_and_clips_and_adds_losses(wrap: Any, p: Any, q: Any) -> None:
    opt = wrap(sgd(p, q), loss_scale=GROWS)
    for loss_id in (None, "aux"):
        opt.backward(S(p))
        opt.unscale_()
        opt.backward(2 * S(q), loss_id)
        opt.clip_grad_norm_(1.0)
        train(opt, S(q))


@right
def clips_at_every_step(wrap: Any, p: Any, q: Any) -> None:
    opt = wrap(sgd(p, q, momentum=0.5), max_grad_norm=1.0)
    for factor in (8.0, 0.25, math.inf, 1.0):
        train(opt, factor * S(p) + S(q))


@right
def clips_by_torch_after_unscaling(wrap: Any, p: Any) -> None:
    opt = wrap(sgd(p))
    for _ in range(2):
        opt.backward(4 * S(p))
        opt.unscale_()
        nn.utils.clip_grad_norm_(trained(opt), 0.5)
        opt.step()
        opt.zero_grad()


@right
def differentiates_an_unscaled_loss_and_clears_it(wrap: Any, p: Any) -> None:
    opt = wrap(sgd(p))
    for _ in range(2):
        S(p).backward()
        p.grad = None
        opt.backward(S(p))
        opt.step()
        S(p).backward()
        opt.zero_grad()


@right
def penalizes_true_gradients(wrap: Any, p: Any) -> None:
    opt = wrap(sgd(p))
    (grad,) = opt.unscaled_grad((p.float() ** 2).sum(), [p])
    opt.backward(S(p) + 0.5 * S(grad))
    opt.step()


@right
def trains_through_cached_representations(wrap: Any, p: Any) -> None:
    opt = wrap(sgd(p))
    encoded = 2 * p.float()
    cached = encoded.detach().requires_grad_()
    (grad,) = opt.unscaled_grad((cached**2).sum(), [cached], create_graph=False)
    assert not grad.requires_grad
    opt.backward(S(grad.to(encoded.dtype) * encoded))
    opt.step()


@right
def freezes_and_adds_parameters(wrap: Any, p: Any, q: Any, r: Any) -> None:
    opt = wrap(sgd(p, q, momentum=0.5))
    for turn in range(4):
        p.requires_grad_(turn != 1)
        if turn == 2:
            r.grad = None
            opt.add_param_group({"params": [r]})
        train(opt, S(p) + S(q) + S(r))


@right
def trains_again_after_a_loss_that_is_not_finite(wrap: Any, p: Any) -> None:
    opt = wrap(sgd(p, momentum=0.5))
    for factor in (1.0, math.inf, 1.0, math.nan, 1.0):
        train(opt, S(p) * factor)


@right
def steps_on_gradients_by_hand_after_a_loss_that_is_not_finite(wrap: Any, p: Any) -> None:
    opt = wrap(sgd(p))
    train(opt, S(p) * math.inf)
    p.grad = torch.ones_like(p)
    opt.step(scaled=False)


@right_or_refused
def clips_the_gradients_of_an_unscaled_loss_and_adds_a_scaled_one(wrap: Any, p: Any) -> None:
    opt = wrap(sgd(p))
    S(p).backward()
    nn.utils.clip_grad_norm_(trained(opt), 1.0)
    opt.backward(S(p))
    opt.step()


@right_or_refused
def wraps_after_a_backward_pass(wrap: Any, p: Any, q: Any) -> None:
    S(q).backward()
    opt = wrap(sgd(p, q))
    opt.backward(S(p))
    opt.step()


@right_or_refused
def adds_a_parameter_after_a_backward_pass(wrap: Any, p: Any, q: Any) -> None:
    opt = wrap(sgd(p))
    S(q).backward()
    opt.add_param_group({"params": [q]})
    opt.backward(S(p) + S(q))
    opt.step()


@right_or_refused
def clips_by_torch_before_unscaling(wrap: Any, p: Any) -> None:
    opt = wrap(sgd(p))
    opt.backward(S(p))
    nn.utils.clip_grad_norm_(trained(opt), 0.5)
    opt.step()


@right_or_refused
def clips_by_torch_while_a_partner_has_scaled_gradients(wrap: Any, p: Any, q: Any) -> None:
    a, b = wrap([sgd(p), sgd(q)])
    a.backward(S(p))
    a.unscale_()
    a.backward(S(q))
    nn.utils.clip_grad_norm_(trained(a), 0.5)
    a.step()
    b.step()


@right
def trains_again_after_a_gradient_that_is_not_finite(wrap: Any, p: Any, q: Any) -> None:
    opt = wrap(sgd(p, q, momentum=0.5))
    for value in (1.0, math.inf, 1.0, math.nan, 1.0):
        opt.backward(S(p) + S(q))
        q.grad[1] *= value
        opt.step()
        opt.zero_grad()


@right
def skips_for_an_infinite_loss_of_finite_gradients(wrap: Any, p: Any) -> None:
    opt = wrap(sgd(p))
    for added in (0.0, math.inf, 0.0):
        train(opt, S(p) + added)


def compiles_the_step(wrap: Any, p: Any, q: Any) -> None:
    opt = wrap(sgd(p, q))
    step = torch.compile(opt.step, backend="eager")
    for loss_id, factor in ((None, 1.0), (None, math.inf), ("aux", 1.0)):
        opt.backward(S(p))
        opt.backward(S(q) * factor, loss_id)
        step()
        opt.zero_grad()


EVERYWHERE = pytest.mark.parametrize(
    ("kind", "fused_step"),
    [pytest.param(kind, on, id=f"{name}{'-fused' * on}") for name, kind in KINDS.items() for on in (False, True)],
)


def named(part: object) -> str | None:
    return getattr(part, "__name__", None)


@EVERYWHERE
@pytest.mark.parametrize("program", RIGHT, ids=named)
def test_a_program_ends_as_in_plain_pytorch(program: Program, kind: Kind, fused_step: bool) -> None:
    assert outcome(program, kind, fused_step=fused_step) == "right"


@pytest.mark.parametrize("name", ["float16", "bfloat16-masters"])
def test_a_compiled_step_ends_as_in_plain_pytorch(name: str) -> None:
    assert outcome(compiles_the_step, KINDS[name]) == "right"


@EVERYWHERE
@pytest.mark.parametrize("program", RIGHT_OR_REFUSED, ids=named)
def test_a_program_ends_as_in_plain_pytorch_or_is_refused(program: Program, kind: Kind, fused_step: bool) -> None:
    outcome(program, kind, fused_step=fused_step)


@EVERYWHERE
@pytest.mark.parametrize("clear", CLEARS.values(), ids=CLEARS)
@pytest.mark.parametrize("gives_up", [gives_up_a_batch_after_unscaling, gives_up_a_batch_of_two_losses], ids=named)
def test_gradients_that_somebody_cleared_are_gone(gives_up: Any, clear: Any, kind: Kind, fused_step: bool) -> None:
    def program(wrap: Any, p: Any) -> None:
        gives_up(wrap, p, clear=clear)

    assert outcome(program, kind, fused_step=fused_step) == "right"


@EVERYWHERE
def test_a_parameters_hook_that_clips_scaled_gradients_is_refused_or_reported(kind: Kind, fused_step: bool) -> None:
    def program(wrap: Any, p: Any) -> None:
        opt = wrap(sgd(p))
        p.register_hook(lambda grad: grad.clamp(-1, 1))
        opt.backward(S(p))
        opt.step()

    if not any("hook" in told for told in Run(program, kind, polyamp.wrap_optimizer, fused_step=fused_step).told):
        outcome(program, kind, fused_step=fused_step)


@EVERYWHERE
def test_a_refused_mixture_is_forgotten_when_it_is_cleared(kind: Kind, fused_step: bool) -> None:
    def program(wrap: Any, p: Any, q: Any) -> None:
        opt = wrap(sgd(p, q))
        S(p).backward()
        opt.backward(S(p))
        with contextlib.suppress(polyamp.PolyampError):
            opt.unscale_()  # refused, or right where the scale is 1
        opt.zero_grad()
        for _ in range(3):
            opt.backward(S(q))
            opt.step()
            opt.zero_grad()

    assert outcome(program, kind, fused_step=fused_step) == "right"


@EVERYWHERE
@pytest.mark.parametrize("clean", CLEANS.values(), ids=CLEANS)
@pytest.mark.parametrize("loses", LOSES, ids=named)
def test_what_a_test_found_is_not_applied_whatever_is_cleaned(
    loses: Any, clean: Any, kind: Kind, fused_step: bool
) -> None:
    def cleaned(*params: Any) -> None:
        for param in params:
            param.grad = None if param.grad is None else clean(param.grad)

    def program(wrap: Any, p: Any, q: Any) -> None:
        opts.append(loses(wrap, p, q, cleaned))

    opts: list[Any] = []
    run = Run(program, kind, polyamp.wrap_optimizer, fused_step=fused_step)
    assert run.refusal is None
    assert not opts[0].last_step.applied
    assert all(map(torch.equal, *run.moments))


@EVERYWHERE
@pytest.mark.parametrize("clear", CLEARS.values(), ids=CLEARS)
def test_an_abandoned_batch_that_was_not_finite_is_forgotten(clear: Any, kind: Kind, fused_step: bool) -> None:
    def program(wrap: Any, p: Any) -> None:
        abandons_a_loss_that_was_not_finite(wrap, p, clear=clear)

    assert outcome(program, kind, fused_step=fused_step) == "right"


def test_a_step_without_gradients_says_so_and_advances_nothing() -> None:
    p, q = weights(2)
    a, b = (polyamp.wrap_optimizer(sgd(one), "mixed_float16", loss_scale=GROWS) for one in (p, q))
    with pytest.raises(polyamp.errors.UsageError, match="a step without a backward pass"):
        a.step()
    b.backward(S(q))
    a.step()
    assert a.last_step.applied
    assert polyamp.save_loss_scale(a)["steps"] == 0
    assert a.loss_scale == 8.0
    with pytest.raises(polyamp.errors.UsageError, match="a step without a backward pass"):
        a.step()


@pytest.mark.parametrize("register", ["register_hook", "register_post_accumulate_grad_hook"])
@pytest.mark.parametrize(("scaled_by", "when"), [("opt", 0), ("opt", 1), ("opt", 3), ("scaler", 0), ("scaler", 1)])
def test_a_hook_on_scaled_gradients_is_reported_once(register: str, scaled_by: str, when: int) -> None:
    p, q = weights(2)
    plain, told = sgd(p, q), []
    for turn in range(6):
        if turn == when:
            for param in (p, q):
                getattr(param, register)(lambda _: None)
        if turn == 1:
            scaler = polyamp.backends.torch.GradScaler("cpu")
            opt = plain if scaled_by == "scaler" else polyamp.wrap_optimizer(plain, "mixed_float16")
        if turn < 2:
            continue
        with warnings.catch_warnings(record=True) as caught, polyamp.autocast("mixed_float16"):
            warnings.simplefilter("always")
            (scaler if scaled_by == "scaler" else opt).scale(S(p) + S(q)).backward()
            if scaled_by == "scaler":
                scaler.step(plain)
                scaler.update()
            else:
                opt.step()
            plain.zero_grad()
            told.append(["hook" in str(one.message) for one in caught])
    assert told == ([[], [True], [], []] if when == 3 else [[True], [], [], []])


@pytest.mark.parametrize("kind", ["bfloat16", "scale-1"])
def test_a_hook_on_gradients_that_are_not_multiplied_is_not_reported(kind: str) -> None:
    def program(wrap: Any, p: Any) -> None:
        p.register_post_accumulate_grad_hook(lambda param: None)
        train(wrap(sgd(p)), S(p))

    assert Run(program, KINDS[kind], polyamp.wrap_optimizer).told == []


# --- what has to be reported, and the loss scale after a loss that is not finite --------------------------------------


@pytest.mark.parametrize("options", [{}, {"max_grad_norm": 1.0}], ids=["", "clipping"])
@pytest.mark.parametrize("policy", ["mixed_bfloat16", "bfloat16", "mixed_float16"])
def test_under_every_16_bit_policy_a_loss_that_is_not_finite_skips_its_step(policy: str, options: Any) -> None:
    (p,) = weights(1, torch.bfloat16 if policy == "bfloat16" else torch.float32)
    opt = polyamp.wrap_optimizer(torch.optim.AdamW([p], lr=0.125), policy, **options)
    for step in range(3):
        before = p.detach().clone()
        with polyamp.autocast(policy):
            loss = S(p) * (math.inf if step == 1 else 1)
        with pytest.warns(polyamp.PolyampWarning, match="not finite") if step == 1 else contextlib.nullcontext():
            opt.backward(loss)
            opt.step()
        assert opt.last_step.applied == (step != 1)
        assert torch.equal(p, before) == (step == 1)
        opt.zero_grad()
    health = polyamp.health(opt)
    assert (health.steps, health.skipped) == (3, 1)
    assert (opt.loss_scale == 1) == ("bfloat16" in policy)


def test_without_a_check_health_does_not_say_that_all_is_well() -> None:
    (p,) = weights(1)
    opt = polyamp.wrap_optimizer(sgd(p), "mixed_bfloat16", loss_scale=LossScale.none())
    with polyamp.autocast("mixed_bfloat16"):
        opt.backward(S(p) * math.inf)
    opt.step()
    assert not p.isfinite().any()
    assert "not checked" in str(polyamp.health(opt))
    assert not re.search(r"\bok\b", str(polyamp.health(opt)))


@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16", None])
def test_an_optimizer_that_never_meets_a_region_is_reported_once_at_its_second_step(policy: str | None) -> None:
    (p,) = weights(1)
    opt = polyamp.wrap_optimizer(sgd(p), *([] if policy is None else [policy]))
    told = []
    for _ in range(5):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            opt.backward(S(p))
            opt.step()
            opt.zero_grad()
        told.append(len(caught))
        assert all(issubclass(one.category, polyamp.PolyampWarning) for one in caught)
        assert all(one.filename == __file__ for one in caught)
    assert told == [0, 1, 0, 0, 0]


def test_an_optimizer_without_a_policy_that_meets_a_region_with_one_is_not_said_to_lack_it() -> None:
    (p,) = weights(1)
    with polyamp.policy("mixed_bfloat16"):
        opt = polyamp.wrap_optimizer(sgd(p))
    for _ in range(3):
        with polyamp.autocast("mixed_bfloat16"):
            loss = S(p)
        opt.backward(loss)
        opt.step()  # a warning would be an error here
        opt.zero_grad()


@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_a_loss_that_is_not_finite_lowers_the_scale_as_an_overflow_does(bad: float) -> None:
    """In every framework alike; see docs/reference/loss_scale.md."""
    (p,) = weights(1)
    config = LossScale(init=64.0, interval=2)
    opt = polyamp.wrap_optimizer(sgd(p), "mixed_float16", loss_scale=config)
    state = config.initial_state()
    for factor in (1.0, bad, 1.0, 1.0):
        with polyamp.autocast("mixed_float16"):
            loss = S(p) * factor
        with contextlib.nullcontext() if factor == 1.0 else pytest.warns(polyamp.PolyampWarning, match="not finite"):
            opt.backward(loss)
            opt.step()
        opt.zero_grad()
        state = polyamp.advance(config, state, factor == 1.0)
        assert config.from_state_dict(opt.state_dict()["loss_scale"]) == state
