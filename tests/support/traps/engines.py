"""Engines that run a trap: functions of a trap and a format that return the result and the gradient.

The gradient is that of a loss with respect to ``w``; the loss gives the elements of the result different weights.
"""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tensorflow as tf
import torch

import polyamp
from polyamp.backends import jax as jax_backend
from polyamp.backends import torch as torch_backend
from support.tensorflow_pass import after_pass
from support.traps.trap import Array, Trap
from support.traps.words import Jax, TensorFlow, Torch

FORMATS = ("float16", "bfloat16")


class Outcome(NamedTuple):
    """A result and the gradient of the parameter, in float32."""

    result: Array
    gradient: Array


Engine = Callable[[Trap, str], Outcome]


def weights(size: int) -> Array:
    """Return the weights of a result's elements in the loss."""
    return np.cos(np.arange(size), dtype=np.float32)


def loss_and_result(ops: Any, trap: Trap, w: Any, inputs: Any) -> tuple[Any, Any]:
    result = trap.program(ops, w, *inputs)
    if not result.shape:
        return result, result
    flat = ops.flat(result)
    return ops.sum(flat * ops.array(weights(flat.shape[0]))), result


# --- PyTorch ----------------------------------------------------------------------------------------------------------


class Module(torch.nn.Module):
    """A trap as a module."""

    def __init__(self, trap: Trap) -> None:
        super().__init__()
        self.trap, self.w = trap, torch.nn.Parameter(torch.tensor(trap.w))

    def forward(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return loss_and_result(Torch, self.trap, self.w, inputs)


def torch_inputs(trap: Trap) -> list[torch.Tensor]:
    return [torch.tensor(array) for array in trap.inputs]


def torch_outcome(module: Module, run: Callable[..., Any]) -> Outcome:
    loss, result = run(*torch_inputs(module.trap))
    loss.float().backward()
    assert module.w.grad is not None
    return Outcome(result.detach().float().numpy(), module.w.grad.numpy())


def torch_float32(trap: Trap, low: str = "") -> Outcome:
    module = Module(trap)
    return torch_outcome(module, module)


def torch_native(trap: Trap, low: str) -> Outcome:
    module = Module(trap)
    with torch.autocast("cpu", getattr(torch, low)):
        loss, result = module(*torch_inputs(trap))
    return torch_outcome(module, lambda *_: (loss, result))


def torch_autocast(trap: Trap, low: str) -> Outcome:
    module = Module(trap)
    with torch_backend.autocast(f"mixed_{low}"):
        loss, result = module(*torch_inputs(trap))
    return torch_outcome(module, lambda *_: (loss, result))


def torch_rewrite(trap: Trap, low: str) -> Outcome:
    module = Module(trap)
    return torch_outcome(module, torch_backend.rewrite(module, *torch_inputs(trap), policy=f"mixed_{low}"))


# --- JAX --------------------------------------------------------------------------------------------------------------


def jax_outcome(step: Callable[..., Any], trap: Trap) -> Outcome:
    (_, result), gradient = jax.jit(step)(trap.w, *trap.inputs)
    return Outcome(*(np.asarray(array, np.float32) for array in (result, gradient)))


def jax_native(trap: Trap, low: str) -> Outcome:
    def cast(one: Any, other: Any) -> Any:
        """Multiply as flax layers with ``dtype=`` do."""
        return jnp.matmul(jnp.asarray(one, low), jnp.asarray(other, low))

    ops = SimpleNamespace(**vars(Jax) | {"matmul": cast})

    def loss(w: Any, *inputs: Any) -> tuple[Any, Any]:
        loss, result = loss_and_result(ops, trap, w, inputs)
        return loss.astype(jnp.float32), result

    return jax_outcome(jax.value_and_grad(loss, has_aux=True), trap)


def jax_autocast(trap: Trap, low: str) -> Outcome:
    loss = jax_backend.autocast(lambda w, *inputs: loss_and_result(Jax, trap, w, inputs), f"mixed_{low}")
    return jax_outcome(jax.value_and_grad(loss, has_aux=True), trap)


def jax_value_and_grad(trap: Trap, low: str) -> Outcome:
    scaling = polyamp.LossScale.none()
    state = polyamp.wrap_optimizer(optax.sgd(0.1), f"mixed_{low}", loss_scale=scaling).init(trap.w)
    step = jax_backend.value_and_grad(
        lambda w, *inputs: loss_and_result(Jax, trap, w, inputs), f"mixed_{low}", has_aux=True
    )
    return jax_outcome(lambda w, *inputs: step(state, w, *inputs), trap)


# --- TensorFlow -------------------------------------------------------------------------------------------------------


def tensorflow_step(trap: Trap) -> tuple[Callable[..., Any], list[Any]]:
    w = tf.Variable(trap.w)
    return lambda *inputs: gradient_step(trap, w, inputs), [tf.constant(array) for array in trap.inputs]


def gradient_step(trap: Trap, w: Any, inputs: Any) -> tuple[Any, Any]:
    with tf.GradientTape() as tape:
        tape.watch(w)
        loss, result = loss_and_result(TensorFlow, trap, w, inputs)
    return result, tf.convert_to_tensor(tape.gradient(loss, w))


def tensorflow_outcome(run: Callable[..., Any], inputs: list[Any]) -> Outcome:
    return Outcome(*(np.asarray(array, np.float32) for array in run(*inputs)))


def tensorflow_rewrite(trap: Trap, low: str) -> Outcome:
    step, inputs = tensorflow_step(trap)
    return tensorflow_outcome(polyamp.rewrite(step, policy=f"mixed_{low}", backend="tensorflow"), inputs)


def tensorflow_native(trap: Trap, low: str) -> Outcome:
    """Run TensorFlow's own graph pass for this processor, whether it has units for the format or not."""
    concrete = tf.function(lambda w, *inputs: gradient_step(trap, w, inputs)).get_concrete_function(
        *map(tf.constant, (trap.w, *trap.inputs))
    )
    fetches = [tensor.op.name for tensor in concrete.outputs]
    graph = after_pass(concrete.graph.as_graph_def(), fetches, low, inline=True)
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        tf.import_graph_def(graph, name="")
        feeds = dict(zip((f"{tensor.op.name}:0" for tensor in concrete.inputs), (trap.w, *trap.inputs), strict=True))
        return Outcome(*session.run([f"{name}:0" for name in fetches], feeds))


ENGINES: dict[str, Engine] = {
    "torch rewrite": torch_rewrite,
    "torch autocast": torch_autocast,
    "torch.autocast": torch_native,
    "JAX autocast": jax_autocast,
    "JAX value_and_grad": jax_value_and_grad,
    "flax dtype=": jax_native,
    "TensorFlow rewrite": tensorflow_rewrite,
    "TensorFlow's pass": tensorflow_native,
}
NATIVE = ("torch.autocast", "flax dtype=", "TensorFlow's pass")
