"""Two flax models at published sizes, GPT-2 of 124 M and ViT-B/16, and the ways to train them that are compared.

All ways start from the same float32 parameters. ``dtype=`` by hand and jmp's recipe scale the loss in float16 with
flax's and jmp's own scaler.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training.dynamic_scale import DynamicScale

import polyamp

Tree = Any
Batch = tuple[jax.Array, jax.Array]
MAX_NORM = 1.0


class Block(nn.Module):
    """Attention and two dense layers, each after a normalization and with a shortcut."""

    heads: int
    dtype: Any = None

    @nn.compact
    def __call__(self, x: jax.Array, mask: jax.Array | None = None) -> jax.Array:
        width = x.shape[-1]
        y = nn.LayerNorm(dtype=self.dtype)(x)
        x += nn.MultiHeadDotProductAttention(self.heads, dtype=self.dtype)(y, mask=mask)
        y = nn.gelu(nn.Dense(4 * width, dtype=self.dtype)(nn.LayerNorm(dtype=self.dtype)(x)))
        return x + nn.Dense(width, dtype=self.dtype)(y)


class GPT2(nn.Module):
    """A network from words [batch, length] to scores of the next word (Radford et al., 2019), embedding shared."""

    words: int = 50257
    length: int = 1024
    width: int = 768
    layers: int = 12
    heads: int = 12
    dtype: Any = None

    @nn.compact
    def __call__(self, text: jax.Array) -> jax.Array:
        words = nn.Embed(self.words, self.width, dtype=self.dtype)
        places = nn.Embed(self.length, self.width, dtype=self.dtype)
        x, mask = words(text) + places(jnp.arange(text.shape[1])), nn.make_causal_mask(text)
        for _ in range(self.layers):
            x = Block(self.heads, self.dtype)(x, mask)
        return words.attend(nn.LayerNorm(dtype=self.dtype)(x))


class ViT(nn.Module):
    """A network from images [batch, side, side, 3] to class scores (Dosovitskiy et al., 2021), without dropout."""

    classes: int = 1000
    patch: int = 16
    width: int = 768
    layers: int = 12
    heads: int = 12
    dtype: Any = None

    @nn.compact
    def __call__(self, images: jax.Array) -> jax.Array:
        patches = nn.Conv(self.width, (self.patch, self.patch), (self.patch, self.patch), dtype=self.dtype)(images)
        x = patches.reshape(len(images), -1, self.width)
        first = self.param("class", nn.initializers.zeros, (1, 1, self.width)).astype(x.dtype)
        x = jnp.concatenate([jnp.broadcast_to(first, (len(images), 1, self.width)), x], 1)
        x += self.param("places", nn.initializers.normal(0.02), (1, *x.shape[1:])).astype(x.dtype)
        for _ in range(self.layers):
            x = Block(self.heads, self.dtype)(x)
        return nn.Dense(self.classes, dtype=self.dtype)(nn.LayerNorm(dtype=self.dtype)(x)[:, 0])


class Task(NamedTuple):
    """A model, made by ``model(small, dtype)``, and its batches of ``samples`` samples."""

    model: Callable[[bool, Any], nn.Module]
    batch: Callable[[bool, int], Batch]
    samples: Callable[[bool], int]

    def params(self, small: bool) -> Tree:
        return jax.jit(self.model(small, None).init)(jax.random.key(0), self.batch(small, 0)[0])["params"]


def gpt2(small: bool, dtype: Any) -> nn.Module:
    return GPT2(211, 32, 64, 2, 4, dtype) if small else GPT2(dtype=dtype)


def text(small: bool, seed: int) -> Batch:
    """Return rows of words that count upwards, each row by its own step, so that the next word can be learned."""
    (count, length), words = ((2, 32), 211) if small else ((12, 1024), 50257)
    random = np.random.default_rng(seed)
    starts, steps = random.integers(words, size=(count, 1)), random.integers(1, 8, size=(count, 1))
    rows = ((starts + steps * np.arange(length + 1)) % words).astype(np.int32)
    return jnp.asarray(rows[:, :-1]), jnp.asarray(rows[:, 1:])


def vit(small: bool, dtype: Any) -> nn.Module:
    return ViT(10, 8, 64, 2, 4, dtype) if small else ViT(dtype=dtype)


def images(small: bool, seed: int) -> Batch:
    """Return noise whose mean depends on the class."""
    count, side, classes = (4, 32, 10) if small else (256, 224, 1000)
    random = np.random.default_rng(seed)
    labels = random.integers(classes, size=count).astype(np.int32)
    colours = np.random.default_rng(0).normal(size=(classes, 1, 1, 3))
    made = random.normal(size=(count, side, side, 3)) + colours[labels]
    return jnp.asarray(made, jnp.float32), jnp.asarray(labels)


TASKS = {
    "gpt2": Task(gpt2, text, lambda small: 2 if small else 12),
    "vit-b16": Task(vit, images, lambda small: 4 if small else 256),
}


class State(NamedTuple):
    """The state that a step changes; ``scaler`` scales the loss by hand."""

    params: Tree
    opt_state: Tree
    scaler: Any = None


class Way(NamedTuple):
    """A way to train: the first state, a step, and a function that reads the loss scale."""

    start: Callable[[Tree], State]
    step: Callable[[State, Batch], tuple[State, jax.Array]]
    loss_scale: Callable[[State], Any] = lambda state: None
    precision: str | None = None  # of float32 products


def optimizer() -> optax.GradientTransformation:
    return optax.adamw(1e-4, weight_decay=0.01)


def clipped() -> optax.GradientTransformation:
    return optax.chain(optax.clip_by_global_norm(MAX_NORM), optimizer())


def loss_of(model: nn.Module) -> Callable[[Tree, Batch], jax.Array]:
    """Return the mean cross-entropy in float32."""

    def loss(params: Tree, batch: Batch) -> jax.Array:
        inputs, labels = batch
        scores = model.apply({"params": params}, inputs).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(scores, labels).mean()

    return loss


def plain(loss: Callable[..., jax.Array], precision: str | None = None) -> Way:
    """Return a way without a loss scale, for float32 and bfloat16."""
    tx = clipped()

    def step(state: State, batch: Batch) -> tuple[State, jax.Array]:
        value, grads = jax.value_and_grad(loss)(state.params, batch)
        updates, opt_state = tx.update(grads, state.opt_state, state.params)
        return State(optax.apply_updates(state.params, updates), opt_state), value

    return Way(lambda params: State(params, tx.init(params)), step, precision=precision)


def with_dynamic_scale(loss: Callable[..., jax.Array]) -> Way:
    """Return a way with flax's scaler, as in its examples."""
    tx = clipped()

    def step(state: State, batch: Batch) -> tuple[State, jax.Array]:
        scaler, finite, value, grads = state.scaler.value_and_grad(loss)(state.params, batch)
        updates, opt_state = tx.update(grads, state.opt_state, state.params)
        new = (optax.apply_updates(state.params, updates), opt_state)
        kept = jax.tree.map(lambda one, other: jnp.where(finite, one, other), new, (state.params, state.opt_state))
        return State(*kept, scaler), value

    return Way(lambda params: State(params, tx.init(params), DynamicScale()), step, lambda state: state.scaler.scale)


def cast_by_jmp(loss: Callable[..., jax.Array], dtype: Any) -> Callable[[Tree, Batch], jax.Array]:
    """Return a model with its parameters and images in 16 bits, and so all operations on them."""
    import jmp

    policy = jmp.Policy(param_dtype=jnp.float32, compute_dtype=dtype, output_dtype=jnp.float32)
    return lambda params, batch: loss(policy.cast_to_compute(params), policy.cast_to_compute(batch))


def with_jmp(loss: Callable[..., jax.Array]) -> Way:
    """Return a way with jmp's scaler, as in its README."""
    import jmp

    tx = clipped()

    def step(state: State, batch: Batch) -> tuple[State, jax.Array]:
        scaler = jmp.DynamicLossScale(*state.scaler)
        value, grads = jax.value_and_grad(lambda params: scaler.scale(loss(params, batch)))(state.params)
        value, grads = scaler.unscale((value, grads))
        finite = jmp.all_finite(grads)
        updates, opt_state = tx.update(grads, state.opt_state, state.params)
        new = (optax.apply_updates(state.params, updates), opt_state)
        kept = jmp.select_tree(finite, new, (state.params, state.opt_state))
        scaler = scaler.adjust(finite)
        return State(*kept, (scaler.loss_scale, scaler.counter)), value

    def start(params: Tree) -> State:
        # only its numbers: lowering a function ahead of time rebuilds its arguments, which jmp's own class refuses
        return State(params, tx.init(params), (jnp.float32(2**16), jnp.int32(0)))

    return Way(start, step, lambda state: state.scaler[0])


def with_polyamp(loss: Callable[..., jax.Array], low: str) -> Way:
    policy = polyamp.policy(f"mixed_{low}")
    tx = polyamp.wrap_optimizer(optimizer(), policy, max_grad_norm=MAX_NORM)
    gradient = polyamp.value_and_grad(loss, policy)  # autocast included

    def step(state: State, batch: Batch) -> tuple[State, jax.Array]:
        value, grads = gradient(state.opt_state, state.params, batch)
        updates, opt_state = tx.update(grads, state.opt_state, state.params)
        return State(optax.apply_updates(state.params, updates), opt_state), value

    def loss_scale(state: State) -> Any:
        return optax.tree.get(state.opt_state, "loss_scale") if low == "float16" else None

    return Way(lambda params: State(params, tx.init(params)), step, loss_scale)


def ways(task: Task, small: bool) -> dict[str, Callable[[], Way]]:
    """Return each way, as a call that makes it. Float32 work of mixed ways has JAX's default, TF32 on a GPU."""
    model = task.model(small, None)
    loss = loss_of(model)
    made: dict[str, Callable[[], Way]] = {
        "float32": lambda: plain(loss, "highest"),
        "TF32": lambda: plain(loss, "tensorfloat32"),
    }
    for low in ("bfloat16", "float16"):
        dtype = jnp.dtype(low)
        by_hand = loss_of(task.model(small, dtype))
        scaled = low == "float16"
        made[f"flax {low}"] = lambda by_hand=by_hand, scaled=scaled: (with_dynamic_scale if scaled else plain)(by_hand)
        made[f"jmp {low}"] = lambda dtype=dtype, scaled=scaled: (with_jmp if scaled else plain)(
            cast_by_jmp(loss, dtype)
        )
        made[f"polyamp {low}"] = lambda low=low: with_polyamp(loss, low)
    return made


def missing(variant: str) -> str | None:
    """Return the reason why a variant cannot run here."""
    return "jmp is not installed" if variant.startswith("jmp") and not importlib.util.find_spec("jmp") else None
