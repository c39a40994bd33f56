"""`head/*` is every operation in module ``head``, directly or deeper, forward and backward, in every engine."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import polyamp

X = torch.randn(2, 4)


class Head(nn.Module):
    """A product of its own beside one deeper."""

    def __init__(self) -> None:
        super().__init__()
        self.deep, self.weight = nn.Linear(4, 5), nn.Parameter(torch.randn(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.deep(torch.mm(x, self.weight))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head, self.ahead = nn.Linear(4, 4), Head(), nn.Linear(5, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.ahead(self.head(self.body(x)))


class Products(TorchDispatchMode):
    """The formats of products, by the sizes of their results: forward and backward."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[tuple[int, ...], torch.dtype]] = []

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = op(*args, **(kwargs or {}))
        if op in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default):
            self.seen.append((tuple(out.shape), out.dtype))
        return out


def under_autocast(model: nn.Module, policy: Any) -> Callable[[Tensor], Tensor]:
    return polyamp.autocast(model.__call__, policy)


def rewritten(model: nn.Module, policy: Any) -> Callable[[Tensor], Tensor]:
    return polyamp.rewrite(model, X, policy=policy)


def compiled_in_autocast(model: nn.Module, policy: Any) -> Callable[[Tensor], Tensor]:
    torch._dynamo.reset()
    return polyamp.autocast(torch.compile(model, backend="eager"), policy)


def converted(model: nn.Module, policy: polyamp.Policy) -> Callable[[Tensor], Tensor]:
    stored = polyamp.policy(param="bfloat16", compute="bfloat16", output="float32", rules=dict(policy.own_rules))
    return polyamp.convert(model, stored)


needs_newer = pytest.mark.skipif(torch.__version__ < "2.13", reason="compiled code refuses rules by path")
ENGINES = [under_autocast, rewritten, pytest.param(compiled_in_autocast, marks=needs_newer), converted]
# All products by the sizes of their results: of the body, of the head itself, of what is deeper, behind it.
PARTS = {
    "body": {(2, 4): 1, (4, 4): 1},
    "head": {(2, 4): 3, (4, 4): 1, (2, 5): 1, (5, 4): 1},
    "ahead": {(2, 6): 1, (6, 5): 1, (2, 5): 1},
}


@pytest.mark.filterwarnings("ignore:The .grad attribute")
@pytest.mark.parametrize("pattern", ["head/*", "head.*", "head"])
@pytest.mark.parametrize("engine", ENGINES)
def test_all_of_the_head_is_in_float32_and_nothing_else(engine: Any, pattern: str) -> None:
    model = Model()
    run = engine(model, polyamp.policy("mixed_bfloat16", rules={pattern: "full"}))
    run(X)
    with Products() as products:
        run(X).float().sum().backward()
    full = [shape for shape, dtype in products.seen if dtype is torch.float32]
    low = [shape for shape, dtype in products.seen if dtype is torch.bfloat16]
    assert sorted(full) == sorted(_sizes("head"))
    assert sorted(low) == sorted([*_sizes("body"), *_sizes("ahead")])


def _sizes(part: str) -> list[tuple[int, ...]]:
    return [size for size, count in PARTS[part].items() for _ in range(count)]


@pytest.mark.filterwarnings("ignore:The .grad attribute")
@pytest.mark.parametrize("engine", ENGINES[:-1])
def test_a_name_at_the_end_is_about_the_scope_itself(engine: Any) -> None:
    model = Model()
    run = engine(model, polyamp.policy("mixed_bfloat16", rules={"head/matmul": "full"}))
    with torch.no_grad():
        run(X)
        with Products() as products:
            run(X)
    formats = dict.fromkeys([(2, 5), (2, 6)], torch.bfloat16)
    assert {shape: dtype for shape, dtype in products.seen if shape in formats} == formats
    assert [dtype for shape, dtype in products.seen if shape == (2, 4)] == [torch.bfloat16, torch.float32]
