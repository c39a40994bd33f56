"""Small programs that float32 computes well: the engines keep all of them, forward and backward."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from support.traps import TRAPS
from support.traps.engines import ENGINES, FORMATS, NATIVE, torch_autocast, torch_native
from support.traps.verdict import KEPT, expected, verdict

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "benchmarks"))

from traps import PAGE, page  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of NumPy, about inf that some traps have
RESULT = json.loads((ROOT / "benchmarks" / "results" / "traps_cpu.json").read_text())

# These follow the flow rule. The last runs the programs in only one format, since it traces them again.
BOTH_FORMATS = ("torch rewrite", "JAX autocast", "TensorFlow rewrite")
CASES = [(engine, low) for engine in BOTH_FORMATS for low in FORMATS] + [("JAX value_and_grad", "float16")]
# The gradients of a solver's steps add up in 16 bits.
LOST = {("steps of a solver", "TensorFlow rewrite", "bfloat16")}
LOST_BY_OTHERS = {row["trap"] for row in RESULT["rows"] if row["engine"] in NATIVE and row["bfloat16"] != KEPT}


def case(name: str, engine: str, low: str) -> Any:
    """Return a case; in bfloat16, traps that every engine keeps run only at night."""
    nightly = low == "bfloat16" and name not in LOST_BY_OTHERS
    return pytest.param(name, engine, low, marks=pytest.mark.long if nightly else ())


@pytest.mark.parametrize(("name", "engine", "low"), [case(name, *one) for name in TRAPS for one in CASES])
def test_traps_are_kept(name: str, engine: str, low: str) -> None:
    assert (verdict(name, ENGINES[engine], low) == KEPT) != ((name, engine, low) in LOST)


@pytest.mark.parametrize("low", FORMATS)
@pytest.mark.parametrize("name", TRAPS)
def test_ambient_autocast_of_torch_keeps_what_native_keeps(name: str, low: str) -> None:
    if verdict(name, torch_native, low) == KEPT:
        assert verdict(name, torch_autocast, low) == KEPT


@pytest.mark.parametrize("name", TRAPS)
def test_traps_are_finite_in_float32(name: str) -> None:
    for array in expected(name):
        assert array.dtype == "float32"
        assert abs(array).max() < 2.0**127  # NaN is not


def test_all_were_measured() -> None:
    assert {row["trap"] for row in RESULT["rows"]} == set(TRAPS)


def test_the_document_is_what_was_measured() -> None:
    assert PAGE.read_text() == page(RESULT)


def test_the_document_says_that_all_are_kept() -> None:
    rows = {(row["trap"], row["engine"]): row for row in RESULT["rows"]}
    lost = {(name, *case) for name in TRAPS for case in CASES if rows[name, case[0]][case[1]] != KEPT}
    assert lost == LOST
