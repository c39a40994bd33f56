"""Code that cannot be rewritten: errors with the line and the fix, and nothing is changed."""

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import polyamp
from polyamp.backends.torch import explain, rewrite
from polyamp.errors import InvalidTypeError, InvalidValueError, PolyampError, UnsupportedError, UsageError
from support.torch_cases import mlp

X = torch.ones(3, 8)
HERE = Path(__file__).name


def branches(x: Tensor) -> Tensor:
    if x.sum() > 0:
        return x @ x.T
    return x


def looks_at_a_number(x: Tensor) -> Tensor:
    return x @ x.T if x.sum().item() > 0 else x


def prints(x: Tensor) -> Tensor:
    y = x @ x.T
    torch._dynamo.graph_break()
    return y


@pytest.mark.parametrize("fn", [branches, looks_at_a_number, prints])
def test_a_graph_break_names_the_users_line(fn: Callable[..., Any]) -> None:
    line = fn.__code__.co_firstlineno + (2 if fn is prints else 1)
    with pytest.raises(UsageError, match="a graph break") as caught:
        polyamp.rewrite(fn, X, policy="mixed_bfloat16")
    assert f"{HERE}:{line} ({fn.__name__})" in str(caught.value)
    assert "torch.where" in str(caught.value)
    assert "polyamp.autocast" in str(caught.value)


def test_a_graph_break_in_a_later_mode_leaves_the_first_graph() -> None:
    class Odd(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x @ x.T if self.training else branches(x)

    model = Odd()
    rewritten = rewrite(model, X, policy="mixed_bfloat16")
    rewritten.eval()
    with pytest.raises(UsageError, match="a graph break"):
        rewritten(X)
    assert rewritten.train()(X).shape == (3, 3)


UNFIT = {
    "run the model on a batch first": nn.LazyLinear(8),
    "module.momentum = ": nn.BatchNorm1d(8, momentum=None),
}


@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature")
@pytest.mark.parametrize(("fix", "module"), UNFIT.items())
def test_a_module_that_cannot_be_captured_is_named(fix: str, module: nn.Module) -> None:
    model = nn.Sequential(nn.Linear(8, 8), module)
    with pytest.raises(UsageError, match=fix) as caught:
        rewrite(model, X, policy="mixed_bfloat16")
    assert f"1: {type(module).__name__}" in str(caught.value)
    model.eval()(X)
    assert rewrite(model, X, policy="mixed_bfloat16")(X).shape == (3, 8)


def test_arguments_that_do_not_fit() -> None:
    for args in ((torch.ones(3, 9),), (X, X), ("text",)):
        with pytest.raises(PolyampError, match="to do:"):
            rewrite(mlp(), *args, policy="mixed_bfloat16")
    rewritten = rewrite(mlp(), X, policy="mixed_bfloat16")
    with pytest.raises(InvalidValueError, match="do not accept these arguments"):
        rewritten(torch.ones(3, 9))
    assert rewritten(X).shape == (3, 4)


def test_what_is_no_module_and_no_function_or_rewritten_already() -> None:
    for thing in (nn.Linear, 3, "model"):
        with pytest.raises(InvalidTypeError):
            rewrite(thing, X, policy="mixed_bfloat16")
    with pytest.raises(InvalidTypeError, match="rewritten already"):
        rewrite(rewrite(mlp(), X, policy="mixed_bfloat16"), X)


@pytest.mark.parametrize("compute", ["float64", "tensorfloat32", "float8_e4m3fn"])
def test_formats_and_options_of_other_frameworks(compute: str) -> None:
    policy = polyamp.policy(param="float32", compute=compute, output="float32")
    for verb in (rewrite, explain):
        with pytest.raises(UnsupportedError, match=compute):
            verb(mlp(), X, policy=policy)
    with pytest.raises(UnsupportedError, match="jit_compile"):
        polyamp.rewrite(mlp(), X, policy="mixed_bfloat16", jit_compile=True)


# --- another autocast -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("region", [lambda: torch.autocast("cpu"), lambda: polyamp.autocast("mixed_bfloat16")])
def test_under_an_autocast_that_is_not_off(region: Callable[[], Any]) -> None:
    rewritten = rewrite(mlp(), X, policy="mixed_bfloat16")
    with region():
        for call in (lambda: rewrite(mlp(), X, policy="mixed_bfloat16"), lambda: rewritten(X)):
            with pytest.raises(UsageError, match="already under another autocast"):
                call()
    assert rewritten(X).dtype == torch.float32
    with polyamp.autocast("float32"), torch.autocast("cpu", enabled=False):
        assert rewrite(mlp(), X, policy="mixed_bfloat16")(X).dtype == torch.float32


def test_an_autocast_inside_of_the_code() -> None:
    def fn(x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return x @ x.T

    with pytest.raises(UsageError, match="already under another autocast") as caught:
        rewrite(fn, X, policy="mixed_bfloat16")
    assert f"{HERE}:" in str(caught.value)


def test_where_the_code_turns_autocast_off_it_computes_in_float32() -> None:
    def fn(x: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            y = checkpoint(torch.matmul, (x @ x.T).float(), x, use_reentrant=False)
        return y @ x.T

    plan = rewrite(fn, X, policy="mixed_bfloat16").plan
    products = [(one.format, one.reason) for one in plan.operations if one.name == "matmul"]
    assert products == [("float32", "torch.autocast(enabled=False)")] * 2 + [("bfloat16", "table")]


# --- what a graph cannot hold -----------------------------------------------------------------------------------------


class Assigning(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("average", torch.zeros(3))
        self.register_buffer("seen", torch.zeros(0, 8))
        self.register_buffer("first", None)
        self.state = torch.zeros(3)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.average = 0.9 * self.average + 0.1 * x.mean(1)
        self.seen = torch.cat([self.seen, x])
        self.first = x if self.first is None else self.first
        self.state = self.state + x.mean(1)
        self.calls += 1
        self.last = x @ x.T
        return self.last


def test_attributes_that_the_code_assigns_but_a_graph_cannot() -> None:
    """A graph can assign a buffer again. It cannot grow one, count, or find the new value of another attribute."""
    model = nn.Sequential(Assigning())
    before = {**vars(model[0]), **model[0]._buffers}
    with pytest.raises(UsageError, match="assigns attributes") as caught:
        rewrite(model, X, policy="mixed_bfloat16")
    assert "found:   0.calls, 0.first, 0.last, 0.seen, 0.state\n" in str(caught.value)
    assert {**vars(model[0]), **model[0]._buffers}.keys() == before.keys()
    assert all(value is before[name] for name, value in {**vars(model[0]), **model[0]._buffers}.items())


class Box:
    """No pytree."""

    def __init__(self, value: Tensor) -> None:
        self.value = value


class Locked(Box):
    def __reduce__(self) -> Any:
        raise TypeError("locked")


def returns_what_cannot_be_copied(x: Tensor) -> Locked:
    return Locked(x @ x.T)


def test_results_of_other_classes_go_around_the_graph() -> None:
    rewritten = rewrite(lambda x: (Box([x @ x.T, x, 3]), {"shape": x.shape[0]}), X, policy="mixed_bfloat16")
    for given in (X, torch.full((5, 8), 2.0)):
        box, rest = rewritten(given)
        product, same, number = box.value
        assert torch.equal(product, (given.bfloat16() @ given.bfloat16().T).float())
        assert same is given
        assert (number, rest) == (3, {"shape": len(given)})
    box.value[0].sum()
    assert rewritten(X)[0] is not rewritten(X)[0]


class Growing:
    """A cache, which the code changes."""

    def __init__(self, *tensors: Tensor) -> None:
        self.layers = [list(tensors)]

    def add(self, x: Tensor) -> Tensor:
        self.layers[0].append(x)
        return torch.cat(self.layers[0])


@pytest.mark.parametrize("cache", [Growing(), Growing(X)])
def test_an_object_that_the_code_changes_is_refused_and_stays(cache: Growing) -> None:
    before = list(cache.layers[0])
    with pytest.raises(PolyampError, match=r"changes an object among its arguments|an argument holds numbers"):
        rewrite(lambda x, cache: cache.add(x) @ x.T, X, cache, policy="mixed_bfloat16")
    plan = explain(lambda x, cache: cache.add(x) @ x.T, X, cache, policy="mixed_bfloat16")
    assert [op.format for op in plan.operations if op.name == "matmul"] == ["bfloat16"]
    assert [one is other for one, other in zip(cache.layers[0], before, strict=True)] == [True] * len(before)


def test_arguments_and_results_that_hide_tensors() -> None:
    with pytest.raises(InvalidTypeError, match="an argument holds numbers"):
        rewrite(lambda x: x, X.numpy(), policy="mixed_bfloat16")
    with pytest.raises(InvalidTypeError, match="an argument holds numbers"):
        rewrite(lambda box: box.value @ box.value.T, Box(X), policy="mixed_bfloat16")
    with pytest.raises(InvalidTypeError, match="returns an object that a graph cannot return"):
        rewrite(returns_what_cannot_be_copied, X, policy="mixed_bfloat16")


def test_pickles() -> None:
    with pytest.raises(UsageError, match="state_dict"):
        pickle.dumps(rewrite(mlp(), X, policy="mixed_bfloat16"))


def test_a_mode_that_was_not_traced_is_not_compiled() -> None:
    rewritten = rewrite(mlp(), X, policy="mixed_bfloat16").eval()
    with pytest.raises(Exception, match="_without_compiling"):
        torch.compile(rewritten, backend="eager", fullgraph=True)(X)
    assert torch.compile(rewritten, backend="eager")(X).shape == (3, 4)
    assert len(rewritten.programs) == 2


def test_torch_compile_that_is_off() -> None:
    with (
        torch.compiler.set_stance("force_eager"),
        pytest.raises(UsageError, match=r"torch\.compile is turned off"),
    ):
        rewrite(mlp(), X, policy="mixed_bfloat16")


def test_what_computes_nothing_is_a_graph_too() -> None:
    with pytest.warns(polyamp.PolyampWarning, match="changed nothing"):
        rewritten = rewrite(lambda x: (x, 3), X, policy="mixed_bfloat16")
    assert torch.equal(rewritten(X)[0], X)


@pytest.mark.parametrize("verb", [polyamp.explain, explain, rewrite])
def test_arguments_that_share_parts_many_times_over_are_refused_at_once(verb: Callable[..., Any]) -> None:
    tree: Any = X
    for _ in range(40):
        tree = [tree, tree]
    with pytest.raises(InvalidTypeError, match="share parts"):
        verb(lambda tree: X @ X.T, tree, policy="mixed_bfloat16")
    with pytest.raises(InvalidTypeError, match="share parts"):
        rewrite(lambda tree: X @ X.T, [X], policy="mixed_bfloat16")(tree)
