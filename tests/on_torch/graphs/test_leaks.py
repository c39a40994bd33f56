"""Rewriting and explaining leave almost nothing in memory, once nobody refers to the result."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import polyamp

pytestmark = pytest.mark.slow

X = torch.ones(3, 8)
FEW = 40  # objects of Dynamo's own for each capture: sources, metrics of the last compilations
KINDS = {"FakeTensor", "FakeTensorMode", "ShapeEnv", "SymNode", "Program", "Rewritten", "_Explainer", "Linear"}
KINDS |= {"_PySymInputStub", "CheckFunctionManager", "FrameSummary", "OutputGraph"}
LOGS = ("LogRecord", "dict", "list")  # what pytest keeps of what torch logs


def rewritten() -> None:
    model = polyamp.rewrite(nn.Sequential(nn.Linear(8, 8), nn.GELU()), X, policy="mixed_bfloat16")
    model(torch.ones(5, 8)).sum().backward()
    assert model.plan.bytes_saved


def explained() -> None:
    assert polyamp.explain(nn.Linear(8, 8), X, policy="mixed_bfloat16").bytes_saved


def breaks(x: Tensor) -> Tensor:
    return x @ x.T if x.sum() > 0 else x


def recorded() -> None:
    model = nn.Linear(8, 8)
    assert polyamp.explain(lambda x: breaks(model(x)), X, policy="mixed_bfloat16").bytes_saved


def objects() -> Counter[str]:
    gc.collect()
    return Counter(type(one).__name__ for one in gc.get_objects() if type(one).__name__ not in LOGS)


@pytest.mark.parametrize("act", [rewritten, explained, recorded])
def test_it_leaves_next_to_nothing(act: Callable[[], None]) -> None:
    for _ in range(3):
        act()
    before = objects()
    for _ in range(10):
        act()
    new = objects() - before
    assert not KINDS & new.keys(), new
    assert new.total() < 10 * FEW, new
