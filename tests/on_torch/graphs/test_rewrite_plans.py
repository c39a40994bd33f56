"""The plan of a torch module: operations, formats, reasons, places, casts and bytes; and rules by path."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import polyamp
from polyamp.backends.torch import explain, rewrite
from support.torch_cases import case, mlp

X, W = torch.full((4, 8), 0.25), torch.full((8, 8), 0.5)


def decided(fn: Callable[..., Any], *args: Any, policy: Any = "mixed_float16") -> list[tuple[str, str, str]]:
    return [(op.name, op.format, op.reason) for op in explain(fn, *args, policy=policy).operations]


def test_each_class_is_decided_by_the_flow_rule() -> None:
    def fn(x: Tensor, w: Tensor, index: Tensor) -> Tensor:
        y = torch.tanh(x @ w + x)  # lower, follow
        y = F.softmax(y, -1).reshape(8, 4)  # full, neutral
        z = torch.cat([(x @ w), x])  # promote
        return y.sum() + z[index].float().sum()

    assert decided(fn, X, W, torch.tensor([0, 1])) == [
        ("matmul", "float16", "table"),
        ("add", "float32", "next to an input"),
        ("tanh", "float16", "bounded, after an input"),
        ("softmax", "float32", "table"),
        ("reshape", "float32", "after softmax"),
        ("matmul", "float16", "table"),
        ("concat", "float32", "next to an input"),
        ("sum", "float32", "table"),
        ("slice", "float32", "after an input"),
        ("cast", "as written", "table"),
        ("sum", "float32", "table"),
        ("add", "float32", "after sum"),
    ]


CONSTANTS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "masked_fill": lambda x, w: (x @ w).masked_fill(x > 0, -1e9),
    "finfo": lambda x, w: (x @ w).masked_fill(x > 0, torch.finfo(torch.float32).min),
    "where": lambda x, w: torch.where(x > 0, x @ w, -3e38),
    "tensor": lambda x, w: torch.where(x > 0, x @ w, torch.tensor(-3e38)),
    "full": lambda x, w: (x @ w) + torch.full((8,), -1e9),
    "full_like": lambda x, w: torch.full_like(x @ w, -1e9),
    "mul": lambda x, w: (x @ w) * 1e6,
    "clamp": lambda x, w: (x @ w).clamp(min=1e-12),
    "add": lambda x, w: (x @ w) + 1e-9,
    "divided": lambda x, w: (x @ w) / 1e-9,
    "pad": lambda x, w: F.pad(x @ w, (1, 1), value=-1e9),
    "in place": lambda x, w: (x @ w).masked_fill_(x > 0, -1e9),
    "item": lambda x, w: (lambda y: (y.__setitem__((slice(None), 0), -1e9), y)[1])(x @ w),
}


@pytest.mark.parametrize("name", CONSTANTS)
def test_constants_that_the_format_cannot_hold_keep_float32(name: str) -> None:
    rewritten = rewrite(CONSTANTS[name], X, W, policy="mixed_float16")
    (last, *_) = [op for op in reversed(rewritten.plan.operations) if op.name != "cast"]
    assert last.format == "float32"
    assert last.reason.startswith(("constant ", "its widest input is float32"))
    torch.testing.assert_close(rewritten(X, W), CONSTANTS[name](X, W), rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("value", [float("-inf"), -1e4, 0.0])
def test_constants_that_it_can_hold_do_not(value: float) -> None:
    assert decided(lambda x, w: (x @ w).masked_fill(x > 0, value), X, W)[-2][1] == "float16"


def test_numbers_of_buffers_are_looked_at_and_the_largest_of_parameters() -> None:
    class Masked(nn.Module):
        def __init__(self, kind: Callable[[Tensor], Any]) -> None:
            super().__init__()
            self.mask = kind(torch.full((8,), -1e9))

        def forward(self, x: Tensor, w: Tensor) -> Tensor:
            return x @ w + self.mask

    assert decided(Masked(nn.Buffer), X, W)[1] == ("add", "float32", "constant 1e+09 is beyond float16")
    assert decided(Masked(lambda tensor: tensor), X, W)[1][1] == "float32"
    assert decided(Masked(nn.Parameter), X, W)[1] == ("add", "float32", "constant 1e+09 is beyond float16")
    assert decided(Masked(lambda tensor: nn.Parameter(tensor * -1e-18)), X, W)[1][1] == "float16"  # it will change


def test_places_are_module_paths_and_lines_and_rules_match_them() -> None:
    model, args = case("gpt")
    patterns = ["layers.*.second_norm", "layers/0/*", "norm"]
    plan = explain(model, *args, policy=polyamp.policy("mixed_bfloat16", rules=dict.fromkeys(patterns, "lower")))
    norms = [(op.format, op.reason) for op in plan.operations if op.name == "layer_norm"]
    second, zeroth, plain = (("bfloat16", f"rule {pattern!r}") for pattern in patterns)
    assert norms == [zeroth, second, plain, second, plain]
    assert plan.unused_rules == ()
    places = {op.where for op in plan.operations}
    assert {"embedding", "layers.0.norm", "layers.1.qkv", "layers.0", "head"} <= {place.split()[0] for place in places}
    assert any(place.startswith("layers.1.qkv torch_cases.py:") and place.endswith("(forward)") for place in places)


def test_what_has_no_effect_is_said() -> None:
    policy = polyamp.policy("mixed_bfloat16", rules={"decoder.*": "full", "matmul": "lower"})
    with pytest.warns(polyamp.PolyampWarning, match=r"rule 'decoder\.\*' .* matched nothing in Sequential"):
        rewritten = rewrite(mlp(), torch.ones(2, 8), policy=policy)
    assert rewritten.plan.unused_rules == ("decoder.*",)
    with pytest.warns(polyamp.PolyampWarning, match="changed nothing"):
        rewrite(lambda x: x + 1, X, policy="mixed_bfloat16")
    policy = polyamp.policy("mixed_bfloat16", rules={"fft": "lower"})
    with pytest.warns(polyamp.PolyampWarning, match=r"rule 'fft' .* has no effect"):
        rewritten = rewrite(lambda x, w: torch.fft.fft(x @ w).abs(), X, W, policy=policy)
    torch.testing.assert_close(rewritten(X, W), torch.fft.fft(X @ W).abs())


# --- casts and bytes --------------------------------------------------------------------------------------------------


def test_one_cast_for_each_value_and_format() -> None:
    rewritten = rewrite(lambda x, w: (x @ w + x @ w.T, x.exp(), (x @ w).exp()), X, W, policy="mixed_bfloat16")
    casts = {node: node.args for node in rewritten.graph.nodes if node.target == "to"}
    assert len(casts) == len(set(casts.values())) == rewritten.plan.totals["casts"]
    assert not any(source in casts for source, *_ in casts.values())  # nothing is cast there and back


def test_bytes_are_those_of_a_product() -> None:
    plan = explain(lambda x, w: x @ w, X, W, policy="mixed_bfloat16")
    product, result = plan.operations
    numbers, weights, output = 32, 64, 32
    assert (product.casts, product.bytes_cast) == (2, 4 * (numbers + weights))
    assert product.bytes_moved == 2 * (numbers + weights + output) + 6 * (numbers + weights)
    assert product.bytes_moved_float32 == 4 * (numbers + weights + output)
    assert (result.name, result.reason, result.bytes_moved) == ("cast", "a result is float32", 6 * output)


def test_bytes_for_the_backward_pass() -> None:
    x, w = X.clone().requires_grad_(), W.clone().requires_grad_()
    totals = explain(lambda x, w: torch.relu(x @ w).sum(), x, w, policy="mixed_bfloat16").totals
    assert totals["bytes_saved_float32"] == 4 * (32 + 64 + 32)
    assert totals["bytes_saved"] == 2 * (32 + 64 + 32)


def test_checkpoints_keep_their_arguments_alone() -> None:
    from torch.utils.checkpoint import checkpoint

    model = nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.Linear(64, 8))
    plain = explain(model, X.expand(100, 4, 8), policy="mixed_bfloat16").totals
    kept = explain(
        lambda x: checkpoint(model, x, use_reentrant=False), X.expand(100, 4, 8), policy="mixed_bfloat16"
    ).totals
    assert kept["bytes_saved"] < plain["bytes_saved"] / 4


# --- nothing is computed ----------------------------------------------------------------------------------------------


def test_explain_computes_nothing() -> None:
    """A product of which the result would take 400 GB, and statistics that stay what they are."""
    model = case("conv")[0]
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    random = torch.get_rng_state()
    one = torch.ones(1).expand(100_000, 3, 8, 8)
    long = torch.ones(1, 1).expand(300_000, 1)
    explain(model, one, policy="mixed_bfloat16")
    assert explain(lambda x: x @ x.T, long, policy="mixed_bfloat16").totals["bytes_moved"] > 10**11
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), random)
