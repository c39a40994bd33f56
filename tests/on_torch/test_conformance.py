"""The PyTorch adapter passes the suite that every adapter passes, whatever it leaves a skip to."""

from __future__ import annotations

import pytest

from polyamp.testing import Conformance
from support.harness_torch import TorchHarness

SKIPS = {  # operators round in another way
    "the host": TorchHarness(),
    "the optimizer's kernel": TorchHarness(fused=True, on_device=True),
}


class TestTorch(Conformance):
    @pytest.fixture(params=SKIPS.values(), ids=SKIPS)
    def harness(self, request: pytest.FixtureRequest) -> TorchHarness:
        harness: TorchHarness = request.param
        return harness
