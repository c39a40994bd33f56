"""Values that rewritten modules keep in float32, and those that they lower: inputs, squares, saturation, norms."""

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import polyamp
from polyamp.backends.torch import explain, rewrite
from support.torch_cases import MODELS

FORMATS = {"float16": 2.0**-11, "bfloat16": 2.0**-8}
W = torch.eye(8)
X = torch.linspace(-3, 3, 32).reshape(4, 8)


class Layer(nn.Module):
    """A product, then a function of its result and of all other arguments."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.weight, self.function = nn.Parameter(W.clone()), function

    def forward(self, x: Tensor, *others: Any) -> Any:
        return self.function(x @ self.weight, *others)


def decided(function: Callable[..., Any], *args: Any, low: str = "float16", **rules: str) -> dict[str, tuple[str, str]]:
    """The format and the reason of each operation of a layer, the last one of a name."""
    policy = polyamp.policy(f"mixed_{low}", rules=rules or None)
    return {op.name: (op.format, op.reason) for op in explain(Layer(function), *args, policy=policy).operations}


def outcome(run: Callable[..., Any], model: Layer, args: tuple[Any, ...]) -> tuple[Tensor, Tensor]:
    model.zero_grad()
    result = run(*args)
    (result.float() * torch.cos(torch.arange(result.numel())).view(result.shape)).sum().backward()
    assert model.weight.grad is not None
    return result.detach(), model.weight.grad.clone()


LABELS, TARGETS = torch.full((4, 8), 100_000), torch.full((4, 8), 1000.1)
MASK = torch.zeros(4, 8)
MASK[:2] = -1e9
DECAYS = 10.0 ** -torch.arange(8)


def blurred(y: Tensor) -> Tensor:
    bell = torch.exp(-((torch.arange(3.0) - 1) ** 2))
    return F.conv1d(y[:, None] + 20, (bell / bell.sum())[None, None])


# PyTorch's own ways to write what tests/parity/test_traps.py runs in every framework; each with its arguments besides
# those of the product, and the factor of the product's arguments.
KEPT: dict[str, tuple[Callable[..., Any], tuple[Any, ...], float]] = {
    "integers that are divided": (lambda y, t: y - t / 2, (LABELS,), 1.0),
    "positions": (lambda y: torch.sin(y + torch.arange(5000, 5008)), (), 1.0),
    "positions in float32": (lambda y: torch.sin(y + torch.arange(5000.0, 5008.0)), (), 1.0),
    "a dot product with itself": (lambda y: torch.dot(y.flatten(), y.flatten()).sqrt(), (), 300.0),
    "a product in place": (lambda y: (y + 1).mul_(y + 1).mean(-1).sqrt(), (), 300.0),
    "a product of views as tensors": (lambda y: (y[None] * torch.as_tensor(y).unsqueeze(0)).mean(-1).sqrt(), (), 300.0),
    "a mask that NumPy makes": (lambda y: (y - torch.as_tensor(np.eye(8, dtype="f")[:4] * 1e9)).clamp(-9), (), 1.0),
    "a variance in windows": (lambda y: blurred(y * y) - blurred(y).square(), (), 1.0),
    "a table of divisors": (lambda y: y * DECAYS / DECAYS, (), 1.0),
    "ones over": (lambda y: torch.log(torch.ones_like(y) / (y.relu() + 1e-5)), (), 1.0),
}


@pytest.mark.parametrize("low", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", KEPT)
def test_what_float32_keeps_is_kept(name: str, low: str) -> None:
    function, others, factor = KEPT[name]
    model, args = Layer(function), (X * factor, *others)
    exact = outcome(model, model, args)
    rewritten = rewrite(model, *args, policy=f"mixed_{low}")
    for ours, theirs in zip(outcome(rewritten, model, args), exact, strict=True):
        assert ours.isfinite().all()
        assert (ours - theirs).norm() <= 24 * FORMATS[low] * theirs.norm() + 1e-6


def reasons(*functions: Callable[..., Any], args: tuple[Any, ...] = (X,)) -> list[tuple[str, str, str]]:
    """The operations of a layer with all these functions of its product and its other arguments."""
    plan = explain(Layer(lambda *given: tuple(one(*given) for one in functions)), *args, policy="mixed_float16")
    return [(op.name, op.format, op.reason) for op in plan.operations]


def test_operations_beside_inputs_say_so() -> None:
    found = reasons(
        lambda y, mask, *_: y + mask,
        lambda y, _, labels, *__: y + labels,
        lambda y, mask, *_: y * (mask > 0),  # booleans choose
        lambda y, mask, *_: y * (mask > 0).float(),
        lambda y, _, __, classes: y * F.one_hot(classes, 8).float(),
        lambda y, *_: y + torch.rand(8),
        lambda y, _, labels, *__: y + (labels > 0).float(),
        lambda y, mask, *_: y * torch.ones_like(mask),
        args=(X, MASK, LABELS, torch.arange(4)),
    )
    next_to_input, next_to_product = ("float32", "next to an input"), ("float16", "next to matmul")
    integers = ("float32", "integers beyond 2048 are not exact in float16")
    assert [one[1:] for one in found if one[0] in ("add", "mul")] == [next_to_input, integers] + [next_to_product] * 6


def test_parameters_and_buffers_are_no_inputs() -> None:
    class Shifted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.bias = nn.Parameter(W.clone()), nn.Parameter(torch.ones(8))
            self.register_buffer("scale", torch.ones(8))

        def forward(self, x: Tensor) -> Tensor:
            return (x @ self.weight + self.bias) * self.scale

    formats = {op.format for op in explain(Shifted(), X, policy="mixed_float16").operations if op.name != "cast"}
    assert formats == {"float16"}
    given = explain(lambda x, w, b: x @ w + b, X, W, nn.Parameter(torch.ones(8)), policy="mixed_float16")
    assert [op.format for op in given.operations[:2]] == ["float16", "float16"]


def test_what_an_operation_is_depends_on_its_operands() -> None:
    squares = (
        lambda y: y * y,
        lambda y: y.t().clone() * torch.real(y).t(),
        lambda y: (y - 1) * (y - 1),
        lambda y: y.view(8, 4) * y.reshape(8, 4),
        lambda y: y.reshape(-1) * y.reshape(y.numel()),
        lambda y: -y * y,
        lambda y: y.chunk(2, -1)[0] * y.chunk(2, -1)[0],
    )
    products = (
        lambda y: y * y.flip(0),
        lambda y: torch.mul(*y.chunk(2, -1)),
        lambda y: F.dropout(y) * F.dropout(y),  # two masks
    )
    reciprocals = (lambda y: 1 / (y + 4), lambda y: torch.full((8,), 2.0) / (y + 4))
    quotients = (lambda y: y / 2, lambda y: y / (y + 4))
    names = [name for name, *_ in reasons(*squares, *products, *reciprocals, *quotients)]
    kinds = [name for name in names if name in ("square", "mul", "reciprocal", "div")]
    assert kinds == ["square"] * 7 + ["mul"] * 3 + ["reciprocal"] * 2 + ["div"] * 2
    assert decided(lambda y: y * y, X, mul="lower")["mul"] == ("float16", "rule 'mul'")


def changed_and_used(y: Tensor) -> Tensor:
    a, b = y + 1, y + 1
    c = torch.sigmoid(a)
    a.mul_(2)
    return c * torch.sigmoid(a) * torch.sigmoid(b) * (a * b)


def without_gradients(y: Tensor) -> Tensor:
    with torch.no_grad():
        fixed = torch.exp(y * 2) @ W
    return fixed + torch.exp(y * 2) @ W


@pytest.mark.parametrize("function", [changed_and_used, without_gradients])
def test_values_are_equal_only_if_their_memory_and_derivatives_are(function: Callable[..., Any]) -> None:
    model = Layer(function)
    exact = outcome(model, model, (X,))
    for ours, theirs in zip(outcome(rewrite(model, X, policy="mixed_float16"), model, (X,)), exact, strict=True):
        assert (ours - theirs).norm() <= 2e-3 * theirs.norm()
    assert "square" not in decided(function, X)


def test_equal_values_have_one_cast_and_equal_results_do_not_share_memory() -> None:
    once = explain(Layer(lambda y: (lambda e: e @ W + e @ W)(torch.exp(y))), X, policy="mixed_float16").totals
    twice = explain(Layer(lambda y: torch.exp(y) @ W + torch.exp(y) @ W), X, policy="mixed_float16").totals
    assert twice["casts"] == once["casts"]
    one, other = rewrite(Layer(lambda y: (y + 1, y + 1)), X, policy="mixed_float16")(X)
    assert one.detach().zero_().data_ptr() != other.data_ptr()


STATE = torch.ones(4, 8)


@pytest.mark.parametrize(
    "write",
    [
        lambda s, y: s.copy_(0.99 * s + 0.01 * y),
        lambda s, y: s.__setitem__(slice(None), s + (y - s) * 0.01),
        lambda s, y: s.data.copy_(torch.lerp(s, y, 0.01)),
        lambda s, y: s.mul_(0.99).add_(y, alpha=0.01),
        lambda s, y: s.copy_((0.99 * s + 0.01 * y).clamp(0, 10)),
        lambda s, y: s.copy_(torch.maximum(0.99 * s + 0.01 * y, 0.5 * s)),
    ],
)
def test_a_state_that_is_written_accumulates(write: Callable[[Tensor, Tensor], Any]) -> None:
    def function(y: Tensor) -> Tensor:
        with torch.no_grad():
            write(STATE, y)
        return y

    STATE.fill_(1)
    rewritten = rewrite(Layer(function), X, policy="mixed_bfloat16")
    for _ in range(100):
        rewritten(torch.full((4, 8), 1.25))
    torch.testing.assert_close(STATE, torch.full((4, 8), 1.25 - 0.25 * 0.99**100), rtol=1e-3, atol=0)


def test_a_product_is_float32_if_full_work_alone_reads_it() -> None:
    assert decided(lambda y: (y * y.flip(0)).sum(), X)["mul"] == ("float32", "read by full work alone")
    assert decided(lambda y: (lambda p: (p.sum(), p @ W))(y * y.flip(0)), X)["mul"][0] == "float16"
    assert decided(lambda y: (lambda p: (p.sum(), p))(y * y.flip(0)), X)["mul"][0] == "float16"
    called = decided(lambda y: checkpoint(torch.exp, y * y.flip(0), use_reentrant=False), X)
    assert called["mul"][0] == "float16"  # bodies of calls are not followed


def test_what_saturates_is_computed_once_where_nobody_wants_it_rounded() -> None:
    model = Layer(lambda y: torch.log(torch.sigmoid(y) + 1e-12))
    graph = rewrite(model, X, policy="mixed_float16").graph
    sigmoids = [node for node in graph.nodes if node.target is torch.sigmoid]
    assert [node.meta["example_value"].dtype for node in sigmoids] == [torch.float32]
    both = Layer(lambda y: (lambda p: (p @ W, torch.log(p + 1e-12), torch.log(p + 1e-10)))(torch.sigmoid(y)))
    graph = rewrite(both, X, policy="mixed_float16").graph
    sigmoids = [node for node in graph.nodes if node.target is torch.sigmoid]
    assert [node.meta["example_value"].dtype for node in sigmoids] == [torch.float16, torch.float32]


@pytest.mark.parametrize("low", FORMATS)
def test_gradients_of_gathers_are_summed_in_float32(low: str) -> None:
    index = torch.zeros(4096, dtype=torch.int64)
    for gathered in (
        lambda y: y[index],
        lambda y: y.index_select(0, index),
        lambda y: torch.gather(y, 0, index[:, None].expand(-1, 8)),
    ):
        model = Layer(gathered)
        rewritten = rewrite(model, torch.ones(4, 8), policy=f"mixed_{low}")
        rewritten(torch.ones(4, 8)).sum().backward()
        torch.testing.assert_close(model.weight.grad, torch.full((8, 8), 4096.0))


# --- masks that a product adds ----------------------------------------------------------------------------------------


def attention(y: Tensor, mask: Tensor) -> Tensor:
    q = y.view(1, 1, 4, 8)
    return F.scaled_dot_product_attention(q, q, q, attn_mask=mask)


def mask_of(value: float) -> Tensor:
    mask = torch.zeros(4, 4)
    mask[:2], mask[2, 2:] = value, value
    return mask


@pytest.mark.parametrize("low", FORMATS)
@pytest.mark.parametrize("value", [torch.finfo(torch.float32).min, -1e4])
def test_rows_that_a_float32_mask_masks_fully_are_as_in_float32(value: float, low: str) -> None:
    model, args = Layer(attention), (X, mask_of(value))
    exact, ours = (outcome(run, model, args) for run in (model, rewrite(model, *args, policy=f"mixed_{low}")))
    for one, other in zip(ours, exact, strict=True):
        assert (one - other).norm() <= 16 * FORMATS[low] * other.norm()


@pytest.mark.parametrize("low", FORMATS)
def test_what_a_product_adds_stays_finite_and_infinities_stay(low: str) -> None:
    def scores(y: Tensor, mask: Tensor) -> Tensor:
        return torch.softmax(torch.addmm(mask, y, y.t()), -1)

    model, args = Layer(scores), (X, mask_of(-1e9))
    for tensor in outcome(rewrite(model, *args, policy=f"mixed_{low}"), model, args):
        assert tensor.isfinite().all()
    mask = mask_of(float("-inf"))[2:].expand(2, 4)
    rewritten = rewrite(Layer(lambda y, m: torch.addmm(m, y[2:], y.t())), X, mask, policy=f"mixed_{low}")
    assert rewritten(X, mask).isneginf().equal(mask.isneginf())


def test_a_mask_on_other_devices_is_cast_and_stays_finite() -> None:
    """Their kernels want it in the type of the query."""
    x, mask = X.to("meta"), mask_of(-1e9).to("meta")
    graph = rewrite(Layer(attention).to("meta"), x, mask, policy="mixed_float16").graph
    (node,) = [node for node in graph.nodes if node.target is F.scaled_dot_product_attention]
    assert node.kwargs["attn_mask"].meta["example_value"].dtype == torch.float16
    assert node.kwargs["attn_mask"].args[0].target is torch.where


# --- inner ------------------------------------------------------------------------------------------------------------

NORMS: dict[str, Callable[[Tensor], Tensor]] = {
    "layer_norm": lambda y: F.layer_norm(y, (8,), torch.ones(8), torch.ones(8)),
    "group_norm": lambda y: F.group_norm(y, 2, torch.ones(8), torch.ones(8)),
    "rms_norm": lambda y: F.rms_norm(y, (8,), torch.ones(8)),
    "instance_norm": lambda y: F.instance_norm(y[None]),
    "batch_norm": lambda y: F.batch_norm(y, torch.zeros(8), torch.ones(8), torch.ones(8), torch.ones(8), training=True),
}
INNER = {
    **NORMS,
    "avg_pool": lambda y: F.avg_pool1d(y, 2),
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "erf": torch.erf,
}


@pytest.mark.parametrize("low", FORMATS)
@pytest.mark.parametrize("name", INNER)
def test_inner_work_is_16_bits_outside(name: str, low: str) -> None:
    saturates = name in ("sigmoid", "tanh", "erf")
    model, args = Layer(INNER[name]), (X * (1 if saturates else 100),)
    rewritten = rewrite(model, *args, policy=f"mixed_{low}")
    assert (name, low, "next to matmul") in [(op.name, op.format, op.reason) for op in rewritten.plan.operations]
    exact, ours = (outcome(run, model, args)[0] for run in (model, rewritten))
    assert (ours - exact).norm() <= 4 * FORMATS[low] * exact.norm()
    if name != "avg_pool":  # which is as large as its data
        found = decided(lambda y: F.relu(INNER[name](y.exp())), X, low=low)
        assert found[name] == (low if saturates else "float32", "bounded, after exp")
        assert found["relu"] == (low, f"next to {name}")


def test_what_is_inner_is_held_in_16_bits() -> None:
    model = Layer(lambda y: torch.softmax(F.layer_norm(y.exp(), (8,)), -1))
    (norm,) = rewrite(model, X, policy="mixed_float16").graph.find_nodes(op="call_function", target=F.layer_norm)
    assert norm.meta["example_value"].dtype == torch.float32
    assert [user.args[1] for user in norm.users] == [torch.float16]


@pytest.mark.parametrize("data", [lambda y: y, torch.exp])
def test_statistics_that_a_norm_gives_are_float32(data: Callable[[Tensor], Tensor]) -> None:
    def function(y: Tensor) -> tuple[Tensor, Tensor]:
        result, mean, _ = torch.native_layer_norm(data(y), (8,), None, None, 1e-5)
        return F.relu(result), mean * 2

    found = decided(function, X)
    assert (found["relu"], found["mul"]) == (("float16", "next to layer_norm"), ("float32", "after layer_norm"))
    for ours, theirs in zip(rewrite(Layer(function), X, policy="mixed_float16")(X), Layer(function)(X), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-2, atol=1e-2)


def test_a_norm_that_is_written_out_is_cast_once_at_its_end() -> None:
    def norm(y: Tensor) -> Tensor:
        z = (y - y.mean(-1, keepdim=True)) * torch.rsqrt(y.var(-1, keepdim=True) + 1e-5) * 2 + 1
        return F.relu(z) + F.gelu(z)

    found = decided(norm, X)
    assert (found["sub"], found["mul"]) == (("float32", "inside a norm"),) * 2
    assert (found["relu"][0], found["gelu"][0]) == ("float16", "float16")
    graph = rewrite(Layer(norm), X, policy="mixed_float16").graph
    names = ["relu", "gelu"]
    sources = {node.args[0] for node in graph.nodes if getattr(node.target, "__name__", "") in names}
    assert len(sources) == 1


# --- next to native autocast ------------------------------------------------------------------------------------------


def transformer() -> tuple[nn.Module, tuple[Tensor]]:
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True, norm_first=True)
    return nn.Sequential(nn.Linear(8, 16), layer, nn.LayerNorm(16), nn.Linear(16, 4)), (torch.randn(4, 12, 8),)


def gradients(run: Callable[..., Any], model: nn.Module, x: Tensor) -> Tensor:
    model.zero_grad()
    (result, *_) = pytree.tree_leaves(run(x))
    (result.double() - torch.sin(torch.arange(result.numel())).view(result.shape)).square().mean().backward()
    return torch.cat([param.grad.double().flatten() for param in model.parameters() if param.grad is not None])


def natively(model: nn.Module, low: str) -> Callable[..., Any]:
    return torch.autocast("cpu", getattr(torch, low))(model)


@pytest.mark.slow
@pytest.mark.parametrize("low", FORMATS)
@pytest.mark.parametrize("name", ["conv", "transformer", "lstm"])
def test_gradients_are_as_exact_as_those_of_native_autocast(name: str, low: str) -> None:
    if name == "lstm" and low == "float16":
        pytest.skip("PyTorch has no float16 LSTM for every CPU")
    errors, make = [], {**MODELS, "transformer": transformer}[name]
    model, args = make()
    rewritten = rewrite(model, *args, policy=f"mixed_{low}")
    for seed in range(3):
        torch.manual_seed(seed)
        other, (x,) = make()
        model.load_state_dict(other.state_dict())
        double = copy.deepcopy(model).double()
        exact = gradients(double, double, x.double())
        ours = gradients(rewritten, model, x)
        native = gradients(natively(model, low), model, x)
        errors.append(((ours - exact).norm() / exact.norm(), (native - exact).norm() / exact.norm()))
    ours_all, native_all = (torch.stack(list(one)).mean() for one in zip(*errors, strict=True))
    assert ours_all <= 1.05 * native_all
