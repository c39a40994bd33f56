"""What a step can get at, how its tensors are counted, and 16-bit tensors that compute in float32."""

import functools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import polyamp
from polyamp.backends.torch.recording.mode import spread_of
from polyamp.backends.torch.recording.reach import Reach
from polyamp.backends.torch.recording.widening import Widened
from polyamp.diagnosis.spread import SAMPLE, stride
from support.diagnosis_cases import count_values

X, Y = torch.linspace(-2, 2, 48).reshape(6, 8), torch.tensor([0, 1, 2, 3, 0, 1])


# What a step can get at.

GLOBAL = nn.Linear(1, 1)


class Trainer:
    def __init__(self) -> None:
        self.parts = {"model": nn.Linear(2, 2)}

    def step(self) -> Any:
        return self._inner()

    def _inner(self) -> Any:
        return self.parts

    def __call__(self) -> Any:
        return GLOBAL(torch.ones(1))


def _closure(model: nn.Module) -> Callable[[], Any]:
    def outer() -> Any:
        return [inner() for _ in range(1)]

    def inner() -> Any:
        return model

    return outer


@pytest.mark.parametrize(
    "holding",
    [
        lambda model: model,
        lambda model: model.forward,
        lambda model: [{"a": (model,)}],
        lambda model: functools.partial(print, model),
        lambda model: functools.partial(print, key=model),
        lambda model: _closure(model),
        lambda model: lambda given=model: given,
        lambda model: torch.compile(lambda x: model(x), backend="eager"),
        lambda model: polyamp.autocast(lambda x: model(x), "mixed_float16"),
    ],
)
def test_a_module_is_found(holding: Callable[[nn.Module], Any]) -> None:
    model = nn.Linear(2, 2)
    assert model in Reach(holding(model)).modules()


def test_objects_and_globals_are_followed() -> None:
    trainer = Trainer()
    assert Reach(trainer.parts).modules() == [trainer.parts["model"]]
    assert set(Reach(trainer.step).modules()) == {trainer.parts["model"], GLOBAL}
    assert Reach(lambda: GLOBAL(X)).modules() == [GLOBAL]


# What is counted.


FLOATS = st.floats(width=32, allow_subnormal=True) | st.sampled_from([0.0, math.inf, -math.inf, math.nan, 2.0**-149])


@given(st.lists(FLOATS, min_size=1, max_size=40))
def test_counts_are_those_of_the_core(values: list[float]) -> None:
    found, expected = spread_of(torch.tensor(values)), count_values(values)
    for name in ("elements", "seen", "zeros", "inf", "nan", "largest", "counts"):
        assert getattr(found, name) == getattr(expected, name)
    assert found.mass == pytest.approx(expected.mass, rel=1e-5, abs=1e-44)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(12.0).reshape(3, 4).t(),
        torch.arange(12.0).reshape(3, 4)[:, ::2],
        torch.ones(1).expand(12),
        torch.arange(6.0).half(),
        torch.arange(6.0).double(),
        torch.arange(6.0).to_sparse(),
        torch.tensor(3.0, requires_grad=True),
        Widened(torch.tensor([1e9, 1.0]), torch.float16),
    ],
)
def test_any_tensor_is_counted(tensor: Tensor) -> None:
    values = tensor.value if isinstance(tensor, Widened) else tensor.detach()
    values = values.coalesce().values() if values.is_sparse else values
    assert spread_of(tensor) == count_values(values.flatten().tolist())


def test_of_large_tensors_a_part_is_counted_and_extremes_are_looked_for_in_all() -> None:
    values = torch.ones(5 * SAMPLE)
    values[1], values[2], values[3] = 1e30, math.inf, math.nan
    spread = spread_of(values)
    assert (spread.elements, spread.seen) == (5 * SAMPLE, len(values[:: stride(5 * SAMPLE)]))
    assert (spread.inf, spread.nan, spread.largest) == (1, 1, pytest.approx(1e30))


# Widened tensors.

LOW = torch.tensor([[0.5, -1.0, 2.0], [0.25, 3.0, -0.75], [1.5, 0.125, 1.0]], dtype=torch.bfloat16)
WIDE, SCALAR = torch.linspace(0.1, 1, 9).reshape(3, 3), torch.tensor(0.5)

CALLS: dict[str, Callable[[Tensor], Any]] = {
    "add": lambda x: x + x,
    "add wide": lambda x: x + WIDE,
    "add scalar": lambda x: x * SCALAR + 2,
    "int": lambda x: x * torch.arange(3),
    "compare": lambda x: (x > 0, x.argmax(), x.isfinite()),
    "where": lambda x: torch.where(x > 0, x, SCALAR),
    "cat": lambda x: torch.cat([x, WIDE]),
    "mm": lambda x: (x @ x, torch.addmm(x[0], x, x), torch.einsum("ij,kj->ik", x, x)),
    "views": lambda x: (x.t(), x[0], x.view(-1), x.unbind(), x.expand(2, 3, 3), x.diagonal()),
    "sum": lambda x: (x.sum(), x.sum(0, dtype=torch.float32), x.mean(-1), x.std(), x.cumsum(0), x.norm()),
    "softmax": lambda x: (x.softmax(-1), torch.softmax(x, -1, dtype=torch.float32), F.log_softmax(x, -1)),
    "layer_norm": lambda x: F.layer_norm(x, (3,), WIDE[0].bfloat16(), WIDE[1].bfloat16()),
    "layer_norm wide": lambda x: F.layer_norm(x, (3,), WIDE[0], WIDE[1]),
    "batch_norm": lambda x: F.batch_norm(x, WIDE[0].clone(), WIDE[1].clone(), WIDE[0], WIDE[1], training=True),
    "group_norm": lambda x: F.group_norm(x.view(1, 3, 3), 3),
    "conv": lambda x: F.conv1d(x.view(1, 3, 3), x.view(3, 3, 1)),
    "attention": lambda x: F.scaled_dot_product_attention(*[x.view(1, 1, 3, 3)] * 3),
    "losses": lambda x: (
        F.mse_loss(x, x * 2),
        F.huber_loss(x, WIDE.bfloat16()),
        F.cross_entropy(x, torch.tensor([0, 1, 2])),
    ),
    "activations": lambda x: (F.gelu(x), F.silu(x), F.softplus(x), F.prelu(x, x[0, :1]), F.dropout(x, 0.0), x.exp()),
    "in place": lambda x: x.clone().mul_(2).clamp_(-1, 1).relu_().add_(WIDE),
    "into a view": lambda x: x.clone().index_put_((torch.tensor([0]),), x[1]).masked_fill_(x > 1, -5.0),
    "shapes in place": lambda x: x.clone().transpose_(0, 1).unsqueeze_(0),
    "made like": lambda x: (
        torch.zeros_like(x),
        x.new_ones(2),
        torch.full_like(x, 3),
        torch.ones_like(x, dtype=torch.int8),
    ),
    "made": lambda x: (x.new_zeros(2) + torch.zeros(2, dtype=torch.bfloat16), torch.ones(3, dtype=torch.bfloat16)),
    "casts": lambda x: (x.float(), x.half(), x.double(), x.to(WIDE), x.bool(), x.type_as(WIDE)),
    "sort": lambda x: (x.sort(), x.topk(2), x.max(0), x.median(), x.unique()),
    "index": lambda x: (x[torch.tensor([0, 2])], x[x[:, 0] > 0.3], x.gather(0, torch.zeros(1, 3, dtype=torch.long))),
    "embedding": lambda x: (F.embedding(torch.tensor([0, 2]), x), F.one_hot(torch.tensor([1]))),
    "pool": lambda x: (F.max_pool1d(x[None], 2), F.avg_pool1d(x[None], 3), F.interpolate(x[None], 6, mode="linear")),
    "bits": lambda x: x.clone().view(torch.int16),
    "fft": lambda x: torch.fft.rfft(x.float()).abs(),
    "foreach": lambda x: torch._foreach_add([x, x], 1.0),
    "item": lambda x: x[0, 0].item(),
}


def _described(out: Any) -> list[Any]:
    leaves = torch.utils._pytree.tree_leaves(out)
    return [(one.dtype, tuple(one.shape)) if isinstance(one, Tensor) else one for one in leaves]


@pytest.mark.parametrize("name", CALLS)
def test_a_widened_tensor_says_what_a_16_bit_one_says(name: str) -> None:
    call = CALLS[name]
    wide, true = call(Widened(LOW.float(), torch.bfloat16)), call(LOW)
    assert _described(wide) == _described(true)
    for one, other in zip(*map(torch.utils._pytree.tree_leaves, (wide, true)), strict=True):
        if isinstance(one, Tensor):
            value = one.value if isinstance(one, Widened) else one
            torch.testing.assert_close(value.double(), other.double(), rtol=0.02, atol=0.02)
