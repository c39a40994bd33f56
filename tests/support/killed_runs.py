"""A training program in float16 that saves after every step, to be killed and started again; see test_kills.py.

    >>> launch("ddp", folder, Kill(step=3, place="saving", rank=1))  # rank 1 kills itself in step 3, then all end
    >>> launch("ddp", folder)  # continues from the last complete checkpoint

Every rank appends a line to its log after every step, so a step that was made twice has two lines.
"""

import hashlib
import io
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import polyamp
from polyamp.backends.torch import LossScaledOptimizer
from support.forked_ranks import run_ranks
from support.torch_kinds import bits

RANKS = {"alone": 1, "ddp": 2, "fsdp": 2, "fsdp_async": 2}  # by the kind of run
STEPS = 9
MICROBATCHES = 2

Place = Literal["accumulating", "stepped", "saving"]


class Kill(NamedTuple):
    """The moment at which a rank kills itself."""

    step: int
    place: Place
    rank: int = 0


class Line(NamedTuple):
    """One step in a log. ``digest`` is that of everything that a later step depends on."""

    step: int
    applied: bool
    digest: str


Die = Callable[[Place], None]


class Training:
    """Everything that is saved: model, wrapped optimizer, schedule, random numbers and the position of the data."""

    def __init__(self, kind: str, rank: int) -> None:
        torch.manual_seed(0)
        layers = torch.nn.Linear(6, 16), torch.nn.Dropout(0.5), torch.nn.Linear(16, 1)
        self.model: torch.nn.Module = torch.nn.Sequential(*layers).half()
        if kind == "ddp":
            self.model = DistributedDataParallel(self.model)
        elif kind.startswith("fsdp"):
            fully_shard(self.model)
        self.opt: LossScaledOptimizer = polyamp.wrap_optimizer(
            torch.optim.AdamW(self.model.parameters(), lr=0.01),
            loss_scale=polyamp.LossScale(init=2.0**18, interval=2),  # so large that it overflows every few steps
        )
        self.schedule = torch.optim.lr_scheduler.ExponentialLR(self.opt, 0.9)
        self.rank, self.position = rank, 0
        torch.manual_seed(rank)  # each rank drops its own elements

    def step(self, die: Die) -> bool:
        """Make one step of several microbatches, and return whether it was applied."""
        self.opt.zero_grad()
        for part in range(MICROBATCHES):
            x = torch.randn(8, 6, generator=torch.Generator().manual_seed(100 * self.position + 10 * part + self.rank))
            loss = self.model(x.half()).float().square().mean()
            self.opt.backward(loss / MICROBATCHES)
            die("accumulating")
        self.opt.step()
        if self.opt.last_step:
            self.schedule.step()
        self.position += 1
        die("stepped")
        return self.opt.last_step.applied

    def others(self) -> dict[str, Any]:
        """Return the state of everything but model and optimizer."""
        return {
            "schedule": self.schedule.state_dict(),
            "position": self.position,
            f"random_{self.rank}": torch.get_rng_state(),
        }

    def load_others(self, saved: dict[str, Any]) -> None:
        self.schedule.load_state_dict(saved["schedule"])
        self.position = saved["position"]
        torch.set_rng_state(saved[f"random_{self.rank}"])

    def state_dict(self) -> dict[str, Any]:
        """Return the state in the form of `torch.distributed.checkpoint`, which calls this method and the next."""
        model, optimizer = get_state_dict(self.model, self.opt)
        return {"model": model, "optimizer": optimizer, **self.others()}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        set_state_dict(self.model, self.opt, model_state_dict=saved["model"], optim_state_dict=saved["optimizer"])
        self.load_others(saved)

    def digest(self) -> str:
        everything = [list(self.model.parameters()), self.opt.state_dict(), self.others()]
        return hashlib.sha256(repr(bits(everything)).encode()).hexdigest()


class Files:
    """One file for each step, written by rank 0 under another name first: a complete file has its final name."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def save(self, training: Training, die: Die) -> None:
        every = [training.others()]
        if dist.is_initialized():
            every *= dist.get_world_size()
            dist.all_gather_object(every, training.others())
        if training.rank == 0:
            state = {"model": training.model.state_dict(), "optimizer": training.opt.state_dict()}
            content = io.BytesIO()
            torch.save({**state, "others": every}, content)
            part, half = self.folder / "part", len(content.getvalue()) // 2
            with part.open("wb") as file:
                file.write(content.getvalue()[:half])
                file.flush()
                die("saving")
                file.write(content.getvalue()[half:])
            part.replace(self.folder / f"{training.position}.pt")

    def finish(self) -> None:
        """Do nothing, since every file is complete."""

    def load(self, training: Training) -> None:
        if complete := sorted(self.folder.glob("*.pt"), key=lambda path: int(path.stem)):
            saved = torch.load(complete[-1], weights_only=True)
            training.model.load_state_dict(saved["model"])
            training.opt.load_state_dict(saved["optimizer"])
            training.load_others(saved["others"][training.rank])


class Shards:
    """One folder for each step, in which `torch.distributed.checkpoint` writes the file ``.metadata`` last."""

    def __init__(self, folder: Path, *, in_background: bool) -> None:
        self.folder = folder
        self.saving: Any = None
        self.group = dist.new_group(backend="gloo") if in_background else None

    def save(self, training: Training, die: Die) -> None:
        writer = DyingWriter(self.folder / str(training.position), die)
        if self.group is None:
            dcp.save({"training": training}, storage_writer=writer)
            return
        self.finish()
        self.saving = dcp.async_save({"training": training}, storage_writer=writer, process_group=self.group)

    def finish(self) -> None:
        """Wait for the checkpoint that is being saved in the background."""
        if self.saving is not None:
            self.saving.result()

    def load(self, training: Training) -> None:
        if complete := sorted(self.folder.glob("*/.metadata"), key=lambda path: int(path.parent.name)):
            dcp.load({"training": training}, checkpoint_id=complete[-1].parent)


class DyingWriter(FileSystemWriter):
    """A writer that can be killed when this rank's shards are written, and the metadata are not."""

    def __init__(self, path: Path, die: Die) -> None:
        super().__init__(path)
        self.die = die

    def write_data(self, plan: Any, planner: Any) -> Any:
        written = super().write_data(plan, planner)
        written.wait()
        self.die("saving")
        return written


def launch(kind: str, folder: Path, kill: Kill | None = None) -> list[int | None]:
    """Train on all ranks, from the last complete checkpoint to the last step, and return how each rank ended."""
    return run_ranks(RANKS[kind], train, folder, kind, kill)


def train(rank: int, folder: Path, kind: str, kill: Kill | None) -> None:
    """Train in the process of one rank."""
    training = Training(kind, rank)
    store = Shards(folder, in_background=kind == "fsdp_async") if kind.startswith("fsdp") else Files(folder)
    store.load(training)

    def die(place: Place) -> None:
        if kill == (now, place, rank):
            os.kill(os.getpid(), signal.SIGKILL)

    for now in range(training.position, STEPS):
        applied = training.step(die)
        with (folder / f"log_{rank}").open("a") as log:
            print(now, int(applied), training.digest(), file=log)
        store.save(training, die)
    store.finish()


def logs(kind: str, folder: Path) -> list[list[Line]]:
    """Return the log of each rank."""
    return [
        [Line(int(step), bool(int(applied)), digest) for step, applied, digest in map(str.split, lines)]
        for lines in ((folder / f"log_{rank}").read_text().splitlines() for rank in range(RANKS[kind]))
    ]
