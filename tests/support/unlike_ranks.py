"""Ranks whose devices are fast in other formats than those of the rank beside them."""

from types import SimpleNamespace

from polyamp.adapters import adapter_named
from polyamp.auto import choose


def check_that_ranks_choose_the_same(framework: str, rank: int) -> None:
    """The first rank's device is fast in both formats, the second's in float16; both choose float16."""
    fast = ["float16", "bfloat16"] if rank == 0 else ["float16"]
    described = {"version": "1", "devices": [{"name": "cuda:0 GPU", "fast": fast}]}
    least_over_ranks = adapter_named(framework).least_over_ranks
    unlike = SimpleNamespace(name=framework, describe=lambda: described, least_over_ranks=least_over_ranks)
    name, why = choose([unlike])
    assert (name, "on another rank: bfloat16" in why) == ("mixed_float16", rank == 0)
