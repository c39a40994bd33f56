"""Lightning with polyamp's plugin: its loops train as in float32, skip as one, and resume to the bit."""

import json
import os
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader

import polyamp
from polyamp import LossScale
from polyamp.backends.torch import GradScaler, LossScaledOptimizer
from polyamp.backends.torch.integrations.lightning import FabricPrecision, MixedPrecision

POLICIES = ["mixed_float16", "mixed_bfloat16", "O2", "bfloat16"]
CLIPPING = [
    {},
    {"gradient_clip_val": 0.1},
    {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
    {"gradient_clip_val": 0.1, "accumulate_grad_batches": 2},
]


@pytest.fixture(autouse=True)
def _quiet(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Ignore Lightning's own warnings; polyamp's are errors."""
    monkeypatch.chdir(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.simplefilter("error", polyamp.PolyampWarning)
        yield


class Model(lightning.LightningModule):
    """A regression whose batches are numbers, so that a resumed run sees the same data; batches of ``bad`` overflow."""

    def __init__(self, bad: tuple[int, ...] = ()) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Tanh(), nn.Linear(8, 4))
        self.bad, self.losses, self.rates = bad, [], []

    def loss(self, index: int) -> Tensor:
        random = torch.Generator().manual_seed(index)
        x = torch.randn(16, 8, generator=random)
        loss = (self.net(x.to(self.net[0].weight.dtype)).float() - x[:, :4].sin()).square().mean()
        return loss * 1e36 if index in self.bad else loss

    def training_step(self, batch: Tensor, index: int) -> Tensor | None:
        loss = self.loss(int(batch))
        self.losses.append(loss.item())
        self.rates.append(self.trainer.optimizers[0].param_groups[0]["lr"])
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=0.03)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def train_dataloader(self) -> Any:
        return DataLoader(range(8))  # type: ignore[arg-type]


class Manual(Model):
    """Manual optimization. ``between`` is called between the backward pass and the step."""

    def __init__(self, between: Callable[[Any, Any], None] = lambda model, optimizer: None, **options: Any) -> None:
        super().__init__(**options)
        self.automatic_optimization, self.between = False, between

    def training_step(self, batch: Tensor, index: int) -> None:
        optimizer: Any = self.optimizers()
        loss = self.loss(int(batch))
        self.losses.append(loss.item())
        self.manual_backward(loss)
        self.between(self, optimizer)
        optimizer.step()
        optimizer.zero_grad()


def trainer(policy: Any = None, *, scale: Any = None, **options: Any) -> lightning.Trainer:
    plugin = None if policy is None else MixedPrecision(policy, loss_scale=scale)
    quiet: dict[str, Any] = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    quiet |= {"accelerator": "cpu", "max_epochs": 1, "enable_checkpointing": False}
    return lightning.Trainer(plugins=plugin, **{**quiet, **options})


def fit(model: Any, policy: Any = None, *, ckpt_path: Any = None, **options: Any) -> Any:
    trainer(policy, **options).fit(model, ckpt_path=ckpt_path)
    return model


def bits(model: nn.Module) -> list[bytes]:
    return [value.detach().float().numpy().tobytes() for value in model.state_dict().values()]


def rough(policy: str) -> float:
    return 0.02 if "bf" in policy else 4e-3


# --- training ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("policy", "options"),
    [*((policy, CLIPPING[-1]) for policy in POLICIES), *(("mixed_float16", options) for options in CLIPPING[:-1])],
    ids=str,
)
def test_losses_are_those_of_float32(policy: str, options: Any) -> None:
    plain, mixed = fit(Model(), **options), fit(Model(), policy, **options)
    assert plain.losses[0] - plain.losses[-1] > 0.01  # it does train
    assert mixed.losses == pytest.approx(plain.losses, abs=rough(policy))
    assert mixed.rates == plain.rates
    assert isinstance(mixed.trainer.optimizers[0], LossScaledOptimizer)


def test_the_trainer_knows_its_precision() -> None:
    words = [trainer(policy).precision for policy in (*POLICIES, "float32")]
    assert words == ["16-mixed", "bf16-mixed", "16-true", "bf16-true", "32-true"]


def test_evaluation_runs_under_the_policy() -> None:
    seen: dict[str, torch.dtype] = {}

    class Evaluated(Model):
        def look(self, where: str) -> None:
            seen[where] = self.net[0](torch.ones(1, 8)).dtype

        def validation_step(self, batch: Any, index: int) -> None:
            self.look("validation")

        def test_step(self, batch: Any, index: int) -> None:
            self.look("test")

        def predict_step(self, batch: Any, index: int) -> None:
            self.look("predict")

    one, data = trainer("mixed_bfloat16"), DataLoader([1])  # type: ignore[arg-type]
    model = Evaluated()
    for run in (one.validate, one.test, one.predict):
        run(model, data, **({} if run == one.predict else {"verbose": False}))
    assert seen == dict.fromkeys(["validation", "test", "predict"], torch.bfloat16)


# --- gradients and skips ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("policy", "accumulate"), [("mixed_float16", 2), ("O2", 1)])
def test_hooks_see_unscaled_gradients(policy: str, accumulate: int) -> None:
    norms: dict[str, list[float]] = {"float32": [], policy: []}

    class Watch(Callback):
        def __init__(self, name: str) -> None:
            self.name = name

        def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
            grads = [param.grad for group in optimizer.param_groups for param in group["params"]]
            norms[self.name].append(torch.stack([grad.norm() for grad in grads]).norm().item())

    for name in norms:
        fit(Model(), name, callbacks=[Watch(name)], accumulate_grad_batches=accumulate)
    assert norms[policy] == pytest.approx(norms["float32"], rel=0.02)


@pytest.mark.parametrize("policy", ["mixed_float16", "O2"])
@pytest.mark.parametrize("manual", [False, True])
def test_a_skip_changes_nothing_and_holds_the_schedule(policy: str, manual: bool) -> None:
    seen: list[list[bytes]] = []

    class Watched(Manual if manual else Model):  # type: ignore[misc]
        def on_train_batch_end(self, *_: Any) -> None:
            seen.append(bits(self))

    model = fit(Watched(bad=(2,)), policy, scale=LossScale(init=2.0**8))
    optimizer = model.trainer.optimizers[0]
    assert seen[2] == seen[1] != seen[3]
    assert optimizer.loss_scale == 2.0**7
    assert model.trainer.global_step == 8  # Lightning counts skipped steps too
    if not manual:
        assert model.rates == [pytest.approx(0.03 * 0.9 ** (index - (index > 2))) for index in range(8)]


# --- manual optimization ----------------------------------------------------------------------------------------------

BETWEEN: dict[str, Callable[[Any, Any], None]] = {
    "nothing": lambda model, optimizer: None,
    "module clips": lambda model, optimizer: model.clip_gradients(optimizer, 0.1, "norm"),
    "module clips values": lambda model, optimizer: model.clip_gradients(optimizer, 0.01, "value"),
    "optimizer clips": lambda model, optimizer: (
        optimizer.clip_grad_norm_(0.1)
        if isinstance(optimizer, LossScaledOptimizer)
        else nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    ),
}


@pytest.mark.parametrize("between", BETWEEN)
@pytest.mark.parametrize("policy", ["mixed_float16", "O2"])
def test_manual_optimization_trains_as_float32_does(policy: str, between: str) -> None:
    plain, mixed = fit(Manual(BETWEEN[between])), fit(Manual(BETWEEN[between]), policy)
    assert mixed.losses == pytest.approx(plain.losses, abs=rough(policy))


class Toggled(Model):
    """Two optimizers in turns; a backward pass through both parts adds to the gradients of the toggled one alone."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Tensor, index: int) -> None:
        for optimizer in self.optimizers():  # type: ignore[union-attr]
            self.toggle_optimizer(optimizer)
            loss = self.loss(int(batch))
            self.losses.append(loss.item())
            self.manual_backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            self.untoggle_optimizer(optimizer)

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(part.parameters(), lr=0.3) for part in (self.net[0], self.net[3])]


@pytest.mark.parametrize("policy", ["mixed_float16", "O2"])
def test_toggled_optimizers_train_as_float32_does(policy: str) -> None:
    assert fit(Toggled(), policy).losses == pytest.approx(fit(Toggled()).losses, abs=rough(policy))


# --- checkpoints ------------------------------------------------------------------------------------------------------


class Killed(Exception):
    pass


class Killer(Callback):
    def __init__(self, batch: int) -> None:
        self.batch, self.count = batch, 0

    def on_train_batch_start(self, *_: Any) -> None:
        if self.count == self.batch:
            raise Killed
        self.count += 1


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(("killed", "accumulate"), [(5, 2), (11, 2), (3, 1)])
def test_a_killed_run_resumes_to_the_bit(policy: str, killed: int, accumulate: int, tmp_path: Path) -> None:
    """Batches 2 and 10 overflow; ``training_step`` gets its batch from the step, as a resumable loader would."""

    class Counting(Model):
        def training_step(self, batch: Tensor, index: int) -> Tensor | None:
            number = self.trainer.current_epoch * 8 + index
            return super().training_step(torch.tensor(number), index)

    options: dict[str, Any] = {"max_epochs": 2, "accumulate_grad_batches": accumulate, "gradient_clip_val": 0.5}
    if "bfloat16" not in policy:
        options["scale"] = LossScale(init=2.0**10, interval=3)
    whole = fit(Counting(bad=(2, 10)), policy, **options)
    saves = ModelCheckpoint(tmp_path, every_n_train_steps=1, save_top_k=-1, save_last=True)
    with pytest.raises(Killed):
        fit(
            Counting(bad=(2, 10)), policy, **options, callbacks=[saves, Killer(killed)], enable_checkpointing=True
        )  # fmt: skip
    resumed = fit(Counting(bad=(2, 10)), policy, **options, ckpt_path=tmp_path / "last.ckpt")
    assert bits(resumed) == bits(whole)
    mine, its = (json.dumps(one.trainer.optimizers[0].state_dict(), default=str) for one in (resumed, whole))
    assert mine == its
    assert resumed.trainer.global_step == whole.trainer.global_step
    torch.load(tmp_path / "last.ckpt", weights_only=True)


# --- refusals ---------------------------------------------------------------------------------------------------------


def test_deepspeed_is_refused() -> None:
    class DeepSpeedStrategy(lightning.pytorch.strategies.SingleDeviceStrategy):
        pass

    with pytest.raises(polyamp.errors.UnsupportedError, match="DeepSpeed scales the loss"):
        fit(Model(), "mixed_float16", strategy=DeepSpeedStrategy())


def test_options_are_checked_when_the_plugin_is_made() -> None:
    for kind in (MixedPrecision, FabricPrecision):
        with pytest.raises(polyamp.errors.UnsupportedError, match="did you mean master_weights"):
            kind("mixed_float16", master_weight=False)
        with pytest.raises(polyamp.errors.InvalidValueError, match="unknown policy"):
            kind("mixed_float15")
        with pytest.raises(polyamp.errors.InvalidValueError):
            kind("mixed_float16", max_grad_norm=-1.0)


# --- without the plugin -----------------------------------------------------------------------------------------------


def test_lightnings_own_plugin_takes_polyamps_scaler() -> None:
    from lightning.pytorch.plugins.precision import MixedPrecision as Native

    one = trainer()
    one.strategy.precision_plugin = Native("16-mixed", "cpu", scaler=GradScaler("cpu", init_scale=2.0**10))
    model = Model()
    one.fit(model)
    assert model.losses == pytest.approx(fit(Model()).losses, abs=4e-3)


# --- Fabric -----------------------------------------------------------------------------------------------------------


def fabric_losses(precision: Any, tmp_path: Path | None = None, steps: int = 6) -> tuple[list[float], Any]:
    fabric = lightning.Fabric(accelerator="cpu", devices=1, plugins=precision)
    model = fabric.setup_module(Model().net)
    plain: Any = torch.optim.Adam(model.parameters(), lr=0.01)
    optimizer: Any = fabric.setup_optimizers(plain if precision is None else precision.wrap_optimizer(plain))
    losses = []
    for step in range(steps):
        for part in range(2):
            random = torch.Generator().manual_seed(2 * step + part)
            x, y = torch.randn(16, 8, generator=random), torch.randn(16, 4, generator=random)
            loss = (model(x).float() - y.sin()).square().mean() / 2
            fabric.backward(loss)
            losses.append(loss.item())
        fabric.clip_gradients(model, optimizer, max_norm=0.1 if step % 2 else None, clip_val=None if step % 2 else 0.01)
        optimizer.step()
        optimizer.zero_grad()
        if tmp_path is not None and step == 2:
            fabric.save(tmp_path / "fabric.ckpt", {"model": model, "optimizer": optimizer})
            nn.init.zeros_(model.module[0].weight)
            fabric.load(tmp_path / "fabric.ckpt", {"model": model, "optimizer": optimizer})
    return losses, optimizer


@pytest.mark.parametrize("policy", POLICIES)
def test_fabric_trains_as_float32_does_and_saves_the_loss_scale(policy: str, tmp_path: Path) -> None:
    plain, _ = fabric_losses(None)
    mixed, optimizer = fabric_losses(FabricPrecision(policy), tmp_path)
    assert mixed == pytest.approx(plain, abs=rough(policy))
    assert optimizer.loss_scale == (1.0 if "bfloat" in policy else 2.0**16)
    assert mixed == fabric_losses(FabricPrecision(policy))[0]


def test_fabric_without_wrapped_optimizers_is_refused() -> None:
    for precision, words in [
        (FabricPrecision("mixed_float16"), "the optimizer is not wrapped"),
        (MixedPrecision("mixed_float16"), "this plugin is for Lightning's Trainer"),
    ]:
        fabric = lightning.Fabric(accelerator="cpu", devices=1, plugins=precision)
        layer = nn.Linear(2, 1)
        plain = torch.optim.SGD(layer.parameters(), lr=0.1)
        with pytest.raises(polyamp.errors.UsageError, match=words):
            fabric.backward(fabric.setup(layer, plain)[0](torch.ones(1, 2)).sum())
    with pytest.raises(polyamp.errors.UsageError, match="the optimizer is not wrapped"):
        FabricPrecision("mixed_float16").optimizer_step(plain)


# --- imports and processes --------------------------------------------------------------------------------------------


def test_the_older_package_names_work(tmp_path: Path) -> None:
    code = """
import pytorch_lightning, sys
from pytorch_lightning.demos.boring_classes import BoringModel
from polyamp.backends.torch.integrations.lightning import MixedPrecision
options = dict(logger=False, enable_checkpointing=False, enable_progress_bar=False, accelerator="cpu", max_steps=2)
trainer = pytorch_lightning.Trainer(plugins=MixedPrecision("mixed_float16", loss_scale=8.0), **options)
trainer.fit(BoringModel())
assert trainer.optimizers[0].last_step and "lightning" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True, cwd=tmp_path, env={**os.environ, "PYTHONWARNINGS": ""})


def test_two_processes(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    script = Path(__file__).with_name("lightning_ranks.py")
    done = subprocess.run(
        [*command, str(script)], cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("all checks passed") == 2
