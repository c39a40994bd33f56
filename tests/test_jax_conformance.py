"""The JAX adapter passes the suite that every adapter passes."""

from __future__ import annotations

import pytest
from harness_jax import JaxHarness

from polyamp.testing import Conformance


class TestJax(Conformance):
    @pytest.fixture
    def harness(self) -> JaxHarness:
        return JaxHarness()
