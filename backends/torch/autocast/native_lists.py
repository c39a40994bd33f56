"""The lists of PyTorch's own autocast, as data: the category of each aten operator, by device type.

The running torch's dispatcher knows *which* operators have a kernel at an Autocast key. *What* the kernel does is only
in C++ (include/ATen/autocast_mode.h for CUDA and device types that share its lists, aten/src/ATen/autocast_mode.cpp for
the CPU), and is copied here. `category` combines both: an operator that a newer torch adds has the category "unknown".
"""

from __future__ import annotations

from functools import cache

from polyamp.backends.torch.unstable import all_operators, registered_operators

TORCH_VERSION = "2.15"  # the release whose lists these are

CATEGORIES: dict[str, str] = {
    "lower": "every floating input is cast to the region's format",
    "full": "every floating input is cast to float32",
    "full_dtype": "run with dtype=float32, unless the caller passes a dtype",
    "full_overload": "run as the overload that takes a dtype, with float32",
    "promote": "every floating input is cast to the widest of them",
    "banned": "refused",
    "unlisted": "run unchanged",
    "unknown": "registered in a torch that is newer than this list",
}

_CUDA = {
    "lower": "_convolution _convolution.deprecated _scaled_dot_product_flash_attention _thnn_fused_gru_cell "
    "_thnn_fused_lstm_cell addbmm addmm addmv addr baddbmm bmm chain_matmul conv1d conv2d conv3d conv_tbc "
    "conv_transpose1d conv_transpose2d.input conv_transpose3d.input convolution cudnn_convolution "
    "cudnn_convolution_transpose einsum gru_cell linalg_multi_dot linalg_vecdot linear lstm_cell matmul mm mv prelu "
    "rnn_relu_cell rnn_tanh_cell scaled_dot_product_attention "
    "_cudnn_rnn",  # only in builds with cuDNN
    "full": "_upsample_bicubic2d_aa _upsample_bilinear2d_aa _upsample_nearest_exact1d _upsample_nearest_exact2d "
    "_upsample_nearest_exact3d acos asin binary_cross_entropy_with_logits cdist cosh cosine_embedding_loss "
    "cosine_similarity dist erfinv exp expm1 frobenius_norm.dim group_norm hinge_embedding_loss huber_loss kl_div "
    "l1_loss layer_norm linalg_matrix_sqrth log log10 log1p log2 logsumexp margin_ranking_loss mse_loss "
    "multi_margin_loss multilabel_margin_loss native_layer_norm nll_loss nll_loss2d nuclear_norm nuclear_norm.dim "
    "pdist poisson_nll_loss pow.Scalar pow.Tensor_Scalar pow.Tensor_Tensor reciprocal renorm rms_norm rsqrt sinh "
    "smooth_l1_loss soft_margin_loss softplus tan triplet_margin_loss upsample_bicubic2d upsample_bilinear2d "
    "upsample_linear1d upsample_nearest1d upsample_nearest2d upsample_nearest3d upsample_trilinear3d",
    "full_dtype": "cumprod cumsum linalg_matrix_norm linalg_matrix_norm.str_ord linalg_vector_norm log_softmax.int "
    "prod prod.dim_int softmax.int sum sum.dim_IntList "
    # with named dimensions, which newer releases do not have
    "cumprod.dimname cumsum.dimname log_softmax.Dimname prod.dim_Dimname softmax.Dimname sum.dim_DimnameList",
    "full_overload": "norm.Scalar norm.ScalarOpt_dim norm.names_ScalarOpt_dim",
    "promote": "addcdiv addcmul atan2 bilinear cross dot grid_sampler index_put scatter_add tensordot vdot",
    "banned": "binary_cross_entropy",
}

_CPU = {
    "lower": "_addmm_activation _convolution.deprecated _native_multi_head_attention addbmm addmm baddbmm bmm conv1d "
    "conv1d.padding conv2d conv2d.padding conv3d conv3d.padding conv_tbc conv_transpose1d conv_transpose2d.input "
    "conv_transpose3d.input linalg_vecdot linear matmul mkldnn_rnn_layer mm prelu scaled_dot_product_attention",
    "full": "_grid_sampler_2d_cpu_fallback _lu_with_info adaptive_avg_pool3d adaptive_max_pool3d avg_pool3d "
    "binary_cross_entropy binary_cross_entropy_with_logits cdist cholesky cholesky_inverse cholesky_solve "
    "cosine_embedding_loss cross_entropy_loss ctc_loss.IntList ctc_loss.Tensor fake_quantize_per_tensor_affine fft_fft "
    "fft_fft2 fft_fftn fft_hfft fft_ifft fft_ifft2 fft_ifftn fft_ihfft fft_irfft fft_irfft2 fft_irfftn fft_rfft "
    "fft_rfft2 fft_rfftn fractional_max_pool2d fractional_max_pool3d geqrf grid_sampler grid_sampler_2d "
    "grid_sampler_3d hinge_embedding_loss huber_loss inverse kl_div l1_loss linalg_cholesky linalg_cholesky_ex "
    "linalg_cond linalg_cond.p_str linalg_eig linalg_eigh linalg_eigvals linalg_eigvalsh linalg_householder_product "
    "linalg_inv linalg_inv_ex linalg_lstsq linalg_matrix_rank linalg_matrix_rank.atol_rtol_float "
    "linalg_matrix_rank.atol_rtol_tensor linalg_matrix_rank.tol_tensor linalg_matrix_sqrth linalg_qr linalg_solve "
    "linalg_svd linalg_svdvals linalg_tensorinv linalg_tensorsolve lu_solve margin_ranking_loss max_pool3d "
    "max_unpool2d max_unpool3d mse_loss multi_margin_loss multilabel_margin_loss multilabel_margin_loss_forward "
    "nanquantile nanquantile.scalar nll_loss nll_loss2d orgqr ormqr pinverse poisson_nll_loss polar prod prod.dim_int "
    "qr quantile quantile.scalar reflection_pad1d reflection_pad2d replication_pad1d replication_pad2d "
    "replication_pad3d smooth_l1_loss soft_margin_loss stft stft.center svd trace triangular_solve triplet_margin_loss "
    "view_as_complex prod.dim_Dimname",
    "promote": "cat index_copy index_copy.dimname stack",
}

_MPS = {"lower": "_mps_convolution", "full": "batch_norm"}  # in addition to the CUDA list


def _by_name(lists: dict[str, str]) -> dict[str, str]:
    return {f"aten::{name}": kind for kind, names in lists.items() for name in names.split()}


_LISTS = {"cpu": _by_name(_CPU), "mps": _by_name(_CUDA) | _by_name(_MPS)}
_SHARED = _by_name(_CUDA)  # XPU, MTIA and MAIA register operators of the CUDA list, with the same macros


def known(device_type: str) -> dict[str, str]:
    """Return the list of a device type: from operators, such as ``aten::softmax.int``, to categories."""
    return _LISTS.get(device_type, _SHARED)


@cache
def existing() -> frozenset[str]:
    """Return the operators of the running torch, which may lack some that the lists of another release have."""
    return frozenset(all_operators())


@cache
def registered(device_type: str) -> frozenset[str]:
    """Return the operators for which the running torch's autocast has kernels on a device type."""
    return frozenset(name for name in registered_operators(device_type) if name.startswith("aten::"))


def category(operator: str, device_type: str) -> str:
    """Return what native autocast does with an operator on a device type, as a key of `CATEGORIES`."""
    if operator not in registered(device_type):
        return "unlisted"
    return known(device_type).get(operator, "unknown")
