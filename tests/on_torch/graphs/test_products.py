"""Products that are multiplications, and integers that become floating values: neither is rounded."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import polyamp
from polyamp.backends.torch import explain, rewrite

L = 4097


class Rotary(nn.Module):
    """Angles: positions times frequencies, which are a parameter; and a product to lower."""

    def __init__(self, angles: Callable[..., Any]) -> None:
        super().__init__()
        self.angles, self.frequencies = angles, nn.Parameter(1e4 ** -(torch.arange(8.0) / 8))
        self.planes, self.w = nn.Parameter(torch.full((2, 8), 0.1)), nn.Parameter(torch.eye(8))
        self.register_buffer("ids", torch.arange(L))

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        return torch.sin(self.angles(self, positions)) * (x @ self.w)


def range_of(dtype: torch.dtype | None = None) -> Tensor:
    return torch.arange(L, dtype=dtype)


MULTIPLIED: dict[str, Callable[..., Any]] = {
    "einsum": lambda m, p: torch.einsum("i,j->ij", p.float(), m.frequencies),
    "einsum of a range": lambda m, p: torch.einsum("i,j->ij", range_of().float(), m.frequencies),
    "einsum over a batch": lambda m, p: torch.einsum("bi,bj->bij", p[None].float(), m.frequencies[None])[0],
    "matmul": lambda m, p: p.float()[:, None] @ m.frequencies[None],
    "matmul of a buffer": lambda m, p: m.ids.float()[:, None] @ m.frequencies[None],
    "bmm": lambda m, p: torch.bmm(p.float()[None, :, None], m.frequencies[None, None])[0],
    "addmm": lambda m, p: torch.addmm(m.frequencies, p.float()[:, None], m.frequencies[None]),
    "addr": lambda m, p: torch.addr(torch.zeros(8), p.float(), m.frequencies),
    "outer": lambda m, p: torch.outer(range_of(torch.float32), m.frequencies),
    "ger": lambda m, p: torch.ger(p.float(), m.frequencies),
    "tensordot": lambda m, p: torch.tensordot(p.float(), m.frequencies, dims=0),
    "tensordot over axes": lambda m, p: torch.tensordot(p.float()[:, None], m.frequencies[None], dims=([1], [0])),
    "linear": lambda m, p: F.linear(p.float()[:, None], m.frequencies[:, None]),
}
SUMMED: dict[str, Callable[..., Any]] = {
    "of an argument": lambda m, p: torch.stack([p, p // 2], -1).float() @ m.planes,
    "of ranges": lambda m, p: torch.stack([range_of(torch.float32), range_of().float()], -1) @ m.planes,
    "of a buffer": lambda m, p: (torch.stack([m.ids, m.ids], -1) * 1.0) @ m.planes,
}


@pytest.mark.parametrize("low", ["float16", "bfloat16"])
@pytest.mark.parametrize(
    ("angles", "is_sum"), [(one, False) for one in MULTIPLIED.values()] + [(one, True) for one in SUMMED.values()]
)
def test_positions_times_frequencies_are_not_rounded(angles: Any, is_sum: bool, low: str) -> None:
    module, x, positions = Rotary(angles), torch.ones(L, 8), torch.arange(L)
    fast = rewrite(module, x, positions, policy=f"mixed_{low}")
    assert (fast(x, positions) - module(x, positions)).abs().max() <= 2.0**-8
    first = next(op for op in fast.plan.operations if op.name == ("matmul" if is_sum else "mul"))
    assert first.format == "float32"
    assert not is_sum or first.reason == f"integers beyond {2048 if low == 'float16' else 256} are not exact in {low}"


def test_gradients_of_the_frequencies_are_right() -> None:
    module, x, positions = Rotary(MULTIPLIED["matmul"]), torch.ones(L, 8), torch.arange(L)
    module(x, positions).sum().backward()
    expected = module.frequencies.grad
    assert expected is not None
    module.frequencies.grad = None
    rewrite(module, x, positions, policy="mixed_bfloat16")(x, positions).sum().backward()
    assert module.frequencies.grad is not None
    assert (module.frequencies.grad - expected).norm() <= 2.0**-7 * expected.norm()


def formats(function: Callable[..., Any], *args: Any) -> list[tuple[str, str]]:
    plan = explain(function, *args, policy="mixed_bfloat16")
    return [(op.name, op.format) for op in plan.operations if op.format != "as written"]


W = nn.Parameter(torch.eye(8))
X, IDS = torch.ones(4, 8), torch.arange(4)


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda x, p: x @ W, [("matmul", "bfloat16")]),
        (lambda x, p: torch.einsum("ij->ji", x @ W), [("matmul", "bfloat16"), ("transpose", "bfloat16")]),
        (lambda x, p: torch.einsum("ij->j", x @ W), [("matmul", "bfloat16"), ("sum", "float32")]),
        (lambda x, p: (x @ W)[:, :1] @ W[:1], [("matmul", "bfloat16"), ("mul", "bfloat16")]),
        (lambda x, p: F.one_hot(p, 8).float() @ W, [("matmul", "bfloat16")]),
        (lambda x, p: (p > 2).float()[None] @ x, [("matmul", "bfloat16")]),
        (lambda x, p: p.to(torch.uint8).float()[None] @ x, [("matmul", "bfloat16")]),
        (lambda x, p: torch.arange(4).float()[None] @ x, [("matmul", "bfloat16")]),
        (lambda x, p: (x @ W) * torch.tensor([4001, 4003] * 4), [("matmul", "bfloat16"), ("mul", "float32")]),
        (lambda x, p: torch.einsum("id,id->i", x @ W, x @ W), [("matmul", "bfloat16")] * 2 + [("square", "float32")]),
    ],
)
def test_what_is_decided_of_products(function: Callable[..., Any], expected: list[tuple[str, str]]) -> None:
    assert [one for one in formats(function, X, IDS) if one[0] not in ("cast", "slice")] == expected


def test_nothing_is_said_of_such_a_layer() -> None:
    module, x = nn.Sequential(nn.Linear(1, 8), nn.ReLU(), nn.Linear(8, 8)), torch.ones(4, 1)
    fast = rewrite(module, x, policy="mixed_float16")
    assert [(op.name, op.format) for op in fast.plan.operations if op.name in ("mul", "matmul")] == [
        ("mul", "float32"),
        ("matmul", "float16"),
    ]
    assert polyamp.lint(module, x, policy="mixed_float16").findings == ()


# --- squared distances that are written out ---------------------------------------------------------------------------


class Distances(nn.Module):
    """Distances of a product's rows from a codebook."""

    def __init__(self, distance: Callable[..., Any]) -> None:
        super().__init__()
        self.distance, self.w = distance, nn.Parameter(torch.eye(8))
        self.codes = nn.Parameter(100 * torch.rand(16, 8, generator=torch.Generator().manual_seed(0)))

    def forward(self, x: Tensor) -> Tensor:
        return self.distance(x @ self.w, self.codes)


def squares(a: Tensor) -> Tensor:
    return a.pow(2).sum(-1)


def of_products(product: Tensor) -> Tensor:
    squared = torch.diagonal(product)
    return squared[:, None] + squared - 2 * product


DISTANCES: dict[str, Callable[[Any, Any], Any]] = {
    "a2 - 2ab + b2": lambda a, b: squares(a)[:, None] - 2 * a @ b.T + squares(b),
    "(a2 + b2) - 2ab": lambda a, b: (a * a).sum(1, keepdim=True) + (b * b).sum(1) - 2 * torch.matmul(a, b.mT),
    "a2 + (b2 - 2ab)": lambda a, b: squares(a)[:, None] + (squares(b) - F.linear(2 * a, b)),
    "-2ab + a2 + b2": lambda a, b: -2 * torch.einsum("id,jd->ij", a, b) + a.square().sum(1)[:, None] + squares(b),
    "einsum": lambda a, b: torch.einsum("id,id->i", a, a)[:, None] + torch.einsum("id,id->i", b, b) - 2 * a @ b.T,
    "norms": lambda a, b: a.norm(dim=1, keepdim=True) ** 2 + torch.linalg.vector_norm(b, dim=1) ** 2 - 2 * a @ b.T,
    "addmm": lambda a, b: torch.addmm(squares(b).expand(8, 16), a, b.T, alpha=-2) + squares(a)[:, None],
    "baddbmm": lambda a, b: torch.baddbmm(squares(a)[None, :, None], a[None], b.T[None], alpha=-2)[0] + squares(b),
    "of a codebook alone": lambda a, b: squares(b) - 2 * a @ b.T,
    "of products with themselves": lambda a, b: of_products(a @ a.T),
    "a kernel": lambda a, b: torch.exp((2 * a @ b.T - squares(a)[:, None] - squares(b)) / 5000),
}
ROWS = (100 * torch.rand(8, 8, generator=torch.Generator().manual_seed(1))).bfloat16().float()


@pytest.mark.parametrize("distance", DISTANCES.values(), ids=list(DISTANCES))
def test_the_product_in_a_distance_is_not_rounded(distance: Any) -> None:
    module = Distances(distance)
    fast = rewrite(module, ROWS, policy="mixed_bfloat16")
    expected = module(ROWS)
    assert (fast(ROWS) - expected).abs().max() <= 1e-5 * expected.abs().max()
    assert {op.format for op in fast.plan.operations if op.reason == "subtracted from squares of its operands"} == {
        "float32"
    }


def test_other_products_of_what_is_squared_stay_in_16_bits() -> None:
    def loss(a: Tensor, b: Tensor) -> Tensor:
        return torch.log_softmax(a @ b.T, -1).mean() + 0.1 * (a * a).mean()

    plan = explain(Distances(loss), ROWS, policy="mixed_bfloat16")
    assert [op.format for op in plan.operations if op.name == "matmul"] == ["bfloat16"] * 2
