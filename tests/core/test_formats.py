"""Formats: their limits are those of IEEE 754, and their names are those that people write."""

from typing import Any

import numpy as np
import pytest

import polyamp
from polyamp.formats import FORMATS, format_of


@pytest.mark.parametrize("name", ["float16", "float32", "float64"])
def test_limits_are_those_of_numpy(name: str) -> None:
    ours, theirs = FORMATS[name], np.finfo(name)
    assert ours.bits == theirs.bits
    assert ours.max == float(theirs.max)
    assert ours.smallest_normal == float(theirs.smallest_normal)
    assert ours.smallest_subnormal == float(theirs.smallest_subnormal)
    assert ours.epsilon == float(theirs.eps)


@pytest.mark.parametrize("name", FORMATS)
def test_fields_agree_with_each_other(name: str) -> None:
    entry = FORMATS[name]
    assert entry.name == name
    assert entry.source
    used = 1 + entry.exponent_bits + entry.mantissa_bits
    assert used == (19 if name == "tensorfloat32" else entry.bits)  # TF32 keeps 19 bits of a 32-bit word
    assert entry.is_low == (entry.bits <= 16)
    assert entry.smallest_normal == 2.0 ** (2 - 2 ** (entry.exponent_bits - 1))


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("float16", "float16"),
        ("FP16", "float16"),
        (" half ", "float16"),
        ("bf16", "bfloat16"),
        ("f32", "float32"),
        ("single", "float32"),
        ("double", "float64"),
        ("tf32", "tensorfloat32"),
        ("float8_e4m3fn", "float8_e4m3fn"),
    ],
)
def test_names_and_short_forms(text: str, name: str) -> None:
    assert format_of(text).name == name


@pytest.mark.parametrize("text", ["", "float15", "int8", "float 16"])
def test_an_unknown_name_lists_the_known_ones(text: str) -> None:
    with pytest.raises(polyamp.errors.InvalidValueError, match="unknown number format") as caught:
        format_of(text, where="policy(compute=)")
    assert "policy(compute=)" in str(caught.value)
    assert all(name in str(caught.value) for name in FORMATS)


@pytest.mark.parametrize("value", [None, 16, np.float16])
def test_a_format_is_named_by_a_string(value: Any) -> None:
    with pytest.raises(polyamp.errors.InvalidTypeError, match="string"):
        format_of(value)
