"""PyTorch's names for the canonical operations of `polyamp.operations`: aten operators and modules with weights.

Operators are listed by their base name: every overload of an operator does the same work (``softmax.int`` and
``softmax.Dimname``), so overloads share one class. `canonical` accepts any spelling of a name.
"""

from __future__ import annotations

from polyamp.operations import by_native_name

OPERATIONS: dict[str, str] = by_native_name(
    {
        # lower
        "matmul": "addbmm addmm addmv addr baddbmm bmm chain_matmul einsum inner linalg_matmul linalg_multi_dot "
        "linalg_vecdot linear linear_backward matmul matmul_backward mkldnn_linear mm mv ger outer _addmm_activation "
        "_grouped_mm _scaled_mm _trilinear matrix_power linalg_matrix_power",
        "tensordot": "tensordot",
        "bilinear": "bilinear",
        "conv": "_convolution conv1d conv2d conv3d conv_depthwise3d conv_tbc conv_tbc_backward conv_transpose1d "
        "conv_transpose2d conv_transpose3d convolution convolution_backward cudnn_convolution "
        "cudnn_convolution_add_relu cudnn_convolution_relu cudnn_convolution_transpose mkldnn_convolution "
        "_mps_convolution thnn_conv2d _conv_depthwise2d slow_conv3d slow_conv_dilated2d slow_conv_dilated3d "
        "slow_conv_transpose2d slow_conv_transpose3d _slow_conv2d_forward _slow_conv2d_backward",
        "attention": "scaled_dot_product_attention _native_multi_head_attention _scaled_dot_product_attention_math "
        "_scaled_dot_product_flash_attention _scaled_dot_product_flash_attention_backward "
        "_scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_flash_attention_for_cpu_backward "
        "_scaled_dot_product_efficient_attention _scaled_dot_product_efficient_attention_backward "
        "_scaled_dot_product_cudnn_attention _scaled_dot_product_cudnn_attention_backward _flash_attention_forward "
        "_flash_attention_backward _efficient_attention_forward _efficient_attention_backward",
        "lstm_cell": "lstm lstm_cell _thnn_fused_lstm_cell _thnn_fused_lstm_cell_backward "
        "_thnn_fused_lstm_cell_backward_impl mkldnn_rnn_layer "
        "mkldnn_rnn_layer_backward",
        "gru_cell": "gru gru_cell _thnn_fused_gru_cell _thnn_fused_gru_cell_backward",
        "rnn_cell": "rnn_tanh rnn_relu rnn_tanh_cell rnn_relu_cell _cudnn_rnn _cudnn_rnn_backward",
        "prelu": "prelu _prelu_kernel _prelu_kernel_backward",
        # full: exponentials, logarithms, powers
        "exp": "exp",
        "exp2": "exp2 special_exp2",
        "expm1": "expm1 special_expm1",
        "log": "log",
        "log1p": "log1p special_log1p",
        "log2": "log2",
        "log10": "log10",
        "pow": "pow float_power",
        "square": "square",
        "rsqrt": "rsqrt",
        "reciprocal": "reciprocal",
        "hypot": "hypot",
        # full: reductions
        "sum": "sum nansum sum_to_size",
        "mean": "mean nanmean",
        "prod": "prod",
        "cumsum": "cumsum",
        "cumprod": "cumprod cumprod_backward",
        "logsumexp": "logsumexp special_logsumexp",
        "logaddexp": "logaddexp logaddexp2",
        "logcumsumexp": "logcumsumexp _logcumsumexp",
        "variance": "std std_mean var var_mean",
        "norm": "norm frobenius_norm nuclear_norm linalg_norm linalg_vector_norm linalg_matrix_norm renorm",
        "distance": "dist pdist cdist pairwise_distance _pdist_forward _pdist_backward _cdist_forward _cdist_backward",
        "cosine_similarity": "cosine_similarity",
        "weight_norm": "_weight_norm _weight_norm_interface _weight_norm_interface_backward",
        "trace": "trace trace_backward",
        "quantile": "quantile nanquantile",
        # full: normalisation
        "softmax": "softmax _softmax _softmax_backward_data _safe_softmax special_softmax",
        "log_softmax": "log_softmax _log_softmax _log_softmax_backward_data special_log_softmax",
        "layer_norm": "layer_norm native_layer_norm native_layer_norm_backward",
        "group_norm": "group_norm native_group_norm native_group_norm_backward",
        "rms_norm": "rms_norm _fused_rms_norm _fused_rms_norm_backward",
        "instance_norm": "instance_norm",
        "batch_norm": "batch_norm native_batch_norm native_batch_norm_backward cudnn_batch_norm "
        "cudnn_batch_norm_backward _native_batch_norm_legit _native_batch_norm_legit_functional "
        "_native_batch_norm_legit_no_training _batch_norm_impl_index _batch_norm_with_update "
        "_batch_norm_with_update_functional _batch_norm_no_update batch_norm_backward batch_norm_stats "
        "batch_norm_elemt",
        # full: losses
        "cross_entropy": "cross_entropy_loss",
        "nll_loss": "nll_loss nll_loss2d nll_loss_nd nll_loss_forward nll_loss_backward nll_loss2d_forward "
        "nll_loss2d_backward",
        "mse_loss": "mse_loss mse_loss_backward",
        "l1_loss": "l1_loss",
        "huber_loss": "huber_loss huber_loss_backward",
        "smooth_l1_loss": "smooth_l1_loss smooth_l1_loss_backward",
        "kl_div": "kl_div",
        "poisson_nll_loss": "poisson_nll_loss",
        "binary_cross_entropy": "binary_cross_entropy binary_cross_entropy_backward",
        "binary_cross_entropy_with_logits": "binary_cross_entropy_with_logits",
        "cosine_embedding_loss": "cosine_embedding_loss",
        "hinge_embedding_loss": "hinge_embedding_loss",
        "margin_ranking_loss": "margin_ranking_loss",
        "multi_margin_loss": "multi_margin_loss multi_margin_loss_backward",
        "multilabel_margin_loss": "multilabel_margin_loss multilabel_margin_loss_forward "
        "multilabel_margin_loss_backward",
        "soft_margin_loss": "soft_margin_loss soft_margin_loss_backward",
        "triplet_margin_loss": "triplet_margin_loss",
        "ctc_loss": "ctc_loss _ctc_loss _ctc_loss_backward _cudnn_ctc_loss",
        # full: steep or unbounded functions
        "acos": "acos arccos",
        "asin": "asin arcsin",
        "tan": "tan",
        "sinh": "sinh",
        "cosh": "cosh",
        "sin": "sin",
        "cos": "cos",
        "acosh": "acosh arccosh",
        "atanh": "atanh arctanh",
        "erf_inv": "erfinv special_erfinv",
        "softplus": "softplus softplus_backward",
        "log_sigmoid": "log_sigmoid log_sigmoid_forward log_sigmoid_backward",
        "logit": "logit logit_backward special_logit",
        "xlogy": "xlogy special_xlogy special_xlog1py",
        "lgamma": "lgamma special_gammaln mvlgamma",
        "digamma": "digamma special_digamma special_psi",
        "polygamma": "polygamma special_polygamma",
        "igamma": "igamma igammac special_gammainc special_gammaincc",
        "bessel": "i0 special_i0 special_i0e special_i1 special_i1e",
        "zeta": "special_zeta",
        # full: linear algebra, transforms, positions
        "cholesky": "cholesky cholesky_inverse cholesky_solve linalg_cholesky linalg_cholesky_ex",
        "qr": "qr geqrf orgqr ormqr linalg_qr linalg_householder_product",
        "svd": "svd pinverse linalg_svd linalg_svdvals linalg_cond linalg_matrix_rank linalg_pinv _linalg_svd",
        "eigh": "linalg_eig linalg_eigh linalg_eigvals linalg_eigvalsh _linalg_eigh",
        "lu": "_lu_with_info lu_solve linalg_lu linalg_lu_factor linalg_lu_factor_ex linalg_lu_solve lu_unpack",
        "solve": "linalg_solve linalg_solve_ex linalg_tensorsolve _linalg_solve_ex",
        "triangular_solve": "triangular_solve linalg_solve_triangular",
        "inverse": "inverse linalg_inv linalg_inv_ex linalg_tensorinv",
        "lstsq": "linalg_lstsq",
        "det": "det logdet slogdet linalg_det linalg_slogdet _linalg_det _linalg_slogdet",
        "matrix_exp": "matrix_exp linalg_matrix_exp",
        "matrix_sqrt": "linalg_matrix_sqrth",  # new in torch 2.15
        "fft": "fft_fft fft_fft2 fft_fftn fft_ifft fft_ifft2 fft_ifftn fft_rfft fft_rfft2 fft_rfftn fft_irfft "
        "fft_irfft2 fft_irfftn fft_hfft fft_ihfft stft istft _fft_c2c _fft_c2r _fft_r2c",
        "complex": "complex polar view_as_complex",
        "interpolate": "upsample_nearest1d upsample_nearest2d upsample_nearest3d upsample_linear1d "
        "upsample_bilinear2d upsample_trilinear3d upsample_bicubic2d _upsample_nearest_exact1d "
        "_upsample_nearest_exact2d _upsample_nearest_exact3d _upsample_bilinear2d_aa _upsample_bicubic2d_aa "
        "upsample_nearest1d_backward upsample_nearest2d_backward upsample_nearest3d_backward "
        "upsample_linear1d_backward upsample_bilinear2d_backward upsample_trilinear3d_backward "
        "upsample_bicubic2d_backward",
        "grid_sample": "grid_sampler grid_sampler_2d grid_sampler_3d _grid_sampler_2d_cpu_fallback "
        "cudnn_grid_sampler grid_sampler_2d_backward grid_sampler_3d_backward affine_grid_generator",
        "fake_quantize": "fake_quantize_per_tensor_affine fake_quantize_per_channel_affine "
        "fake_quantize_per_tensor_affine_cachemask fake_quantize_per_channel_affine_cachemask",
        # promote
        "concat": "cat concat concatenate hstack vstack dstack column_stack row_stack block_diag",
        "stack": "stack",
        "scatter": "index_put _unsafe_index_put _index_put_impl index_copy scatter slice_scatter select_scatter "
        "diagonal_scatter masked_scatter index_fill put",
        "scatter_add": "scatter_add index_add scatter_reduce index_reduce embedding_dense_backward "
        "index_select_backward slice_backward select_backward gather_backward",
        "dot": "dot vdot",
        "addcmul": "addcmul",
        "addcdiv": "addcdiv",
        "atan2": "atan2 arctan2",
        "cross_product": "cross linalg_cross",
        # follow
        "add": "add",
        "sub": "sub subtract rsub",
        "mul": "mul multiply",
        "div": "div divide true_divide",
        "floor_div": "floor_divide",
        "remainder": "remainder fmod frac",
        "lerp": "lerp",
        "sqrt": "sqrt",
        "sigmoid": "sigmoid sigmoid_backward special_expit",
        "tanh": "tanh tanh_backward",
        "elu": "elu elu_backward",
        "celu": "celu",
        "selu": "selu",
        "leaky_relu": "leaky_relu leaky_relu_backward rrelu rrelu_with_noise rrelu_with_noise_backward",
        "gelu": "gelu gelu_backward",
        "silu": "silu silu_backward",
        "mish": "mish mish_backward",
        "glu": "glu glu_backward",
        "hard_sigmoid": "hardsigmoid hardsigmoid_backward",
        "hard_swish": "hardswish hardswish_backward",
        "soft_shrink": "softshrink softshrink_backward",
        "hard_shrink": "hardshrink hardshrink_backward",
        "erf": "erf special_erf",
        "erfc": "erfc special_erfc",
        "atan": "atan arctan",
        "asinh": "asinh arcsinh",
        "sinc": "sinc special_sinc",
        "dropout": "dropout native_dropout native_dropout_backward alpha_dropout feature_dropout "
        "feature_alpha_dropout _fused_dropout",
        "avg_pool": "avg_pool1d avg_pool2d avg_pool3d avg_pool2d_backward avg_pool3d_backward adaptive_avg_pool1d "
        "adaptive_avg_pool2d adaptive_avg_pool3d adaptive_avg_pool3d_backward _adaptive_avg_pool2d "
        "_adaptive_avg_pool2d_backward _adaptive_avg_pool3d _adaptive_avg_pool3d_backward",
        "fold": "col2im",
        # neutral
        "reshape": "reshape reshape_as view view_as flatten unflatten squeeze unsqueeze ravel as_strided "
        "_unsafe_view _reshape_alias atleast_1d atleast_2d atleast_3d",
        "transpose": "transpose permute t swapaxes swapdims movedim moveaxis adjoint mT mH numpy_T",
        "broadcast": "expand expand_as broadcast_to broadcast_tensors meshgrid",
        "tile": "repeat tile repeat_interleave",
        "flip": "flip fliplr flipud rot90",
        "slice": "slice select narrow narrow_copy unfold_copy",
        "split": "split split_with_sizes chunk unbind tensor_split hsplit vsplit dsplit unsafe_split unsafe_chunk",
        "gather": "gather index index_select take take_along_dim masked_select _unsafe_index",
        "space_to_depth": "pixel_shuffle pixel_unshuffle channel_shuffle",
        "pad": "pad constant_pad_nd reflection_pad1d reflection_pad2d reflection_pad3d replication_pad1d "
        "replication_pad2d replication_pad3d _pad_circular _pad_enum reflection_pad1d_backward "
        "reflection_pad2d_backward reflection_pad3d_backward replication_pad1d_backward replication_pad2d_backward "
        "replication_pad3d_backward",
        "embedding": "embedding embedding_bag _embedding_bag",
        "roll": "roll",
        "unfold": "unfold im2col",
        "diagonal": "diagonal diag diag_embed diagflat tril triu",
        "identity": "clone detach alias contiguous lift_fresh positive resolve_conj resolve_neg",
        "fill": "fill full_like zeros_like ones_like empty_like new_zeros new_ones new_full new_empty zero",
        "one_hot": "one_hot",
        "where": "where masked_fill",
        "clip": "clamp clamp_min clamp_max clip hardtanh hardtanh_backward threshold threshold_backward nan_to_num",
        "maximum": "maximum fmax",
        "minimum": "minimum fmin",
        "max": "max amax aminmax",  # also max.other, the maximum of two, which is of the same class
        "min": "min amin",
        "argmax": "argmax argmin",
        "top_k": "topk kthvalue median nanmedian mode",
        "nonzero": "nonzero argwhere",
        "sort": "sort argsort msort",
        "cummax": "cummax cummin",
        "compare": "eq ne lt le gt ge equal less less_equal greater greater_equal not_equal isclose allclose "
        "searchsorted bucketize heaviside",
        "is_finite": "isfinite isinf isnan isposinf isneginf",
        "relu": "relu relu6",
        "max_pool": "max_pool1d max_pool1d_with_indices max_pool2d max_pool2d_with_indices max_pool3d "
        "max_pool3d_with_indices max_pool2d_with_indices_backward max_pool3d_with_indices_backward "
        "adaptive_max_pool1d adaptive_max_pool2d adaptive_max_pool3d adaptive_max_pool2d_backward "
        "adaptive_max_pool3d_backward fractional_max_pool2d fractional_max_pool3d fractional_max_pool2d_backward "
        "fractional_max_pool3d_backward",
        "max_unpool": "max_unpool2d max_unpool3d",
        "abs": "abs absolute",
        "neg": "neg negative",
        "sign": "sign sgn copysign signbit",
        "round": "round floor ceil trunc fix",
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
)

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
    return OPERATIONS.get(base, OPERATIONS.get(base.removesuffix("_")))


FUNCTIONS: dict[str, str] = by_native_name(
    {
        "add": "iadd",
        "sub": "isub",
        "mul": "imul",
        "div": "truediv itruediv",
        "floor_div": "floordiv ifloordiv",
        "remainder": "mod imod",
        "pow": "ipow",
        "matmul": "imatmul",
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
