"""The NumPy backend passes the suite that polyamp's own adapters pass: ``pytest examples/new_backend``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from polyamp_numpy import SGD, Adam, LossScaled

import polyamp
from polyamp.testing import Arrays, Conformance


class NumpySession:
    def __init__(self, holder: LossScaled) -> None:
        self.holder = holder

    def step(self, grads: Arrays) -> polyamp.StepResult:
        scale = np.float32(self.holder.state.scale)
        with np.errstate(over="ignore"):  # some tests make gradients overflow
            scaled = {name: (grad * scale).astype(self.holder.stored[name].dtype) for name, grad in grads.items()}
        self.holder.step(scaled)
        return self.holder.last_step

    def weights(self) -> dict[str, Any]:
        return {name: param.copy() for name, param in self.holder.stored.items()}

    def memory(self) -> dict[str, Any]:
        masters = {f"master.{name}": param for name, param in self.holder.inner.params.items()}
        return {name: array.copy() for name, array in (masters | self.holder.inner.memory).items()}

    def load_loss_scale(self, saved: Mapping[str, Any]) -> None:
        polyamp.load_loss_scale(self.holder, saved)


class NumpyHarness:
    name = "numpy"

    def start(
        self,
        weights: Arrays,
        policy: polyamp.Policy,
        *,
        optimizer: str = "sgd",
        learning_rate: float = 0.1,
        **options: Any,
    ) -> NumpySession:
        kind = {"sgd": SGD, "adam": Adam}[optimizer]
        params = {name: array.astype(policy.param) for name, array in weights.items()}
        return NumpySession(polyamp.wrap_optimizer(kind(params, learning_rate), policy, **options))

    def plain_optimizer(self) -> SGD:
        return SGD({"w": np.ones(2, np.float32)}, 0.1)

    def tree(self, arrays: Arrays) -> dict[str, Any]:
        return dict(arrays)

    def trainable(self, array: Any) -> Any:
        return array.copy()

    def arrays(self, tree: Any) -> dict[str, Any]:
        return dict(tree)


class TestNumpyBackend(Conformance):
    @pytest.fixture
    def harness(self) -> NumpyHarness:
        return NumpyHarness()
