"""The TensorFlow adapter passes the suite that every adapter passes."""

import pytest

from support.conformance import Conformance
from support.harness_tensorflow import TensorFlowHarness


class TestTensorFlow(Conformance):
    @pytest.fixture
    def harness(self) -> TensorFlowHarness:
        return TensorFlowHarness()
