"""`polyamp.parity` calls every planted degradation of a Keras network worse, and equivalent what is not damaged.

The task is that of ``tests/parity/test_planted_degradations.py``.
"""

from __future__ import annotations

from typing import Any

import pytest

import polyamp
from polyamp import LossScale
from polyamp.equivalence.comparison import Comparison
from support import planted_keras

SEEDS, MARGIN = 6, "25%"
POLICIES = {
    "undamaged": polyamp.policy("mixed_float16"),
    "norm in 16 bits": polyamp.policy("mixed_float16", rules={"norm": "lower"}),
    "log softmax in 16 bits": polyamp.policy("mixed_float16", rules={"probabilities": "lower"}),
    "scale too small": polyamp.policy("mixed_float16", loss_scale=LossScale.fixed(2.0**-10)),
}

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::polyamp.PolyampWarning"),  # what breaks here reports itself too
]


def compare(train: Any, policies: list[polyamp.Policy]) -> list[Comparison]:
    found = polyamp.parity(train, policies, seeds=SEEDS, margin=MARGIN, controls=False, progress=False)
    return list(found.comparisons)


@pytest.fixture(scope="module")
def compared() -> dict[str, Comparison]:
    return dict(zip(POLICIES, compare(planted_keras.classify, [*POLICIES.values()]), strict=True))


@pytest.mark.parametrize("name", POLICIES)
def test_what_is_damaged_is_worse_and_the_rest_is_equivalent(compared: dict[str, Comparison], name: str) -> None:
    assert compared[name].verdict == ("equivalent" if name == "undamaged" else "worse")
    assert compared[name].difference is not None  # judged by its numbers: no run diverged


@pytest.mark.parametrize(
    ("train", "verdict"),
    [
        (planted_keras.classify_with_plain_adam, "equivalent"),
        (planted_keras.classify_with_adam, "worse"),
        (planted_keras.classify_without_epsilon, "worse"),
    ],
    ids=["plain", "second moments in 16 bits", "epsilon in 16 bits"],
)
def test_an_optimizer_that_keeps_its_numbers_in_16_bits_is_worse(train: Any, verdict: str) -> None:
    (found,) = compare(train, [polyamp.policy("mixed_float16")])
    assert found.verdict == verdict
