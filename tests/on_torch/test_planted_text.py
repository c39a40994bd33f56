"""`polyamp.parity` calls every planted degradation of a language model worse, and equivalent what is not damaged."""

from __future__ import annotations

import pytest

from polyamp.equivalence.comparison import Comparison
from support import planted_text
from support.planted_text_torch import predict

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::polyamp.PolyampWarning"),  # what breaks here reports itself too
]


@pytest.fixture(scope="module")
def compared() -> dict[str, Comparison]:
    return planted_text.compared(predict)


@pytest.mark.parametrize("name", planted_text.POLICIES)
def test_what_is_damaged_is_worse_and_the_rest_is_equivalent(compared: dict[str, Comparison], name: str) -> None:
    assert compared[name].verdict == ("equivalent" if name == "undamaged" else "worse")
