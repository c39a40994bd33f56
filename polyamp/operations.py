"""The canonical operations: the class of each, its sources, and the reason where the sources disagree.

There is one table for every framework. An adapter maps its own operation names to these names
(``polyamp.backends.*.operations``), so the same operation has the same class everywhere. docs/operations.md is written
from this table, by benchmarks/operations_page.py, and a change of it or of the flow rule raises `RULE_VERSION`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from polyamp.errors import InvalidValueError

RULE_VERSION = 6
"""The version of the flow rule and of this table, which published numbers carry."""

CLASSES: dict[str, str] = {
    "lower": "runs in the compute format: Tensor Core work",
    "inner": "computes in float32 and returns 16 bits: the result is bounded",
    "full": "runs in float32",
    "promote": "runs in the widest format among its inputs",
    "follow": "safe in 16 bits unless an input came from full work",
    "neutral": "moves or compares values: runs in the format of its inputs",
    "keep": "never changed",
}

SOURCES: dict[str, str] = {
    "cuda": "PyTorch 2.13, CUDA autocast: include/ATen/autocast_mode.h (lower_precision_fp = lower, fp32 = full)",
    "cpu": "PyTorch 2.13, CPU autocast, one list for float16 and bfloat16: aten/src/ATen/autocast_mode.cpp",
    "tf_fp16": "TensorFlow 2.21, class AutoMixedPrecisionListsFp16 of core/grappler/optimizers/"
    "auto_mixed_precision_lists.h (allow = lower, deny = full, infer = follow, clear = neutral)",
    "tf_bf16": "TensorFlow 2.21, class AutoMixedPrecisionListsMkl of the same header",
    "jax": "JAX practice: the products of a layer run in its dtype= (flax 0.12, linen/linear.py); normalisation "
    "statistics (flax, linen/normalization.py, force_float32_reductions) and the softmax of attention (equinox 0.13, "
    "nn/_attention.py) are float32; jax.numpy reductions raise 16 bits to 32 inside (jax 0.10)",
    "apex": "NVIDIA Apex, amp/lists and the O2 properties in amp/frontend.py, before their removal in cb65b8ed",
    "paper": "Micikevicius et al., Mixed Precision Training, ICLR 2018, section 3.3: products of vectors in 16 bits "
    "with 32-bit sums, large reductions in 32 bits, pointwise work in either",
    "fsdp": "PyTorch 2.13, torch.distributed.fsdp.MixedPrecisionPolicy: values are reduced in the format they have",
    "range": "the formats' limits (polyamp.formats): the result or its derivative leaves float16, or depends on "
    "argument bits that 16-bit formats do not have",
    "kernels": "LAPACK, cuSOLVER and XLA offer it only in 32 and 64 bits (cuFFT: 16 bits for powers of two only)",
    "inside": "cuDNN 9 and oneDNN 3 normalisation, PyTorch 2.13's native_layer_norm, native_group_norm and pooling "
    "kernels (they accumulate in opmath_t), TensorFlow 2.21's FusedBatchNormV3, XLA's tanh, logistic and erf: 16-bit "
    "data, float32 arithmetic, parameters and statistics; the result is of order one for any data",
    "exact": "the definition: values are moved or compared, or are not floating-point numbers, so nothing is rounded",
}


class Operation(NamedTuple):
    """One canonical operation.

    >>> softmax = OPERATIONS["softmax"]
    >>> softmax.op_class, softmax.sources["cuda"], softmax.sources["tf_fp16"]
    ('full', 'full', 'follow')

    Attributes:
        op_class: its class, one of `CLASSES`.
        sources: the class that each source (a key of `SOURCES`) assigns; ``banned`` if the source refuses the
            operation.
        why: the reason for ``op_class``; always present if a source assigns another class.
    """

    op_class: str
    sources: Mapping[str, str]
    why: str = ""


# Format: [class]; then ``names : sources``, where ``source=class`` marks a source that differs; then why.
_TABLE = """
[lower]
matmul                              : cuda cpu tf_fp16 tf_bf16 jax apex paper
conv                                : cuda cpu tf_fp16 tf_bf16 jax apex paper
attention                           : cuda cpu tf_fp16 jax
lstm_cell                           : cuda cpu tf_fp16
gru_cell rnn_cell                   : cuda tf_fp16
tensordot                           : cuda=promote paper
    A product of matrices by another name: JAX and TensorFlow trace it as one, and it is lowered as matmul is.
bilinear                            : cuda=promote apex=promote paper
    Like tensordot.
prelu                               : cuda cpu apex
    Not Tensor Core work: it is lowered with the product before it, because its weight is a float32 parameter.

[inner]
# norms: the statistics are float32 inside
layer_norm group_norm               : inside cuda=full jax=full apex=full
    The 16-bit kernels have float32 statistics inside and move half the bytes. CUDA autocast has these operations in
    its float32 list, so that everything after them becomes float32.
rms_norm                            : inside cuda=full jax=full
    Like layer_norm.
instance_norm                       : inside jax=full
    Like batch_norm.
batch_norm                          : inside jax=full apex=full paper=full tf_fp16=follow tf_bf16=follow
    Its statistics are reductions, and its kernels keep them in float32 if the data are 16-bit; its parameters and
    running statistics stay float32, as in Apex O2. TensorFlow lists the fused kernels, which do the same inside.
avg_pool                            : inside tf_fp16=follow tf_bf16=follow cpu=full
    A window is a short sum, divided. The CPU list names the 3-d kernels, one of which has no 16-bit version there.
# functions that saturate: for any number, inf too, the result is of order one
sigmoid tanh erf                    : inside tf_fp16=follow tf_bf16=follow
    They are 16-bit after full work too, so that the output of a loop, such as an LSTM's tanh of its cell state, is in
    16 bits. Full work that reads one reads it unrounded.
atan sinc                           : range paper=follow
    Bounded, but their derivatives have x * x, which leaves float16 from 256 on.
atan2                               : range cuda=promote apex=promote
    An angle. Its derivative, x / (x * x + y * y), leaves float16 from 256 on, and below 2e-4.

[full]
# exponentials, logarithms, powers
exp expm1                           : cuda tf_fp16 tf_bf16 apex
exp2                                : range
log                                 : cuda apex tf_fp16=follow tf_bf16=follow
    As log1p; and if 16 bits round a small probability to 0, its logarithm is -inf.
log1p                               : cuda tf_fp16=follow tf_bf16=follow
    It is made for arguments near 0, whose small bits a 16-bit sum loses before the logarithm is taken.
log2 log10                          : cuda apex
pow                                 : cuda tf_fp16 tf_bf16 apex
square squared_difference           : range tf_fp16=follow tf_bf16=follow
    Squares leave float16 from 256 on. And in a variance computed as mean(x**2) - mean(x)**2, as in flax, rounded
    squares would leave nothing in either format if the mean is large.
rsqrt                               : cuda apex tf_fp16=follow tf_bf16=follow
    Its derivative, x**-1.5 / 2, overflows in float16 below x = 4e-4. The table does not depend on the format.
reciprocal                          : cuda apex tf_fp16=follow tf_bf16=follow
    It overflows in float16 below x = 1.6e-5, and its derivative below 4e-3. A quotient (div) does not have such a
    fixed numerator.
cbrt hypot                          : range
# reductions
sum                                 : cuda tf_fp16 jax apex paper tf_bf16=follow
    With 8 bits, a bfloat16 sum of ones stops at 256: the paper's rule for large reductions holds in both formats.
mean                                : tf_fp16 jax paper tf_bf16=follow
    A sum, divided: it overflows, and stops growing, where sum does.
prod                                : cuda cpu jax apex tf_fp16=follow tf_bf16=follow
    Products of many factors soon overflow or underflow in float16, and the error grows with their number.
cumsum                              : cuda apex paper
cumprod                             : cuda apex
logsumexp                           : cuda
logaddexp logcumsumexp              : range
variance                            : jax apex paper
norm                                : cuda tf_fp16 tf_bf16 apex
distance                            : cuda cpu apex
cosine_similarity                   : cuda apex
local_response_norm                 : apex paper
weight_norm                         : paper
trace quantile                      : cpu
# normalisation
softmax                             : cuda jax apex paper tf_fp16=follow tf_bf16=follow
    It sums exponentials, and the loss after it takes their logarithm: only TensorFlow's lists allow 16 bits.
log_softmax                         : cuda apex tf_fp16=follow tf_bf16=follow
    Like softmax.
# losses
cross_entropy                       : cpu tf_fp16 tf_bf16 apex
nll_loss mse_loss l1_loss smooth_l1_loss kl_div poisson_nll_loss    : cuda cpu apex
binary_cross_entropy_with_logits cosine_embedding_loss              : cuda cpu apex
hinge_embedding_loss margin_ranking_loss multi_margin_loss          : cuda cpu apex
multilabel_margin_loss soft_margin_loss triplet_margin_loss         : cuda cpu apex
huber_loss                          : cuda cpu
ctc_loss                            : cpu
binary_cross_entropy                : cpu cuda=banned apex=banned
    CUDA autocast refuses it, since 16-bit probabilities near 0 and 1 are lost before it runs. Refusing is not a class:
    it runs in float32, and binary_cross_entropy_with_logits remains the better choice.
# steep or unbounded functions
acos asin tan sinh cosh             : cuda apex
sin cos acosh asinh atanh           : range
erf_inv                             : cuda apex
softplus                            : cuda apex tf_fp16=follow tf_bf16=follow
    It is log(1 + exp(x)), and JAX traces it as that: it has the class of its parts.
log_sigmoid logit xlogy             : range
lgamma digamma polygamma igamma beta bessel zeta                    : range
# linear algebra and transforms
cholesky qr svd eigh solve inverse lstsq                            : cpu kernels
lu triangular_solve                 : cpu kernels
matrix_sqrt                         : cuda cpu kernels
det matrix_exp schur                : kernels
fft complex                         : cpu kernels
# positions need more bits than 16-bit formats have
interpolate                         : cuda apex tf_fp16=neutral tf_bf16=neutral
    The backward pass adds many gradients into one place, and bfloat16 cannot represent positions past 256. Only
    TensorFlow, whose lists name the nearest and bilinear kernels, treats it as moving values.
grid_sample                         : cpu cuda=promote
    bfloat16 cannot represent sampling positions past 256; promote would leave them in 16 bits if both inputs are.
fake_quantize                       : cpu
save                                : tf_fp16 tf_bf16

[promote]
concat stack                        : cpu apex tf_fp16=neutral tf_bf16=neutral
    It only moves values, but its inputs must agree: the widest format loses nothing.
scatter                             : cuda cpu tf_bf16=neutral
    As concat: the values and the tensor that they are written into must agree.
scatter_add                         : cuda
dot                                 : cuda apex
    The inner product of two vectors is memory-bound: Tensor Cores cannot make it faster.
addcmul addcdiv cross_product       : cuda apex

[follow]
add sub mul div                     : tf_fp16 tf_bf16 paper apex=promote
    PyTorch and Apex take the widest input, so that one float32 bias would raise everything after it; here a value that
    is float32 only by declaration does not.
floor_div                           : tf_fp16 tf_bf16
remainder lerp                      : paper
sqrt                                : tf_fp16 tf_bf16
integer_pow                         : paper range=full
    Powers leave float16 soon, so the flow rule treats them as full there: the derivative of gelu's tanh form, with its
    cube, would be inf times 0 from 41 on. bfloat16 has the range.
elu selu leaky_relu softsign        : tf_fp16 tf_bf16
erfc                                : tf_fp16 tf_bf16
gelu silu mish celu glu hard_sigmoid hard_swish     : paper
soft_shrink hard_shrink tanh_shrink : paper
dropout                             : paper
fold                                : paper
all_reduce                          : fsdp

[neutral]
# moving
reshape                             : exact tf_fp16 tf_bf16
transpose broadcast tile flip       : exact tf_fp16 tf_bf16
slice split gather                  : exact tf_fp16 tf_bf16
space_to_depth                      : exact tf_fp16 tf_bf16
pad                                 : exact tf_fp16 tf_bf16 cpu=full
    The CPU list names only the reflection and replication kernels; moving values loses nothing.
embedding roll unfold diagonal      : exact
identity                            : exact tf_fp16 tf_bf16
fill                                : exact tf_fp16 tf_bf16
one_hot                             : exact tf_fp16
tensor_list loop_edge               : exact tf_fp16 tf_bf16
all_gather all_to_all collective_permute            : exact
# choosing and comparing
where clip maximum minimum          : exact tf_fp16 tf_bf16
max min argmax top_k nonzero        : exact tf_fp16 tf_bf16
sort cummax                         : exact
is_finite                           : exact tf_fp16 tf_bf16
compare                             : exact tf_fp16 tf_bf16 apex=promote
    Apex had to make the inputs of a comparison agree itself; today the frameworks have rules for that.
relu                                : exact tf_fp16 tf_bf16
max_pool                            : exact tf_fp16 tf_bf16 cpu=full
    The CPU list names the 3-d kernels. Choosing a maximum does not round.
max_unpool                          : exact cpu=full
    Like max_pool.
segment_max                         : exact tf_fp16=lower
    TensorFlow lowers two kernels of NVIDIA's container because of their neighbours; its own builds do not have them.
# exact in every format
abs neg sign round                  : exact tf_fp16 tf_bf16

[keep]
cast                                : exact
    A cast in the code states what the user wants.
shape                               : exact tf_fp16=neutral tf_bf16=neutral
    It returns integers and reads no values.
integer logical random quantize bitcast complex_part        : exact
constant variable optimizer_update  : exact
call cond scan custom_call token    : exact
while_loop                          : exact tf_bf16=neutral
    The body reads the formats that the loop was declared with; the operations inside it are decided one by one.
"""


def _rows(table: str) -> Iterator[tuple[str, str, list[str]]]:
    """Yield the class, the ``names : sources`` line and the lines of why, for each row."""
    op_class, row, why = "", "", list[str]()
    for line in table.splitlines():
        if line.startswith("    "):
            why.append(line.strip())
            continue
        if row:
            yield op_class, row, why
        row, why = "", []
        if line.startswith("["):
            op_class = line.strip("[]")
        elif line and not line.startswith("#"):
            row = line
    if row:
        yield op_class, row, why


def _read(table: str) -> dict[str, Operation]:
    operations: dict[str, Operation] = {}
    for op_class, row, why in _rows(table):
        names, _, listed = row.partition(":")
        votes = (word.partition("=") for word in listed.split())
        sources = {source: other or op_class for source, _, other in votes}
        for name in names.split():
            operations[name] = Operation(op_class, sources, " ".join(why))
    return operations


OPERATIONS: dict[str, Operation] = _read(_TABLE)


def is_product(name: str) -> bool:
    """Return whether an operation is work of Tensor Cores."""
    return name in OPERATIONS and OPERATIONS[name].op_class == "lower"


def by_native_name(natives: Mapping[str, str]) -> dict[str, str]:
    """Turn ``{canonical: "native native ..."}``, which is short to write, into ``{native: canonical}``.

    >>> by_native_name({"matmul": "mm bmm", "exp": "exp"})
    {'mm': 'matmul', 'bmm': 'matmul', 'exp': 'exp'}

    Args:
        natives: for each canonical operation, its native names, separated by blanks.

    Raises:
        InvalidValueError: the table does not have a canonical name, or a native name occurs twice.
    """
    canonical: dict[str, str] = {}
    for operation, names in natives.items():
        if operation not in OPERATIONS:
            raise _bad_map("unknown canonical operation", operation, "a name in polyamp.operations.OPERATIONS")
        for native in names.split():
            if canonical.setdefault(native, operation) != operation:
                raise _bad_map("a native operation has two canonical names", native, "one")
    return canonical


def _bad_map(what: str, found: str, allowed: str) -> InvalidValueError:
    return InvalidValueError(
        what, where="by_native_name(natives)", found=found, allowed=allowed, fix="correct that entry"
    )
