"""``polyamp demo``: from the same weights and batches, real digits have the same losses in every framework."""

import json
import sys
from contextlib import redirect_stdout
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from polyamp import LossScale, cli, policy
from polyamp.demo import examples

STEPS = 60
pytestmark = pytest.mark.slow

POLICIES = {
    "float32": policy("float32"),
    "mixed_bfloat16": policy("mixed_bfloat16"),
    # A scale that grows and does not overflow: a skipped step would shift the run against the others by one batch.
    "mixed_float16": policy("mixed_float16", loss_scale=LossScale(init=2.0**10, interval=20)),
}

# The largest distance of one step's loss from float32's, relative to that loss or to 0.1 nats if it is smaller. One
# product is rounded by 2**-11 in float16 and 2**-8 in bfloat16; the steps of training carry that along.
TOLERANCE = {"float32": 1e-3, "mixed_float16": 4e-2, "mixed_bfloat16": 8e-2}


@dataclass
class Demo:
    """What one call of the command printed and wrote."""

    printed: str
    report: dict[str, Any]
    picture: bytes

    def runs(self, name: str) -> dict[str, dict[str, Any]]:
        """Return the runs under a policy, by framework."""
        return {run["framework"].split()[0]: run for run in self.report["runs"] if run["policy"] == name}


def demo(patch: pytest.MonkeyPatch, *options: str) -> None:
    patch.setattr(sys, "argv", ["polyamp", "demo", *options])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 0


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Demo:
    assert examples()[1] == []
    folder = tmp_path_factory.mktemp("demo")
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(StringIO()) as printed:
        patch.setattr("polyamp.demo.POLICIES", POLICIES)
        demo(patch, "--steps", str(STEPS), "--json", str(folder / "json"), "--plot", str(folder / "picture.png"))
        return Demo(
            printed.getvalue(), json.loads((folder / "json").read_text()), (folder / "picture.png").read_bytes()
        )


def distance(losses: list[float], reference: list[float]) -> float:
    return float(np.max(np.abs(np.subtract(losses, reference)) / np.maximum(np.abs(reference), 0.1)))


@pytest.mark.parametrize("name", POLICIES)
def test_losses_agree_with_float32_in_every_framework(done: Demo, name: str) -> None:
    assert done.runs(name).keys() == {"torch", "jax", "keras", "tensorflow"}
    reference = done.runs("float32")["torch"]["losses"]
    distances = {framework: distance(run["losses"], reference) for framework, run in done.runs(name).items()}
    assert max(distances.values()) <= TOLERANCE[name], distances
    assert min(run["accuracy"] for run in done.runs(name).values()) > 0.8


@pytest.mark.parametrize("name", POLICIES)
def test_mixed_precision_stores_float32_parameters_and_half_the_activations(done: Demo, name: str) -> None:
    for framework, run in done.runs(name).items():
        assert run["parameter_bytes"] == 4 * 6090, framework
        scores = 64 * 10  # of which Keras makes float32 numbers
        others = 64 * (2 * 8 * 8 * 16 + 4 * 4 * 16 + 2 * 4 * 4 * 32 + 2 * 2 * 32)
        size = 4 if name == "float32" else 2
        assert run["activation_bytes"] - size * others in (size * scores, 4 * scores), framework


def test_it_prints_a_table_and_writes_json_and_a_picture(done: Demo) -> None:
    assert len(done.report["runs"]) == 4 * len(POLICIES)
    for run in done.report["runs"]:
        assert run["framework"].split()[0] in done.printed
        assert len(run["losses"]) == len(run["scales"]) == len(run["applied"]) == STEPS
        assert (run["largest_difference"] == 0) is (run["policy"] == "float32")
    assert {framework["version"] for framework in done.report["frameworks"].values()}
    assert done.picture.startswith(b"\x89PNG")


def test_demo_of_one_framework(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    demo(monkeypatch, "--steps", "3", "--framework", "torch", "--json", str(tmp_path / "one.json"))
    assert {run["framework"] for run in json.loads((tmp_path / "one.json").read_text())["runs"]} == {"torch"}
