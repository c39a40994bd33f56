"""Programs of ranks for `apex.parallel`: each compares itself with one process that has the whole batch."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import polyamp
from polyamp.backends.torch.compat.apex.parallel import (
    DistributedDataParallel,
    Reducer,
    SyncBatchNorm,
    convert_syncbn_model,
    create_syncbn_process_group,
)

ROWS = 4  # of each rank

OPTIONS: list[tuple[dict[str, Any], float]] = [  # with the factor of the gradients' average
    ({}, 1.0),
    ({"delay_allreduce": True}, 1.0),
    ({"message_size": 1}, 1.0),
    ({"allreduce_always_fp32": True}, 1.0),
    ({"gradient_average": False}, 2.0),
    ({"gradient_predivide_factor": 2.0}, 1.0),
    ({"gradient_average": False, "gradient_predivide_factor": 4.0, "allreduce_always_fp32": True}, 0.5),
    ({"num_allreduce_streams": 2, "retain_allreduce_buffers": True, "device_ids": None}, 1.0),
]


class Model(nn.Module):
    """A model with a part that a forward pass may leave out, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.unused, self.last = nn.Linear(4, 8), nn.Linear(4, 8), nn.Linear(8, 2)
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, x: Tensor, both: bool = True) -> Tensor:
        hidden = self.first(x) + (self.unused(x) if both else 0)
        return self.last(torch.tanh(hidden))


def data() -> Tensor:
    return torch.randn(2 * ROWS, 4, generator=torch.Generator().manual_seed(3))


def made(rank: int, dtype: torch.dtype = torch.float32) -> Model:
    torch.manual_seed(rank)  # so that the ranks begin with other values
    return Model().to(dtype)


def whole(dtype: torch.dtype, both: bool) -> Model:
    model = made(0, dtype)
    model(data().to(dtype), both).float().square().mean().backward()
    return model


def averages(rank: int, folder: Path) -> None:
    """Compare gradients under all options."""
    warnings.simplefilter("ignore", polyamp.PolyampWarning)
    part = data()[rank * ROWS : (rank + 1) * ROWS]
    for options, factor in OPTIONS:
        for dtype in (torch.float32, torch.float16):
            both = not options.get("delay_allreduce")
            model = made(rank, dtype)
            parallel = DistributedDataParallel(model, **options)
            assert isinstance(parallel, nn.parallel.DistributedDataParallel)
            assert parallel.module is model
            model.seen.fill_(rank)
            parallel(part.to(dtype), both).float().square().mean().backward()
            assert model.seen.item() == rank  # buffers are not sent
            expected = whole(dtype, both)
            for (name, own), one in zip(model.named_parameters(), expected.parameters(), strict=True):
                assert torch.equal(own, one), name  # the first rank's
                if one.grad is None:
                    assert own.grad is None or not own.grad.any(), name
                    continue
                assert own.grad is not None, name
                tolerance = {"rtol": 1e-5, "atol": 1e-6} if dtype == torch.float32 else {"rtol": 5e-3, "atol": 2e-3}
                torch.testing.assert_close(own.grad, one.grad * factor, **tolerance, msg=f"{options} {dtype} {name}")


def pauses(rank: int, folder: Path) -> None:
    """Keep gradients local, then send them again."""
    warnings.simplefilter("ignore", polyamp.PolyampWarning)
    part = data()[rank * ROWS : (rank + 1) * ROWS]
    parallel = DistributedDataParallel(made(rank))
    parallel.disable_allreduce()
    parallel(part).square().mean().backward()
    alone = made(0)
    alone(part).square().mean().backward()
    for own, one in zip(parallel.module.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(own.grad, one.grad)
    parallel.zero_grad()
    parallel.enable_allreduce()
    parallel(part).square().mean().backward()
    for own, one in zip(parallel.module.parameters(), whole(torch.float32, True).parameters(), strict=True):
        torch.testing.assert_close(own.grad, one.grad)


def wrapped(rank: int, folder: Path) -> None:
    """Train with a wrapped optimizer: an overflow on one rank skips on both."""
    warnings.simplefilter("ignore", polyamp.PolyampWarning)
    parallel = DistributedDataParallel(made(rank, torch.float16))
    optimizer = polyamp.wrap_optimizer(torch.optim.SGD(parallel.parameters(), lr=0.1), "O2")
    part = data()[rank * ROWS : (rank + 1) * ROWS].half()
    applied = []
    for step in range(3):
        optimizer.zero_grad()
        loss = parallel(part).float().square().mean()
        optimizer.backward(loss * (torch.inf if (rank, step) == (1, 1) else 1))
        optimizer.step()
        applied.append(bool(optimizer.last_step))
    assert applied == [True, False, True]
    flat = torch.cat([param.detach().flatten() for param in parallel.parameters()])
    others = [torch.empty_like(flat) for _ in range(2)]
    dist.all_gather(others, flat)
    assert torch.equal(*others)


def reduces(rank: int, folder: Path) -> None:
    """Average by hand, for a module and for lists of gradients."""
    warnings.simplefilter("ignore", polyamp.PolyampWarning)
    model, part = made(rank), data()[rank * ROWS : (rank + 1) * ROWS]
    reducer = Reducer(model)
    model(part).square().mean().backward()
    reducer.reduce()
    for own, one in zip(model.parameters(), whole(torch.float32, True).parameters(), strict=True):
        assert torch.equal(own, one)
        torch.testing.assert_close(own.grad, one.grad)
    grads = [torch.full((2,), float(rank)), (torch.full((3,), 2.0 * rank, dtype=torch.float16),)]
    Reducer(grads).reduce()
    assert grads[0].tolist() == [0.5, 0.5]  # type: ignore[union-attr]
    assert grads[1][0].tolist() == [1.0, 1.0, 1.0]


def normalises(rank: int, folder: Path) -> None:
    """Compare synchronised batch norms with one over the whole batch."""
    warnings.simplefilter("ignore", polyamp.PolyampWarning)
    images = torch.randn(6, 3, 4, 5, generator=torch.Generator().manual_seed(5))
    rows = slice(0, 2) if rank == 0 else slice(2, 6)  # batches of other sizes
    weights = torch.randn(6, 3, 4, 5, generator=torch.Generator().manual_seed(6))
    for channel_last in (False, True):
        plain, own = nn.BatchNorm2d(3), images[rows].clone().requires_grad_()
        with torch.no_grad():
            plain.weight.copy_(torch.tensor([1.0, 2.0, 3.0]))
        synced = convert_syncbn_model(nn.Sequential(nn.BatchNorm2d(3)), channel_last=channel_last)
        synced.load_state_dict({f"0.{key}": value.clone() for key, value in plain.state_dict().items()})
        every = images.clone().requires_grad_()
        for _ in range(2):
            expected = plain(every)
            out = synced(own.movedim(1, -1)).movedim(-1, 1) if channel_last else synced(own)
        torch.testing.assert_close(out, expected[rows])
        (expected * weights).sum().backward()
        (out * weights[rows]).sum().backward()
        torch.testing.assert_close(own.grad, every.grad[rows], rtol=1e-4, atol=1e-5)
        for key, value in plain.state_dict().items():
            torch.testing.assert_close(synced.state_dict()[f"0.{key}"], value)
        synced.eval()
        plain.eval()
        shown = synced(own.movedim(1, -1)).movedim(-1, 1) if channel_last else synced(own)
        torch.testing.assert_close(shown, plain(every)[rows])
    assert isinstance(synced[0], SyncBatchNorm)
    half = SyncBatchNorm(3)(images[rows].half())
    assert half.dtype == torch.float16


def groups(rank: int, folder: Path) -> None:
    """Share statistics in groups of one, which is no sharing."""
    group = create_syncbn_process_group(1)
    assert dist.get_world_size(group) == 1
    assert dist.get_world_size(create_syncbn_process_group(2)) == 2
    x = torch.randn(4, 3) + rank
    torch.testing.assert_close(SyncBatchNorm(3, process_group=group)(x), nn.BatchNorm1d(3)(x))
    with pytest.raises(polyamp.errors.InvalidValueError, match="divides 2"):
        create_syncbn_process_group(3)


def compare(rank: int, folder: Path) -> None:
    """Make all comparisons, in one pair of processes."""
    for program in (averages, pauses, wrapped, reduces, normalises, groups):
        program(rank, folder)
