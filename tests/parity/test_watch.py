"""A watched step is explained in every framework, and not changed."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tensorflow as tf
import torch

import polyamp
from polyamp.diagnosis.diagnose import Verdict

W = np.full((4, 3), 0.1, np.float32)
X = np.ones((8, 4), np.float32)
BAD = X * 6e4  # the forward product is within float16, but not its gradients


class Watched:
    """A watched step of one framework, and its results."""

    def __init__(self, **options: Any) -> None:
        self.verdicts: list[Verdict] = []
        self.options = {"on_verdict": self.verdicts.append, "policy": "mixed_float16"} | options


class TorchStep(Watched):
    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.weight = torch.nn.Parameter(torch.tensor(W))
        self.opt = polyamp.wrap_optimizer(torch.optim.SGD([self.weight], lr=0.1), "mixed_float16")
        self.step = polyamp.watch(self.train, self.opt, **self.options)

    def train(self, x: torch.Tensor) -> None:
        with polyamp.autocast("mixed_float16"):
            loss = (x @ self.weight).float().square().mean()
        self.opt.backward(loss)
        self.opt.step()
        self.opt.zero_grad()

    def __call__(self, x: Any) -> None:
        self.step(torch.tensor(x))

    def weights(self) -> Any:
        return self.weight.detach().numpy()


class JaxStep(Watched):
    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        tx = polyamp.wrap_optimizer(optax.sgd(0.1), "mixed_float16")
        self.params = {"w": jnp.array(W)}
        self.state = tx.init(self.params)

        @functools.partial(jax.jit, donate_argnums=(0, 1))
        def train(params: Any, opt_state: Any, x: Any) -> Any:
            def loss_fn(params: Any, x: Any) -> Any:
                return ((x @ params["w"]).astype(jnp.float32) ** 2).mean()

            loss, grads = polyamp.value_and_grad(loss_fn, "mixed_float16")(opt_state, params, x)
            updates, opt_state = tx.update(grads, opt_state, params)
            return optax.apply_updates(params, updates), opt_state, loss

        self.step = polyamp.watch(train, **self.options)

    def __call__(self, x: Any) -> None:
        self.params, self.state, _ = self.step(self.params, self.state, jnp.array(x))

    def weights(self) -> Any:
        return np.asarray(self.params["w"])


class TensorFlowStep(Watched):
    def __init__(self, **options: Any) -> None:
        from polyamp.backends.tensorflow import LossScaler

        super().__init__(**options)
        self.weight, self.scaler = tf.Variable(W), LossScaler("mixed_float16")
        sgd = tf.compat.v1.train.GradientDescentOptimizer(0.1)

        def train(x: Any) -> Any:
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.square(x @ self.weight))
                scaled = self.scaler.scale(loss)
            self.scaler.step(sgd, [(tape.gradient(scaled, self.weight), self.weight)])
            return loss

        self.step = polyamp.watch(polyamp.rewrite(train, policy="mixed_float16"), self.scaler, **self.options)

    def __call__(self, x: Any) -> None:
        self.step(tf.constant(x))

    def weights(self) -> Any:
        return self.weight.numpy()


STEPS: dict[str, Callable[..., Any]] = {"torch": TorchStep, "jax": JaxStep, "tensorflow": TensorFlowStep}
steps = pytest.mark.parametrize("kind", STEPS)


@steps
def test_a_run_of_skips_gets_one_verdict(kind: str) -> None:
    watched = STEPS[kind]()
    for _ in range(9):
        watched(X)
    assert watched.verdicts == []
    for _ in range(14):
        watched(BAD)
    assert [verdict.first is None for verdict in watched.verdicts] == [False]
    assert watched.verdicts[0].recording.scale == 2.0**10  # after six skips: the scale of the step that is checked
    for x in (X, *[BAD] * 8):
        watched(x)
    assert [verdict.first is None for verdict in watched.verdicts] == [False, False]


@steps
def test_watching_changes_nothing(kind: str) -> None:
    watched, plain = STEPS[kind](after=2), STEPS[kind](after=1000)
    for x in (X, BAD, BAD, BAD, BAD, X, X):
        watched(x)
        plain(x)
    assert (len(watched.verdicts), len(plain.verdicts)) == (1, 0)
    assert watched.weights().tobytes() == plain.weights().tobytes()


def test_a_verdict_is_a_warning_where_nobody_is_to_have_it() -> None:
    watched = TorchStep(on_verdict=None)
    for _ in range(7):
        watched(BAD)
    with pytest.warns(polyamp.PolyampWarning, match=r"(?s)skipped in a row.*loss scale 2\^9.*verdict: "):
        watched(BAD)
