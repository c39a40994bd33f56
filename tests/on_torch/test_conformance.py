"""The PyTorch adapter passes the suite that every adapter passes."""

from __future__ import annotations

import pytest

from polyamp.testing import Conformance
from support.harness_torch import TorchHarness


class TestTorch(Conformance):
    @pytest.fixture
    def harness(self) -> TorchHarness:
        return TorchHarness()
