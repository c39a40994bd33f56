"""Small steps of a value, and large constants that a norm removes: what is added last must not round what was there."""

from typing import Any

from support.traps.trap import EYE, X, Z, eye, trap


@trap("each step is less than half a unit in the last place", EYE, X)
def steps_of_a_solver(ops: Any, w: Any, x: Any) -> Any:
    y = ops.matmul(x, w)
    for _ in range(48):
        y = y + 0.005 * ops.tanh(y)
    return y


@trap("each step is less than half a unit in the last place", eye(0.5), X)
def averages_in_a_python_loop(ops: Any, w: Any, x: Any) -> Any:
    y = ops.matmul(x, w)
    state = y + 1.0
    for _ in range(40):
        state = 0.99 * state + ops.matmul(y, w) / 100.0
    return state


@trap("100 is added to values, and their difference is what counts", EYE, X, Z)
def advantages_of_values(ops: Any, w: Any, x: Any, z: Any) -> Any:
    advantage = (ops.matmul(x, w) + 100.0) - 0.99 * (ops.matmul(z, w) + 100.0)
    centred = advantage - ops.mean(advantage, -1)
    return centred / (ops.sqrt(ops.mean(ops.square(centred), -1)) + 1e-8)


@trap("a bias of 50 is added and removed by the norm", EYE, X)
def norm_of_biased(ops: Any, w: Any, x: Any) -> Any:
    y = ops.matmul(x, w) + 50.0
    centred = y - ops.mean(y, -1)
    return centred * ops.rsqrt(ops.variance(y) + 1e-5)


@trap("a bias of 50 is added and removed by the means", EYE, X, Z)
def correlation_of_biased(ops: Any, w: Any, x: Any, z: Any) -> Any:
    a, b = ops.matmul(x, w) + 50.0, ops.matmul(z, w) + 50.0
    a, b = a - ops.mean(a, -1), b - ops.mean(b, -1)
    return ops.sum(a * b, -1) / (ops.norm(a) * ops.norm(b))
