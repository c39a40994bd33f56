"""Train a small language model in float16 under FSDP2 on two processes, next to bfloat16 and float32.

    python finetune.py

This trains float16 twice. In the second run one process is killed half-way; then training starts again, continues from
the last checkpoint, and must end with the same bits.

On several machines: torchrun --nnodes 2 --nproc-per-node 8 ... finetune.py
"""

import argparse
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from gpt import GPT, Config, log_probs, text
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import fully_shard

import polyamp

ROWS, MICRO_BATCHES = 8, 2  # rows of each rank in a micro-batch; micro-batches in a step
SCALE = polyamp.LossScale(init=2.0**19, interval=20)  # grows a hundred times as often as usual, to show skipped steps
POLICIES = {
    "float32": polyamp.policy("float32"),
    "bfloat16": polyamp.policy("mixed_bfloat16"),
    "float16": polyamp.policy("mixed_float16", loss_scale=SCALE),
}
LOCAL_RANK = int(os.environ.get("LOCAL_RANK", 0))
DEVICE = torch.device("cuda", LOCAL_RANK) if torch.cuda.is_available() else torch.device("cpu")


class Run:
    """One training run, which continues from its last checkpoint."""

    def __init__(self, folder: Path, policy: polyamp.Policy, config: Config) -> None:
        torch.manual_seed(0)
        self.folder, self.policy, self.config, self.losses, self.skipped = folder, policy, config, [], 0
        self.model = GPT(config).to(DEVICE)
        for block in self.model.blocks:
            fully_shard(block, mp_policy=policy.to_fsdp(output=policy.compute))
        fully_shard(self.model, mp_policy=policy.to_fsdp())
        adam = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.opt = polyamp.wrap_optimizer(adam, policy, max_grad_norm=1.0)
        self.text = text().to(DEVICE)

    def train(self, steps: int, every: int, kill_at: int | None = None) -> None:
        self.resume()
        while len(self.losses) < steps:
            if len(self.losses) == kill_at and dist.get_rank() == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            self.losses.append(self.step())
            if len(self.losses) % 10 == 0 and dist.get_rank() == 0:
                print(f"{self.folder.name}: {polyamp.health(self.opt)}", flush=True)
            if len(self.losses) % every == 0:
                self.save()

    def step(self) -> float:
        total = torch.zeros((), device=DEVICE)
        for micro_batch in range(MICRO_BATCHES):
            self.model.set_requires_gradient_sync(micro_batch == MICRO_BATCHES - 1)
            with polyamp.autocast(self.policy):
                loss = -log_probs(self.model, self.batch(micro_batch)).mean() / MICRO_BATCHES
            self.opt.backward(loss)
            total += loss.detach()
        self.opt.step()
        self.opt.zero_grad()
        self.skipped += not self.opt.last_step
        dist.all_reduce(total)
        return total.item() / dist.get_world_size()

    def batch(self, micro_batch: int) -> torch.Tensor:
        """Return rows of text that depend on the step, the micro-batch and the rank alone."""
        number = (len(self.losses) * MICRO_BATCHES + micro_batch) * dist.get_world_size() + dist.get_rank()
        random = torch.Generator().manual_seed(number)
        starts = torch.randint(len(self.text) - self.config.context - 1, (ROWS, 1), generator=random)
        return self.text[(starts + torch.arange(self.config.context + 1)).to(DEVICE)].long()

    def save(self) -> None:
        model, optimizer = get_state_dict(self.model, self.opt)
        state = {"model": model, "optimizer": optimizer, "losses": self.losses, "skipped": self.skipped}
        dcp.save(state, checkpoint_id=self.folder / f"{len(self.losses):06}")

    def resume(self) -> None:
        saved = sorted(self.folder.glob("*/.metadata"))  # written when a checkpoint is complete
        if saved:
            model, optimizer = get_state_dict(self.model, self.opt)
            state = {"model": model, "optimizer": optimizer, "losses": [], "skipped": 0}
            dcp.load(state, checkpoint_id=saved[-1].parent)
            set_state_dict(self.model, self.opt, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
            self.losses, self.skipped = state["losses"], state["skipped"]

    def whole(self) -> GPT:
        """Return the trained model, not sharded."""
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        model = GPT(self.config)
        weights = get_model_state_dict(self.model, options=options)
        if dist.get_rank() == 0:
            model.load_state_dict(weights)
        return model.to(DEVICE)


def main(asked: argparse.Namespace) -> None:
    """Train every run and report, as one of several processes."""
    config = Config(asked.width, asked.layers, context=asked.context)
    policies = {**POLICIES, "killed": POLICIES["float16"]}
    runs = {name: Run(asked.folder / name, policy, config) for name, policy in policies.items()}
    for name, run in runs.items():
        run.train(asked.steps, every=asked.steps // 3, kill_at=asked.kill_at if name == "killed" else None)
    models = {name: run.whole() for name, run in runs.items()}
    if dist.get_rank() == 0:
        report(asked.folder, runs, models)


def report(folder: Path, runs: dict[str, Run], models: dict[str, GPT]) -> None:
    last = len(runs["float32"].losses) // 10 or 1
    print(f"{'training':<10}{'first loss':>11}{'last loss':>11}{'skipped':>9}")
    for name, run in runs.items():
        print(f"{name:<10}{run.losses[0]:>11.4f}{sum(run.losses[-last:]) / last:>11.4f}{run.skipped:>9}")
    table = {name: {"losses": run.losses, "skipped": run.skipped} for name, run in runs.items()}
    same = runs["killed"].losses == runs["float16"].losses and is_same(models["killed"], models["float16"])
    table["killed"]["same_bits"] = same
    print(f"killed and resumed: {'the same bits as' if same else 'other bits than'} float16")
    (folder / "table.json").write_text(json.dumps(table, indent=1) + "\n")


def is_same(one: GPT, other: GPT) -> bool:
    pairs = zip(one.state_dict().values(), other.state_dict().values(), strict=True)
    return all(torch.equal(left, right) for left, right in pairs)


def launch(*options: str) -> int:
    """Start two processes, and return the exit status."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    return subprocess.run([*torchrun, __file__, *sys.argv[1:], *options], check=False).returncode


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--context", type=int, default=64)
    parser.add_argument("--folder", type=Path, default=Path("runs"), help="for checkpoints and reports; runs continue")
    parser.add_argument("--kill-at", type=int, help="the step at which a process of the run 'killed' dies")
    return parser.parse_args()


if __name__ == "__main__":
    asked = options()
    if "RANK" not in os.environ:  # not started by torchrun
        launch("--kill-at", str(asked.steps // 2))
        sys.exit(launch())
    dist.init_process_group("nccl" if DEVICE.type == "cuda" else "gloo")
    if DEVICE.type == "cuda":
        torch.cuda.set_device(DEVICE)
    main(asked)
    dist.destroy_process_group()
