"""Turns PyTorch's errors about formats in a region into polyamp's, with a remedy.

Native autocast lowers some operations and leaves others alone, so tensors of two formats meet. Out-of-place
operations promote them. PyTorch refuses to write one into the other, and formats that a kernel lacks. Only an error
that leaves the region is examined, so programs that run pay nothing. For example, with ``low`` in float16::

    torch.zeros(2, 2).index_add(0, rows, low)  # float32
    torch.zeros(2, 2).index_add_(0, rows, low)  # a FormatError; its cause: "self (Float) and source (Half) must have.."
"""

from __future__ import annotations

import re
import traceback
from typing import NamedTuple

from polyamp.backends.torch.user_code import line_in
from polyamp.errors import FormatError, PolyampError

_LOW = r"(Half|BFloat16|b?float16)"
_REWRITE = "or use polyamp.rewrite(model, x, policy=policy), which casts where it has to"


class _Refusal(NamedTuple):
    messages: str  # a pattern of PyTorch's messages
    what: str
    allowed: str
    fix: str


_REFUSALS = (
    _Refusal(
        r"(index_add_|index_reduce_|index_copy_|put_|scatter)\(\).*(same|equal)|Index put requires"
        r"|masked_scatter: expected|expected dtype \S+ for `(end|weight)`|^self and \w+ must have the same dtype"
        r"|^Input dtypes must be the same",
        "PyTorch cannot write a tensor into one of another format",
        "what is written has the format of the tensor that it is written into",
        "write out of place, which promotes: h = h.index_put((mask,), y) for h[mask] = y, h = h.scatter_add(...) for "
        f"h.scatter_add_(...); cast what is written, as in y.to(h.dtype); {_REWRITE}",
    ),
    _Refusal(
        rf"value cannot be converted to type .*{_LOW} without overflow",
        "a number that the tensor's format does not have",
        "numbers up to 65504 in float16",
        "for a mask use torch.finfo(x.dtype).min, or keep it in float32, as in rules={'where': 'full'}; cast the "
        f"tensor, as in x.float(); {_REWRITE}",
    ),
    _Refusal(
        rf"[eE]xpected out tensor (to have )?dtype .*{_LOW}|dtype of out|self and result must have the same"
        r"|values must be of same type|expects mantissa to have dtype|self\.dtype\(\) == output\.dtype\(\)"
        rf"|result dtype \S+ does not match input dtype {_LOW}",
        "the tensor of out= has another format than the result",
        "out= of the result's format",
        f"leave out= out, or make that tensor in the result's format; {_REWRITE}",
    ),
    _Refusal(
        r"could not create a primitive descriptor",
        "oneDNN has no kernel in 16 bits for this operation on this CPU",
        "what the CPU's kernels support: LSTMs in float32 and bfloat16",
        "run it with torch.backends.mkldnn.flags(enabled=False), or keep the layer in float32 by its path, as in "
        f"rules={{'encoder.lstm': 'full'}}; choose mixed_bfloat16; {_REWRITE}",
    ),
    _Refusal(
        rf"not implemented for '{_LOW}'|Unsupported dtype {_LOW}|doesn't handle types other than float and double"
        r"|Low precision dtypes not supported|(float or double|Float or Double) .*but got"
        rf"|{_LOW}.*of float, double, cfloat or cdouble types",
        "PyTorch has no kernel in 16 bits for this operation",
        "operations with a kernel in 16 bits, or float32",
        "cast its input, as in x.float(), or keep the operation in float32 by its name in docs/operations.md, as in "
        f"rules={{'svd': 'full'}} for torch.linalg.pinv; {_REWRITE}",
    ),
    _Refusal(
        rf"(?s)(?=.*{_LOW}).*((have|be) the same|same (d|scalar )?type|[eE]xpected scalar[ _]type"
        r"|Found dtype|d(id|oes) not match)"
        r"|^_chunk_cat expects all|^mixed dtype|Expected scalar types of X and dY|tensors with different dtypes"
        r"|^both inputs should have same",
        "PyTorch does not take operands of different formats here",
        "operands of one format",
        "cast one of them, as in x.float(), also before a part of the model that runs in float32; leave out= out; "
        "decorate an autograd.Function with torch.amp.custom_fwd and custom_bwd, as its backward pass runs outside of "
        "the region; "
        f"keep a norm whose backward pass is batched in float32, as in rules={{'*_norm': 'full'}}; {_REWRITE}",
    ),
    _Refusal(
        r"Cannot insert a Tensor that requires grad as a constant",
        "torch.jit.trace met the cast of a weight that the region keeps",
        "a region inside the traced function, or one that keeps no casts",
        "call torch.set_autocast_cache_enabled(False) as the first line of the region, or enter the region inside the "
        "traced function",
    ),
)


class _NoKernelError(FormatError, NotImplementedError):
    """A `FormatError` that is also PyTorch's NotImplementedError."""


def raise_explained(error: BaseException | None) -> None:
    """Raise a `FormatError` for an error of PyTorch about formats; do nothing for other errors."""
    if not isinstance(error, RuntimeError) or isinstance(error, PolyampError):
        return
    message = str(error)
    refusal = next((one for one in _REFUSALS if re.search(one.messages, message)), None)
    if refusal is None:
        return
    kind = _NoKernelError if isinstance(error, NotImplementedError) else FormatError
    raise kind(
        refusal.what,
        where=line_in("".join(traceback.format_tb(error.__traceback__))) or "a region of autocast",
        found=message.partition("\n")[0],
        allowed=refusal.allowed,
        fix=refusal.fix,
    ) from error
