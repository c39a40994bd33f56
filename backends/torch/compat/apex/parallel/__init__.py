"""`apex.parallel`: data parallelism and synchronised batch norms with Apex's names and options, on PyTorch's.

As in Apex, ``apex.parallel.LARC`` is a module: ``from apex.parallel.LARC import LARC``.
"""

from torch.distributed import ReduceOp

from polyamp.backends.torch.compat.apex.parallel import LARC
from polyamp.backends.torch.compat.apex.parallel.distributed import DistributedDataParallel, Reducer
from polyamp.backends.torch.compat.apex.parallel.sync_batchnorm import (
    SyncBatchNorm,
    convert_syncbn_model,
    create_syncbn_process_group,
)

__all__ = [
    "LARC",
    "DistributedDataParallel",
    "ReduceOp",
    "Reducer",
    "SyncBatchNorm",
    "convert_syncbn_model",
    "create_syncbn_process_group",
]
