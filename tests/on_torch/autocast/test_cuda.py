"""Autocast by rules on a GPU, where autograd has its own thread; run with ``--gpu``."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import polyamp
from support.torch_waits import waits_are_errors

pytestmark = pytest.mark.gpu

LOWER = polyamp.policy("mixed_float16", rules={"softmax": "lower", "layers.1": "full"})


def test_default_policies_are_native() -> None:
    pytest.importorskip("expecttest", reason="torch's own test lists import it, and not every GPU machine has it")
    from torch.testing._internal.autocast_test_lists import AutocastTestLists

    lists = AutocastTestLists(torch.device("cuda"))
    for name, args, *rest in lists.torch_fp32 + lists.torch_fp16:
        keywords = rest[0] if rest and isinstance(rest[0], dict) else {}
        if name.startswith(("_thnn", "cudnn")):
            continue
        with torch.autocast("cuda", torch.float16):
            native = getattr(torch, name)(*args, **keywords)
        with polyamp.autocast("mixed_float16"):
            ours = getattr(torch, name)(*args, **keywords)
        assert type(ours) is type(native)
        assert not isinstance(native, Tensor) or ours.dtype == native.dtype


def test_rules_hold_on_the_gpu_and_float16_meets_bfloat16() -> None:
    x = torch.ones(4, 4, device="cuda")
    with polyamp.autocast(LOWER):
        assert torch.softmax(x, -1).dtype == torch.float16
        assert torch.exp(x.half()).dtype == torch.float32
        assert torch.atan2(x.half(), x.bfloat16()).dtype == torch.float32


def test_an_update_inside_a_region_is_seen_without_a_sync() -> None:
    layer, x = nn.Linear(8, 8, device="cuda"), torch.ones(2, 8, device="cuda")
    with waits_are_errors(), polyamp.autocast(LOWER):
        before = layer(x)
        with torch.no_grad():
            layer.weight.mul_(2)
        after = layer(x)
    assert not torch.equal(before, after)
