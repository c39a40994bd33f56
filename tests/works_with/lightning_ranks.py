"""Two ranks of Lightning's strategies, run by test_lightning.py with torchrun."""

import logging
import os
import sys
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.utils.data import DataLoader

from polyamp import LossScale
from polyamp.backends.torch.integrations.lightning import FabricPrecision, MixedPrecision

RANK = int(os.environ["RANK"])
BAD = 2  # the batch that overflows, on rank 1 alone
SCALE = LossScale(init=2.0**8)


class Model(lightning.LightningModule):
    """Each rank has its own batches, which are functions of their numbers."""

    def __init__(self, bad: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))
        self.losses: list[float] = []
        self.rates: list[float] = []
        self.seen: list[Tensor] = []
        self.bad = bad

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        random = torch.Generator().manual_seed(2 * (6 * self.trainer.current_epoch + index) + RANK)
        x, y = torch.randn(16, 8, generator=random), torch.randn(16, 4, generator=random)
        loss = (self.net(x) - y.sin()).square().mean()
        self.losses.append(loss.item())
        self.rates.append(self.trainer.optimizers[0].param_groups[0]["lr"])
        return loss * 1e38 if self.bad and index == BAD and RANK == 1 else loss

    def on_train_batch_end(self, *_: Any) -> None:
        weight = self.net[0].weight.detach()
        self.seen.append((weight.full_tensor() if hasattr(weight, "full_tensor") else weight).float().clone())

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=0.03)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def train_dataloader(self) -> Any:
        return DataLoader([0] * 12)  # type: ignore[arg-type]


class Sharded(Model):
    def configure_model(self) -> None:
        if not isinstance(self.net, FSDPModule):
            fully_shard(self.net, mesh=self.device_mesh["data_parallel"])  # type: ignore[index]


def trainer(policy: str | None, strategy: Callable[[], Any], **options: Any) -> lightning.Trainer:
    plugin = None if policy is None else MixedPrecision(policy, loss_scale=None if "bf" in policy else SCALE)
    quiet: dict[str, Any] = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    quiet |= {"accelerator": "cpu", "devices": 2, "max_epochs": 1, "enable_checkpointing": False}
    return lightning.Trainer(plugins=plugin, strategy=strategy(), **{**quiet, "gradient_clip_val": 0.5, **options})


def sharding(*, distributed: bool) -> Callable[[], Any]:
    return lambda: ModelParallelStrategy(2, 1, save_distributed_checkpoint=distributed)


def check_overflow_on_one_rank_skips_on_both(kind: Any, strategy: Callable[[], Any]) -> None:
    model = kind()
    trainer("mixed_float16", strategy).fit(model)
    optimizer = model.trainer.optimizers[0]
    assert torch.equal(model.seen[BAD], model.seen[BAD - 1])
    assert not torch.equal(model.seen[BAD], model.seen[BAD + 1])
    assert optimizer.loss_scale == SCALE.init / 2
    assert model.rates == [0.03 * 0.5 ** (index - (index > BAD)) for index in range(6)], model.rates


def check_losses_are_those_of_float32(kind: Any, strategy: Callable[[], Any], policy: str) -> None:
    plain, mixed = kind(bad=False), kind(bad=False)
    trainer(None, strategy, gradient_clip_val=None).fit(plain)
    trainer(policy, strategy, gradient_clip_val=None).fit(mixed)
    torch.testing.assert_close(torch.tensor(mixed.losses), torch.tensor(plain.losses), rtol=0.02, atol=0.01)


def check_resumes_to_the_bit(kind: Any, strategy: Callable[[], Any], policy: str, file: Path) -> None:
    whole, half, resumed = kind(), kind(), kind()
    trainer(policy, strategy, max_epochs=2).fit(whole)
    one = trainer(policy, strategy)
    one.fit(half)
    one.save_checkpoint(file)
    trainer(policy, strategy, max_epochs=2).fit(resumed, ckpt_path=str(file))
    assert torch.equal(resumed.seen[-1], whole.seen[-1])
    assert resumed.losses == whole.losses[6:]
    assert resumed.trainer.optimizers[0].loss_scale == whole.trainer.optimizers[0].loss_scale


def check_fabric(policy: str) -> None:
    precision = FabricPrecision(policy, loss_scale=SCALE)
    fabric = lightning.Fabric(accelerator="cpu", devices=2, strategy="ddp", plugins=precision)
    fabric.launch()
    torch.manual_seed(0)
    model = fabric.setup_module(nn.Linear(4, 1))
    plain = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer: Any = fabric.setup_optimizers(precision.wrap_optimizer(plain))
    for step in range(4):
        before = model.weight.detach().clone()
        loss = model(torch.full((2, 4), 1.0 + RANK)).square().mean()
        fabric.backward(loss * 1e38 if step == BAD and RANK == 1 else loss)
        fabric.clip_gradients(model, optimizer, max_norm=1.0, error_if_nonfinite=False)
        optimizer.step()
        optimizer.zero_grad()
        assert torch.equal(before, model.weight) == (step == BAD)
    assert optimizer.loss_scale == SCALE.init / 2


def main() -> None:
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    full, shards = sharding(distributed=False), sharding(distributed=True)
    for kind, strategy in ((Model, lambda: "ddp"), (Sharded, full)):
        check_overflow_on_one_rank_skips_on_both(kind, strategy)
        check_losses_are_those_of_float32(kind, strategy, "mixed_float16")
    for policy in ("mixed_float16", "O2"):
        for kind, strategy, name in ((Model, lambda: "ddp", "ddp"), (Sharded, full, "full"), (Sharded, shards, "dcp")):
            check_resumes_to_the_bit(kind, strategy, policy, Path(f"{policy}_{name}.ckpt"))
    check_fabric("O2")
    print("all checks passed")


if __name__ == "__main__":
    try:
        main()
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)  # the other rank may wait for this one
