"""The JAX adapter passes the suite that every adapter passes."""

import pytest

from support.conformance import Conformance
from support.harness_jax import JaxHarness


class TestJax(Conformance):
    @pytest.fixture
    def harness(self) -> JaxHarness:
        return JaxHarness()
