"""A polyamp adapter for NumPy, whose "optimizers" are the two classes below: everything a new backend has to write."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

import polyamp
from polyamp.formats import format_of
from polyamp.scale import report_limits

Arrays = dict[str, NDArray[Any]]


class SGD:
    """Gradient descent on a dict of arrays, in place."""

    def __init__(self, params: Arrays, learning_rate: float) -> None:
        self.params, self.learning_rate = params, np.float32(learning_rate)
        self.memory: Arrays = {}

    def step(self, grads: Arrays) -> None:
        for name, param in self.params.items():
            param -= self.learning_rate * grads[name]


class Adam(SGD):
    """Adam (Kingma and Ba, ICLR 2015) with the usual constants."""

    def __init__(self, params: Arrays, learning_rate: float) -> None:
        super().__init__(params, learning_rate)
        self.memory = {f"{k}.{name}": np.zeros_like(p) for k in "mv" for name, p in params.items()}
        self.memory["steps"] = np.zeros((), np.int64)

    def step(self, grads: Arrays) -> None:
        self.memory["steps"] += 1
        steps = self.memory["steps"]
        for name, param in self.params.items():
            m, v, grad = self.memory[f"m.{name}"], self.memory[f"v.{name}"], grads[name]
            m += np.float32(0.1) * (grad - m)
            v += np.float32(0.001) * (grad * grad - v)
            scale = np.float32(1) / (np.sqrt(v / np.float32(1 - 0.999**steps)) + np.float32(1e-8))
            param -= self.learning_rate * (m / np.float32(1 - 0.9**steps)) * scale


class LossScaled:
    """A wrapped optimizer: unscale in float32, test, clip, update or skip, advance the scale."""

    def __init__(self, inner: SGD, settings: polyamp.LossScale, max_grad_norm: float | None) -> None:
        self.inner, self.settings, self.max_grad_norm = inner, settings, max_grad_norm
        self.state = settings.initial_state()
        self.stored = inner.params  # 16-bit parameters get float32 master weights, which the inner optimizer updates
        inner.params, inner.memory = _widened(inner.params), _widened(inner.memory)

    def step(self, scaled: Arrays) -> None:
        finite = not self.settings.check or all(bool(np.isfinite(grad).all()) for grad in scaled.values())
        if finite:
            self.inner.step(self._clip({n: g.astype(np.float32) / self._divisor() for n, g in scaled.items()}))
            for name, param in self.stored.items():
                param[...] = self.inner.params[name]
        self.state = polyamp.advance(self.settings, self.state, finite)
        report_limits(self.settings, self.state)

    @property
    def last_step(self) -> polyamp.StepResult:
        return polyamp.StepResult(self.state)

    def _divisor(self) -> np.float32:
        return np.float32(self.state.scale)

    def _clip(self, grads: Arrays) -> Arrays:
        if self.max_grad_norm is None:
            return grads
        norm = np.sqrt(sum(np.sum(np.square(grad)) for grad in grads.values()))
        limit = np.float32(self.max_grad_norm)
        return {name: grad * (limit / max(norm, limit)) for name, grad in grads.items()}


def _widened(arrays: Arrays) -> Arrays:
    is_half = {name: array.dtype == np.float16 for name, array in arrays.items()}
    return {name: array.astype(np.float32) if is_half[name] else array for name, array in arrays.items()}


class NumpyAdapter:
    """The required methods of `polyamp.adapters.Adapter`, and one optional verb, which `polyamp.health` uses."""

    name = "numpy"
    operations: Mapping[str, str] = {"matmul": "matmul", "exp": "exp", "add": "add", "sum": "sum"}

    def owns(self, obj: object) -> bool:
        return False

    def describe(self) -> dict[str, Any]:
        return {"version": np.__version__, "devices": [{"name": "cpu", "fast": []}], "notes": []}

    def cast(self, tree: Any, format_name: str, /) -> Any:
        if isinstance(tree, dict):
            return {key: self.cast(value, format_name) for key, value in tree.items()}
        if isinstance(tree, np.ndarray) and np.issubdtype(tree.dtype, np.floating):
            with np.errstate(over="ignore"):  # beyond the format's range the result is inf, as in IEEE 754
                return tree.astype(format_of(format_name).name)
        return tree

    def wrap_optimizer(
        self, optimizer: Any, policy: polyamp.Policy, *, loss_scale: polyamp.LossScale, max_grad_norm: float | None
    ) -> LossScaled:
        if isinstance(optimizer, LossScaled):
            raise polyamp.errors.UsageError("this optimizer is wrapped already", fix="wrap it once")
        if not isinstance(optimizer, SGD):
            raise polyamp.errors.InvalidTypeError("not a polyamp_numpy optimizer", found=type(optimizer).__name__)
        return LossScaled(optimizer, loss_scale, max_grad_norm)

    def scale_loss(self, loss: Any, holder: LossScaled) -> Any:
        return np.float32(loss) * np.float32(holder.state.scale)

    def loss_scale_of(self, holder: LossScaled) -> tuple[polyamp.LossScale, polyamp.LossScaleState]:
        return holder.settings, holder.state

    def load_loss_scale(self, holder: LossScaled, saved: Mapping[str, Any]) -> LossScaled:
        holder.state = holder.settings.from_state_dict(saved)
        return holder


adapter = NumpyAdapter()
