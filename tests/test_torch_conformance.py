"""The PyTorch adapter passes the suite that every adapter passes."""

from __future__ import annotations

import pytest
from harness_torch import TorchHarness

from polyamp.testing import Conformance


class TestTorch(Conformance):
    @pytest.fixture
    def harness(self) -> TorchHarness:
        return TorchHarness()
