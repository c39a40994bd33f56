"""Two ranks that train by accelerate, each in a process of its own, which test_accelerate.py starts."""

import os
import warnings
from typing import Any

import accelerate
import torch
from accelerate.utils import DistributedType

from polyamp import LossScale
from polyamp.backends.torch.integrations.accelerate import prepare

SCALE = LossScale(init=2.0**10)


def network(seed: int = 0) -> torch.nn.Module:
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 4))


def _use_fsdp2() -> None:
    """Make accelerate use FSDP2 on the CPU, which its own choice of a plugin does not."""
    plugin = accelerate.FullyShardedDataParallelPlugin(
        fsdp_version=2, state_dict_type="SHARDED_STATE_DICT", auto_wrap_policy="no_wrap"
    )
    for state in (accelerate.PartialState, accelerate.state.AcceleratorState):
        state._shared_state["distributed_type"] = DistributedType.FSDP
    accelerate.state.AcceleratorState._shared_state["fsdp_plugin"] = plugin


def _on_rank(rank: int, policy: str | None, fsdp: bool, folder: str) -> tuple[list[float], list[float], bool]:
    """Train, spoil a step on rank 1, save, train on, and train on from the saved state in new objects.

    Returns:
        The losses, the losses after the state was saved, and whether they came again.
    """
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerator: Any = accelerate.Accelerator(cpu=True)
    if fsdp:
        _use_fsdp2()
    if policy is not None:
        prepare(accelerator, policy, loss_scale=SCALE)
    random = torch.Generator().manual_seed(rank)
    x, y = torch.randn(16, 8, generator=random), torch.randn(16, 4, generator=random)

    def made() -> tuple[Any, Any]:
        model = network()
        prepared: tuple[Any, Any] = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
        return prepared

    def step(model: Any, optimizer: Any, factor: float = 1.0) -> float:
        loss = (model(x) - y).square().mean()
        accelerator.backward(loss * factor)
        accelerator.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        value: float = loss.item()
        return value

    model, optimizer = made()
    losses = [step(model, optimizer) for _ in range(3)]
    if policy is not None:
        step(model, optimizer, torch.inf if rank == 1 else 1.0)
        assert accelerator.optimizer_step_was_skipped
        assert accelerator.scaler.get_scale() == SCALE.init / 2
    accelerator.save_state(folder)
    after = [step(model, optimizer) for _ in range(3)]
    accelerator.free_memory()
    model, optimizer = made()
    step(model, optimizer)
    accelerator.load_state(folder)
    return losses, after, [step(model, optimizer) for _ in range(3)] == after


CASES = [(policy, fsdp) for policy in (None, "mixed_float16", "O2") for fsdp in (False, True)]


def run_rank(rank: int, port: int, folder: str, queue: Any) -> None:
    where = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({key: str(value) for key, value in where.items()}, ACCELERATE_USE_CPU="true")
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    done = [_on_rank(rank, policy, fsdp, f"{folder}/{policy}-{fsdp}") for policy, fsdp in CASES]
    queue.put((rank, done))
    torch.distributed.destroy_process_group()
