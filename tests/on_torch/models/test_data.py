"""The data of the founding tables' models: real, the same every time, and in the stated shapes."""

from __future__ import annotations

import doctest
import importlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

EXAMPLES = Path(__file__).parents[3] / "examples"


@pytest.fixture
def data(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    return importlib.import_module("models.data")


@pytest.mark.parametrize("name", ["data", "founding"])
def test_the_examples_of_the_docstrings_hold(data: Any, name: str) -> None:
    found = doctest.testmod(importlib.import_module(f"models.{name}"))
    assert found.attempted
    assert not found.failed


def test_no_test_image_is_among_those_that_train(data: Any) -> None:
    digits = data.images(size=28)
    trained = {image.tobytes() for image in digits.train.x}
    assert sum(image.tobytes() in trained for image in digits.test.x) == 0
    assert np.bincount(digits.test.y).min() > 200


def test_the_seed_decides_the_batches_and_every_example_comes_once_in_an_epoch(data: Any) -> None:
    part = data.Part(np.zeros(12), np.zeros(12))
    first, again, other = (np.array(data.batches_of(part, 4, 6, seed)) for seed in (0, 0, 1))
    assert (first == again).all()
    assert (first != other).any()
    assert sorted(first[:3].ravel()) == sorted(first[3:].ravel()) == list(range(12))
