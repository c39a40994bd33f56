"""Policies of jmp around a loss function."""

import jax
import jax.numpy as jnp
import polyamp

policy = polyamp.policy("params=float32,compute=float16,output=float32")
pure = polyamp.policy("bfloat16")
by_dtype = polyamp.policy(param=jnp.float32, compute=jnp.float16, output=jnp.float32)


def loss_fn(params, x):
    params, x = policy.cast_to_compute((params, x))
    return policy.cast_to_output(jnp.square(x @ params["w"]).mean())


losses = [float(jax.jit(loss_fn)({"w": jnp.full((8, 2), 0.5)}, jnp.ones((4, 8))))]
