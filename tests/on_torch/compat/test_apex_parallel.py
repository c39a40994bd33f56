"""`apex.parallel`: two processes against one, and `LARC` against its formula."""

from __future__ import annotations

import math
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import polyamp
from polyamp.backends.torch.compat.apex import parallel
from polyamp.backends.torch.compat.apex.fp16_utils import FP16_Optimizer
from polyamp.backends.torch.compat.apex.parallel.distributed import _check
from polyamp.backends.torch.compat.apex.parallel.LARC import LARC
from polyamp.backends.torch.compat.attached import attach
from polyamp.backends.torch.modules import operation_of
from polyamp.errors import InvalidTypeError, PolyampDeprecationWarning, PolyampWarning
from support import apex_ranks
from support.forked_ranks import outputs, run_ranks

old_interface = pytest.mark.filterwarnings("ignore::polyamp.errors.PolyampDeprecationWarning")


def test_two_processes_are_one_with_the_whole_batch(tmp_path: Path) -> None:
    assert run_ranks(2, apex_ranks.compare, tmp_path) == [0, 0], outputs(tmp_path)


@old_interface
def test_options_are_refused_or_reported_once() -> None:
    for options in ({"message_sizes": 3}, {"shared_param": True}):
        with pytest.raises(InvalidTypeError, match="message_size"):
            parallel.DistributedDataParallel(nn.Linear(1, 1), **options)
    _check(None, {"num_allreduce_streams": 1, "prof": False})  # the defaults
    with pytest.warns(PolyampWarning, match="prof have no effect"):
        _check(None, {"prof": True})
    _check(None, {"prof": True})  # a second warning would be an error


@old_interface
def test_converted_batch_norms_keep_parameters_and_mode() -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 4, 1), nn.Sequential(nn.BatchNorm2d(4)), nn.InstanceNorm2d(4, affine=True)
    ).eval()
    before, x = dict(model.named_parameters()), torch.randn(2, 3, 4, 4)
    expected = model(x)
    converted = parallel.convert_syncbn_model(model)
    assert converted is model
    assert all(one is before[name] for name, one in converted.named_parameters())
    assert [type(part) for part in (converted[1][0], converted[2])] == [parallel.SyncBatchNorm, nn.InstanceNorm2d]
    assert torch.equal(converted(x), expected)
    assert not converted[1][0].training
    assert operation_of(converted[1][0]) == "batch_norm"
    alone = parallel.convert_syncbn_model(nn.BatchNorm1d(3, affine=False, track_running_stats=False))
    y = torch.randn(5, 3)
    torch.testing.assert_close(alone(y), nn.BatchNorm1d(3, affine=False)(y))


@pytest.mark.parametrize("momentum", [0.1, None])
def test_one_process_tracks_as_a_batch_norm(momentum: float | None) -> None:
    ours, theirs = parallel.SyncBatchNorm(3, momentum=momentum), nn.BatchNorm1d(3, momentum=momentum)
    for _ in range(3):
        x = torch.randn(5, 3)
        torch.testing.assert_close(ours(x), theirs(x))
    for key, value in theirs.state_dict().items():
        torch.testing.assert_close(ours.state_dict()[key], value)


def test_a_residual_is_added_before_relu() -> None:
    x, z = torch.randn(4, 3), torch.randn(4, 3)
    norm = parallel.SyncBatchNorm(3, fuse_relu=True)
    torch.testing.assert_close(norm(x, z), torch.relu(nn.BatchNorm1d(3)(x) + z))


def test_each_old_name_shows_its_successor() -> None:
    with pytest.warns(PolyampDeprecationWarning, match=r"convert_sync_batchnorm\(model\)") as caught:
        parallel.convert_syncbn_model(nn.Linear(1, 1))
    assert caught[0].filename == __file__
    successor = r"torch\.nn\.parallel\.DistributedDataParallel"
    with pytest.raises(ValueError, match="process group"), pytest.warns(PolyampWarning, match=successor) as caught:
        parallel.DistributedDataParallel(nn.Linear(1, 1))
    assert caught[0].filename == __file__


# LARC.


def model(dtype: torch.dtype = torch.float32) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(4, 3).to(dtype)


X = torch.randn(8, 4, generator=torch.Generator().manual_seed(2))


def formula(params: list[Tensor], grads: list[Tensor], trust: float, clip: bool, lr: float, decay: float) -> None:
    for p, g in zip(params, grads, strict=True):
        size, slope = float(p.norm()), float(g.norm())
        rate, own = 1.0, 0.0
        if size and slope:
            rate, own = trust * size / (slope + size * decay + 1e-8), decay
            rate = min(rate / lr, 1.0) if clip else rate
        p.sub_(lr * rate * (g + own * p))


@pytest.mark.parametrize("clip", [True, False])
@pytest.mark.parametrize("decay", [0.0, 0.1])
@pytest.mark.parametrize("trust", [0.02, 10.0])
def test_steps_are_those_of_the_formula(clip: bool, decay: float, trust: float) -> None:
    net = model()
    net.register_parameter("zero", nn.Parameter(torch.zeros(3)))
    optimizer = LARC(torch.optim.SGD(net.parameters(), lr=0.1, weight_decay=decay), trust, clip)
    exact = [param.detach().double() for param in net.parameters()]
    for _ in range(4):
        optimizer.zero_grad()
        (net(X) + net.zero).square().mean().backward()
        grads = [param.grad.double() for param in net.parameters()]  # type: ignore[union-attr]
        optimizer.step()
        formula(exact, grads, trust, clip, 0.1, decay)
        assert optimizer.param_groups[0]["weight_decay"] == decay
    for param, expected in zip(net.parameters(), exact, strict=True):
        torch.testing.assert_close(param.detach(), expected.float(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("order", ["wrapped LARC", "LARC of wrapped", "attached LARC", "LARC of attached", "FP16"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_rates_are_those_of_unscaled_gradients(order: str, dtype: torch.dtype) -> None:
    if order == "FP16" and dtype == torch.float32:
        pytest.skip("for 16-bit models")
    net, plain, policy = model(dtype), model(dtype).float(), "O2" if dtype == torch.float16 else "mixed_float16"
    sgd = torch.optim.SGD(net.parameters(), lr=0.5, momentum=0.9, weight_decay=0.01)
    inner: Any = LARC(sgd, 0.1) if order in ("wrapped LARC", "attached LARC", "FP16") else sgd
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("warnings.warn", lambda *_, **__: None)
        if order == "FP16":
            scaler: Any = FP16_Optimizer(inner, static_loss_scale=1024.0, verbose=False)
            stepped = scaler
        elif "attached" in order:
            scaler = attach(inner, policy)
            stepped = LARC(inner, 0.1) if order == "LARC of attached" else inner
        else:
            scaler = polyamp.wrap_optimizer(inner, policy)
            stepped = LARC(scaler, 0.1) if order == "LARC of wrapped" else scaler
    control = LARC(torch.optim.SGD(plain.parameters(), lr=0.5, momentum=0.9, weight_decay=0.01), 0.1)
    for _ in range(3):
        stepped.zero_grad()
        scaler.backward(net(X.to(dtype)).float().square().mean())
        stepped.step()
        control.zero_grad()
        plain(X).square().mean().backward()
        control.step()
    tolerance = {"rtol": 1e-5, "atol": 1e-6} if dtype == torch.float32 else {"rtol": 1e-2, "atol": 2e-3}
    for param, expected in zip(stepped.param_groups[0]["params"], plain.parameters(), strict=True):
        assert param.dtype == torch.float32
        torch.testing.assert_close(param.detach(), expected.detach(), **tolerance)


@pytest.mark.filterwarnings("ignore::polyamp.errors.PolyampWarning")
def test_an_overflow_skips_larcs_step_whole() -> None:
    for outside in (True, False):
        net = model()
        sgd = torch.optim.SGD(net.parameters(), lr=0.5, momentum=0.9, weight_decay=0.01)
        scaler: Any = polyamp.wrap_optimizer(sgd if outside else LARC(sgd), "mixed_float16")
        stepped = LARC(scaler) if outside else scaler
        before = [param.detach().clone() for param in net.parameters()]
        scaler.backward(net(X).sum() * math.inf)
        stepped.step()
        assert not scaler.last_step
        assert all(map(torch.equal, before, net.parameters()))
        assert not sgd.state
        assert sgd.param_groups[0]["weight_decay"] == 0.01


def test_larc_is_its_optimizer_to_schedules_states_and_copies() -> None:
    net = model()
    sgd = torch.optim.SGD(net.parameters(), lr=0.5, momentum=0.9)
    optimizer = LARC(sgd, trust_coefficient=0.5, clip=False)
    assert isinstance(optimizer, torch.optim.Optimizer)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = net(X).square().mean()
        loss.backward()
        return loss

    assert optimizer.step(closure).requires_grad
    schedule.step()
    assert sgd.param_groups[0]["lr"] == 0.25
    saved = optimizer.state_dict()
    assert str(saved) == str(sgd.state_dict())
    optimizer.load_state_dict(saved)
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]})
    assert len(sgd.param_groups) == 2
    copied = pickle.loads(pickle.dumps(LARC(torch.optim.SGD(net.parameters(), lr=0.5), 0.5, False)))
    assert (copied.trust_coefficient, copied.clip, copied.param_groups[0]["lr"]) == (0.5, False, 0.5)
