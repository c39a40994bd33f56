"""The Keras adapter passes the suite that every adapter passes, on the backend that Keras runs on."""

from __future__ import annotations

import pytest

from polyamp.testing import Conformance
from support.harness_keras import KerasHarness


@pytest.mark.backends
class TestKeras(Conformance):
    @pytest.fixture
    def harness(self) -> KerasHarness:
        return KerasHarness()
