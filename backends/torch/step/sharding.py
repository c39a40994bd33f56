"""Parameters that FSDP2 shards by module: the policy that it gathers them by, and groups that it cannot gather.

``fully_shard`` gathers all parameters of a module in one buffer, so they need one dtype. `polyamp.convert` under ``O2``
stores norms in float32 and the rest in float16, so a block with a norm cannot be one group:

    block      norm.weight float32, linear.weight float16    refused by `check_groups`
    instead    fully_shard(block.norm), then fully_shard(block)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from polyamp.backends.torch.dtypes import DTYPES
from polyamp.backends.torch.unstable import fsdp_groups
from polyamp.errors import UnsupportedError, UsageError
from polyamp.policies import Policy

_TAKEN = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def fsdp_policy(policy: Policy, *, reduce: str, output: str, cast_forward_inputs: bool) -> Any:
    """Return the ``MixedPrecisionPolicy`` of a policy; see `Policy.to_fsdp`."""
    from torch.distributed.fsdp import MixedPrecisionPolicy

    reduced = _taken(reduce, where="policy.to_fsdp(reduce=)")
    compute = _taken(policy.compute, where="policy.to_fsdp() of a policy's compute format")
    if policy.needs_master_weights and policy.decide("layer_norm").op_class in ("inner", "full"):
        return MixedPrecisionPolicy(reduce_dtype=reduced)  # two stored dtypes, which `convert` casts between
    return MixedPrecisionPolicy(compute, reduced, _taken(output, where="policy.to_fsdp(output=)"), cast_forward_inputs)


def check_groups(params: Sequence[Tensor]) -> None:
    """Raise if ``fully_shard`` has put parameters of several dtypes into one group, which its first forward refuses."""
    if len({param.dtype for param in params}) == 1 or not any(hasattr(param, "placements") for param in params):
        return
    own = set(params)
    for group in fsdp_groups():
        dtypes = sorted({str(param.dtype) for param in group if param.requires_grad})
        if len(dtypes) > 1 and not own.isdisjoint(group):
            raise UsageError(
                "fully_shard cannot gather parameters of several dtypes together",
                where=f"a group of {len(group)} parameters of one fully_shard",
                found=" and ".join(dtypes),
                allowed="one dtype in a group",
                fix="call fully_shard on each norm first, then on the module around it; or store all parameters in "
                'float32: without convert, fully_shard(module, mp_policy=polyamp.policy("mixed_float16").to_fsdp())',
            )


def _taken(name: str, *, where: str) -> torch.dtype:
    dtype = DTYPES[name]
    if dtype not in _TAKEN:
        raise UnsupportedError(
            "FSDP has no such format",
            where=where,
            found=name,
            allowed=", ".join(known for known, one in DTYPES.items() if one in _TAKEN),
            fix="use a policy or an option with one of those",
        )
    return dtype
