"""Rewritten modules: values and gradients next to float32 and native autocast, training, modes, sizes, shared state."""

import copy
import functools
import gc
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn

import polyamp
from polyamp.backends.torch import rewrite
from support.torch_cases import MODELS, ConvNet, case, mlp

pytestmark = pytest.mark.slow

X = torch.ones(3, 8)
POLICIES = {"mixed_bfloat16": 2.0**-8, "mixed_float16": 2.0**-11}  # and the rounding error of their formats


def total(results: Any) -> Tensor:
    """A number that hangs on every floating result."""
    floating = [leaf for leaf in pytree.tree_leaves(results) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
    return torch.stack(
        [(leaf.float() * torch.linspace(0.5, 1.5, leaf.numel()).view(leaf.shape)).mean() for leaf in floating]
    ).sum()


def run(fn: Callable[..., Any], model: nn.Module, args: tuple[Any, ...]) -> tuple[list[Tensor], list[Tensor]]:
    model.zero_grad()
    torch.manual_seed(1)
    results = fn(*args)
    total(results).backward()
    gradients = [param.grad.clone() for param in model.parameters() if param.grad is not None]
    return [leaf.detach().float() for leaf in pytree.tree_leaves(results) if isinstance(leaf, Tensor)], gradients


def error(ours: list[Tensor], theirs: list[Tensor]) -> float:
    """Norm of the difference over the norm."""
    one, other = (torch.cat([tensor.flatten().double() for tensor in tensors]) for tensors in (ours, theirs))
    return float((one - other).norm() / other.norm())


@functools.cache
def made(name: str, policy: str = "mixed_bfloat16") -> tuple[nn.Module, tuple[Any, ...], Any]:
    """A model, its arguments and what it becomes; shared by tests that change neither."""
    model, args = case(name)
    return model, args, rewrite(model, *args, policy=policy)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", MODELS)
def test_values_and_gradients_are_those_of_float32_to_a_few_roundings(name: str, policy: str) -> None:
    model, args, rewritten = made(name, policy)
    exact, exact_gradients = run(model, model, args)
    values, gradients = run(rewritten, model, args)
    assert 0 < error(values, exact) < 4 * POLICIES[policy]
    assert 0 < error(gradients, exact_gradients) < 16 * POLICIES[policy]
    assert (
        [one.dtype for one in gradients] == [one.dtype for one in exact_gradients] == [torch.float32] * len(gradients)
    )


@pytest.mark.parametrize("name", ["lstm", "block"])
def test_a_float32_policy_changes_no_bit(name: str) -> None:
    model, args = case(name)
    model.eval()
    rewritten = rewrite(model, *args, policy="float32")
    for ours, theirs in zip(pytree.tree_leaves(rewritten(*args)), pytree.tree_leaves(model(*args)), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


@pytest.mark.parametrize("name", MODELS)
def test_results_parameters_and_buffers_are_as_the_modules(name: str) -> None:
    model, args, rewritten = made(name)
    (ours, spec), (theirs, original_spec) = pytree.tree_flatten(rewritten(*args)), pytree.tree_flatten(model(*args))
    assert spec == original_spec
    assert [leaf.dtype for leaf in ours] == [leaf.dtype for leaf in theirs]
    assert isinstance(rewritten, torch.fx.GraphModule)
    for which in ("named_parameters", "named_buffers"):
        found = [[(key, id(tensor)) for key, tensor in getattr(one, which)()] for one in (rewritten, model)]
        assert found[0] == found[1]
    assert list(rewritten.state_dict()) == list(model.state_dict())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:The .grad attribute")  # of Dynamo and inductor
@pytest.mark.parametrize(("name", "backend"), [("conv", "aot_eager"), ("block", "aot_eager"), ("layer", "inductor")])
def test_torch_compile_compiles_it(name: str, backend: str) -> None:
    model, args, rewritten = made(name)
    results, grads = run(torch.compile(rewritten, backend=backend, fullgraph=True), model, args)
    expected, exact = run(rewritten, model, args)
    assert error(results, expected) <= 0.01
    assert error(grads, exact) <= 0.02


# --- modes ------------------------------------------------------------------------------------------------------------


def test_modes_and_statistics_are_the_originals_and_each_mode_has_a_graph() -> None:
    model, x = ConvNet(dropout=0.5), torch.randn(8, 3, 8, 8)
    twin = copy.deepcopy(model)
    rewritten = rewrite(model, x, policy="mixed_bfloat16")
    assert model.norm.num_batches_tracked == 0
    assert not torch.equal(rewritten(x), rewritten(x))
    twin(x), twin(x)
    torch.testing.assert_close(model.norm.running_mean, twin.norm.running_mean, rtol=0.02, atol=1e-3)
    assert (model.norm.num_batches_tracked, model.norm.running_var.dtype) == (2, torch.float32)
    rewritten.eval()
    assert not model.training
    assert not model.norm.training
    assert torch.equal(rewritten(x), rewritten(x))
    rewritten.train()
    rewritten(x)
    assert (model.norm.num_batches_tracked, len(rewritten.programs)) == (3, 2)
    model.norm.eval()  # a frozen batch norm, as users have it
    rewritten(x)
    assert (model.norm.num_batches_tracked, len(rewritten.programs)) == (3, 3)


def test_no_grad_is_left_as_it_was() -> None:
    layer = nn.Linear(4, 4)

    def fn(x: Tensor) -> Tensor:
        with torch.no_grad():
            target = layer(x)
        return layer(x) - target

    x = torch.ones(2, 4)
    rewritten = rewrite(fn, x, policy="mixed_bfloat16")
    with torch.no_grad():
        assert not rewritten(x).requires_grad
        assert not torch.is_grad_enabled()
    rewritten(x).sum().backward()
    assert torch.equal(layer.bias.grad, torch.full((4,), 2.0))


# --- arguments --------------------------------------------------------------------------------------------------------


def test_batch_and_length_may_change() -> None:
    model, _ = case("gpt")
    rewritten = rewrite(model, torch.randint(0, 32, (3, 7)), policy="mixed_bfloat16")
    for batch, length in [(2, 9), (5, 4), (3, 7), (8, 2)]:
        tokens = torch.randint(0, 32, (batch, length))
        torch.testing.assert_close(rewritten(tokens), model(tokens), rtol=0.05, atol=0.05)
    assert len(rewritten.programs) == 1


def test_a_size_for_which_the_code_goes_another_way_gets_a_graph_of_its_own() -> None:
    def fn(x: Tensor) -> Tensor:
        return x @ x.T if x.shape[0] > 3 else x * 0

    rewritten = rewrite(fn, torch.ones(4, 2), policy="mixed_bfloat16")
    assert rewritten(torch.ones(5, 2)).shape == (5, 5)
    assert rewritten(torch.ones(3, 2)).shape == (3, 2)
    assert rewritten(torch.ones(1, 2)).shape == (1, 2)
    assert len(rewritten.programs) == 3


def test_keyword_arguments_and_trees_come_in_and_go_out() -> None:
    def fn(pair: dict[str, Any], *, scale: float, bias: Tensor | None = None) -> dict[str, Any]:
        y = pair["x"] @ pair["more"][0] * scale
        return {"y": y if bias is None else y + bias, "rest": (pair["more"][1], scale, None)}

    pair = {"x": torch.ones(2, 3), "more": [torch.ones(3, 2), "name"]}
    rewritten = rewrite(fn, pair, scale=2.0, policy="mixed_bfloat16")
    assert rewritten(pair, scale=2.0)["rest"] == ("name", 2.0, None)
    assert torch.equal(rewritten(pair, scale=2.0)["y"], torch.full((2, 2), 6.0))
    assert torch.equal(rewritten(pair, scale=3.0)["y"], torch.full((2, 2), 9.0))
    assert torch.equal(rewritten(pair, scale=2.0, bias=torch.ones(2))["y"], torch.full((2, 2), 7.0))


def test_a_call_without_examples_captures_by_the_policy_of_the_rewriting() -> None:
    with polyamp.policy("mixed_bfloat16"):
        rewritten = polyamp.rewrite(mlp())
    with pytest.raises(polyamp.PolyampError, match="not traced yet"):
        _ = rewritten.plan
    with polyamp.policy("mixed_float16"):
        assert rewritten(torch.ones(2, 8)).shape == (2, 4)
    assert rewritten.plan.policy == "mixed_bfloat16"
    assert "bfloat16" in rewritten.plan.totals["by_format"]


def test_the_graph_may_be_edited() -> None:
    rewritten = rewrite(lambda x: x @ x, torch.ones(2, 2), policy="mixed_bfloat16")
    (product,) = (node for node in rewritten.graph.nodes if "matmul" in str(node.target))
    with rewritten.graph.inserting_after(product):
        negative = rewritten.graph.call_function(torch.neg, (product,))
    product.replace_all_uses_with(negative)
    negative.args = (product,)
    rewritten.recompile()
    assert torch.equal(rewritten(torch.ones(2, 2)), torch.full((2, 2), -2.0))


def test_a_copy_trains_a_copy() -> None:
    model, args = case("mlp")
    rewritten = rewrite(model, *args, policy="mixed_bfloat16")
    twin = copy.deepcopy(rewritten)
    assert list(twin.state_dict()) == list(rewritten.state_dict())
    assert torch.equal(twin(*args), rewritten(*args))
    twin(*args).sum().backward()
    assert all(param.grad is None for param in model.parameters())


def test_a_capture_logs_no_error(capfd: pytest.CaptureFixture[str]) -> None:
    rewrite(mlp(), X, policy="mixed_bfloat16")
    assert capfd.readouterr().err == ""


def test_many_modules_of_one_class_are_captured() -> None:
    """Dynamo counts the graphs of one function, and stops at eight."""
    layers = [nn.Linear(8, 4) for _ in range(9)]
    assert all(rewrite(layer, X, policy="mixed_bfloat16")(X).shape == (3, 4) for layer in layers)


def test_tied_weights_are_cast_once() -> None:
    model, args, rewritten = made("gpt")
    casts = [node for node in rewritten.graph.nodes if node.target == "to" and node.args[0].op == "get_attr"]
    assert sorted(str(node.args[0].target) for node in casts) == sorted({str(node.args[0].target) for node in casts})
    rewritten(*args).backward()
    assert model.head.weight is model.embedding.weight


def test_a_function_trains_the_modules_that_it_names() -> None:
    model = nn.Sequential(nn.Linear(8, 4), nn.Dropout(0.5))

    def loss_of(x: Tensor) -> Tensor:
        return model(x).square().mean()

    rewritten = rewrite(loss_of, X, policy="mixed_bfloat16")
    assert list(rewritten.state_dict()) == [f"model.{name}" for name in model.state_dict()]
    rewritten(X).backward()
    assert model[0].weight.grad is not None
    rewritten.eval()
    assert torch.equal(rewritten(X), rewritten(X))
    assert len(rewritten.programs) == 2


def test_the_same_tensor_twice_is_no_two_tensors() -> None:
    x, y = torch.ones(2, 2), torch.full((2, 2), 3.0)
    rewritten = rewrite(lambda one, other: one @ other, x, x, policy="mixed_bfloat16")
    assert torch.equal(rewritten(x, y), torch.full((2, 2), 6.0))
    assert torch.equal(rewritten(y, y), torch.full((2, 2), 18.0))
    assert len(rewritten.programs) == 2


def test_many_kinds_of_arguments_are_said() -> None:
    rewritten = rewrite(lambda x, number: x @ x * number, policy="mixed_bfloat16")
    for number in range(16):
        rewritten(torch.ones(2, 2), float(number))
    with pytest.warns(polyamp.PolyampWarning, match="more than 16 kinds of arguments") as caught:
        rewritten(torch.ones(2, 2), 16.0)
    assert [warning.filename for warning in caught] == [__file__]


# --- what is left in memory once nobody refers to the result ---------------------------------------------------------

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
    for _ in range(2):
        act()
        before = objects()  # twice: the first look leaves objects of its own
    for _ in range(5):
        act()
    new = objects() - before
    assert not KINDS & new.keys(), new
    assert new.total() < 5 * FEW, new
