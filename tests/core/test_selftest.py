"""The self-test names what is wrong or slow on a device, and finds nothing on one that is right.

NumPy is the device: it computes in float32 and rounds. Its results are replaced by those of broken devices.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from polyamp import selftest
from polyamp.adapters import AdapterTable
from support.broken_devices import DTYPES, Broken, Trial, added_in, numpy_trial, slower, with_nan, with_rounded_inputs


def check(trial: Trial, operation: str, format_name: str) -> dict[str, Any]:
    """What is found about an operation in small sizes."""
    return selftest.check(trial, "cpu", operation, format_name, 64)[0]


@pytest.mark.parametrize("format_name", selftest.TESTED)
@pytest.mark.parametrize("operation", selftest.OPERATIONS)
def test_a_device_that_rounds_once_is_right(operation: str, format_name: str) -> None:
    found = check(numpy_trial, operation, format_name)
    assert (found["verdict"], found["why"]) == ("right", "")


def test_a_convolution_that_returns_nan_is_named() -> None:
    found = check(Broken(numpy_trial, "conv", "float16", with_nan), "conv", "float16")
    assert (found["verdict"], found["why"], found["error"]) == ("wrong", "NaN or inf from finite numbers", None)


@pytest.mark.parametrize("format_name", ["float16", "bfloat16"])
def test_a_product_that_adds_in_16_bits_is_named(format_name: str) -> None:
    broken = Broken(numpy_trial, "matmul", format_name, added_in(DTYPES[format_name]))
    found = check(broken, "matmul", format_name)
    assert found["verdict"] == "wrong"
    assert found["why"].startswith("error ")
    assert "at depth 409" in found["why"]  # 4096, or 4093


@pytest.mark.parametrize("format_name", ["float16", "bfloat16"])
def test_a_sum_that_adds_in_16_bits_is_named(format_name: str) -> None:
    def add(result: np.ndarray[Any, Any], values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        return added_in(DTYPES[format_name])(result[:, None], values, np.ones((values.shape[1], 1)))[:, 0]

    found = check(Broken(numpy_trial, "sum", format_name, add), "sum", format_name)
    assert (found["verdict"], found["why"].split()[0]) == ("wrong", "error")


def test_an_error_beyond_rounding_is_named() -> None:
    broken = Broken(numpy_trial, "sum", "bfloat16", lambda result, values: 1.1 * result)
    found = check(broken, "sum", "bfloat16")
    assert (found["verdict"], found["why"].split()[0]) == ("wrong", "error")
    assert found["error"] == pytest.approx(0.1, rel=0.1)


def test_a_float32_product_in_tensorfloat32_is_right() -> None:
    broken = Broken(numpy_trial, "matmul", "float32", with_rounded_inputs(10))
    assert check(broken, "matmul", "float32")["verdict"] == "right"


@pytest.mark.parametrize(("format_name", "verdict"), [("float16", "not supported"), ("float32", "wrong")])
def test_what_a_framework_refuses_is_not_supported(format_name: str, verdict: str) -> None:
    def refuse(*arguments: object) -> Any:
        raise NotImplementedError("no kernel for 'Half'\nand more")

    found = check(refuse, "conv", format_name)
    assert (found["verdict"], found["why"]) == (verdict, "NotImplementedError: no kernel for 'Half'")


def examine(trial: Trial, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    monkeypatch.setattr(selftest, "OPERATIONS", {"matmul": selftest.OPERATIONS["matmul"]})
    return selftest.examine(trial, "cpu", lambda text: None)


def test_a_slow_format_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    found = examine(slower(numpy_trial, "matmul", "float16"), monkeypatch)
    speeds = {one["format"]: one["speed"] for one in found}
    assert speeds["float32"] == 1.0
    assert speeds["float16"] < 0.5
    for fast, says in (
        (["float16"], "the device reports units for float16, but matmul in float16 runs at"),
        ([], "no units for float16"),
    ):
        assert any(says in note for note in selftest.notes_on({"name": "cpu", "fast": fast}, found))


def finding(operation: str, format_name: str, verdict: str = "right", speed: float = 1.0) -> dict[str, Any]:
    return {"operation": operation, "format": format_name, "verdict": verdict, "speed": speed}


def test_right_formats_have_right_products_and_convolutions_and_nothing_wrong() -> None:
    found = [
        *(finding(name, format_name) for name in ("matmul", "conv") for format_name in selftest.TESTED),
        finding("sum", "float16", "not supported"),
        finding("sum", "bfloat16", "wrong"),
    ]
    assert selftest.right_formats(found).keys() == {"float32", "float16"}
    found[4] = finding("conv", "float16", "not supported")
    assert selftest.right_formats(found).keys() == {"float32"}


def test_a_quick_operation_runs_many_times_between_two_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the time on a GPU would be that of the host, and the same in every format."""
    monkeypatch.setattr(selftest, "WIDTHS", (64,))
    turns: list[int] = []

    def trial(*arguments: Any) -> Any:
        result, run = numpy_trial(*arguments)
        return result, lambda times: turns.append(times) or run(1)

    examine(trial, monkeypatch)
    assert turns[0] == 1
    assert turns[-1] >= 2


# --- what is kept ----------------------------------------------------------------------------------------------------


@pytest.fixture
def kept_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the cache; a test takes a moment."""
    monkeypatch.setenv("POLYAMP_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(selftest, "OPERATIONS", {"sum": selftest.OPERATIONS["sum"]})
    monkeypatch.setattr(selftest, "WIDTHS", (64,))
    return tmp_path / "cache"


def outcome(counts: list[str], **changed: Any) -> dict[str, Any]:
    """Test a device of NumPy, and count the trials."""

    def trial(*arguments: Any) -> Any:
        counts.append(arguments[0])
        return numpy_trial(*arguments)

    again = changed.pop("again", False)
    described = {"version": "1", "devices": [{"name": "cpu (NumPy)", "fast": []}], "notes": [], **changed}
    verbs = {"describe": lambda: described, "trial": trial}
    return selftest.result_of(AdapterTable("mine", {}, owns=complex, verbs=verbs), counts.append, again=again)


def test_a_result_is_kept_and_read_again(kept_in: Path) -> None:
    first = outcome([])
    assert first["kept"] is None
    second = outcome(counts := [])
    assert (second["devices"], second["kept"], counts) == (first["devices"], str(*kept_in.iterdir()), [])
    assert outcome(counts, again=True)["kept"] is None
    assert "sum" in counts


@pytest.mark.parametrize(
    "changed",
    [
        {"version": "2"},
        {"settings": {"XLA_FLAGS": "--fast"}},
        {"devices": [{"name": "cuda:0 other", "fast": []}]},
    ],
)
def test_a_result_of_another_version_setting_or_device_is_not_used(kept_in: Path, changed: dict[str, Any]) -> None:
    outcome([])
    assert outcome([], **changed)["kept"] is None


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text[: len(text) // 2],
        lambda text: "",
        lambda text: "[]",
        lambda text: "\0" + text,
        lambda text: text.replace('"verdict"', '"other"'),
        lambda text: json.dumps({**json.loads(text), "devices": {"cpu (NumPy)": [1]}}),
        lambda text: json.dumps({**json.loads(text), "devices": None}),
    ],
)
def test_a_damaged_file_is_ignored(kept_in: Path, damage: Callable[[str], str]) -> None:
    outcome([])
    (file,) = kept_in.iterdir()
    file.write_text(damage(file.read_text()))
    assert outcome([])["kept"] is None
    assert outcome([])["kept"] == str(file)


def test_a_result_that_cannot_be_kept_is_returned(kept_in: Path) -> None:
    kept_in.write_text("not a folder")
    found = outcome([])
    assert found["devices"]
    assert "not kept" in found["notes"][-1]
    assert "POLYAMP_CACHE" in found["notes"][-1]


# --- the command -----------------------------------------------------------------------------------------------------

ADAPTER = """
import os, time
import numpy as np
from polyamp.adapters import AdapterTable
from support.broken_devices import Broken, numpy_trial, with_nan

def trial(operation, arrays, format_name, device):
    if (operation, format_name) == ("conv", "float16"):
        {fault}
    return numpy_trial(operation, arrays, format_name, device)

device = {{"name": "cpu (NumPy)", "fast": []}}
described = {{"version": np.__version__, "devices": [device], "notes": []}}
adapter = AdapterTable("mine", {{}}, owns=complex, verbs={{"describe": lambda: described, "trial": trial}})
"""
COMMAND = """
import polyamp.doctor, polyamp.selftest
polyamp.doctor._LIMIT, polyamp.selftest.WIDTHS, polyamp.selftest.DEPTHS = {limit}, (64,), (256, 253)
from polyamp.cli import main
main()
"""


def doctor(folder: Path, fault: str, *more: str, limit: float = 60.0) -> subprocess.CompletedProcess[str]:
    """Run the command beside the package of another adapter."""
    (folder / "mine_adapter.py").write_text(ADAPTER.format(fault=fault))
    (folder / "mine-1.dist-info").mkdir(exist_ok=True)
    (folder / "mine-1.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: mine\nVersion: 1\n")
    (folder / "mine-1.dist-info" / "entry_points.txt").write_text("[polyamp.backends]\nmine = mine_adapter:adapter\n")
    paths = os.pathsep.join([str(folder), str(Path(__file__).parents[1])])
    environment = {**os.environ, "PYTHONPATH": paths, "POLYAMP_CACHE": str(folder / "cache")}
    command = [sys.executable, "-c", COMMAND.format(limit=limit), "doctor", "--test", "mine", *more]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def test_the_command_prints_a_table_and_keeps_it(tmp_path: Path) -> None:
    done = doctor(tmp_path, "pass")
    assert (done.returncode, "Traceback" in done.stderr) == (0, False), done.stdout
    assert all(f"│ {operation} " in done.stdout for operation in selftest.OPERATIONS)
    again = doctor(tmp_path, "pass", "--json")
    found = json.loads(again.stdout)
    assert found["frameworks"]["mine"]["installed"]
    assert Path(found["selftest"]["mine"]["kept"]).parent == tmp_path / "cache"
    speeds = selftest.right_formats(found["selftest"]["mine"]["devices"]["cpu (NumPy)"])
    assert speeds.keys() == set(selftest.TESTED)


@pytest.mark.parametrize(
    ("fault", "limit", "says"),
    [
        (
            "return Broken(numpy_trial, 'conv', 'float16', with_nan)(operation, arrays, format_name, device)",
            60,
            "NaN or inf",
        ),
        ("os.abort()", 60, "the process ended with exit code -6, in conv in float16 on cpu"),
        ("time.sleep(600)", 5, "there was no answer for 5 seconds, in conv in float16 on cpu"),
    ],
    ids=["wrong", "crash", "hang"],
)
def test_what_is_wrong_makes_the_exit_code_1(tmp_path: Path, fault: str, limit: float, says: str) -> None:
    done = doctor(tmp_path, fault, limit=limit)
    assert done.returncode == 1
    assert says in done.stdout
    assert "Traceback" not in done.stderr
