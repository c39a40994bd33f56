"""The PyTorch adapter passes the suite that every adapter passes, whatever it leaves a skip to."""

from typing import Any

import pytest

from polyamp import LossScale, policy
from support.conformance import Conformance
from support.harness import random_arrays, same_bits
from support.harness_torch import TorchHarness
from support.torch_steps import DEVICES

SKIPS = {  # operators round in another way
    "the host": TorchHarness(),
    "the optimizer's kernel": TorchHarness(fused=True, on_device=True),
}


class TestTorch(Conformance):
    @pytest.fixture(params=SKIPS.values(), ids=SKIPS)
    def harness(self, request: pytest.FixtureRequest) -> TorchHarness:
        harness: TorchHarness = request.param
        return harness


class TestTorchOnCuda(Conformance):
    pytestmark = pytest.mark.gpu

    @pytest.fixture(params=[False, True], ids=["unfused", "fused"])
    def harness(self, request: pytest.FixtureRequest) -> TorchHarness:
        return TorchHarness("cuda", fused=request.param, fused_step=False)


class TestFusedTorch(Conformance):
    @pytest.fixture(params=DEVICES)
    def harness(self, request: pytest.FixtureRequest) -> TorchHarness:
        return TorchHarness(request.param, fused_step=True)

    @pytest.mark.parametrize("optimizer", ["sgd", "adam"])
    def test_scaling_by_a_power_of_two_changes_no_bit(self, harness: TorchHarness, optimizer: Any) -> None:
        """Between two scales. The plain optimizer, which the suite compares with, rounds in another order."""
        sessions = [
            harness.start(random_arrays(0), policy("mixed_float16"), optimizer=optimizer, loss_scale=scale)
            for scale in (LossScale.fixed(1.0), LossScale())
        ]
        for seed in range(5):
            for session in sessions:
                session.step(random_arrays(seed))
        assert same_bits(*(session.weights() for session in sessions))
