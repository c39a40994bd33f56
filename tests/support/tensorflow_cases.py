"""Training steps for the tests of `polyamp.rewrite`, and measurements of the rewritten graphs."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
import tensorflow.experimental.numpy as tnp

from polyamp.backends.tensorflow import adapter

LOW = {"mixed_float16": tf.float16, "mixed_bfloat16": tf.bfloat16}
POLICIES = list(LOW)
TOLERANCE = {"mixed_float16": 2.0**-8, "mixed_bfloat16": 2.0**-5}  # of a few products, rounded to 11 and 8 bits
PRODUCTS = {native for native, name in adapter.operations.items() if name in ("matmul", "conv")}


def normal(*shape: int, seed: int = 0, scale: float = 0.4) -> tf.Tensor:
    return tf.constant(np.random.default_rng(seed).standard_normal(shape) * scale, tf.float32)


def train_step(forward: Callable[..., Any], *variables: tf.Variable, rate: float = 0.1) -> Callable[..., Any]:
    """Return a step of gradient descent on the mean square of ``forward(*arguments, *variables)``."""

    def step(*arguments: Any) -> tuple[tf.Tensor, list[Any]]:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(forward(*arguments, *variables)))
        grads = [tf.convert_to_tensor(grad) for grad in tape.gradient(loss, variables)]
        for variable, grad in zip(variables, grads, strict=True):
            variable.assign_sub(rate * grad)
        return loss, grads

    return step


def variables_like(*values: tf.Tensor) -> list[tf.Variable]:
    return [tf.Variable(value) for value in values]


# The graphs that really run.


def nodes_that_run(function: Any, *args: Any, **kwargs: Any) -> list[tf.compat.v1.NodeDef]:
    """Return the nodes of a traced function and of the functions that it calls, as the runtime has them."""
    concrete = (
        function.get_concrete_function(*args, **kwargs) if hasattr(function, "get_concrete_function") else function
    )
    return list(called_nodes(concrete.graph.as_graph_def()))


def called_nodes(graph_def: Any) -> Iterator[Any]:
    """Return the nodes of a graph and of the functions that it calls, each function once."""
    library = {function.signature.name: function for function in graph_def.library.function}
    pending, seen = [graph_def.node], set[str]()
    while pending:
        for node in pending.pop():
            yield node
            for name in {one.name for value in node.attr.values() for one in (value.func, *value.list.func)} - seen:
                if name in library:
                    seen.add(name)
                    pending.append(library[name].node_def)


def types_of(nodes: Sequence[Any], ops: Any = PRODUCTS) -> Counter[str]:
    """Count the nodes of some operations by type."""
    return Counter(tf.as_dtype(node.attr[_type_of(node)].type).name for node in nodes if node.op in ops)


def _type_of(node: Any) -> str:
    return "Ta" if node.op == "SparseMatMul" else "T"


def planned(plan: Any, *names: str) -> Counter[str]:
    """Count a plan's operations of these canonical names by format."""
    return Counter(op.format for op in plan.operations if op.name in (names or ("matmul", "conv")))


def relative_error(value: Any, expected: Any) -> float:
    """Return the largest difference, relative to the largest expected element."""
    value, expected = np.asarray(value, np.float64), np.asarray(expected, np.float64)
    return float(np.max(np.abs(value - expected)) / max(np.max(np.abs(expected)), 1e-30))


# The edge cases: functions of x [6, 8] and w [8, 8].


def cond(x: Any, w: Any) -> Any:
    return tf.cond(tf.reduce_sum(x) < 1e9, lambda: x @ w, lambda: x)


def while_loop(x: Any, w: Any) -> Any:
    def turn(step: Any, state: Any) -> tuple[Any, Any]:
        return step + 1, tf.tanh(x @ w + state)

    return tf.while_loop(lambda step, state: step < 3, turn, (0, tf.zeros((6, 8))))[1]


def products_in_a_loop(x: Any, w: Any) -> Any:
    return tf.while_loop(lambda step, state: step < 3, lambda step, state: (step + 1, state @ w), (0, x))[1]


def autograph_for(x: Any, w: Any) -> Any:
    for _ in tf.range(3):
        x = x @ w
    return x


def nested_loops(x: Any, w: Any) -> Any:
    for _ in tf.range(2):
        for _ in tf.range(2):
            x = x @ w
        if tf.reduce_sum(x) < 1e9:
            x = tf.tanh(x @ w) + x
    return x


def tensor_array(x: Any, w: Any) -> Any:
    array = tf.TensorArray(tf.float32, 3)
    for index in tf.range(3):
        array = array.write(index, x @ w)
    return array.stack()


def map_fn(x: Any, w: Any) -> Any:
    return tf.map_fn(lambda row: tf.linalg.matvec(w, row), x)


def scan(x: Any, w: Any) -> Any:
    return tf.scan(lambda state, row: tf.linalg.matvec(w, state) + row, x)


@tf.custom_gradient
def steep(x: Any) -> Any:
    y = tf.exp(x)
    return y, lambda grad: grad * y


def custom_gradient(x: Any, w: Any) -> Any:
    return steep(x @ w)


def silu(x: Any, w: Any) -> Any:
    return tf.nn.silu(x @ w) @ w


def py_function(x: Any, w: Any) -> Any:
    return tf.ensure_shape(tf.py_function(lambda y: y * 2.0, [x @ w], tf.float32), (6, 8)) @ w


def numpy_function(x: Any, w: Any) -> Any:
    y = tf.numpy_function(lambda y: np.asarray(y * 2, np.float32), [tf.stop_gradient(x @ w)], tf.float32)
    return tf.ensure_shape(y, (6, 8)) + x @ w


def rfft(x: Any, w: Any) -> Any:
    return tf.math.real(tf.signal.rfft(x @ w))


@tf.recompute_grad
def _recomputed(x: Any, w: Any) -> Any:
    return tf.tanh(tf.tanh(x @ w) @ w)


def recompute_grad(x: Any, w: Any) -> Any:
    return _recomputed(x, tf.convert_to_tensor(w)) @ w


@tf.function
def _traced_before(x: Any, w: Any) -> Any:
    return tf.nn.gelu(x @ w)


def traced_before(x: Any, w: Any) -> Any:
    _traced_before.get_concrete_function(x, tf.convert_to_tensor(w))
    return _traced_before(x, w) @ w


def raw_matmul(x: Any, w: Any) -> Any:
    return tf.raw_ops.MatMul(a=x, b=w, transpose_b=True)


LAST, TOTAL = tf.Variable(tf.zeros((6, 8))), tf.Variable(tf.zeros((6, 8)))


def assign(x: Any, w: Any) -> Any:
    TOTAL.assign(x)
    LAST.assign(x @ w)
    TOTAL.assign_add(x @ w)
    return LAST + TOTAL + x @ w


def cholesky(x: Any, w: Any) -> Any:
    return tf.linalg.cholesky(tf.matmul(w, w, transpose_a=True) + tf.eye(8)) @ tf.transpose(x)


def mixing(x: Any, w: Any) -> Any:
    y = x @ w
    return tf.concat([tf.stack([y, tf.exp(y), x]), [tf.where(y > 0, y, x)], [tf.maximum(tf.exp(y), y)]], 0)


def einsum(x: Any, w: Any) -> Any:
    return tf.einsum("ij,jk->ki", x, w)


def sparse(x: Any, w: Any) -> Any:
    eye = tf.SparseTensor([[i, i] for i in range(8)], tf.fill([8], 2.0), (8, 8))
    return x @ tf.sparse.sparse_dense_matmul(eye, w)


def embedding(x: Any, w: Any) -> Any:
    ids = tf.constant([0, 3, 3, 5, 7, 1])
    return (tf.nn.embedding_lookup(w, ids) + x) @ w


def sparse_gradient(x: Any, w: Any) -> Any:
    """Use the weight only in a look-up, so that its gradient is an IndexedSlices."""
    return tf.nn.embedding_lookup(w, tf.constant([0, 3, 3])) @ tf.transpose(x)


def resize(x: Any, w: Any) -> Any:
    return tf.image.resize(tf.reshape(x @ w, (1, 6, 8, 1)), (9, 12))


def clip_by_global_norm(x: Any, w: Any) -> Any:
    clipped, norm = tf.clip_by_global_norm([x @ w, w], 1.0)
    return clipped[0] @ clipped[1] + norm


def tensorflow_numpy(x: Any, w: Any) -> Any:
    return tnp.matmul(tnp.asarray(x), tnp.asarray(w))


def switch_case(x: Any, w: Any) -> Any:
    index = tf.cast(tf.reduce_sum(x) > 1e9, tf.int32) + 1
    return tf.switch_case(index, [lambda: x, lambda: x @ w, lambda: tf.exp(x @ w)]) @ w


def case(x: Any, w: Any) -> Any:
    total = tf.reduce_sum(x)
    return tf.case([(total > 1e9, lambda: x), (total < 1e8, lambda: x @ w)], default=lambda: tf.exp(x)) + x


def v1_loop(x: Any, w: Any) -> Any:
    """Run a loop with TensorFlow 1's control flow, which has its nodes in the graph itself."""
    graph = tf.compat.v1.get_default_graph()
    with graph.as_default():
        control_flow_v2 = tf.compat.v1.control_flow_v2_enabled()
        tf.compat.v1.disable_control_flow_v2()
        try:
            state = tf.compat.v1.while_loop(
                lambda step, state: step < 3, lambda step, state: (step + 1, tf.tanh(state @ w) @ w), (0, x)
            )[1]
            return tf.compat.v1.cond(tf.reduce_sum(state) < 1e9, lambda: state @ w, lambda: state)
        finally:
            if control_flow_v2:
                tf.compat.v1.enable_control_flow_v2()


def conv(x: Any, w: Any) -> Any:
    image = tf.reshape(x @ w, (1, 6, 8, 1))
    y = tf.nn.conv2d(image, tf.reshape(w, (2, 2, 1, 16)), 1, "SAME")
    y = tf.nn.max_pool2d(tf.nn.relu(y), 2, 2, "SAME")
    return tf.nn.depthwise_conv2d(y, tf.reshape(w, (1, 1, 16, 4)), [1, 1, 1, 1], "SAME")


def loop_that_reads_a_product(x: Any, w: Any) -> Any:
    y = x @ w

    def turn(step: Any, state: Any) -> tuple[Any, Any]:
        return step + 1, tf.tanh(state @ w) + y * tf.sigmoid(y)

    return tf.while_loop(lambda step, state: step < 3, turn, (0, y))[1]


def loop_that_swaps(x: Any, w: Any) -> Any:
    turn = lambda step, one, two: (step + 1, two, one @ w)  # noqa: E731
    _, one, two = tf.while_loop(lambda step, one, two: step < 3, turn, (0, x @ w, x))
    return one + two


def branches_that_differ(x: Any, w: Any) -> Any:
    y = x @ w
    first = tf.cond(tf.reduce_sum(x) < 1e9, lambda: y @ w, lambda: tf.exp(y))
    return first + tf.cond(tf.reduce_sum(x) < 1e9, lambda: tf.tanh(y), lambda: y)


@tf.function
def _beside_a_product(x: Any, w: Any) -> tuple[Any, Any, None, Any]:
    return x, tf.shape(x), None, tf.tanh(x) @ w


def one_function_for_many_states(x: Any, w: Any) -> Any:
    """Call one function with a weak, a low and a strong float32 value, and with another shape."""
    same, shape, _, y = _beside_a_product(x, w)
    again, _, _, z = _beside_a_product(y, w)
    full = _beside_a_product(tf.exp(-tf.abs(z)), w)[3]
    last = _beside_a_product(tf.concat([full, again], 0), w)[3]
    return last[: shape[0]] + same


def dynamic_array(x: Any, w: Any) -> Any:
    array, out = tf.TensorArray(tf.float32, 6).unstack(x @ w), tf.TensorArray(tf.float32, 0, dynamic_size=True)
    for index in tf.range(6):
        out = out.write(index, 2.0 * array.read(index))
    return tf.concat([out.gather([0, 3]), out.stack()], 0) @ w


EDGES: dict[str, Callable[[Any, Any], Any]] = {
    "cond": cond,
    "while_loop": while_loop,
    "products in a loop": products_in_a_loop,
    "autograph for": autograph_for,
    "nested loops": nested_loops,
    "TensorArray": tensor_array,
    "map_fn": map_fn,
    "scan": scan,
    "custom_gradient": custom_gradient,
    "silu": silu,
    "py_function": py_function,
    "numpy_function": numpy_function,
    "rfft": rfft,
    "recompute_grad": recompute_grad,
    "traced before": traced_before,
    "raw_ops": raw_matmul,
    "assign": assign,
    "cholesky": cholesky,
    "mixing": mixing,
    "einsum": einsum,
    "sparse_dense_matmul": sparse,
    "embedding": embedding,
    "IndexedSlices": sparse_gradient,
    "resize": resize,
    "clip_by_global_norm": clip_by_global_norm,
    "numpy": tensorflow_numpy,
    "switch_case": switch_case,
    "case": case,
    "v1 loop": v1_loop,
    "conv": conv,
    "loop that reads a product": loop_that_reads_a_product,
    "loop that swaps": loop_that_swaps,
    "branches that differ": branches_that_differ,
    "one function for many states": one_function_for_many_states,
    "dynamic TensorArray": dynamic_array,
}
