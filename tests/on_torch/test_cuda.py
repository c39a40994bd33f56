"""Tests that need a GPU; run with ``--gpu``."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

import polyamp
import polyamp.backends.torch
from polyamp.errors import NonFiniteLossError
from polyamp.testing import Conformance
from support.harness_torch import TorchHarness
from support.torch_waits import waits_are_errors

pytestmark = pytest.mark.gpu


class TestTorchOnCuda(Conformance):
    """By PyTorch's own kernels; by polyamp's in ``kernels/test_fused_conformance.py``."""

    @pytest.fixture(params=[False, True], ids=["unfused", "fused"])
    def harness(self, request: pytest.FixtureRequest) -> TorchHarness:
        return TorchHarness("cuda", fused=request.param, fused_step=False)


def trained(steps: int) -> tuple[torch.nn.Module, polyamp.backends.torch.LossScaledOptimizer]:
    model = torch.nn.Linear(64, 64, device="cuda")
    inner = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    opt = polyamp.wrap_optimizer(inner, "mixed_float16", max_grad_norm=1.0)
    for _ in range(steps):
        train_step(model, opt)
    return model, opt


def train_step(model: torch.nn.Module, opt: polyamp.backends.torch.LossScaledOptimizer) -> None:
    with polyamp.autocast("mixed_float16"):
        loss = model(torch.ones(8, 64, device="cuda")).float().square().mean()
    opt.backward(loss)
    opt.step()
    opt.zero_grad()


def test_fused_step_waits_for_no_device() -> None:
    model, opt = trained(steps=2)  # the first step decides on the host
    with waits_are_errors():
        for _ in range(5):
            train_step(model, opt)


@pytest.mark.parametrize("nonfinite_loss", ["skip", "raise"])
def test_non_finite_loss_is_reported_by_a_later_step(nonfinite_loss: Any) -> None:
    model, opt = trained(steps=2)
    opt.scaler.settings = dataclasses.replace(opt.scaler.settings, nonfinite_loss=nonfinite_loss)
    polyamp.errors.forget_warnings()
    before = [parameter.clone() for parameter in model.parameters()]

    def train_on_nan() -> None:
        for _ in range(3):
            opt.backward(model(torch.full((8, 64), torch.nan, device="cuda")).sum())
            opt.step()
            opt.zero_grad()
            torch.cuda.synchronize()

    said = pytest.raises(NonFiniteLossError) if nonfinite_loss == "raise" else pytest.warns(polyamp.PolyampWarning)
    with said:
        train_on_nan()
    assert all(map(torch.equal, model.parameters(), before))


def test_doctor_names_the_gpu_and_its_fast_formats() -> None:
    described = polyamp.adapters.adapter_named("torch").describe()
    gpu = described["devices"][0]
    assert gpu["name"].startswith("cuda:0")
    if torch.cuda.get_device_capability() >= (8, 0):
        assert {"float16", "bfloat16"} <= set(gpu["fast"])
