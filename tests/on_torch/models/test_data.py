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


def test_boxes_of_scenes_are_those_of_the_masks(data: Any) -> None:
    for scene in data.scenes(3):
        for box, mask in zip(scene.boxes, scene.masks, strict=True):
            rows, columns = np.nonzero(mask)
            assert list(box) == [columns.min(), rows.min(), columns.max() + 1, rows.max() + 1]
        assert scene.masks.sum(0).max() == 1, "digits do not overlap"
        assert scene.pixels[scene.masks.any(0)].min() > 0.3


def test_utterances_end_in_silence_and_have_as_many_speakers_as_labels(data: Any) -> None:
    spoken = data.utterances(speakers=2, frames=60)
    assert spoken.train.y.shape == (3000, 2)
    assert spoken.train.y.min() == 1
    assert spoken.train.y.max() == data.SPEAKERS
    assert np.abs(spoken.test.x[:, -2:]).max() == 0  # two vowels have at most 58 frames


def test_translations_end_and_are_padded(data: Any) -> None:
    pairs = data.pairs()
    for side in pairs.train:
        ends = (side == data.END).argmax(1)
        assert ((side == data.END).sum(1) == 1).all()
        assert all((row[end + 1 :] == data.PAD).all() for row, end in zip(side, ends, strict=True))
    assert pairs.train.y.max() < pairs.classes
    assert pairs.train.x.max() < pairs.words


def test_the_seed_decides_the_batches_and_every_example_comes_once_in_an_epoch(data: Any) -> None:
    part = data.Part(np.zeros(12), np.zeros(12))
    first, again, other = (np.array(data.batches_of(part, 4, 6, seed)) for seed in (0, 0, 1))
    assert (first == again).all()
    assert (first != other).any()
    assert sorted(first[:3].ravel()) == sorted(first[3:].ravel()) == list(range(12))
