"""`polyamp.parity` calls every planted degradation of a language model worse, and equivalent what is not damaged."""

from __future__ import annotations

import pytest

import polyamp
from polyamp import LossScale
from polyamp.equivalence.comparison import Comparison
from support.planted_text import predict

POLICIES = {
    "undamaged": polyamp.policy("mixed_float16"),
    "norm in 16 bits": polyamp.policy("mixed_float16", rules={"norm/*": "lower"}),
    "log softmax in 16 bits": polyamp.policy("mixed_float16", rules={"probabilities/*": "lower"}),
    "scale too small": polyamp.policy("mixed_float16", loss_scale=LossScale.fixed(2.0**-20)),
}

pytestmark = pytest.mark.filterwarnings("ignore::polyamp.PolyampWarning")  # what breaks here reports itself too


@pytest.fixture(scope="module")
def compared() -> dict[str, Comparison]:
    found = polyamp.parity(predict, [*POLICIES.values()], seeds=5, margin="1%", controls=False, progress=False)
    return dict(zip(POLICIES, found.comparisons, strict=True))


@pytest.mark.parametrize("name", POLICIES)
def test_what_is_damaged_is_worse_and_the_rest_is_equivalent(compared: dict[str, Comparison], name: str) -> None:
    assert compared[name].verdict == ("equivalent" if name == "undamaged" else "worse")
