"""Recordings on a GPU equal those of the same step on the CPU."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import polyamp
from polyamp.backends.torch import adapter
from polyamp.diagnosis.recording import PARAMETER, Recording

pytestmark = pytest.mark.gpu


def recorded(model: nn.Module, device: str, widened: bool) -> Recording:
    there = copy.deepcopy(model).to(device)
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(32, 64, generator=generator), torch.randint(0, 10, (32,), generator=generator)

    def loss_of(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(there(x), y)

    policy = polyamp.policy("mixed_float16")
    return adapter.record(loss_of, (x.to(device), y.to(device)), {}, policy, widened=widened, scale=2.0**10)


@pytest.mark.parametrize("widened", [True, False])
@pytest.mark.parametrize(
    "model",
    [
        nn.Sequential(nn.Linear(64, 128), nn.LayerNorm(128), nn.GELU(), nn.Linear(128, 10)),
        nn.Sequential(
            nn.Unflatten(1, (4, 16)),
            nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True),
            nn.Flatten(),
            nn.Linear(64, 10),
        ),
    ],
    ids=["mlp", "attention"],
)
def test_a_step_is_recorded_as_on_the_cpu(model: nn.Module, widened: bool) -> None:
    cpu, cuda = recorded(model, "cpu", widened), recorded(model, "cuda", widened)
    assert cuda.loss == pytest.approx(cpu.loss, rel=1e-2)
    for one, two in zip(cpu.of_kind(PARAMETER), cuda.of_kind(PARAMETER), strict=True):
        assert (one.name, one.shape, one.format) == (two.name, two.shape, two.format)
        assert one.spread.largest == pytest.approx(two.spread.largest, rel=5e-2)
