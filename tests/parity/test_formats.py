"""Formats against the frameworks' own descriptions of them."""

from __future__ import annotations

import ml_dtypes
import pytest
import torch

from polyamp.formats import FORMATS


@pytest.mark.parametrize("name", ["bfloat16", "float8_e4m3fn", "float8_e5m2"])
def test_limits_are_those_of_ml_dtypes(name: str) -> None:
    ours, theirs = FORMATS[name], ml_dtypes.finfo(name)
    assert (ours.bits, ours.max, ours.epsilon) == (theirs.bits, float(theirs.max), float(theirs.eps))
    assert ours.smallest_normal == float(theirs.smallest_normal)
    assert ours.smallest_subnormal == float(theirs.smallest_subnormal)


@pytest.mark.parametrize("name", sorted(set(FORMATS) - {"tensorfloat32"}))
def test_limits_are_those_of_torch(name: str) -> None:
    ours, theirs = FORMATS[name], torch.finfo(getattr(torch, name))
    assert (ours.bits, ours.max, ours.epsilon) == (theirs.bits, theirs.max, theirs.eps)
    assert ours.smallest_normal == theirs.smallest_normal
