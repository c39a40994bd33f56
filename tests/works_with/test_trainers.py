"""Trainers that call `loss.backward()` and clip by themselves: a clear error, or float32's losses."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
import transformers

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


# --- Hugging Face's Trainer -------------------------------------------------------------------------------------------


def bert() -> torch.nn.Module:
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=60,
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    model: torch.nn.Module = transformers.BertForSequenceClassification(config)
    return model


def sentences() -> list[dict[str, Any]]:
    random = torch.Generator().manual_seed(1)
    words = torch.randint(0, 60, (32, 8), generator=random)
    return [{"input_ids": row, "labels": int(row[0] % 2)} for row in words]


class Losses(transformers.TrainerCallback):
    def __init__(self) -> None:
        self.losses: list[float] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        if logs and "loss" in logs:
            self.losses.append(float(logs["loss"]))


class MixedTrainer(transformers.Trainer):
    """The right subclass: the loss under autocast, the backward pass of the scaled loss."""

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        with polyamp.autocast("mixed_float16"):
            return super().compute_loss(*args, **kwargs)

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        self.accelerator.backward = lambda loss, **_: self.optimizer.optimizer.backward(loss)


def train_bert(
    folder: Path, kind: Callable[..., Any], wrap: Callable[[Any], Any], max_grad_norm: float = 1.0
) -> list[float]:
    model, kept = bert(), Losses()
    arguments = transformers.TrainingArguments(
        output_dir=str(folder),
        max_steps=STEPS,
        logging_steps=1,
        report_to=[],
        use_cpu=True,
        per_device_train_batch_size=8,
        save_strategy="no",
        disable_tqdm=True,
        max_grad_norm=max_grad_norm,
        lr_scheduler_type="constant",
    )
    optimizer = wrap(torch.optim.SGD(model.parameters(), lr=0.1))
    data: Any = sentences()
    trainer = kind(model=model, args=arguments, train_dataset=data, optimizers=(optimizer, None), callbacks=[kept])
    trainer.train()
    return kept.losses


def test_hf_trainer_with_a_wrapped_optimizer_and_nothing_else_is_refused(tmp_path: Path) -> None:
    with pytest.raises(polyamp.UsageError, match="not scaled"):
        train_bert(tmp_path, transformers.Trainer, wrapped)


def test_hf_trainer_that_clips_scaled_gradients_is_refused(tmp_path: Path) -> None:
    with pytest.raises(polyamp.UsageError, match="clipped while they were scaled"):
        train_bert(tmp_path, MixedTrainer, wrapped)


def test_hf_trainer_that_scales_the_loss_trains_as_float32_does(tmp_path: Path) -> None:
    plain = train_bert(tmp_path, transformers.Trainer, lambda optimizer: optimizer, max_grad_norm=0.0)
    mixed = train_bert(tmp_path, MixedTrainer, wrapped, max_grad_norm=0.0)
    assert plain[0] - plain[-1] > 0.01  # it does train
    assert mixed == pytest.approx(plain, abs=2e-3)


# --- accelerate -------------------------------------------------------------------------------------------------------


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


def accelerated(around: str, backward: Callable[[Any, Any, Any], None], clip: bool = False) -> list[float]:
    model, x, y = task()
    accelerator = accelerate.Accelerator(cpu=True)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.3)
    if around == "prepare(wrapped)":
        model, optimizer = accelerator.prepare(model, wrapped(optimizer))
    else:
        model, optimizer = accelerator.prepare(model, optimizer)
        optimizer = wrapped(optimizer)
    losses = []
    for _ in range(STEPS):
        with polyamp.autocast("mixed_float16"):
            loss = (model(x) - y).square().mean()
        backward(accelerator, optimizer, loss)
        if clip:
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("around", ["prepare(wrapped)", "wrap(prepared)"])
def test_accelerate_with_a_loss_that_nobody_scaled_is_refused(around: str) -> None:
    with pytest.raises(polyamp.UsageError, match="not scaled"):
        accelerated(around, lambda accelerator, optimizer, loss: accelerator.backward(loss))


def scaled_of(optimizer: Any) -> Any:
    return optimizer if hasattr(optimizer, "scale") else optimizer.optimizer


@pytest.mark.parametrize("around", ["prepare(wrapped)", "wrap(prepared)"])
def test_accelerate_with_a_scaled_loss_trains_as_float32_does(around: str) -> None:
    def backward(accelerator: Any, optimizer: Any, loss: Any) -> None:
        accelerator.backward(scaled_of(optimizer).scale(loss))

    assert accelerated(around, backward) == pytest.approx(plain_losses(), abs=2e-3)
    with pytest.raises(polyamp.UsageError, match="clipped while they were scaled"):
        accelerated(around, backward, clip=True)
