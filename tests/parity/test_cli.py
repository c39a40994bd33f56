"""The command line on real steps of each framework: the same model gets the same report."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from polyamp import cli

COMMON = """
import numpy as np

rng = np.random.default_rng(0)
W1 = np.float32(rng.standard_normal((16, 32)) * 0.3)
W2 = np.float32(rng.standard_normal((32, 10)) * 0.2)
X = np.float32(rng.standard_normal((8, 16)))
Y = np.eye(10, dtype=np.float32)[rng.integers(0, 10, 8)]
"""

TORCH = """
import torch

model = torch.nn.Sequential(torch.nn.Linear(16, 32, bias=False), torch.nn.ReLU(), torch.nn.Linear(32, 10, bias=False))
with torch.no_grad():
    model[0].weight.copy_(torch.tensor(W1.T))
    model[2].weight.copy_(torch.tensor(W2.T))

def loss_fn(x, y):
    return torch.nn.functional.cross_entropy(model(x), y)

def step():
    return loss_fn, torch.tensor(X), torch.tensor(Y)

def large():
    return loss_fn, torch.tensor(X) * 1e6, torch.tensor(Y)

def plain():
    return {"step": loss_fn, "args": step()[1:], "optimizer": torch.optim.SGD(model.parameters(), lr=0.1)}

def scalar():
    return loss_fn(*step()[1:])
"""

JAX = """
import jax
import jax.numpy as jnp
import optax

params = {"w1": jnp.array(W1), "w2": jnp.array(W2)}

def loss_fn(params, x, y):
    logits = jax.nn.relu(x @ params["w1"]) @ params["w2"]
    return optax.softmax_cross_entropy(logits, y).mean()

def step():
    return loss_fn, params, jnp.array(X), jnp.array(Y)
"""

TENSORFLOW = """
import tensorflow as tf

w1, w2 = tf.Variable(W1), tf.Variable(W2)

def loss_fn(x, y):
    logits = tf.nn.relu(x @ w1) @ w2
    return tf.reduce_mean(tf.nn.softmax_cross_entropy_with_logits(labels=y, logits=logits))

def step():
    return loss_fn, tf.constant(X), tf.constant(Y)
"""

KERAS = """
import keras

model = keras.Sequential([keras.Input((16,)), keras.layers.Dense(32, "relu"), keras.layers.Dense(10)])
model.layers[0].kernel.assign(W1)
model.layers[1].kernel.assign(W2)
model.compile(optimizer="sgd", loss=keras.losses.CategoricalCrossentropy(from_logits=True))

def step():
    return model, X, Y
"""

SOURCES = {"torch": TORCH, "jax": JAX, "tensorflow": TENSORFLOW, "keras": KERAS}
LOSS = 2.15311  # for that model and batch, in float32
FRAMEWORKS = pytest.mark.parametrize("framework", SOURCES)


@pytest.fixture(scope="module")
def targets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("targets")
    for framework, source in SOURCES.items():
        (folder / f"{framework}_target.py").write_text(COMMON + source)
    return folder


@pytest.fixture(autouse=True)
def _here(targets: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(targets)
    monkeypatch.setattr(sys, "path", [*sys.path, str(targets)])


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["polyamp", *arguments])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    return int(ended.value.code or 0)


@pytest.mark.slow
@FRAMEWORKS
def test_diagnose_prints_saves_and_draws(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, framework: str
) -> None:
    report, picture = tmp_path / "step.json", tmp_path / "step.png"
    words = ("--policy", "mixed_bfloat16", "--json", str(report), "--plot", str(picture))  # a plain optimizer will do
    assert run(monkeypatch, "diagnose", f"{framework}_target:step", *words) == 0
    shown = capsys.readouterr().out
    assert "recommended: LossScale.skip_nonfinite()" in shown
    assert "verdict: FINITE" in shown
    saved = json.loads(report.read_text())
    assert (saved["verdict"], saved["probe"]["format"]) == ("finite", "bfloat16")
    assert saved["probe"]["loss"] == pytest.approx(LOSS, abs=1e-4)
    assert not [finding for finding in saved["lint"]["findings"] if finding["severity"] != "note"]
    assert picture.read_bytes().startswith(b"\x89PNG")


@FRAMEWORKS
def test_profile_prints_saves_and_draws(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, framework: str
) -> None:
    if framework == "keras":  # a model is not a step: its own train step is
        words = ("torch_target:scalar", "--backend", "keras")
        assert run(monkeypatch, "profile", *words) == 1
        assert "keras adapter has no profiler" in " ".join(capsys.readouterr().err.split())
        return
    report, picture = tmp_path / "step.json", tmp_path / "step.png"
    words = ("--runs", "1", "--folder", str(tmp_path), "--json", str(report), "--plot", str(picture))
    assert run(monkeypatch, "profile", f"{framework}_target:step", *words) == 0
    assert f"{framework} on cpu, its own policy" in capsys.readouterr().out
    assert Path(json.loads(report.read_text())["file"]).is_relative_to(tmp_path)
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("diagnose", "torch_target:large"), "verdict: FORWARD pass overflows"),
        (("diagnose", "torch_target:plain"), "[optimizer-not-wrapped]"),
        (("explain", "torch_target:step", "--policy", 'mixed_float16 {"rules": {"nowhere": "full"}}'), "nowhere"),
    ],
)
def test_what_is_found_is_exit_code_3(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], says: str
) -> None:
    assert run(monkeypatch, *words) == 3
    assert says in capsys.readouterr().out


@FRAMEWORKS
def test_explain_lists_the_operations(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], framework: str
) -> None:
    assert run(monkeypatch, "explain", f"{framework}_target:step", "--json", "-") == 0
    plan: dict[str, Any] = json.loads(capsys.readouterr().out)
    formats = {op["format"] for op in plan["operations"] if op["name"] == "matmul"}
    assert formats == {"float16"}


def test_explain_finds_the_largest_batch(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    command = ("explain", "torch_target:step", "--memory", "0.001", "--examples", "8")
    assert run(monkeypatch, *command, "--json", "-") == 0
    largest = json.loads(capsys.readouterr().out)["largest_batch"]
    assert largest["policy"] > largest["float32"] > 0
    assert run(monkeypatch, *command) == 0
    shown = f"largest batch in 0.001 GiB with AdamW: {largest['policy']} (float32: {largest['float32']})"
    assert capsys.readouterr().out.splitlines()[-1] == shown
    assert run(monkeypatch, *command, "--memory", "-1") == 1
    assert run(monkeypatch, *command[:4]) == 2
    refused = capsys.readouterr().err
    assert "a positive number of bytes" in refused
    assert "--memory needs --examples N" in refused


def test_a_function_may_be_the_step_itself(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(monkeypatch, "diagnose", "torch_target:scalar", "--backend", "torch", "--json", "-") == 0
    assert json.loads(capsys.readouterr().out)["probe"]["loss"] == pytest.approx(LOSS, abs=1e-4)
