"""Wrapped optimizers whose distributed checkpoints are read over other meshes; see test_resharding.py."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import polyamp
from polyamp.backends.torch import LossScaledOptimizer
from support.harness_torch import OPTIMIZERS
from support.torch_kinds import bits

RANKS = 4


class Case(NamedTuple):
    """One kind of training."""

    name: str
    dtype: torch.dtype
    flat: bool = False


CASES = [
    Case("adamw_fused", torch.float16),
    Case("adam", torch.bfloat16, flat=True),
    Case("momentum", torch.float32),
]


class Training:
    """A model and its wrapped optimizer, in the form that `torch.distributed.checkpoint` saves.

    Args:
        case: see `Case`.
        mesh: of one dimension for shards, of two named "copies" and "shards" for HSDP, or with a dimension "tensor" for
            tensor parallelism; None is one process.
        group: the ranks of the mesh; None are all ranks.
    """

    def __init__(self, case: Case, mesh: DeviceMesh | None, group: Any = None) -> None:
        torch.manual_seed(0)
        layer = torch.nn.Linear
        self.model = torch.nn.Sequential(layer(6, 10), torch.nn.ReLU(), layer(10, 3)).to(case.dtype)
        names = () if mesh is None else mesh.mesh_dim_names or ()
        if mesh is not None and "tensor" in names:
            parallelize_module(self.model, mesh["tensor"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
            mesh = mesh["shards"]
        if mesh is not None:
            fully_shard(self.model, mesh=mesh)
        self.opt: LossScaledOptimizer = polyamp.wrap_optimizer(
            OPTIMIZERS[case.name](self.model.parameters()),
            loss_scale=polyamp.LossScale(init=1024.0, interval=2),
            process_group=False if mesh is None else group,
        )
        self.dtype, self.options = case.dtype, StateDictOptions(flatten_optimizer_state_dict=case.flat)

    def step(self, *, overflow: bool = False) -> None:
        self.opt.zero_grad()
        self.opt.backward(self.model(torch.ones(8, 6, dtype=self.dtype)).float().square().mean())
        if overflow:
            next(self.model.parameters()).grad.mul_(torch.inf)
        self.opt.step()
        assert self.opt.last_step.applied != overflow

    def state_dict(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.opt, options=self.options)
        return {"model": model, "optimizer": optimizer}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        model, optimizer = saved["model"], saved["optimizer"]
        set_state_dict(self.model, self.opt, model_state_dict=model, optim_state_dict=optimizer, options=self.options)

    def contents(self) -> Any:
        """Return everything that training depends on, with whole tensors."""
        saved = self.opt.state_dict()
        states, masters = saved["state"].values(), saved["master_weights"] or {}
        tensors = [*self.model.parameters(), *masters.values(), *(value for one in states for value in one.values())]
        return bits(list(whole(tensors))), saved["loss_scale"]


def whole(values: Iterable[Any]) -> Iterable[Any]:
    return (value.full_tensor() if isinstance(value, DTensor) else value for value in values)


def reshard(rank: int, folder: Path) -> None:
    """Save on four ranks, and read on meshes of four, two and one, each from the checkpoint of the one before."""
    meshes = {
        "hsdp": init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "shards")),
        "tensor": init_device_mesh("cpu", (2, 2), mesh_dim_names=("shards", "tensor")),
        "two": DeviceMesh("cpu", [0, 1]),
        "four": init_device_mesh("cpu", (RANKS,)),
    }
    groups = {"two": dist.new_group([0, 1])}
    for number, case in enumerate(CASES):
        at = folder / str(number)
        first = Training(case, meshes["four"])
        for overflow in (True, False, False, True, False):
            first.step(overflow=overflow)
        before = first.contents()
        dcp.save({"all": first}, checkpoint_id=at)
        for name, mesh in meshes.items():
            group = groups.get(name)
            if rank in mesh.mesh:
                read = Training(case, mesh, group)
                dcp.load({"all": read}, checkpoint_id=at, process_group=group)
                assert read.contents() == before, (case, name)
                at = at.with_name(f"{number}_{name}")
                dcp.save({"all": read}, checkpoint_id=at, process_group=group)
            at = at.with_name(f"{number}_{name}")
            dist.barrier()
        broadcast(rank, read, again := Training(case, meshes["hsdp"]))
        assert again.contents() == before, case
        for each in (first, read):
            each.step()
        assert first.contents() == read.contents(), case
        if rank == 0:
            alone = Training(case, None)
            dcp.load({"all": alone}, checkpoint_id=at, no_dist=True)
            assert alone.contents() == before, case


def broadcast(rank: int, source: Training, target: Training) -> None:
    """Gather the whole state on rank 0, and load it from there."""
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    model = get_model_state_dict(source.model, options=options)
    optimizer = get_optimizer_state_dict(source.model, source.opt, options=options)
    assert bool(model) == bool(optimizer) == (rank == 0)
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(target.model, model, options=options)
    set_optimizer_state_dict(target.model, target.opt, optimizer, options=options)
