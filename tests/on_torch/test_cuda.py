"""Tests that need a GPU; run with ``--gpu``."""

import copy
import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import polyamp
import polyamp.backends.torch
from polyamp.backends.torch import adapter
from polyamp.diagnosis.recording import PARAMETER, Recording
from polyamp.errors import NonFiniteLossError
from support.torch_waits import waits_are_errors

pytestmark = pytest.mark.gpu


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


def test_a_profile_has_the_kernels_of_each_kind_and_what_waits_for_the_gpu(tmp_path: Any) -> None:
    model, opt = trained(steps=1)

    def step() -> float:
        train_step(model, opt)
        return float(model.weight.detach().sum())

    report = polyamp.profile(step, runs=2, folder=tmp_path)
    assert sum(report.shares.values()) == pytest.approx(1)
    assert {"16-bit products", "memory-bound", "optimizer"} <= {one.kind for one in report.work}
    assert any("aten::item" in place for place in report.waits)


def test_doctor_names_the_gpu_and_its_fast_formats() -> None:
    described = polyamp.adapters.adapter_named("torch").describe()
    gpu = described["devices"][0]
    assert gpu["name"].startswith("cuda:0")
    if torch.cuda.get_device_capability() >= (8, 0):
        assert {"float16", "bfloat16"} <= set(gpu["fast"])


# Autocast by rules, where autograd has its own thread.

LOWER = polyamp.policy("mixed_float16", rules={"softmax": "lower"})


@pytest.mark.filterwarnings("ignore:torch.chain_matmul is deprecated:UserWarning")
def test_default_policies_are_native() -> None:
    pytest.importorskip("expecttest", reason="torch's own test lists import it, and not every GPU machine has it")
    from torch.testing._internal.autocast_test_lists import AutocastTestLists

    lists = AutocastTestLists(torch.device("cuda"))
    for name, args, *rest in lists.torch_fp32 + lists.torch_fp16:
        keywords = rest[0] if rest and isinstance(rest[0], dict) else {}
        if name.startswith(("_thnn", "cudnn")) or name == "einsum":  # of which PyTorch's list has no tuple
            continue
        with torch.autocast("cuda", torch.float16):
            native = getattr(torch, name)(*args, **keywords)
        with polyamp.autocast("mixed_float16"):
            ours = getattr(torch, name)(*args, **keywords)
        assert type(ours) is type(native)
        assert not isinstance(native, Tensor) or ours.dtype == native.dtype


def test_rules_hold_on_the_gpu_and_float16_meets_bfloat16() -> None:
    x = torch.ones(4, 4, device="cuda")
    with polyamp.autocast(LOWER):
        assert torch.softmax(x, -1).dtype == torch.float16
        assert torch.exp(x.half()).dtype == torch.float32
        assert torch.atan2(x.half(), x.bfloat16()).dtype == torch.float32


def test_an_update_inside_a_region_is_seen_without_a_sync() -> None:
    layer, x = nn.Linear(8, 8, device="cuda"), torch.ones(2, 8, device="cuda")
    with waits_are_errors(), polyamp.autocast(LOWER):
        before = layer(x)
        with torch.no_grad():
            layer.weight.mul_(2)
        after = layer(x)
    assert not torch.equal(before, after)


# Recordings equal those of the same step on the CPU.


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
