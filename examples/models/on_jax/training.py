"""Train and evaluate any flax model under any policy: the step and the loop that the models of this folder share.

>>> import polyamp
>>> from models.data import images
>>> class Linear(linen.Module):
...     @linen.compact
...     def __call__(self, x, train):
...         return linen.Dense(10)(x.reshape(len(x), -1))
>>> task = Task(Linear(), cross_entropy, optax.adamw(0.01))
>>> policy = polyamp.policy("mixed_bfloat16")
>>> found = classify(task, images(size=8), policy, seed=0, size=50, steps=30)
>>> found["accuracy"] > 0.5
True
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
from flax import linen

import polyamp
from models.data import Data, batches_of
from polyamp.backends.jax import apply_gradients, select

STATISTICS = "batch_stats"
"""Flax's collection of the running means and variances of batch norms."""
MAX_GRAD_NORM = 1.0


class Task(NamedTuple):
    """What is trained. It is hashable: JAX compiles one program for each task and policy."""

    model: linen.Module
    loss_of: Callable[[Any, Any], jax.Array]
    """Returns the mean loss of the model's outputs and the labels."""
    optimizer: optax.GradientTransformation


class State(NamedTuple):
    params: Any
    statistics: Any
    opt_state: Any


def cross_entropy(scores: jax.Array, labels: jax.Array) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(scores, labels).mean()


def adam(rate: float, steps: int) -> optax.GradientTransformation:
    """Return Adam whose learning rate rises for a fifth of the steps and then falls to 0 along a cosine."""
    return optax.adam(optax.warmup_cosine_decay_schedule(0.0, rate, steps // 5, steps), b2=0.99)


def optimizer_of(task: Task, policy: polyamp.Policy) -> optax.GradientTransformationExtraArgs:
    return polyamp.wrap_optimizer(task.optimizer, policy, max_grad_norm=MAX_GRAD_NORM)


@partial(jax.jit, static_argnames="task")
def initial(task: Task, inputs: tuple[Any, ...], seed: int) -> Any:
    """Return the model's variables, in float32."""
    return task.model.init(jax.random.key(seed), *inputs, train=False)


@partial(jax.jit, static_argnames=("task", "policy"), donate_argnames="state")
def step(
    task: Task, policy: polyamp.Policy, state: State, inputs: tuple[Any, ...], labels: Any, key: jax.Array
) -> tuple[State, jax.Array]:
    """Return the state after one update, and the loss before it. A skipped step leaves the statistics as they were."""
    tx = optimizer_of(task, policy)

    def loss_fn(params: Any, statistics: Any, inputs: tuple[Any, ...], labels: Any, key: jax.Array) -> Any:
        variables = {"params": params, STATISTICS: statistics}
        options = {"train": True, "mutable": [STATISTICS], "rngs": {"dropout": key}}
        outputs, changed = task.model.apply(variables, *inputs, **options)
        return task.loss_of(outputs, labels), changed.get(STATISTICS, statistics)

    loss_and_grads = polyamp.value_and_grad(loss_fn, policy, has_aux=True)
    (loss, statistics), grads = loss_and_grads(state.opt_state, state.params, state.statistics, inputs, labels, key)
    params, opt_state = apply_gradients(tx, grads, state.opt_state, state.params)
    statistics = select(opt_state.last_step.applied, statistics, state.statistics)
    return State(params, statistics, opt_state), loss


@partial(jax.jit, static_argnames=("task", "policy"))
def outputs_of(task: Task, policy: polyamp.Policy, variables: Any, inputs: tuple[Any, ...]) -> Any:
    """Return the model's outputs without dropout, computed under the policy."""
    return polyamp.autocast(partial(task.model.apply, train=False), policy)(variables, *inputs)


def fit(task: Task, batches: Sequence[tuple[tuple[Any, ...], Any]], policy: polyamp.Policy, seed: int) -> Any:
    """Train for one step on each batch of (inputs, labels), and return the trained variables."""
    variables = initial(task, batches[0][0], seed)
    opt_state = optimizer_of(task, policy).init(variables["params"])
    state = State(variables["params"], variables.get(STATISTICS, {}), opt_state)
    keys = jax.random.split(jax.random.key(seed), len(batches))
    for (inputs, labels), key in zip(batches, keys, strict=True):
        state, _ = step(task, policy, state, inputs, labels, key)
    return {"params": state.params, STATISTICS: state.statistics}


def classify(
    task: Task,
    data: Data,
    policy: polyamp.Policy,
    seed: int,
    *,
    size: int,
    steps: int,
    scores_of: Callable[[Any], Any] = np.asarray,
) -> dict[str, float]:
    """Train on batches of ``size`` examples, and return accuracy and loss on the test part.

    ``scores_of`` returns the scores in a model's outputs.
    """
    batches = [((data.train.x[rows],), data.train.y[rows]) for rows in batches_of(data.train, size, steps, seed)]
    variables = fit(task, batches, policy, seed)
    parts = np.split(data.test.x, len(data.test.x) // 250)
    scores = np.concatenate([scores_of(outputs_of(task, policy, variables, (x,))) for x in parts])
    accuracy = (scores.argmax(1) == data.test.y).mean()
    return {"accuracy": float(accuracy), "loss": float(cross_entropy(scores, data.test.y))}
