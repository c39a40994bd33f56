"""Hugging Face's Trainer under a policy: `integrations.transformers.with_policy`."""

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
import transformers

import polyamp
from polyamp import LossScale
from polyamp.backends.torch.integrations.transformers import with_policy

SCALE = LossScale(init=2.0**10)
STEPS = 6
FIELDS = ("loss", "grad_norm", "learning_rate")


@pytest.fixture(autouse=True)
def _warnings_of_the_trainer() -> Iterator[None]:
    """Ignore the trainer's own warnings; polyamp's are errors. Forget accelerate's shared state."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.simplefilter("error", polyamp.PolyampWarning)
        yield
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)  # it keeps the arguments' precision


def bert(dropout: float) -> torch.nn.Module:
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=60,
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
    )
    model: torch.nn.Module = transformers.BertForSequenceClassification(config)
    return model


def sentences() -> Any:
    random = torch.Generator().manual_seed(1)
    words = torch.randint(0, 60, (64, 8), generator=random)
    return [{"input_ids": row, "labels": int(row[0] % 2)} for row in words]


class Log(transformers.TrainerCallback):
    """Keeps what the trainer logs at each step."""

    def __init__(self) -> None:
        self.rows: list[tuple[float, ...]] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        if logs and "loss" in logs:
            self.rows.append(tuple(float(logs[field]) for field in FIELDS))


class Spoiled(transformers.Trainer):
    """Has one step whose gradients are inf."""

    def training_step(self, model: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        loss = super().training_step(model, *args, **kwargs)
        if self.state.global_step == 2:
            next(model.parameters()).grad.fill_(torch.inf)
        return loss


def made(folder: Path, kind: Any, *, dropout: float = 0.0, callbacks: Any = (), **arguments: Any) -> Any:
    options: dict[str, Any] = {
        "max_steps": STEPS,
        "per_device_train_batch_size": 8,
        "learning_rate": 1e-2,
        "save_steps": 3,
        "logging_steps": 1,
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
    }
    args = transformers.TrainingArguments(output_dir=str(folder), **(options | arguments))
    data, model = sentences(), bert(dropout)
    return kind(model=model, args=args, train_dataset=data, eval_dataset=data[:16], callbacks=list(callbacks))


def logged(folder: Path, kind: Any, resume: Path | None = None, **options: Any) -> tuple[Any, list[tuple[float, ...]]]:
    log = Log()
    trainer = made(folder, kind, callbacks=[log], **options)
    trainer.train(resume_from_checkpoint=None if resume is None else str(resume))
    return trainer, log.rows


@pytest.mark.parametrize("arguments", [{}, {"gradient_accumulation_steps": 2}, {"max_grad_norm": 0.0}], ids=str)
@pytest.mark.parametrize(("policy", "within"), [("mixed_float16", 5e-3), ("O2", 5e-3), ("mixed_bfloat16", 5e-2)])
def test_losses_norms_and_evaluation_are_those_of_float32(
    tmp_path: Path, policy: str, within: float, arguments: dict[str, Any]
) -> None:
    plain, expected = logged(tmp_path, transformers.Trainer, **arguments)
    mixed, rows = logged(tmp_path, with_policy(transformers.Trainer, policy, loss_scale=SCALE), **arguments)
    assert len(rows) == STEPS
    for row, wanted in zip(rows, expected, strict=True):
        assert row == pytest.approx(wanted, abs=within)  # the gradient's norm too
    losses = [trainer.evaluate()["eval_loss"] for trainer in (mixed, plain)]
    assert losses[0] == pytest.approx(losses[1], abs=within)
    assert losses[0] != losses[1]  # evaluated under the policy
    predicted = mixed.predict(sentences()[:8]).predictions
    assert predicted.dtype == "float32"


@pytest.mark.parametrize("policy", ["mixed_float16", "O2"])
def test_a_run_that_was_killed_resumes_to_the_bit(tmp_path: Path, policy: str) -> None:
    kind = with_policy(transformers.Trainer, policy)  # at 2**16
    whole, rows = logged(tmp_path, kind, dropout=0.1)
    again, resumed = logged(tmp_path / "again", kind, dropout=0.1, resume=tmp_path / "checkpoint-3")
    assert resumed == rows[3:]
    assert all(map(torch.equal, whole.model.state_dict().values(), again.model.state_dict().values()))
    states = [trainer.optimizer.state_dict() for trainer in (whole, again)]
    assert states[0]["loss_scale"] == states[1]["loss_scale"]
    masters = [state["master_weights"] or {} for state in states]
    assert all(map(torch.equal, masters[0].values(), masters[1].values()))
    assert bool(masters[0]) == (policy == "O2")


def test_a_skipped_step_holds_the_schedule(tmp_path: Path) -> None:
    trainer, rows = logged(tmp_path, with_policy(Spoiled, "mixed_float16", loss_scale=SCALE))
    rates = [row[-1] for row in rows]
    assert rates[2] == rates[3]
    assert len(set(rates)) == STEPS - 1
    assert trainer.accelerator.scaler.get_scale() == SCALE.init / 2


@pytest.mark.parametrize("flag", ["fp16", "bf16"])
def test_a_precision_in_the_arguments_is_refused(tmp_path: Path, flag: str) -> None:
    kind = with_policy(transformers.Trainer, "mixed_float16")
    with pytest.raises(polyamp.errors.UsageError, match=rf"precision of its own(.|\n)*{flag}"):
        made(tmp_path, kind, **{flag: True})


def test_other_classes_are_refused() -> None:
    with pytest.raises(polyamp.errors.InvalidTypeError, match="a class of trainers"):
        with_policy(torch.nn.Linear, "mixed_float16")  # type: ignore[arg-type]
