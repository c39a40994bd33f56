"""Policies of jmp around a loss function."""

import jax
import jax.numpy as jnp
import jmp

policy = jmp.get_policy("params=float32,compute=float16,output=float32")
pure = jmp.get_policy("bf16")
by_dtype = jmp.Policy(param_dtype=jnp.float32, compute_dtype=jnp.float16, output_dtype=jnp.float32)


def loss_fn(params, x):
    params, x = policy.cast_to_compute((params, x))
    return policy.cast_to_output(jnp.square(x @ params["w"]).mean())


losses = [float(jax.jit(loss_fn)({"w": jnp.full((8, 2), 0.5)}, jnp.ones((4, 8))))]
