"""`apex.multi_tensor_apply`: present, without Apex's kernels, so that a script takes its path without them.

Scripts ask ``multi_tensor_applier.available`` before they import ``amp_C``, which only Apex's own build has.
"""

from __future__ import annotations

from typing import Any, NoReturn

from polyamp.errors import UnsupportedError


class MultiTensorApply:
    """The object that calls Apex's kernels with lists of tensors; here there are none.

    >>> multi_tensor_applier.available
    False
    >>> multi_tensor_applier.import_err
    ModuleNotFoundError("No module named 'amp_C'")

    Args:
        chunk_size: elements per thread block of Apex's kernels.
    """

    available = False
    import_err = ModuleNotFoundError("No module named 'amp_C'", name="amp_C")

    def __init__(self, chunk_size: int) -> None:
        self.chunk_size = chunk_size

    def __call__(self, op: Any, noop_flag_buffer: Any, tensor_lists: Any, *args: Any) -> NoReturn:
        """Raise `UnsupportedError`: no kernel can be called."""
        raise UnsupportedError(
            "Apex's kernels are not here",
            where="multi_tensor_applier(op, ...)",
            found=op,
            allowed="operations of PyTorch",
            fix="ask multi_tensor_applier.available first; PyTorch's optimizers take foreach=True",
        ) from self.import_err


multi_tensor_applier = MultiTensorApply(2048 * 32)
