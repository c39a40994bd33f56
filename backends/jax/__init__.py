"""JAX: an optax optimizer around any other, loss functions differentiated under a policy, pytrees in any format.

>>> import jax, optax, polyamp.backends.jax as amp
>>> tx = amp.wrap_optimizer(optax.sgd(0.5), "mixed_float16")
>>> params = {"w": jax.numpy.ones(2)}
>>> opt_state = tx.init(params)
>>> def loss_fn(params, x):
...     return (x @ params["w"]).mean()
>>> loss, grads = amp.value_and_grad(loss_fn, "mixed_float16")(opt_state, params, jax.numpy.full((4, 2), 0.5))
>>> params, opt_state = amp.apply_gradients(tx, grads, opt_state, params)
>>> float(loss), params
(1.0, {'w': Array([0.75, 0.75], dtype=float32)})
"""

from polyamp.errors import importing
from polyamp.rewriting import explain, rewrite

with importing("jax", extra="jax"):
    import jax  # noqa: F401

from polyamp.backends.jax.adapter import adapter
from polyamp.backends.jax.casting import cast
from polyamp.backends.jax.gradients import apply_updates, select
from polyamp.backends.jax.graphs.rewrite import autocast
from polyamp.backends.jax.optimizer import apply_gradients, wrap_optimizer
from polyamp.backends.jax.state import LossScaleOptState, check_limits
from polyamp.backends.jax.value_and_grad import scale_loss, value_and_grad

__all__ = [
    "LossScaleOptState",
    "adapter",
    "apply_gradients",
    "apply_updates",
    "autocast",
    "cast",
    "check_limits",
    "explain",
    "rewrite",
    "scale_loss",
    "select",
    "value_and_grad",
    "wrap_optimizer",
]
