"""The behaviour of autocast for each operator in a region, and the operators that must be overridden for it.

Native autocast has a list of operators per device type (`category`). An operator is overridden where a policy's
rule asks for something else, and in a few cases without a rule:

>>> lower_softmax = Region(torch.bfloat16, (Rule("softmax", "lower"),))
>>> behaviour("aten::softmax.int", lower_softmax, "cpu")  # the rule
'lower'
>>> behaviour("aten::mm", lower_softmax, "cpu") is None  # native autocast does it
True
>>> behaviour("aten::var", lower_softmax, "cpu")  # it squares its inputs, and no list has it
'full'
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import torch

from polyamp.backends.torch import unstable
from polyamp.backends.torch.autocast.regions import Region
from polyamp.backends.torch.operations import canonical
from polyamp.backends.torch.unstable import all_operators, registered_operators
from polyamp.errors import warn_once
from polyamp.flow import Rule, decide
from polyamp.operations import OPERATIONS

# The native categories that already do what a class asks for; then nothing is overridden.
_DOES: dict[str, set[str]] = {
    "lower": {"lower"},
    "inner": set(),
    "full": {"full", "full_dtype", "full_overload"},
    "promote": set(),  # native kernels refuse float16 next to bfloat16
    "follow": {"unlisted"},
    "neutral": {"unlisted"},
    "keep": {"unlisted"},
}

_CLASS_OF_LIST = {"lower": "lower", "full": "full", "full_dtype": "full", "full_overload": "full", "promote": "promote"}

# These promote their inputs themselves. Native autocast's kernels do so first, and refuse what the operators accept.
PROMOTING = frozenset({"aten::cat", "aten::stack", "aten::addcmul", "aten::addcdiv", "aten::atan2"})

# Not in native lists, so these run in the type of their input, and square it: 300 overflows.
_FULL_HERE = frozenset({"variance"})

_ONLY_ON_CUDA = {
    "aten::_cudnn_rnn",
    "aten::cudnn_convolution",
    "aten::cudnn_convolution_transpose",
    "aten::_scaled_dot_product_flash_attention",
    "aten::_thnn_fused_gru_cell",
    "aten::_thnn_fused_lstm_cell",
}


def behaviour(operator: str, region: Region, device_type: str) -> str | None:
    """Return the class that an operator gets in a region; None leaves the operator to native autocast."""
    native = category(operator, device_type)
    decision = decide(region.rules, class_name(operator))
    if not decision.is_by_rule:
        return _without_rule(operator, native, region, device_type)
    if native == "unknown":
        warn_once(
            f"{operator} is in native autocast's list of torch {torch.__version__}, which is newer than the list that "
            f"polyamp knows (torch {TORCH_VERSION}): {decision.reason} has no effect on it. Update polyamp."
        )
        return None
    return None if native in _DOES[decision.op_class] else decision.op_class


def _without_rule(operator: str, native: str, region: Region, device_type: str) -> str | None:
    if native == "promote":
        return None if operator in PROMOTING else "promote"
    if class_name(operator) in _FULL_HERE and native == "unlisted":
        return "full"
    return _as_on_cuda(operator) if device_type == "cpu" and region.dtype is torch.float16 else None


def _as_on_cuda(operator: str) -> str | None:
    """Return an operator's class in CUDA's list, if the CPU's list does not have it and the CPU can run it."""
    if category(operator, "cpu") != "unlisted" or operator in _ONLY_ON_CUDA or _has_named_dimensions(operator):
        return None
    return _CLASS_OF_LIST.get(known("cuda").get(operator, ""))


def _has_named_dimensions(operator: str) -> bool:
    return "dimname" in operator.lower() or ".names" in operator


def overridden_without_rule(region: Region, device_type: str) -> Iterator[str]:
    """Yield the operators that every region overrides, independent of its rules; see `_without_rule`."""
    for name in registered(device_type) - PROMOTING:
        if category(name, device_type) == "promote" and not _has_named_dimensions(name):
            yield name
    if device_type == "cpu" and region.dtype is torch.float16:
        yield from (name for name in known("cuda").keys() & existing() if _as_on_cuda(name))
    yield from (name for operation in _FULL_HERE for name in _index()[operation])


def overridden_by_rules(region: Region, device_type: str) -> Iterator[str]:
    """Yield the operators that a region's rules override."""
    for rule in region.rules:
        for name in operators_of(rule.pattern):
            if behaviour(name, region, device_type) is not None:
                yield name


@cache
def native_classes(device_type: str, dtype: torch.dtype) -> dict[str, frozenset[str]]:
    """Return the classes that canonical operations have under autocast without rules, by any of their operators."""
    found: dict[str, set[str]] = {}
    for name in existing():
        op_class = _CLASS_OF_LIST.get(category(name, device_type))
        if op_class is None and device_type == "cpu" and dtype is torch.float16:
            op_class = _as_on_cuda(name)
        if class_name(name) in _FULL_HERE:
            op_class = "full"
        if op_class is not None:
            found.setdefault(class_name(name), set()).add(op_class)
    return {name: frozenset(classes) for name, classes in found.items()}


# Names of operators.


def class_name(operator: str) -> str:
    """Return the name by which rules know an operator: the canonical one; for users' operators their own."""
    return canonical(operator) or operator.partition(".")[0]


def operators_of(pattern: str) -> list[str]:
    """Return the operators that a rule's pattern names and that can be overridden."""
    rule = Rule(pattern, "keep")
    return [name for operation, names in _index().items() if rule.matches(operation) for name in names]


@cache
def _index() -> dict[str, list[str]]:
    """Return every operator that can be overridden, by canonical name."""
    index: dict[str, list[str]] = {}
    for name in unstable.all_operators():
        operation = canonical(name) if name.startswith("aten::") else None
        if operation is not None and OPERATIONS[operation].op_class != "keep" and _can_be_overridden(name):
            index.setdefault(operation, []).append(name)
    return index


_LEFT_OUT = {"_scaled_mm", "_grouped_mm"}  # their inputs have 8 bits, and scales


def _can_be_overridden(name: str) -> bool:
    """Return whether an operator runs forward, takes tensors, and neither changes nor aliases its arguments."""
    # A view of a 16-bit value has to stay a 16-bit value.
    base, _, overload = name.removeprefix("aten::").partition(".")
    if base.endswith("_") or "backward" in base or base in _LEFT_OUT:
        return False
    if "out" in overload or _has_named_dimensions(name):
        return False
    arguments = unstable.schema_arguments(overload_named(name))
    types = [str(argument.type) for argument in arguments]
    return (
        not any(argument.alias_info is not None for argument in arguments)
        and any("Tensor" in one for one in types)
        and not any("Generator" in one for one in types)
    )


def overload_named(name: str) -> Any:
    """Return an operator's overload by its name."""
    namespace, _, rest = name.partition("::")
    base, _, overload = rest.partition(".")
    return getattr(getattr(getattr(torch.ops, namespace), base), overload or "default")


# --- the lists of PyTorch's own autocast, as data: the category of each aten operator, by device type ----------------
#
# The running torch's dispatcher knows *which* operators have a kernel at an Autocast key. *What* the kernel does is in
# C++ only (include/ATen/autocast_mode.h for CUDA and device types that share its lists, aten/src/ATen/autocast_mode.cpp
# for the CPU), and is copied here. An operator that a newer torch adds has the category "unknown".

TORCH_VERSION = "2.15"  # the release whose lists these are

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
    """Return what native autocast does with an operator: a kind of list, ``unlisted``, or ``unknown`` here."""
    if operator not in registered(device_type):
        return "unlisted"
    return known(device_type).get(operator, "unknown")
