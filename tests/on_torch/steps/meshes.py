"""Four ranks in meshes of one and two dimensions, run by test_ranks.py in four processes: every test runs on all.

Each arrangement of a model over ranks is compared with the same model in one process, trained by plain PyTorch.
"""

import copy
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

import polyamp
from polyamp import LossScale
from polyamp.backends.torch import LossScaledOptimizer
from support.forked_ranks import default_group

# a sequence of layers returns what the last of them does, which is a view in FSDP's eyes
pytestmark = pytest.mark.filterwarnings("ignore:FSDP2-wrapped module:UserWarning")

RANK = int(os.environ["RANK"])
STEPS, LIMIT = 3, 0.1  # below every norm here

torch.manual_seed(0)
X, Y = torch.randn(8, 4, 8), torch.randn(8, 4, 1)


@pytest.fixture(scope="module", autouse=True)
def group() -> Iterator[None]:
    with default_group(RANK, 4, os.environ["POLYAMP_TEST_RENDEZVOUS"], timeout=timedelta(seconds=60)):
        yield


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(self.norm(x)).relu())


def model_of() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(Block(), Block(), nn.Linear(8, 1))


def loss_of(model: nn.Module, rows: slice = slice(None)) -> Tensor:
    return (model(X[rows]) - Y[rows]).square().mean()


def expected() -> tuple[list[float], dict[str, Tensor]]:
    """The norms and the final parameters of the model in one process."""
    model, norms = model_of(), []
    opt = torch.optim.SGD(model.parameters(), lr=0.5)
    for _ in range(STEPS):
        opt.zero_grad()
        loss_of(model).backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), LIMIT).item())
        opt.step()
    return norms, dict(model.named_parameters())


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def part(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def bits(opt: LossScaledOptimizer) -> list[bytes]:
    params = [param for group in opt.param_groups for param in group["params"]]
    return [part(param.detach()).contiguous().numpy().tobytes() for param in params]


def ranks_agree(value: float) -> bool:
    values = [None] * 4
    dist.all_gather_object(values, value)
    return len(set(values)) == 1


def check(
    model: nn.Module, backward: Callable[[LossScaledOptimizer], None], scaled: bool | None = None, **options: Any
) -> None:
    """Train as in one process, by its norms; then an overflow on rank 2 alone skips the step on all."""
    for looks in (True, False):
        trained = copy.deepcopy(dict(model.named_parameters())) if looks else {}
        opt = polyamp.wrap_optimizer(
            torch.optim.SGD(model.parameters(), lr=0.5),
            loss_scale=LossScale(init=1024.0),
            max_grad_norm=None if looks else LIMIT,
            fused_step=not looks,
            **options,
        )
        train(model, opt, backward, scaled, looks=looks)
        with torch.no_grad():
            for name, value in trained.items():
                model.get_parameter(name).copy_(value)
    opt.zero_grad()
    backward(opt)
    before = bits(opt)
    if RANK == 2:
        grads = [part(param.grad) for param in model.parameters() if param.grad is not None]
        next(grad for grad in grads if grad.numel()).view(-1)[0] = math.nan
    opt.step(scaled=scaled)
    assert not opt.last_step
    assert bits(opt) == before
    assert re.search("not finite: rank 2$" if RANK != 2 else "not finite: rank 2: .*1 NaN of", opt.last_step.reason)
    assert opt.loss_scale == 512.0
    assert ranks_agree(opt.loss_scale)


def train(
    model: nn.Module,
    opt: LossScaledOptimizer,
    backward: Callable[[LossScaledOptimizer], None],
    scaled: bool | None,
    *,
    looks: bool,
) -> None:
    norms, params = expected()
    for norm in norms:
        opt.zero_grad()
        backward(opt)
        if looks:
            assert opt.clip_grad_norm_(LIMIT, scaled=scaled).item() == pytest.approx(norm, rel=1e-5)
        opt.step(scaled=None if looks else scaled)
        assert opt.last_step
    for name, param in model.named_parameters():
        torch.testing.assert_close(whole(param.detach()), params[name.removeprefix("module.")].detach())


def replica(count: int, index: int) -> slice:
    """The rows of one of several data-parallel replicas."""
    return slice(index, None, count)


def shard(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    for block in model[:2]:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def split(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Split the blocks over ranks by columns and rows."""
    for block in model[:2]:
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return model


def test_ddp() -> None:
    model = DistributedDataParallel(model_of())
    check(model, lambda opt: opt.backward(loss_of(model, replica(4, RANK))))


@pytest.mark.parametrize("names", ["shard", "replicate shard", "tensor", "data tensor"])
def test_shards_and_tensor_parallelism(names: str) -> None:
    """By FSDP2 with uneven shards, by hybrid shards, split over all ranks, and split and sharded."""
    dims = tuple(names.split())
    mesh = init_device_mesh("cpu", (4,) if len(dims) == 1 else (2, 2), mesh_dim_names=dims)
    model, rows = model_of(), replica(4, RANK)
    if "tensor" in dims:
        split(model, mesh["tensor"])
        rows = replica(2, mesh["data"].get_local_rank()) if "data" in dims else slice(None)
    if names != "tensor":
        shard(model, mesh["data"] if "data" in dims else mesh)
    check(model, lambda opt: opt.backward(loss_of(model, rows)))


def test_sequence_parallel() -> None:
    model, mesh = model_of(), init_device_mesh("cpu", (4,))

    for block in model[:2]:
        parallelize_module(
            block,
            mesh,
            {
                "norm": SequenceParallel(),
                "up": ColwiseParallel(input_layouts=Shard(1)),
                "down": RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
            },
        )
        parallelize_module(block, mesh, PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Shard(1)))
        parallelize_module(
            block, mesh, PrepareModuleOutput(output_layouts=Shard(1), desired_output_layouts=Replicate())
        )
    check(model, lambda opt: opt.backward(loss_of(model)))


@pytest.mark.skipif(torch.__version__ < "2.13", reason="PyTorch's stages refuse the shapes of these inputs")
@pytest.mark.parametrize("schedule", [ScheduleGPipe, Schedule1F1B])
def test_pipeline_of_shards(schedule: Any) -> None:
    """The schedule runs the backward passes, and only the last stage has a loss."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pipe", "data"))
    model, place = model_of(), mesh["pipe"].get_local_rank()
    for index in (0,) if place else (1, 2):
        model[index] = nn.Identity()
    shard(model, mesh["data"])
    rows = replica(2, mesh["data"].get_local_rank())
    wrapped: list[LossScaledOptimizer] = []
    pipeline = schedule(
        PipelineStage(model, place, 2, torch.device("cpu"), group=mesh.get_group("pipe")),
        n_microbatches=2,
        loss_fn=lambda output, target: wrapped[-1].scale((output - target).square().mean()),
    )

    def backward(opt: LossScaledOptimizer) -> None:
        wrapped.append(opt)
        pipeline.step(target=Y[rows]) if place else pipeline.step(X[rows])

    check(model, backward, scaled=True, norm_group=mesh.get_group("pipe"))


class Experts(nn.Module):
    """A layer that all ranks have, and an expert for each rank, which computes its part of the rows."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.shared = nn.Linear(8, 8)
        self.experts = nn.ModuleList(nn.Linear(8, 1) for _ in range(4))

    def loss(self, index: int) -> Tensor:
        rows = replica(4, index)
        found = self.shared(X[rows])
        if index != 3:  # no row comes to this expert, which gets no gradient
            found = self.experts[index](found)
        return (found - Y[rows]).square().mean() / 4


def clip(shared: Iterable[Tensor], mine: Iterable[Tensor]) -> Tensor:
    """Clip as the guide shows it: by the norm over the experts of all ranks."""
    replicated, own = ([param.grad for param in params if param.grad is not None] for params in (shared, mine))
    total = sum((grad.square().sum() for grad in own), torch.zeros(()))
    dist.all_reduce(total)
    norm = torch.sqrt(total + sum(grad.square().sum() for grad in replicated))
    torch._foreach_mul_([*replicated, *own], (LIMIT / (norm + 1e-6)).clamp(max=1.0))
    return norm


def test_experts_that_no_other_rank_sees() -> None:
    model, whole = Experts(), Experts()
    mine = list(model.experts[RANK].parameters())
    opt = polyamp.wrap_optimizer(
        torch.optim.SGD([*model.shared.parameters(), *mine], lr=0.5),
        loss_scale=LossScale(init=1024.0),
    )
    plain = torch.optim.SGD(whole.parameters(), lr=0.5)
    for _ in range(STEPS):
        plain.zero_grad()
        sum(whole.loss(index) for index in range(4)).backward()
        norm = nn.utils.clip_grad_norm_(whole.parameters(), LIMIT)
        plain.step()
        opt.zero_grad()
        opt.backward(model.loss(RANK))
        for param in model.shared.parameters():
            dist.all_reduce(param.grad)
        opt.unscale_()
        torch.testing.assert_close(clip(model.shared.parameters(), mine), norm)
        opt.step()
        assert opt.last_step
    torch.testing.assert_close(model.experts[RANK].weight, whole.experts[RANK].weight)
    torch.testing.assert_close(model.shared.weight, whole.shared.weight)
    before = bits(opt)
    opt.zero_grad()
    opt.backward(model.loss(RANK), gradient=torch.tensor(math.inf if RANK == 1 else 1.0))
    opt.step()
    assert bits(opt) == before
    assert "rank 1" in opt.last_step.reason
