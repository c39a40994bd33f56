"""PyTorch's names for the canonical operations of `polyamp.operations`: aten operators and modules with weights.

Operators are listed by their base name: every overload of an operator does the same work (``softmax.int`` and
``softmax.Dimname``), so overloads share one class. `canonical` accepts any spelling of a name.
"""

from __future__ import annotations

import re

from polyamp.operations import by_native_name

# These have polyamp's names in PyTorch too.
_SHARED = """
matmul tensordot bilinear lstm_cell gru_cell prelu exp exp2 expm1 log log1p log2 log10 pow square rsqrt reciprocal
hypot sum mean prod cumsum cumprod logsumexp logaddexp logcumsumexp norm cosine_similarity trace quantile softmax
log_softmax layer_norm group_norm rms_norm instance_norm batch_norm nll_loss mse_loss l1_loss huber_loss
smooth_l1_loss kl_div poisson_nll_loss binary_cross_entropy binary_cross_entropy_with_logits cosine_embedding_loss
hinge_embedding_loss margin_ranking_loss multi_margin_loss multilabel_margin_loss soft_margin_loss triplet_margin_loss
ctc_loss acos asin tan sinh cosh sin cos acosh atanh softplus log_sigmoid logit xlogy lgamma digamma polygamma igamma
cholesky qr svd triangular_solve inverse det matrix_exp complex concat stack scatter scatter_add dot addcmul addcdiv
atan2 add sub mul div remainder lerp sqrt sigmoid tanh elu celu selu leaky_relu gelu silu mish glu erf erfc atan asinh
sinc dropout reshape transpose tile flip slice split gather pad embedding roll unfold diagonal fill one_hot where clip
maximum minimum max min argmax nonzero sort cummax relu abs neg sign round
"""

OPERATIONS: dict[str, str] = by_native_name(
    {
        # lower
        "matmul": "addbmm addmm addmv addr baddbmm bmm chain_matmul einsum inner linalg_matmul linalg_multi_dot "
        "linalg_vecdot linear mkldnn_linear mm mv ger outer _addmm_activation _grouped_mm _scaled_mm _trilinear "
        "matrix_power linalg_matrix_power",
        "conv": "_convolution conv1d conv2d conv3d conv_depthwise3d conv_tbc conv_transpose1d conv_transpose2d "
        "conv_transpose3d convolution cudnn_convolution cudnn_convolution_add_relu cudnn_convolution_relu "
        "cudnn_convolution_transpose mkldnn_convolution _mps_convolution thnn_conv2d _conv_depthwise2d slow_conv3d "
        "slow_conv_dilated2d slow_conv_dilated3d slow_conv_transpose2d slow_conv_transpose3d _slow_conv2d_forward "
        "_slow_conv2d_backward",
        "attention": "scaled_dot_product_attention _native_multi_head_attention _scaled_dot_product_attention_math "
        "_scaled_dot_product_flash_attention _scaled_dot_product_flash_attention_for_cpu "
        "_scaled_dot_product_efficient_attention _scaled_dot_product_cudnn_attention _flash_attention_forward "
        "_flash_attention_backward _efficient_attention_forward _efficient_attention_backward "
        "_cudnn_attention_forward _cudnn_attention_backward",
        "lstm_cell": "lstm _thnn_fused_lstm_cell mkldnn_rnn_layer",
        "gru_cell": "gru _thnn_fused_gru_cell",
        "rnn_cell": "rnn_tanh rnn_relu rnn_tanh_cell rnn_relu_cell _cudnn_rnn",
        "prelu": "_prelu_kernel",
        # full: exponentials, logarithms, powers
        "pow": "float_power",
        # full: reductions
        "sum": "nansum sum_to_size",
        "mean": "nanmean",
        "logaddexp": "logaddexp2",
        "logcumsumexp": "_logcumsumexp",
        "variance": "std std_mean var var_mean",
        "norm": "frobenius_norm nuclear_norm linalg_norm linalg_vector_norm linalg_matrix_norm renorm",
        "distance": "dist pdist cdist pairwise_distance _pdist_forward _pdist_backward _cdist_forward _cdist_backward",
        "weight_norm": "_weight_norm _weight_norm_interface",
        "quantile": "nanquantile",
        # full: normalisation
        "softmax": "_softmax _safe_softmax",
        "log_softmax": "_log_softmax",
        "layer_norm": "native_layer_norm",
        "group_norm": "native_group_norm",
        "rms_norm": "_fused_rms_norm",
        "batch_norm": "native_batch_norm cudnn_batch_norm _native_batch_norm_legit "
        "_native_batch_norm_legit_functional _native_batch_norm_legit_no_training _batch_norm_impl_index "
        "_batch_norm_with_update _batch_norm_with_update_functional _batch_norm_no_update batch_norm_stats "
        "batch_norm_elemt",
        # full: losses
        "cross_entropy": "cross_entropy_loss",
        "nll_loss": "nll_loss2d nll_loss_nd nll_loss_forward nll_loss2d_forward",
        "multilabel_margin_loss": "multilabel_margin_loss_forward",
        "ctc_loss": "_ctc_loss _cudnn_ctc_loss",
        # full: steep or unbounded functions
        "acos": "arccos",
        "asin": "arcsin",
        "acosh": "arccosh",
        "atanh": "arctanh",
        "erf_inv": "erfinv",
        "log_sigmoid": "log_sigmoid_forward",
        "xlogy": "special_xlog1py",
        "lgamma": "special_gammaln mvlgamma",
        "digamma": "special_psi",
        "igamma": "igammac special_gammainc special_gammaincc",
        "bessel": "i0 special_i0e special_i1 special_i1e",
        "zeta": "special_zeta",
        # full: linear algebra, transforms, positions
        "cholesky": "cholesky_inverse cholesky_solve linalg_cholesky linalg_cholesky_ex",
        "qr": "geqrf orgqr ormqr linalg_qr linalg_householder_product",
        "svd": "pinverse linalg_svd linalg_svdvals linalg_cond linalg_matrix_rank linalg_pinv _linalg_svd",
        "eigh": "linalg_eig linalg_eigh linalg_eigvals linalg_eigvalsh _linalg_eigh",
        "lu": "_lu_with_info lu_solve linalg_lu linalg_lu_factor linalg_lu_factor_ex linalg_lu_solve lu_unpack",
        "solve": "linalg_solve linalg_solve_ex linalg_tensorsolve _linalg_solve_ex",
        "triangular_solve": "linalg_solve_triangular",
        "inverse": "linalg_inv linalg_inv_ex linalg_tensorinv",
        "lstsq": "linalg_lstsq",
        "det": "logdet slogdet linalg_det linalg_slogdet _linalg_det _linalg_slogdet",
        "matrix_exp": "linalg_matrix_exp",
        "matrix_sqrt": "linalg_matrix_sqrth",  # new in torch 2.15
        "fft": "fft_fft fft_fft2 fft_fftn fft_ifft fft_ifft2 fft_ifftn fft_rfft fft_rfft2 fft_rfftn fft_irfft "
        "fft_irfft2 fft_irfftn fft_hfft fft_ihfft stft istft _fft_c2c _fft_c2r _fft_r2c",
        "complex": "polar view_as_complex",
        "interpolate": "upsample_nearest1d upsample_nearest2d upsample_nearest3d upsample_linear1d "
        "upsample_bilinear2d upsample_trilinear3d upsample_bicubic2d _upsample_nearest_exact1d "
        "_upsample_nearest_exact2d _upsample_nearest_exact3d _upsample_bilinear2d_aa _upsample_bicubic2d_aa",
        "grid_sample": "grid_sampler grid_sampler_2d grid_sampler_3d _grid_sampler_2d_cpu_fallback cudnn_grid_sampler "
        "affine_grid_generator",
        "fake_quantize": "fake_quantize_per_tensor_affine fake_quantize_per_channel_affine "
        "fake_quantize_per_tensor_affine_cachemask fake_quantize_per_channel_affine_cachemask",
        # promote
        "concat": "cat concatenate hstack vstack dstack column_stack row_stack block_diag",
        "scatter": "index_put _unsafe_index_put _index_put_impl index_copy slice_scatter select_scatter "
        "diagonal_scatter masked_scatter index_fill put",
        "scatter_add": "index_add scatter_reduce index_reduce embedding_backward embedding_dense_backward "
        "_embedding_bag_backward index_select_backward slice_backward select_backward gather_backward "
        "diagonal_backward masked_select_backward unfold_backward",
        "dot": "vdot",
        "atan2": "arctan2",
        "cross_product": "cross linalg_cross",
        # follow
        "sub": "subtract rsub",
        "mul": "multiply",
        "div": "divide true_divide",
        "floor_div": "floor_divide",
        "remainder": "fmod frac",
        "sigmoid": "special_expit",
        "leaky_relu": "rrelu rrelu_with_noise",
        "hard_sigmoid": "hardsigmoid",
        "hard_swish": "hardswish",
        "soft_shrink": "softshrink",
        "hard_shrink": "hardshrink",
        "atan": "arctan",
        "asinh": "arcsinh",
        "dropout": "native_dropout alpha_dropout feature_dropout feature_alpha_dropout _fused_dropout",
        "avg_pool": "avg_pool1d avg_pool2d avg_pool3d adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d "
        "_adaptive_avg_pool2d _adaptive_avg_pool3d",
        "fold": "col2im",
        # neutral
        "reshape": "reshape_as view view_as flatten unflatten squeeze unsqueeze ravel as_strided _unsafe_view "
        "_reshape_alias atleast_1d atleast_2d atleast_3d",
        "transpose": "permute t swapaxes swapdims movedim moveaxis adjoint mT mH numpy_T",
        "broadcast": "expand expand_as broadcast_to broadcast_tensors meshgrid",
        "tile": "repeat repeat_interleave",
        "flip": "fliplr flipud rot90",
        "slice": "select narrow narrow_copy unfold_copy",
        "split": "split_with_sizes chunk unbind tensor_split hsplit vsplit dsplit unsafe_split unsafe_chunk",
        "gather": "index index_select take take_along_dim masked_select _unsafe_index",
        "space_to_depth": "pixel_shuffle pixel_unshuffle channel_shuffle",
        "pad": "constant_pad_nd reflection_pad1d reflection_pad2d reflection_pad3d replication_pad1d "
        "replication_pad2d replication_pad3d _pad_circular _pad_enum",
        "embedding": "embedding_bag _embedding_bag",
        "unfold": "im2col",
        "diagonal": "diag diag_embed diagflat tril triu",
        "identity": "clone detach alias contiguous lift_fresh positive resolve_conj resolve_neg",
        "fill": "full_like zeros_like ones_like empty_like new_zeros new_ones new_full new_empty zero",
        "where": "masked_fill",
        "clip": "clamp clamp_min clamp_max hardtanh threshold nan_to_num",
        "maximum": "fmax",
        "minimum": "fmin",
        "max": "amax aminmax",  # also max.other, the maximum of two, which is of the same class
        "min": "amin",
        "argmax": "argmin",
        "top_k": "topk kthvalue median nanmedian mode",
        "nonzero": "argwhere",
        "sort": "argsort msort",
        "cummax": "cummin",
        "compare": "eq ne lt le gt ge equal less less_equal greater greater_equal not_equal isclose allclose "
        "searchsorted bucketize heaviside",
        "is_finite": "isfinite isinf isnan isposinf isneginf",
        "relu": "relu6",
        "max_pool": "max_pool1d max_pool1d_with_indices max_pool2d max_pool2d_with_indices max_pool3d "
        "max_pool3d_with_indices adaptive_max_pool1d adaptive_max_pool2d adaptive_max_pool3d fractional_max_pool2d "
        "fractional_max_pool3d",
        "max_unpool": "max_unpool2d max_unpool3d",
        "abs": "absolute",
        "neg": "negative",
        "sign": "sgn copysign signbit",
        "round": "floor ceil trunc fix",
        # keep
        "cast": "to _to_copy type_as _cast_Float _cast_Half _cast_Double",
        "shape": "size stride numel dim sym_size sym_numel sym_stride storage_offset",
        "integer": "bitwise_and bitwise_or bitwise_xor bitwise_not bitwise_left_shift bitwise_right_shift gcd lcm "
        "__and__ __or__ __xor__ __lshift__ __rshift__ arange bincount count_nonzero",
        "logical": "logical_and logical_or logical_xor logical_not all any",
        "random": "bernoulli normal normal_functional uniform rand randn randint randperm rand_like randn_like "
        "randint_like multinomial exponential poisson",
        "quantize": "quantize_per_tensor quantize_per_channel dequantize",
        "complex_part": "real imag conj _conj angle view_as_real",
        "constant": "zeros ones full empty eye linspace scalar_tensor",
        "optimizer_update": "_fused_adam _fused_adamw _fused_sgd _fused_adagrad _amp_update_scale "
        "_amp_foreach_non_finite_check_and_unscale",
    }
) | {name: name for name in _SHARED.split()}

MODULES: dict[str, str] = by_native_name(
    {
        "matmul": "Linear",
        "bilinear": "Bilinear",
        "conv": "Conv1d Conv2d Conv3d ConvTranspose1d ConvTranspose2d ConvTranspose3d",
        "attention": "MultiheadAttention",
        "lstm_cell": "LSTM LSTMCell",
        "gru_cell": "GRU GRUCell",
        "rnn_cell": "RNN RNNCell",
        "prelu": "PReLU",
        "batch_norm": "BatchNorm1d BatchNorm2d BatchNorm3d SyncBatchNorm LazyBatchNorm1d LazyBatchNorm2d "
        "LazyBatchNorm3d",
        "layer_norm": "LayerNorm",
        "group_norm": "GroupNorm",
        "rms_norm": "RMSNorm",
        "instance_norm": "InstanceNorm1d InstanceNorm2d InstanceNorm3d LazyInstanceNorm1d LazyInstanceNorm2d "
        "LazyInstanceNorm3d",
        "local_response_norm": "LocalResponseNorm CrossMapLRN2d",  # no weights, but named like a norm that has them
        "embedding": "Embedding EmbeddingBag",
        "cross_entropy": "CrossEntropyLoss LinearCrossEntropyLoss",
        "nll_loss": "NLLLoss",
        "binary_cross_entropy": "BCELoss",
        "binary_cross_entropy_with_logits": "BCEWithLogitsLoss MultiLabelSoftMarginLoss",
        "multi_margin_loss": "MultiMarginLoss",
    }
)
"""Modules with parameters or buffers, whose format `polyamp.convert` decides. Subclasses count as their base."""


def canonical(native: str) -> str | None:
    """Return the canonical name of an aten operator, in any spelling; None if the map does not have it."""
    path = native.replace("::", ".").split(".")
    base = path[1] if path[0] == "aten" else native
    return OPERATIONS.get(base) or OPERATIONS.get(_SPELLING.sub("", base))


# The derivative of an operator, the operator in place, and the name that ``torch.special`` has for it.
_SPELLING = re.compile(r"^special_|_$|_backward(_data|_impl)?$")


FUNCTIONS: dict[str, str] = by_native_name(
    {
        "add": "iadd",
        "sub": "isub",
        "mul": "imul",
        "div": "truediv itruediv",
        "floor_div": "floordiv ifloordiv",
        "remainder": "mod imod",
        "pow": "ipow",
        "cross_entropy": "cross_entropy",
        "distance": "cdist",
        "norm": "lp_pool1d lp_pool2d lp_pool3d",
        "local_response_norm": "local_response_norm",
        "log_sigmoid": "logsigmoid",
        "softsign": "softsign",
        "tanh_shrink": "tanhshrink",
        "dropout": "dropout1d dropout2d dropout3d",
        "interpolate": "interpolate upsample",
        "grid_sample": "grid_sample affine_grid",
        "fold": "fold",
        "slice": "getitem",
        "scatter": "setitem",
        "cast": "float double half bfloat16 type int long short bool cpu cuda",
        "constant": "tensor as_tensor new_tensor",
        "shape": "item len sym_int sym_float sym_max sym_min",
        "integer": "and_ or_ xor invert lshift rshift iand ior ixor",
        "logical": "not_",
    }
)
"""Names of functions, methods and Python's operators that are not names of aten operators."""

# Their kernels take 16-bit data with float32 weights, and update statistics in float32 buffers. A cast of these would
# be a copy, and the update would be lost.
WITH_STATISTICS = frozenset({"batch_norm", "instance_norm"})
