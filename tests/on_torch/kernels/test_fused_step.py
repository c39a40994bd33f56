"""`wrap_optimizer(fused_step=True)` takes the steps that it takes without, and that the plain optimizer takes.

On the CPU these are the operators' references, or the compiled ones where they are built; on a GPU the kernels.
"""

import io
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim

from polyamp.backends.torch import adapter, why_not_fused
from polyamp.errors import InvalidTypeError
from support.torch_kinds import Net
from support.torch_steps import (
    COVERED,
    DEVICES,
    STEP_OPERATORS,
    NoSync,
    Way,
    close,
    loss_of,
    network,
    operators,
    same,
    spoil,
    state_of,
    train,
    ways,
    wrapped,
)

STEPS = 12


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("micro_batches", "max_norm"), [(1, 100.0), (2, 0.3)])
@pytest.mark.parametrize("name", COVERED)
def test_steps_are_those_of_the_plain_optimizer(
    name: str, micro_batches: int, max_norm: float | None, device: str
) -> None:
    fused, unfused, plain = ways(COVERED[name], lambda: network(device), max_grad_norm=max_norm)
    histories = [train(way, range(STEPS), micro_batches=micro_batches) for way in (fused, unfused, plain)]
    close(histories[0], histories[1])
    close(histories[0], histories[2])
    close(state_of(fused.opt), state_of(plain.opt))
    assert fused.opt.loss_scale == unfused.opt.loss_scale
    assert fused.opt.scaler.state == unfused.opt.scaler.state


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", COVERED)
def test_a_step_is_one_look_at_the_gradients_and_one_update(name: str, device: str) -> None:
    fused, *_ = ways(COVERED[name], lambda: network(device), max_grad_norm=1.0)
    train(fused, range(2), overflows={})
    fused.opt.zero_grad()
    fused.opt.backward(loss_of(fused.model))
    assert operators(fused.opt.step) == ["grad_stats", STEP_OPERATORS[name]]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", COVERED)
def test_a_step_writes_no_gradient(name: str, device: str) -> None:
    fused, *_ = ways(COVERED[name], lambda: network(device), max_grad_norm=0.1)
    fused.opt.backward(loss_of(fused.model))
    grads = [param.grad.clone() for param in fused.model.parameters()]
    fused.opt.step()
    same([param.grad for param in fused.model.parameters()], grads)


@pytest.mark.parametrize("max_norm", [None, 1.0])
@pytest.mark.parametrize(
    ("dtype", "storage"),
    [(torch.float32, None), (torch.float16, True)],
)
@pytest.mark.parametrize("name", ["adamw", "momentum", "sgd"])
def test_a_step_waits_for_nothing(name: str, dtype: torch.dtype, storage: Any, max_norm: float | None) -> None:
    model = network(dtype=dtype)
    way = Way(model, wrapped(COVERED[name](model.parameters()), True, master_weights=storage, max_grad_norm=max_norm))
    train(way, range(2), overflows={})
    for step in range(4):
        way.opt.zero_grad()
        way.opt.backward(loss_of(model, step))
        if step % 2:
            spoil(model, math.nan)
        with NoSync():
            way.opt.step()
            _ = way.opt.last_step
    assert way.opt.last_step.skipped_in_a_row == 1


def test_without_fused_step_no_operator_of_ours_runs_on_a_cpu() -> None:
    for choice in (None, False):
        model = network()
        way = Way(model, wrapped(COVERED["adamw"](model.parameters()), choice))
        assert operators(lambda way=way: train(way, range(2), overflows={})) == []


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["adamw", "momentum", "nesterov"])
def test_groups_have_their_own_settings(name: str, device: str) -> None:
    options = [{"weight_decay": 0.0}, {"lr": 1e-3}, {"maximize": True, "lr": 1e-4}]

    def make(params: Any) -> torch.optim.Optimizer:
        own = list(params)
        parts = [own[:1], own[1:3], own[3:]]
        return COVERED[name]([{"params": part, **more} for part, more in zip(parts, options, strict=True)])

    fused, _, plain = ways(make, lambda: network(device), max_grad_norm=1.0)
    close(*(train(way, range(STEPS)) for way in (fused, plain)))
    fused.opt.zero_grad()
    fused.opt.backward(loss_of(fused.model))
    assert operators(fused.opt.step) == ["grad_stats", STEP_OPERATORS[name]]


# Loops as people write them: state, hooks, parameters of every sort.


def fresh(name: str, fused: bool, device: str, dtype: torch.dtype = torch.float32) -> Way:
    model = network(device, dtype)
    return Way(model, wrapped(COVERED[name](model.parameters()), fused, max_grad_norm=0.5))


def saved_and_loaded(way: Way, into: Way) -> Way:
    file = io.BytesIO()
    torch.save([way.model.state_dict(), way.opt.state_dict()], file)
    file.seek(0)
    for part, saved in zip(into, torch.load(file), strict=True):
        part.load_state_dict(saved)
    return into


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("before", "after"), [(True, True), (True, False), (False, True)])
@pytest.mark.parametrize("name", ["adamw", "nesterov"])
def test_saved_training_goes_on_with_or_without(name: str, before: bool, after: bool, device: str) -> None:
    way = fresh(name, before, device)
    train(way, range(6))
    resumed = saved_and_loaded(way, fresh(name, after, device))
    compare = same if before == after else close
    compare(train(resumed, range(6, 12)), train(way, range(6, 12)))
    assert resumed.opt.loss_scale == way.opt.loss_scale


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("on", ["wrapped", "inner"])
def test_hooks_run_once_a_step(on: str, device: str) -> None:
    way = fresh("adamw", True, device)
    seen: list[str] = []
    target = way.opt if on == "wrapped" else way.opt.inner
    target.register_step_pre_hook(lambda *_: seen.append("pre"))
    target.register_step_post_hook(lambda *_: seen.append("post"))
    train(way, range(2), overflows={})
    assert seen == ["pre", "post"] * 2


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", COVERED)
def test_parameters_of_every_sort(name: str, dtype: torch.dtype, device: str) -> None:
    made = ways(COVERED[name], lambda: Net(dtype, usual=True).to(device), max_grad_norm=5.0)
    histories = [train(way, range(8), loss=lambda model, _: model.loss()) for way in made]
    rounding = {"rtol": 1e-4, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 2.0**-5, "atol": 2.0**-4}
    for history in histories[1 : 3 if dtype == torch.float32 else 2]:  # the plain one has no masters
        close(histories[0], history, **rounding)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["adamw", "momentum"])
def test_a_parameter_joins_and_another_pauses(name: str, device: str) -> None:
    """Adam counts each parameter's own steps."""

    def pausing(model: nn.Module, step: int) -> Tensor:
        return loss_of(model, step) if step % 3 else model[0].weight.square().sum()

    fused, _, plain = ways(lambda params: COVERED[name](list(params)[:3]), lambda: network(device))
    histories = []
    for way in (fused, plain):
        rows = train(way, range(4), overflows={2: math.inf}, loss=pausing)
        (way.opt if way is fused else way.opt.inner).add_param_group({"params": [way.model[2].bias], "lr": 0.3})
        histories.append(rows + train(way, range(4, 10), overflows={6: math.inf}, loss=pausing))
    close(*histories)


# Groups, gradients and optimizers that the operators do not cover step as they do without.

FALLBACKS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "amsgrad": lambda params: optim.AdamW(params, lr=0.02, amsgrad=True),
    "dampening": lambda params: optim.SGD(params, lr=0.05, momentum=0.9, dampening=0.1),
    "adagrad": lambda params: optim.Adagrad(params, lr=0.05),
    "rmsprop": lambda params: optim.RMSprop(params, lr=0.01, momentum=0.9, centered=True),
    "nadam": lambda params: optim.NAdam(params, lr=0.02),
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("max_norm", [None, 0.3])
@pytest.mark.parametrize("name", FALLBACKS)
def test_what_the_kernels_do_not_cover_steps_as_ever(name: str, max_norm: float | None, device: str) -> None:
    fused, _, plain = ways(FALLBACKS[name], lambda: network(device), max_grad_norm=max_norm)
    close(*(train(way, range(10)) for way in (fused, plain)))
    fused.opt.zero_grad()
    fused.opt.backward(loss_of(fused.model))
    assert not {"adam_step_", "sgd_step_"} & set(operators(fused.opt.step))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("max_norm", [None, 0.3])
def test_groups_that_fall_back_beside_one_that_does_not(max_norm: float | None, device: str) -> None:
    def make(params: Any) -> torch.optim.Optimizer:
        own = list(params)
        return optim.AdamW([{"params": own[:2]}, {"params": own[2:], "amsgrad": True}], lr=0.02)

    fused, _, plain = ways(make, lambda: network(device), max_grad_norm=max_norm)
    close(*(train(way, range(10)) for way in (fused, plain)))


class Kinds(nn.Module):
    """float64, complex and sparse gradients beside float32 ones."""

    def __init__(self, sparse: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(7, 4, sparse=sparse)
        self.phase = nn.Parameter(torch.randn(4, dtype=torch.complex64))
        self.wide = nn.Parameter(torch.randn(4, dtype=torch.float64))
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.embedding((x * 10).long() % 7).mean(1) * self.phase.abs()
        return self.head((hidden.double() * self.wide).float())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("name", "sparse"), [("adamw", False), ("momentum", False), ("sgd", True)])
def test_gradients_that_the_kernels_do_not_take(name: str, sparse: bool, device: str) -> None:
    fused, _, plain = ways(COVERED[name], lambda: Kinds(sparse).to(device))
    close(*(train(way, range(8)) for way in (fused, plain)), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("device", DEVICES)
def test_a_bad_gradient_of_a_kind_that_falls_back_skips_all_of_the_step(device: str) -> None:
    model = Kinds(sparse=False).to(device)
    way = Way(model, wrapped(COVERED["adamw"](model.parameters()), True))
    train(way, range(2), overflows={})
    before = [param.detach().clone() for param in model.parameters()]
    for bad in (model.phase, model.wide, model.head.bias):
        way.opt.zero_grad()
        way.opt.backward(loss_of(model))
        bad.grad[0] = math.nan
        way.opt.step()
        same([param.detach() for param in model.parameters()], before)
        assert not way.opt.last_step


def test_the_step_says_why_it_is_not_fused() -> None:
    def made(name: str = "adamw", choice: bool | None = True, **options: Any) -> Way:
        model = network()
        make = (COVERED | FALLBACKS)[name]
        return Way(model, wrapped(make(model.parameters()), choice, **options))

    assert why_not_fused(made(choice=False).opt) == "fused_step=False was given."
    assert "on GPUs" in (why_not_fused(made(choice=None).opt) or "")
    assert why_not_fused(made().opt) == "It has made no step yet."
    for wrong in (torch.optim.SGD(network().parameters(), lr=0.1), [made().opt], None):
        with pytest.raises(InvalidTypeError, match="why_not_fused"):
            why_not_fused(wrong)
    reasons = [
        (made(), None),
        (made("rmsprop"), "RMSprop has no operator"),
        (made("amsgrad"), "do not support an option"),
    ]
    for way, reason in reasons:
        train(way, range(1), overflows={})
        found = why_not_fused(way.opt)
        assert (found is None) if reason is None else (found is not None and reason in found)
    way = made()
    way.opt.register_step_pre_hook(lambda *_: None)
    train(way, range(1), overflows={})
    assert why_not_fused(way.opt) == "Hooks before the step must see unscaled gradients."
    way = made()
    way.opt.backward(loss_of(way.model))
    way.opt.unscale_()
    way.opt.step()
    assert "before the step" in (why_not_fused(way.opt) or "")


@pytest.mark.skipif(torch.cuda.is_available(), reason="the step is fused here")
def test_the_doctor_says_why_steps_are_not_fused_on_this_machine() -> None:
    assert why_not_fused(wrapped(COVERED["sgd"](network().parameters()), None)) in adapter.describe()["notes"]
