"""Four flax models on real data, and ways to train them in 16 bits: by hand with jmp, flax and mpx, and with polyamp.

Every variant of a model starts from the same float32 parameters and sees the same batch.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import jmp
import numpy as np
import optax

import polyamp

try:
    import mpx
except ModuleNotFoundError:
    mpx = None

Tree = Any
Loss = Callable[[Tree, Tree, Tree], tuple[jax.Array, Tree]]


class MLP(nn.Module):
    """A network from images [batch, 8, 8, 1] to scores of 10 digits."""

    scale: int = 1
    dtype: Any = None

    @nn.compact
    def __call__(self, images: jax.Array) -> jax.Array:
        x = images.reshape(len(images), -1)
        for _ in range(4):
            x = nn.relu(nn.Dense(512 * self.scale, dtype=self.dtype)(x))
        return nn.Dense(10, dtype=self.dtype)(x)


class CNN(nn.Module):
    """The same task with four convolutions, each with batch normalization by the batch's statistics and a ReLU."""

    scale: int = 1
    dtype: Any = None

    @nn.compact
    def __call__(self, images: jax.Array) -> jax.Array:
        x = images
        for width in (32, 32, 64, 64):
            x = nn.Conv(width * self.scale, (3, 3), use_bias=False, dtype=self.dtype)(x)
            x = nn.relu(nn.BatchNorm(use_running_average=False, dtype=self.dtype)(x))
        return nn.Dense(10, dtype=self.dtype)(x.mean((1, 2)))


class Transformer(nn.Module):
    """A network from bytes [batch, length] to scores of the next byte: four causal blocks, normalized first."""

    scale: int = 1
    dtype: Any = None

    @nn.compact
    def __call__(self, text: jax.Array) -> jax.Array:
        width, mask = 128 * self.scale, nn.make_causal_mask(text)
        x = nn.Embed(256, width, dtype=self.dtype)(text)
        x += self.param("positions", nn.initializers.normal(0.02), (text.shape[1], width)).astype(x.dtype)
        for _ in range(4):
            y = nn.LayerNorm(dtype=self.dtype)(x)
            x += nn.MultiHeadDotProductAttention(4 * self.scale, dtype=self.dtype)(y, mask=mask)
            y = nn.gelu(nn.Dense(4 * width, dtype=self.dtype)(nn.LayerNorm(dtype=self.dtype)(x)))
            x += nn.Dense(width, dtype=self.dtype)(y)
        return nn.Dense(256, dtype=self.dtype)(nn.LayerNorm(dtype=self.dtype)(x))


class LSTM(nn.Module):
    """The same task with an LSTM in a scan over the bytes. Its state has its input's dtype, as when casting by hand."""

    scale: int = 1
    dtype: Any = None

    @nn.compact
    def __call__(self, text: jax.Array) -> jax.Array:
        width = 128 * self.scale
        x = nn.Embed(256, width, dtype=self.dtype)(text)
        zeros = jnp.zeros((len(text), width), x.dtype)
        states = nn.RNN(nn.OptimizedLSTMCell(width, dtype=self.dtype))(x, initial_carry=(zeros, zeros))
        return nn.Dense(256, dtype=self.dtype)(states)


def digits(scale: int) -> tuple[jax.Array, jax.Array]:
    """Return images and labels of scikit-learn, in a number that grows with ``scale``."""
    from sklearn.datasets import load_digits

    data = load_digits()
    chosen = np.arange(128 * scale) % len(data.target)
    return jnp.asarray(data.images[chosen, :, :, None] / 16, jnp.float32), jnp.asarray(data.target[chosen])


def text(scale: int) -> tuple[jax.Array, jax.Array]:
    """Return bytes of the licence that comes with NumPy, and the bytes that follow them."""
    licences = [file for file in importlib.metadata.files("numpy") or [] if file.name == "LICENSE.txt"]
    written = max((file.read_text() for file in licences), key=len).encode()
    count, length = 8 * scale, 128
    lines = np.resize(np.frombuffer(written, np.uint8), (count, length + 1)).astype(np.int32)
    return jnp.asarray(lines[:, :-1]), jnp.asarray(lines[:, 1:])


MODELS: dict[str, tuple[Any, Callable[[int], tuple[jax.Array, jax.Array]]]] = {
    "MLP": (MLP, digits),
    "transformer": (Transformer, text),
    "CNN": (CNN, digits),
    "LSTM": (LSTM, text),
}


@dataclass(frozen=True)
class Task:
    """A model with its data; ``make`` builds it with a ``dtype``, and ``state`` is not trained."""

    make: Callable[..., nn.Module]
    params: Tree
    state: Tree
    batch: tuple[jax.Array, jax.Array]

    def arguments(self) -> tuple[Tree, Tree, Tree]:
        """Return copies of parameters and state, which a step may take the memory of, and the batch."""
        return jax.tree.map(jnp.copy, self.params), jax.tree.map(jnp.copy, self.state), self.batch


def task(name: str, scale: int = 1) -> Task:
    """Return one of `MODELS`; ``scale`` multiplies its width and its batch."""
    model, data = MODELS[name]
    batch = data(scale)
    variables = jax.jit(model(scale).init)(jax.random.key(0), batch[0])
    state = {key: value for key, value in variables.items() if key != "params"}
    return Task(lambda dtype=None: model(scale, dtype), variables["params"], state, batch)


def same(tree: Tree) -> Tree:
    return tree


@dataclass(frozen=True)
class Variant:
    """A way to train: a loss, a cast of the parameters before it is differentiated, and a cast of the gradients."""

    name: str
    loss: Loss
    before: Callable[[Tree], Tree] = same
    after: Callable[[Tree], Tree] = same

    def gradient(self, params: Tree, state: Tree, batch: Tree) -> tuple[jax.Array, Tree, Tree]:
        """Return the loss, the new state and the gradients."""
        found = jax.value_and_grad(self.loss, has_aux=True)(self.before(params), state, batch)
        (value, state), grads = found
        return value, state, self.after(grads)

    def bytes_saved(self, params: Tree, state: Tree, batch: Tree) -> int:
        """Return the bytes kept for the backward pass. Nothing is computed."""

        def kept(params: Tree) -> Any:
            return jax.vjp(lambda own: self.loss(own, state, batch), self.before(params), has_aux=True)[1]

        return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(jax.eval_shape(kept, params)))


def loss_of(model: nn.Module, cast: Callable[[Tree], Tree] = same, loss_scale: float = 1.0) -> Loss:
    """Return the mean cross-entropy in float32, with ``cast`` applied to the parameters and the images."""

    def loss(params: Tree, state: Tree, batch: Tree) -> tuple[jax.Array, Tree]:
        inputs, labels = batch
        params, inputs = cast((params, inputs))
        scores, state = model.apply({"params": params, **state}, inputs, mutable=list(state))
        losses = optax.softmax_cross_entropy_with_integer_labels(scores.astype(jnp.float32), labels)
        return losses.mean() * loss_scale, state

    return loss


def variants(task: Task, low: str, loss_scale: float) -> dict[str, Variant]:
    """Return float32 and every way to compute in ``low``; all gradients are ``loss_scale`` times too large."""
    model, dtype = task.make(), jnp.dtype(low)
    plain = loss_of(model, loss_scale=loss_scale)
    policy = jmp.Policy(param_dtype=jnp.float32, compute_dtype=dtype, output_dtype=jnp.float32)
    made = [
        Variant("float32", plain),
        Variant("jmp", loss_of(model, policy.cast_to_compute, loss_scale)),
        Variant("flax dtype=", loss_of(task.make(dtype), loss_scale=loss_scale)),
        Variant("polyamp", polyamp.autocast(plain, f"mixed_{low}")),
    ]
    if mpx is not None:
        made.insert(3, with_mpx(model, dtype, loss_scale))
    return {variant.name: variant for variant in made}


def with_mpx(model: nn.Module, dtype: Any, loss_scale: float) -> Variant:
    """Apply mpx's recipe: differentiate by 16-bit copies of the parameters, then cast the gradients.

    Its ``filter_value_and_grad`` does the same, and adds loss scaling, which no variant has here.
    """
    loss = loss_of(model, lambda tree: mpx.cast_tree(tree, dtype), loss_scale)
    return Variant("mpx", loss, lambda params: mpx.cast_tree(params, dtype), mpx.cast_to_full_precision)


def exact_gradient(task: Task) -> Tree:
    """Return the gradients of the loss in float64."""
    with jax.enable_x64(True):
        params, state, batch = jax.tree.map(
            lambda leaf: np.asarray(leaf, np.float64 if leaf.dtype == jnp.float32 else None),
            (task.params, task.state, task.batch),
        )
        gradient = jax.grad(double_loss(task.make(jnp.float64)), has_aux=True)
        return jax.tree.map(np.asarray, jax.jit(gradient)(params, state, batch)[0])


def double_loss(model: nn.Module) -> Loss:
    def loss(params: Tree, state: Tree, batch: Tree) -> tuple[jax.Array, Tree]:
        inputs, labels = batch
        scores, state = model.apply({"params": params, **state}, inputs, mutable=list(state))
        return optax.softmax_cross_entropy_with_integer_labels(scores, labels).mean(), state

    return loss
