"""The examples run as programs, show what they are there to show, and stay short."""

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
FEWER = 2
"""Micro-batches of an update, of 24. The loss of each is divided by the words of 24, so its gradients are the same."""


def run(monkeypatch: pytest.MonkeyPatch, name: str, *options: str) -> None:
    monkeypatch.setattr(sys, "argv", [name, *options])
    monkeypatch.syspath_prepend(str((EXAMPLES / name).parent))
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")


def start(name: str, *options: str | Path, cwd: Path) -> str:
    """Run an example in its own process, as a user does, and return what it prints."""
    environment = {
        **os.environ,
        "PYTHONPATH": str((EXAMPLES / name).parent),
        "TF_CPP_MIN_LOG_LEVEL": "2",
        "XLA_FLAGS": "",
    }
    command = [sys.executable, EXAMPLES / name, *options]
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_example_prints_its_table_when_it_runs_by_itself(capsys: pytest.CaptureFixture[str]) -> None:
    program = (EXAMPLES / "torch_digits.py").read_text().replace("RATE = 300,", "RATE = 130,")  # fewer steps
    exec(compile(program, "torch_digits.py", "exec"), {"__name__": "__main__"})  # test_demo.py trains all four
    printed = capsys.readouterr().out
    heading, *rows = [line.split() for line in printed.splitlines() if line.strip()]
    assert heading == ["policy", "accuracy", "loss", "scale", "skipped"]
    assert [row[0] for row in rows] == ["float32", "mixed_bfloat16", "mixed_float16"]
    assert all(float(row[1].rstrip("%")) > 90 for row in rows), printed


def test_float16_stalls_without_a_loss_scale_and_matches_float32_with_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES / "lstm"))
    monkeypatch.setattr("word_lstm.MICRO_BATCHES", FEWER)
    run(monkeypatch, "lstm/torch_lstm.py", "--steps", "4", "--json", str(tmp_path / "table.json"))
    printed = capsys.readouterr().out
    table = json.loads((tmp_path / "table.json").read_text())
    assert list(table) == ["float32", "float16, scale 1", "float16, dynamic"]
    assert all(f"{row['loss']:.4f}" in printed for row in table.values())
    losses = {name: row["loss"] * 24 / FEWER for name, row in table.items()}
    assert losses["float16, scale 1"] - losses["float32"] > 0.1
    assert abs(losses["float16, dynamic"] - losses["float32"]) < 0.01
    assert [row["skipped"] for row in table.values()] == [0, 0, 0]


@pytest.mark.long
@pytest.mark.parametrize("name", ["torch_lstm.py", "jax_lstm.py", "tensorflow_lstm.py"])
def test_the_lstms_run_as_their_users_run_them(name: str, tmp_path: Path) -> None:
    start(f"lstm/{name}", "--json", "table.json", cwd=tmp_path)
    losses = {name: row["loss"] for name, row in json.loads((tmp_path / "table.json").read_text()).items()}
    assert losses["float16, scale 1"] - losses["float32"] > 0.1
    assert abs(losses["float16, dynamic"] - losses["float32"]) < 0.01


@pytest.mark.long  # tests/on_torch has the kill and the shards apart
def test_float16_under_fsdp_survives_a_kill(tmp_path: Path) -> None:
    sizes = ("--steps", "12", "--width", "32", "--layers", "2", "--context", "12")
    printed = start("float16_finetune/finetune.py", *sizes, "--folder", tmp_path / "runs", cwd=tmp_path)
    table = json.loads((tmp_path / "runs" / "table.json").read_text())
    assert list(table) == ["float32", "bfloat16", "float16", "killed"]
    first, *_ = losses = table["float32"]["losses"]
    assert losses[-1] < first - 0.5
    assert all(abs(row["losses"][0] - first) < 0.01 for row in table.values())
    assert all(abs(row["losses"][-1] - losses[-1]) < 0.2 for row in table.values())  # a step or two later
    skipped = table["float16"]["skipped"]
    assert 1 <= skipped <= 3
    assert [row["skipped"] for row in table.values()] == [0, 0, skipped, skipped]
    assert table["killed"]["losses"] == table["float16"]["losses"]
    assert table["killed"]["same_bits"]
    assert f"float16: steps 10  skipped {skipped}" in printed


def test_examples_are_short() -> None:
    for path in (*EXAMPLES.glob("*.py"), *EXAMPLES.glob("lstm/*.py")):
        assert len(path.read_text().splitlines()) < 75, path.name
