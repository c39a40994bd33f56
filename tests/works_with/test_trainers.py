"""Trainers that call `loss.backward()` and clip by themselves: a clear error, or float32's losses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning
import pytest
import torch

import polyamp
from polyamp import LossScale

SCALE = LossScale(init=2.0**10)
STEPS = 6


def wrapped(optimizer: torch.optim.Optimizer) -> Any:
    return polyamp.wrap_optimizer(optimizer, "mixed_float16", loss_scale=SCALE)


@pytest.fixture(autouse=True)
def _warnings_of_the_trainers(recwarn: pytest.WarningsRecorder) -> None:
    """Ignore the trainers' own warnings; polyamp's are errors."""
    import warnings

    warnings.simplefilter("ignore")
    warnings.simplefilter("error", polyamp.PolyampWarning)


def task() -> tuple[torch.nn.Module, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    return torch.nn.Linear(8, 4), torch.randn(16, 8), torch.randn(16, 4)


def plain_losses() -> list[float]:
    model, x, y = task()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    losses = []
    for _ in range(STEPS):
        loss = (model(x) - y).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


# --- Lightning --------------------------------------------------------------------------------------------------------


class Module(lightning.LightningModule):
    def __init__(self, manual: bool) -> None:
        super().__init__()
        self.automatic_optimization = not manual
        self.layer, self.x, self.y = task()
        self.losses: list[float] = []

    def configure_optimizers(self) -> Any:
        return wrapped(torch.optim.SGD(self.layer.parameters(), lr=0.3))

    def train_dataloader(self) -> Any:
        return torch.utils.data.DataLoader(range(STEPS))  # type: ignore[arg-type]

    def training_step(self, batch: Any, index: int) -> Any:
        with polyamp.autocast("mixed_float16"):
            loss = (self.layer(self.x) - self.y).square().mean()
        self.losses.append(loss.item())
        if not self.automatic_optimization:
            optimizer: Any = self.optimizers(use_pl_optimizer=False)
            self.manual_backward(optimizer.scale(loss))
            optimizer.step()
            optimizer.zero_grad()
            return None
        return loss


def lightning_losses(folder: Path, manual: bool, **options: Any) -> list[float]:
    module = Module(manual)
    quiet: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = lightning.Trainer(
        max_epochs=1, accelerator="cpu", default_root_dir=folder, enable_model_summary=False, **quiet, **options
    )
    trainer.fit(module)
    return module.losses


@pytest.mark.parametrize("options", [{}, {"gradient_clip_val": 1.0}], ids=str)
def test_lightning_with_a_wrapped_optimizer_and_nothing_else_is_refused(tmp_path: Path, options: Any) -> None:
    with pytest.raises(polyamp.UsageError, match="not scaled"):
        lightning_losses(tmp_path, manual=False, **options)


def test_lightning_with_manual_optimization_trains_as_float32_does(tmp_path: Path) -> None:
    assert lightning_losses(tmp_path, manual=True) == pytest.approx(plain_losses(), abs=2e-3)


def test_lightning_takes_our_scaler(tmp_path: Path) -> None:
    from lightning.pytorch.plugins.precision import MixedPrecision

    scaler = polyamp.backends.torch.GradScaler("cpu", init_scale=2.0**10)
    plugin = MixedPrecision("16-mixed", "cpu", scaler=scaler)

    class Plain(Module):
        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.layer.parameters(), lr=0.3)

    module = Plain(manual=False)
    trainer = lightning.Trainer(
        max_epochs=1,
        accelerator="cpu",
        plugins=[plugin],
        default_root_dir=tmp_path,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module)
    assert module.losses == pytest.approx(plain_losses(), abs=2e-3)
