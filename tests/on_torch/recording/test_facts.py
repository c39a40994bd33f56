"""`facts` of the PyTorch adapter, for `polyamp.lint`, and the code that it shares with `record`."""

import functools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import polyamp
from polyamp.backends.torch import adapter
from polyamp.backends.torch.recording.mode import spread_of
from polyamp.backends.torch.recording.reach import Reach
from polyamp.backends.torch.recording.widening import Widened
from polyamp.diagnosis.lint import ClassLoss, Facts, Product
from polyamp.diagnosis.spread import SAMPLE, stride
from support.diagnosis_cases import count_values
from support.torch_cases import Block, mlp

X, Y = torch.linspace(-2, 2, 48).reshape(6, 8), torch.tensor([0, 1, 2, 3, 0, 1])


def facts(target: Any, *args: Any, optimizer: Any = None, policy: Any = "mixed_float16") -> Facts:
    return adapter.facts(target, args, {}, polyamp.policy(policy), optimizer)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


# What lint is told.


@pytest.mark.parametrize(
    ("make", "state"),
    [
        (lambda model: torch.amp.GradScaler("cpu"), "native scaler"),
        (lambda model: (sgd(model), torch.amp.GradScaler("cpu", enabled=False)), "plain"),
        (lambda model: (sgd(model), torch.amp.GradScaler("cpu")), "native scaler"),
    ],
)
def test_what_the_optimizer_is(make: Callable[[nn.Module], Any], state: str) -> None:
    model = mlp()
    optimizer = make(model)
    assert facts(model, optimizer=optimizer).optimizer == state
    assert facts(lambda: (model(X).float().mean(), optimizer)).optimizer == state


def test_parameters_of_16_bits_and_their_masters() -> None:
    model = polyamp.convert(mlp(), "O2")
    names = ("0.weight", "0.bias", "2.weight", "2.bias", "5.weight", "5.bias")
    plain, wrapped = (
        facts(model, optimizer=optimizer) for optimizer in (None, polyamp.wrap_optimizer(sgd(model), "O2"))
    )
    assert plain.low_parameters == names
    assert (plain.has_masters, wrapped.has_masters) == (False, True)
    assert facts(mlp()).low_parameters == ()


def test_a_model_alone_is_not_run() -> None:
    found = facts(mlp())
    assert (found.products, found.losses, found.casts) == ((), (), ())


def test_sizes_of_products() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.back = nn.Conv2d(4, 6, 3, groups=2), nn.ConvTranspose2d(6, 5, 3)
            self.head = nn.Linear(5, 7)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.back(self.conv(x)).mean((2, 3)))

    found = facts(Net(), torch.ones(2, 4, 8, 8))
    assert found.products == (
        Product("conv", "conv", "float16", (4, 6)),
        Product("back", "conv", "float16", (5, 6)),
        Product("head", "matmul", "float16", (2, 5, 7)),
    )


def test_sizes_of_attention() -> None:
    sizes = [(one.name, one.sizes) for one in facts(Block(), torch.ones(2, 5, 16)).products]
    assert ("attention", (5, 8, 5)) in sizes


@pytest.mark.parametrize(("reduction", "rows"), [("mean", 6), ("sum", 1), ("none", 6)])
def test_classes_and_rows_of_a_loss(reduction: str, rows: int) -> None:
    model = mlp()
    found = facts(lambda: F.cross_entropy(model(X), Y, reduction=reduction).mean())
    assert found.losses == (ClassLoss("", 4, rows),)


def test_pixels_are_rows() -> None:
    logits = torch.zeros(2, 3, 4, 5, requires_grad=True)
    assert facts(lambda: F.cross_entropy(logits, torch.zeros(2, 4, 5, dtype=torch.long))).losses == (
        ClassLoss("", 3, 40),
    )


class Casting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        low = self.inner(x.half())
        with torch.autocast("cpu", enabled=False):
            low.to(torch.bfloat16)  # outside of autocast it is the user's business
        return low.to(torch.float32).double() + low.detach().cpu()


def test_casts_of_the_users_own_are_known_by_their_lines() -> None:
    model = nn.Sequential(Casting())
    found = facts(lambda: model(X).mean()).casts
    assert [(one.native, one.format) for one in found] == [("Tensor.half", "float16"), ("Tensor.to", "float32")]
    assert all(one.where.startswith(f"0 {Path(__file__).name}:") and one.where.endswith("(forward)") for one in found)


def test_autocasts_casts_are_not_the_users() -> None:
    model = mlp()
    policy = polyamp.policy("mixed_float16")
    assert facts(lambda: F.cross_entropy(policy.cast_to_output(model(X)), Y)).casts == ()
    assert (
        facts(lambda: sum(X.to(y.dtype).mean() + X.to(y).mean() + X.type_as(y).mean() for y in [model(X)])).casts == ()
    )


def test_a_training_step_is_looked_at_up_to_its_update_and_undone() -> None:
    model = mlp()
    optimizer = sgd(model)
    before = [param.tolist() for param in model.parameters()]

    def step() -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(X), Y).backward()
        optimizer.step()

    found = facts(step)
    assert (found.optimizer, len(found.products), len(found.losses)) == ("plain", 3, 1)
    assert [param.tolist() for param in model.parameters()] == before
    assert {param.grad for param in model.parameters()} == {None}


def test_lint_reads_them() -> None:
    model = nn.Linear(8, 50_257)
    many = torch.zeros(6, dtype=torch.long)
    found = polyamp.lint(
        lambda: F.cross_entropy(model(X), many), policy="mixed_float16", optimizer=sgd(model), rows=2**15
    )
    assert {"optimizer-not-wrapped", "stuck-loss"} <= {one.code for one in found.errors}
    assert "unaligned" in {one.code for one in found.notes}


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
