"""JAX's names for the canonical operations of `polyamp.operations`: primitives, by ``primitive.name``.

Functions such as ``jax.nn.softmax`` are made of primitives, and a jaxpr shows only these. For a primitive with several
outputs, graphs/interpreter.py decides what each becomes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from polyamp.operations import by_native_name

# Primitives that have the canonical name.
_NAMED_ALIKE = (
    "exp exp2 expm1 log log1p log2 pow integer_pow rsqrt reciprocal cbrt cumsum cumprod acos asin tan "
    "sinh cosh sin cos acosh atanh erf_inv lgamma digamma polygamma zeta svd schur lu triangular_solve "
    "fft complex stack atan2 sub mul div sqrt tanh erf erfc atan asinh transpose tile gather pad "
    "sort is_finite abs neg sign cond scan"
)

OPERATIONS: dict[str, str] = by_native_name(
    {name: name for name in _NAMED_ALIKE.split()}
    | {
        # lower
        "matmul": "dot_general ragged_dot_general scaled_dot scaled_matmul scaled_matmul_wrapper symmetric_product",
        "conv": "conv_general_dilated",
        "attention": "dot_product_attention_fwd dot_product_attention_fwd_wrapper dot_product_attention_bwd "
        "dot_product_attention_bwd_wrapper",
        # full
        "square": "square one_minus_square",
        "sum": "reduce_sum",
        "prod": "reduce_prod",
        "logcumsumexp": "cumlogsumexp",
        "igamma": "igamma igammac igamma_grad_a",
        "beta": "regularized_incomplete_beta",
        "bessel": "bessel_i0e bessel_i1e",
        "cholesky": "cholesky cholesky_update",
        "qr": "qr geqrf geqp3 householder_product ormqr",
        "eigh": "eig eigh hessenberg tridiagonal",
        "solve": "tridiagonal_solve custom_linear_solve",
        # promote
        "concat": "concatenate",
        "scatter": "scatter dynamic_update_slice",
        "scatter_add": "scatter-add scatter-sub scatter-mul scatter-min scatter-max select_and_scatter_add",
        # follow
        "add": "add add_any",
        "remainder": "rem",
        "sigmoid": "logistic",
        "avg_pool": "reduce_window_sum",
        "all_reduce": "psum psum_invariant reduce_scatter",
        # neutral
        "reshape": "reshape squeeze",
        "broadcast": "broadcast_in_dim broadcast_to",
        "flip": "rev",
        "slice": "slice dynamic_slice",
        "split": "split unstack",
        "identity": "copy name stop_gradient optimization_barrier sharding_constraint reshard device_put pvary "
        "layout_constraint",
        "fill": "zeros_like",
        "all_gather": "all_gather all_gather_invariant pbroadcast",
        "all_to_all": "all_to_all ragged_all_to_all",
        "collective_permute": "ppermute",
        "where": "select_n",
        "clip": "clamp",
        "maximum": "max",  # lax.max is of two arrays; the reduction is reduce_max
        "minimum": "min",
        "max": "reduce_max pmax",
        "min": "reduce_min pmin",
        "argmax": "argmax argmin",
        "top_k": "top_k approx_top_k",
        "cummax": "cummax cummin",
        "compare": "eq ne lt le gt ge eq_to lt_to le_to",
        "max_pool": "reduce_window_max reduce_window_min select_and_gather_add select_and_scatter",
        "round": "round floor ceil",
        # keep
        "cast": "convert_element_type reduce_precision",
        "bitcast": "bitcast_convert_type nextafter",
        "integer": "shift_left shift_right_arithmetic shift_right_logical population_count clz mulhi iota axis_index",
        "logical": "and or xor not reduce_and reduce_or reduce_xor",  # of integers they work on the bits
        "random": "threefry2x32 random_bits random_seed random_split random_fold_in random_wrap random_unwrap "
        "random_clone random_gamma rng_bit_generator rng_uniform",
        "complex_part": "real imag conj",
        "variable": "get swap addupdate",
        "call": "jit closed_call call remat2 remat_opt custom_jvp_call custom_vjp_call custom_vmap_call shard_map",
        "while_loop": "while",
        "custom_call": "pallas_call ffi_call pure_callback io_callback debug_callback reduce reduce_window",
        "token": "create_token after_all",
    }
)


def canonical(primitive: str, params: Mapping[str, Any]) -> str:
    """Return the canonical name of a primitive, or its own name if it has none."""
    if primitive == "integer_pow" and params["y"] in _POWERS:
        return _POWERS[params["y"]]
    return OPERATIONS.get(primitive, primitive)


_POWERS = {2: "square", -1: "reciprocal"}
