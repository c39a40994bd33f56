"""Trainers that scale, clip and step by themselves, with a wrapped optimizer: wrong numbers raise clear errors."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import polyamp

NOT_SCALED, CLIPPED = "was not scaled", "clipped while they were scaled"
INPUTS = torch.randn(16, 8, generator=torch.Generator().manual_seed(0))
TARGETS = torch.randn(16, 2, generator=torch.Generator().manual_seed(1))


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    """Ignore the trainers' own warnings."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2))


def wrap(model: nn.Module, **options: Any) -> Any:
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    return polyamp.wrap_optimizer(inner, "mixed_float16", loss_scale=polyamp.LossScale(init=256.0), **options)


def plain_losses(steps: int, max_norm: float | None = None) -> list[float]:
    model = network()
    plain, losses = torch.optim.SGD(model.parameters(), lr=0.1), []
    for _ in range(steps):
        plain.zero_grad()
        loss = (model(INPUTS) - TARGETS).square().mean()
        loss.backward()
        if max_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        plain.step()
        losses.append(loss.item())
    return losses


# --- accelerate -------------------------------------------------------------------------------------------------------


@pytest.fixture
def accelerator() -> Iterator[Any]:
    accelerate = pytest.importorskip("accelerate")
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    yield accelerate.Accelerator(cpu=True)
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)


def test_accelerate_is_refused_where_it_scales_nothing(accelerator: Any) -> None:
    model = network()
    model, opt = accelerator.prepare(model, wrap(model))
    accelerator.backward((model(INPUTS) - TARGETS).square().mean())
    before = [param.clone() for param in model.parameters()]
    with pytest.raises(polyamp.errors.UsageError, match=NOT_SCALED):
        opt.step()
    assert all(map(torch.equal, before, model.parameters()))


@pytest.mark.parametrize("method", ["clip_grad_norm_", "clip_grad_value_"])
def test_accelerate_is_refused_where_it_clips_scaled_gradients(accelerator: Any, method: str) -> None:
    model = network()
    model, opt = accelerator.prepare(model, wrap(model))
    accelerator.backward(opt.optimizer.scale((model(INPUTS) - TARGETS).square().mean()))
    with pytest.raises(polyamp.errors.UsageError, match=CLIPPED):
        getattr(accelerator, method)(model.parameters(), 0.1)


def test_accelerate_trains_as_plain_where_the_loss_is_scaled(accelerator: Any) -> None:
    model = network()
    model, opt = accelerator.prepare(model, wrap(model))
    losses = []
    for _ in range(4):
        opt.zero_grad()
        loss = (model(INPUTS) - TARGETS).square().mean()
        accelerator.backward(opt.optimizer.scale(loss))
        opt.optimizer.unscale_()
        accelerator.clip_grad_norm_(model.parameters(), 0.1)
        opt.step()
        assert not opt.optimizer.step_was_skipped
        losses.append(loss.item())
    assert losses == pytest.approx(plain_losses(4, 0.1), abs=1e-6)


def test_accelerates_scaler_around_a_wrapped_optimizer_is_refused(accelerator: Any) -> None:
    accelerate_optimizer = pytest.importorskip("accelerate.optimizer")
    model = network()
    scaler = torch.amp.GradScaler("cpu")
    opt = accelerate_optimizer.AcceleratedOptimizer(wrap(model), scaler=scaler)
    scaler.scale((model(INPUTS) - TARGETS).square().mean()).backward()
    with pytest.raises(polyamp.errors.UsageError, match="wrapped already"):
        opt.step()


# --- Lightning --------------------------------------------------------------------------------------------------------


def lightning_module(scales: bool, **options: Any) -> Any:
    lightning = pytest.importorskip("lightning")

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.seen = network(), []
            self.automatic_optimization = not scales

        def training_step(self, batch: list[Tensor], index: int) -> Tensor:
            loss = (self.net(batch[0]) - batch[1]).square().mean()
            self.seen.append(loss.item())
            if scales:
                opt = self.optimizers(use_pl_optimizer=False)
                opt.zero_grad()
                self.manual_backward(opt.scale(loss))
                opt.step()
            return loss

        def configure_optimizers(self) -> Any:
            return wrap(self.net, **options)

    return Module()


def lightning_fit(module: Any, folder: Path, **options: Any) -> Any:
    lightning = pytest.importorskip("lightning")
    data = DataLoader(TensorDataset(INPUTS, TARGETS), batch_size=16)
    trainer = lightning.Trainer(
        max_epochs=4, accelerator="cpu", devices=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, default_root_dir=folder, **options,
    )  # fmt: skip
    trainer.fit(module, data)
    return trainer


def test_lightning_is_refused_where_it_scales_nothing(tmp_path: Path) -> None:
    with pytest.raises(polyamp.errors.UsageError, match=NOT_SCALED):
        lightning_fit(lightning_module(scales=False), tmp_path)


@pytest.mark.parametrize("algorithm", ["norm", "value"])
def test_lightning_clips_nothing_that_is_scaled(algorithm: str, tmp_path: Path) -> None:
    lightning = pytest.importorskip("lightning")

    class Scales(lightning.pytorch.plugins.Precision):
        def pre_backward(self, tensor: Tensor, module: Any) -> Tensor:
            return module.optimizers(use_pl_optimizer=False).scale(super().pre_backward(tensor, module))

    with pytest.raises(polyamp.errors.UsageError, match=CLIPPED):
        lightning_fit(
            lightning_module(scales=False),
            tmp_path,
            plugins=[Scales()],
            gradient_clip_val=0.1,
            gradient_clip_algorithm=algorithm,
        )


def test_lightning_trains_as_plain_where_the_loss_is_scaled(tmp_path: Path) -> None:
    module = lightning_module(scales=True, max_grad_norm=0.1)
    lightning_fit(module, tmp_path)
    assert module.seen == pytest.approx(plain_losses(4, 0.1), abs=1e-6)


def test_lightning_resumes_a_wrapped_optimizer_from_a_plain_checkpoint(tmp_path: Path) -> None:
    lightning = pytest.importorskip("lightning")

    class Plain(type(lightning_module(scales=False))):  # type: ignore[misc]
        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.net.parameters(), lr=0.1)

    trainer = lightning_fit(Plain(), tmp_path)
    trainer.save_checkpoint(tmp_path / "plain.ckpt")
    module = lightning_module(scales=True)
    data = DataLoader(TensorDataset(INPUTS, TARGETS), batch_size=16)
    resumed = lightning.Trainer(
        max_epochs=6, accelerator="cpu", devices=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, default_root_dir=tmp_path,
    )  # fmt: skip
    resumed.fit(module, data, ckpt_path=tmp_path / "plain.ckpt")
    assert module.seen == pytest.approx(plain_losses(6)[4:], abs=1e-6)


# --- Hugging Face -----------------------------------------------------------------------------------------------------


class Regression(nn.Module):
    """A model in the form that the Trainer needs."""

    def __init__(self) -> None:
        super().__init__()
        self.net = network()

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"loss": (self.net(x) - labels).square().mean()}


def hugging_face(folder: Path, scales: bool, **options: Any) -> Any:
    transformers = pytest.importorskip("transformers")

    class Trainer(transformers.Trainer):  # type: ignore[misc,name-defined]
        seen: list[float]

        def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            loss = model(**inputs)["loss"]
            self.seen.append(loss.item())
            return self.optimizer.optimizer.scale(loss) if scales else loss

    rows = [{"x": x, "labels": y} for x, y in zip(INPUTS, TARGETS, strict=True)]
    arguments = transformers.TrainingArguments(
        output_dir=str(folder), max_steps=4, per_device_train_batch_size=16, use_cpu=True, report_to=[],
        save_strategy="no", disable_tqdm=True, lr_scheduler_type="constant", **options,
    )  # fmt: skip
    model = Regression()
    trainer = Trainer(model=model, args=arguments, train_dataset=rows, optimizers=(wrap(model), None))
    trainer.seen = []
    return trainer


def test_the_trainer_is_refused_where_it_scales_nothing(tmp_path: Path) -> None:
    with pytest.raises(polyamp.errors.UsageError, match=NOT_SCALED):
        hugging_face(tmp_path, scales=False).train()


def test_the_trainers_default_clipping_of_scaled_gradients_is_refused(tmp_path: Path) -> None:
    with pytest.raises(polyamp.errors.UsageError, match=CLIPPED):
        hugging_face(tmp_path, scales=True).train()


def test_the_trainer_trains_as_plain_where_the_loss_is_scaled(tmp_path: Path) -> None:
    trainer = hugging_face(tmp_path, scales=True, max_grad_norm=0.0)
    trainer.train()
    assert trainer.seen == pytest.approx(plain_losses(4), abs=1e-5)
