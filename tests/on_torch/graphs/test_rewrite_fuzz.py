"""Random programs with views and changes in place, over small integers that every format holds: equal to the bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import example, given, reject, settings
from hypothesis import strategies as st
from torch import Tensor

from polyamp.backends.torch.graphs.rewrite import rewrite

pytestmark = pytest.mark.slow

SIZE = 4
P = torch.eye(SIZE)[[2, 0, 3, 1]]  # a product with it moves columns
Step = tuple[str, int, int]


def changed(change: Callable[[Tensor], Any]) -> Callable[[Tensor, Tensor], Tensor]:
    def run(x: Tensor, _: Tensor) -> Tensor:
        change(x)
        return x

    return run


STEPS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "matmul": lambda x, y: x @ P,
    "add": lambda x, y: (x + y).clamp(-8, 8),
    "where": lambda x, y: torch.where(y > 0, x, y),
    "full": lambda x, y: torch.cumsum(x.clamp(-1, 1), 0),
    "relu_": lambda x, y: x.relu_(),
    "add_": lambda x, y: x.add_(y).clamp_(-8, 8),
    "iadd": changed(lambda x: x.__iadd__(1).clamp_(-8, 8)),
    "neg_": changed(lambda x: x.neg_()),
    "transpose": lambda x, y: x.t(),
    "view": lambda x, y: x.reshape(-1).view(SIZE, SIZE),
    "row": changed(lambda x: x[1].fill_(3)),
    "item": changed(lambda x: x.__setitem__((slice(None), 0), 2)),
    "item of another": lambda x, y: changed(lambda z: z.__setitem__(0, y[1]))(x, y),
    "copy_": lambda x, y: x.copy_(y),
    "clone": lambda x, y: x.clone(),
    "round": lambda x, y: x.float(),
    "concat": lambda x, y: torch.cat([x[:2], y[2:]]),
}


def program(steps: list[Step]) -> Callable[[Tensor, Tensor], tuple[Tensor, ...]]:
    """Each step makes a new value from two earlier ones; all of them are returned, as they are at the end."""

    def run(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        values = [x, w, x @ P, w + 1]
        for name, one, other in steps:
            values.append(STEPS[name](values[one % len(values)], values[other % len(values)]))
        return tuple(values[2:])

    return run


STEP = st.tuples(st.sampled_from(sorted(STEPS)), st.integers(0, 9), st.integers(0, 9))


@settings(max_examples=25, deadline=None)
@example(steps=[("transpose", 1, 0), ("add_", 4, 1)], low="mixed_bfloat16")  # refused
@given(steps=st.lists(STEP, min_size=3, max_size=9), low=st.sampled_from(["mixed_bfloat16", "mixed_float16"]))
def test_programs_give_what_they_give(steps: list[Step], low: str) -> None:
    fn = program(steps)
    x, w = torch.arange(16.0).reshape(SIZE, SIZE) % 5 - 2, torch.arange(16.0).reshape(SIZE, SIZE) % 3
    ours_in, theirs_in = (x.clone(), w.clone()), (x.clone(), w.clone())
    try:
        theirs = fn(*theirs_in)
    except RuntimeError:  # torch itself refuses to add a matrix to its own transpose in place
        reject()
    ours = rewrite(fn, x, w, policy=low)(*ours_in)
    for one, other in zip((*ours, *ours_in), (*theirs, *theirs_in), strict=True):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)
