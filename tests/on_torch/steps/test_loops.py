"""Training loops as people write them, each beside the same loop without scaling: the same weights come out."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import lr_scheduler
from torch.optim.swa_utils import SWALR

import polyamp
from polyamp.backends.torch import LossScaledOptimizer
from support.harness_torch import X as INPUTS
from support.harness_torch import Y as TARGETS
from support.harness_torch import contents, linear, loss_of, skipping_on_device
from support.torch_kinds import Net

Optimizer = torch.optim.Optimizer
SCALED = [False, True]


def wrap(optimizer: Optimizer, scaled: bool, **options: Any) -> Any:
    return polyamp.wrap_optimizer(optimizer, "mixed_float16", **options) if scaled else optimizer


def backward(loss: Tensor, optimizer: Any) -> None:
    optimizer.backward(loss) if isinstance(optimizer, LossScaledOptimizer) else loss.backward()


def network(seed: int = 0, outputs: int = 1) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, outputs))


def alike(run: Callable[[bool], list[Tensor]], tolerance: float = 0.0) -> None:
    """To the last bit: these loops scale by powers of two."""
    plain, scaled = map(run, SCALED)
    torch.testing.assert_close(scaled, plain, rtol=tolerance, atol=tolerance)


def test_an_optimizer_for_each_parameter_steps_inside_the_backward_pass() -> None:
    def run(scaled: bool) -> list[Tensor]:
        model = network()
        opts = {param: wrap(torch.optim.SGD([param], lr=0.1), scaled) for param in model.parameters()}

        def step(param: Tensor) -> None:
            opts[param].step()
            opts[param].zero_grad()

        for param in opts:
            param.register_post_accumulate_grad_hook(step)
        for _ in range(4):
            backward(functional.mse_loss(model(INPUTS).squeeze(1), TARGETS), next(iter(opts.values())))
        return list(model.parameters())

    alike(run)


def test_gradients_that_are_views_of_one_buffer() -> None:
    def run(scaled: bool) -> list[Tensor]:
        model = network()
        buffer = torch.zeros(sum(param.numel() for param in model.parameters()))
        views = buffer.split([param.numel() for param in model.parameters()])
        for param, view in zip(model.parameters(), views, strict=True):
            param.grad = view.view_as(param)
        opt = wrap(torch.optim.SGD(model.parameters(), lr=0.1), scaled)
        for _ in range(3):
            buffer.zero_()
            backward(functional.mse_loss(model(INPUTS).squeeze(1), TARGETS), opt)
            opt.step()
        return list(model.parameters())

    alike(run)


SCHEDULES: dict[str, Callable[[Optimizer], Any]] = {
    "LambdaLR": lambda opt: lr_scheduler.LambdaLR(opt, lambda step: 0.9**step),
    "OneCycleLR": lambda opt: lr_scheduler.OneCycleLR(opt, 0.1, total_steps=10),
    "ReduceLROnPlateau": lambda opt: lr_scheduler.ReduceLROnPlateau(opt, patience=0),
    "SequentialLR": lambda opt: lr_scheduler.SequentialLR(
        opt, [lr_scheduler.ConstantLR(opt, 0.1, 2), lr_scheduler.ExponentialLR(opt, 0.9)], [2]
    ),
    "SWALR": lambda opt: SWALR(opt, 0.05),
}


@pytest.mark.parametrize("scheduled_first", [True, False])
@pytest.mark.parametrize("name", SCHEDULES)
def test_schedules_move_rates_and_momenta_as_they_do_unwrapped(name: str, scheduled_first: bool) -> None:
    def run(scaled: bool) -> list[Tensor]:
        model = linear()
        plain = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        schedule = SCHEDULES[name](plain) if scheduled_first else None
        opt = wrap(plain, scaled)
        schedule = schedule or SCHEDULES[name](opt)
        rows = []
        for _ in range(7):
            opt.zero_grad()
            backward(loss_of(model), opt)
            opt.step()
            schedule.step(*([1.0] if name == "ReduceLROnPlateau" else []))
            rows.append(torch.tensor([opt.param_groups[0][key] for key in ("lr", "momentum")], dtype=torch.float64))
        return [*rows, *model.parameters()]

    alike(run)


def test_replicas_on_threads_train_as_one() -> None:
    def run(scaled: bool) -> list[Tensor]:
        model = nn.DataParallel(network())
        opt = wrap(torch.optim.SGD(model.parameters(), lr=0.1), scaled)
        for _ in range(3):
            opt.zero_grad()
            with polyamp.autocast("mixed_bfloat16"):
                loss = functional.mse_loss(model(INPUTS).float().squeeze(1), TARGETS)
            backward(loss, opt)
            opt.step()
        return list(model.parameters())

    alike(run)


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize("default", [torch.device("meta"), torch.float64], ids=str)
def test_defaults_for_new_tensors_do_not_matter(on_device: bool, default: Any) -> None:
    model, plain_model = linear(), linear()
    plain = torch.optim.AdamW(plain_model.parameters(), lr=0.1, fused=True)
    inner = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
    opt = skipping_on_device(polyamp.wrap_optimizer(inner, "mixed_float16", max_grad_norm=1e6), on_device)
    for overflow in (False, False, True, False):
        opt.zero_grad()
        with default_dtype(default) if isinstance(default, torch.dtype) else default:
            opt.backward(loss_of(model))
            if overflow:
                model.weight.grad[0, 0] = math.nan
            opt.step()
        if not overflow:
            plain.zero_grad()
            loss_of(plain_model).backward()
            plain.step()
    assert contents(opt) == contents(plain)
    assert opt.loss_scale == 32768.0


SORTS: dict[str, Callable[[Any], Optimizer]] = {
    "sgd-foreach": lambda params: torch.optim.SGD(params, lr=0.1, foreach=True),
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.05, foreach=False),
}


@pytest.mark.parametrize("name", SORTS)
def test_parameters_of_every_sort_train_and_skip(name: str) -> None:
    def run(scaled: bool) -> list[Tensor]:
        model = Net(torch.float32)
        opt = wrap(SORTS[name](model.parameters()), scaled)
        for step in range(12):
            opt.zero_grad()
            backward(model.loss(), opt)
            if step % 4 == 2:
                model.waves.grad[0] = math.inf
            if scaled or step % 4 != 2:
                opt.step()
        return list(model.parameters())

    alike(run)


def test_sparse_gradients_with_repeated_rows_train_and_skip() -> None:
    def run(scaled: bool) -> list[Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(7, 4, sparse=True), nn.Linear(4, 2))
        opt = wrap(SORTS["sgd-foreach"](model.parameters()), scaled)
        for step in range(6):
            opt.zero_grad()
            backward(model(torch.randint(0, 7, (3, 4))).square().mean(), opt)
            if step == 2:
                model[1].bias.grad[0] = math.inf
            if scaled or step != 2:
                opt.step()
        return list(model.parameters())

    alike(run, tolerance=1e-6)  # repeated rows are added up in another order
