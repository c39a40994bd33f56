"""The TensorFlow adapter passes the suite that every adapter passes."""

from __future__ import annotations

import pytest
from harness_tensorflow import TensorFlowHarness

from polyamp.testing import Conformance


class TestTensorFlow(Conformance):
    @pytest.fixture
    def harness(self) -> TensorFlowHarness:
        return TensorFlowHarness()
