"""The self-test in every framework: no false alarm on this CPU, and each broken device is named."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from polyamp import selftest
from polyamp.adapters import adapter_named
from polyamp.auto import choose
from support.broken_devices import DTYPES, Broken, added_in, slower, with_nan

FRAMEWORKS = pytest.mark.parametrize("name", ["torch", "jax", "tensorflow"])


def device_of(name: str) -> tuple[Any, str]:
    """The trial of a framework's adapter, and its CPU."""
    adapter = adapter_named(name)
    return adapter.trial, adapter.describe()["devices"][-1]["name"].split()[0]


@FRAMEWORKS
@pytest.mark.parametrize("format_name", selftest.TESTED)
@pytest.mark.parametrize("operation", selftest.OPERATIONS)
def test_nothing_is_wrong_on_this_cpu(name: str, operation: str, format_name: str) -> None:
    found, _ = selftest.check(*device_of(name), operation, format_name, 64)
    assert (found["verdict"], found["why"]) == ("right", "")


@FRAMEWORKS
@pytest.mark.parametrize(
    ("operation", "format_name", "worse", "says"),
    [
        ("conv", "float16", with_nan, "NaN or inf from finite numbers"),
        ("matmul", "float16", added_in(DTYPES["float16"]), "error "),
        ("matmul", "bfloat16", added_in(DTYPES["bfloat16"]), "error "),
    ],
)
def test_what_is_wrong_is_named(
    name: str, operation: str, format_name: str, worse: Callable[..., Any], says: str
) -> None:
    trial, device = device_of(name)
    found, _ = selftest.check(Broken(trial, operation, format_name, worse), device, operation, format_name, 64)
    assert (found["verdict"], found["why"].startswith(says)) == ("wrong", True)


@FRAMEWORKS
def test_a_slow_format_is_named(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    trial, device = device_of(name)
    monkeypatch.setattr(selftest, "OPERATIONS", {"matmul": selftest.OPERATIONS["matmul"]})
    found = selftest.examine(slower(trial, "matmul", "bfloat16"), device, lambda text: None)
    notes = selftest.notes_on({"name": device, "fast": ["bfloat16"]}, found)
    assert any(
        f"{device}: the device reports units for bfloat16, but matmul in bfloat16 runs at" in note for note in notes
    )


@FRAMEWORKS
def test_settings_that_decide_how_precise_float32_products_are_can_be_read(name: str) -> None:
    settings = adapter_named(name).describe()["settings"]
    assert all(isinstance(value, str) for value in settings.values())
    assert settings


@FRAMEWORKS
def test_the_automatic_policy_is_what_the_kept_test_found(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("POLYAMP_CACHE", str(tmp_path))
    monkeypatch.setattr(selftest, "OPERATIONS", {one: selftest.OPERATIONS[one] for one in ("matmul", "conv")})
    monkeypatch.setattr(selftest, "WIDTHS", (64,))
    adapter = adapter_named(name)
    selftest.result_of(adapter, lambda text: None, again=True)
    (file,) = tmp_path.iterdir()
    saved = json.loads(file.read_text())
    for one in (each for findings in saved["devices"].values() for each in findings):
        one["speed"] = {"float16": 3.0, "bfloat16": 2.0}.get(one["format"], 1.0)
    file.write_text(json.dumps(saved))
    assert choose([adapter])[0] == "mixed_float16"
    for one in (each for findings in saved["devices"].values() for each in findings):
        one["verdict"] = "wrong" if (one["operation"], one["format"]) == ("conv", "float16") else "right"
    file.write_text(json.dumps(saved))
    assert choose([adapter])[0] == "mixed_bfloat16"


MIXED = """
import torch
torch.backends.fp32_precision = "ieee"
torch.backends.cuda.matmul.fp32_precision = torch.backends.cudnn.conv.fp32_precision = "tf32"
from polyamp.adapters import adapter_named
print(adapter_named("torch").describe()["settings"])
"""


def test_switches_of_tf32_that_pytorch_refuses_to_read_are_reported() -> None:
    done = subprocess.run([sys.executable, "-c", MIXED], capture_output=True, text=True, check=True)
    assert done.stdout.count("unreadable: ") == 2
