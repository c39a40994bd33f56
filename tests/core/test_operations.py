"""The canonical table: complete, consistent with what its sources say, and shown as it is."""

import re

import pytest
from operations_page import PAGE, as_markdown

import polyamp
from polyamp.operations import CLASSES, OPERATIONS, SOURCES, by_native_name


def test_every_entry_is_complete_and_every_disagreement_is_decided_in_words() -> None:
    for name, entry in OPERATIONS.items():
        assert re.fullmatch(r"[a-z][a-z0-9]*(_[a-z0-9]+)*", name)
        assert entry.op_class in CLASSES, name
        assert set(entry.sources) <= set(SOURCES), name
        assert set(entry.sources.values()) <= {*CLASSES, "banned"}, name
        assert entry.op_class in entry.sources.values(), name
        if set(entry.sources.values()) != {entry.op_class}:
            assert len(entry.why) > 10, name
            assert entry.why.endswith("."), name


@pytest.mark.parametrize("source", SOURCES)
def test_every_source_is_used_and_names_a_version_or_date(source: str) -> None:
    assert any(source in entry.sources for entry in OPERATIONS.values())
    assert source in ("range", "exact", "kernels") or re.search(r"\d", SOURCES[source])


@pytest.mark.parametrize(
    ("op_class", "names"),
    [
        ("lower", "matmul conv attention lstm_cell gru_cell rnn_cell"),
        (
            "full",
            "softmax log_softmax exp log pow sum mean cumsum norm cross_entropy mse_loss fft cholesky interpolate",
        ),
        ("inner", "layer_norm batch_norm group_norm instance_norm rms_norm avg_pool sigmoid tanh erf"),
        ("promote", "concat stack scatter"),
        ("follow", "add sub mul div gelu silu elu dropout"),
        ("neutral", "reshape transpose slice gather embedding where maximum relu max_pool compare"),
        ("keep", "integer random cast shape while_loop cond"),
    ],
)
def test_the_contract(op_class: str, names: str) -> None:
    assert {OPERATIONS[name].op_class for name in names.split()} == {op_class}


def test_the_document_is_current() -> None:
    assert PAGE.read_text() == as_markdown(), "run benchmarks/operations_page.py"


def test_native_names_are_turned_round() -> None:
    assert by_native_name({"matmul": "mm  bmm", "exp": "exp"}) == {"mm": "matmul", "bmm": "matmul", "exp": "exp"}


@pytest.mark.parametrize(
    ("natives", "says"),
    [
        ({"matmull": "mm"}, "unknown canonical.*\n.*\n.*matmull"),
        ({"matmul": "mm", "conv": "mm"}, "two canonical.*\n.*\n.*mm"),
    ],
)
def test_a_wrong_native_map_is_refused(natives: dict[str, str], says: str) -> None:
    with pytest.raises(polyamp.errors.InvalidValueError, match=says):
        by_native_name(natives)
