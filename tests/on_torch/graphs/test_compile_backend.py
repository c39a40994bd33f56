"""``torch.compile(backend="polyamp")``: plans Dynamo's graphs; the code between them runs in the policy's autocast."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule

import polyamp
from polyamp.backends.torch import unstable
from polyamp.backends.torch.graphs.rewrite import rewrite
from polyamp.errors import InvalidTypeError, InvalidValueError
from support.torch_cases import case, mlp

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:The .grad attribute")]  # Dynamo's own look at it

X = torch.randn(2, 4)


@pytest.fixture(autouse=True)
def _fresh() -> None:
    torch._dynamo.reset()


@torch._dynamo.disable
def eager(f: Callable[[Tensor], Tensor], h: Tensor, seen: list[torch.dtype]) -> Tensor:
    out = f(h)
    seen.append(out.dtype)
    return out


class Net(nn.Module):
    """``where`` is the part that is left to Python: the first, the middle or the last one, or all."""

    def __init__(self, where: str = "last") -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.where, self.seen = where, list[torch.dtype]()

    def forward(self, x: Tensor) -> Tensor:
        x = eager(self.a, x, self.seen) if self.where in ("first", "all") else self.a(x)
        x = eager(self.b, x, self.seen) if self.where in ("middle", "all") else self.b(x)
        return eager(self.c, x, self.seen) if self.where in ("last", "all") else self.c(x)


def compiled(model: Any, policy: Any = "mixed_bfloat16", inner: Any = "eager") -> Any:
    bound = {} if policy is None else {"policy": policy}
    return torch.compile(model, backend="polyamp", options={"backend": inner, **bound})


def is_clean() -> bool:
    return not any(map(torch.is_autocast_enabled, ("cpu", "ipu", "maia"))) and torch.get_autocast_dtype("cpu") == (
        torch.bfloat16
    )


@pytest.mark.parametrize("where", ["first", "middle", "last", "all"])
def test_what_python_runs_is_lowered_at_every_call(where: str) -> None:
    model = Net(where)
    fast = compiled(model, inner="aot_eager")
    for _ in range(3):
        fast(X).float().sum().backward()
        assert is_clean()
    assert set(model.seen) == {torch.bfloat16}
    torch.testing.assert_close(fast(X).float(), model(X), rtol=0.1, atol=0.05)


def test_a_frame_that_is_not_compiled_is_compiled_once() -> None:
    from torch._dynamo.utils import counters

    fast = compiled(Moving())
    fast(X)
    frames = dict(counters["frames"])
    fast(X)
    assert dict(counters["frames"]) == frames


def test_graphs_run_outside_of_the_region() -> None:
    """Else autocast would lower what a rule keeps in float32."""
    policy = polyamp.policy("mixed_bfloat16", rules={"a": "full"})
    seen: list[Any] = []

    def inner(module: Any, inputs: Any) -> Any:
        def run(*given: Any) -> Any:
            seen.append(torch.is_autocast_enabled("cpu"))
            return module(*given)

        return run

    fast = torch.compile(Net("last"), backend="polyamp", options={"policy": policy, "backend": inner})
    fast(X)
    fast(X)
    assert seen
    assert not any(seen)


@pytest.mark.parametrize("rule", [{"c": "full"}, {"matmul": "full"}, {"c/*": "full"}])
def test_rules_hold_between_graphs(rule: dict[str, str]) -> None:
    model = Net("last")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", polyamp.PolyampWarning)  # with the second rule nothing is lowered
        compiled(model, polyamp.policy("mixed_bfloat16", rules=rule))(X)
    assert model.seen == [torch.float32]


def test_an_error_leaves_no_region() -> None:
    @torch._dynamo.disable
    def fails(x: Tensor) -> Tensor:
        assert torch.is_autocast_enabled("cpu")
        raise KeyError("mine")

    model = nn.Linear(4, 4)
    fast = compiled(lambda x: fails(model(x)))
    for _ in range(2):
        with pytest.raises(KeyError, match="mine") as caught:
            fast(X)
        assert is_clean()
        assert caught.value.__traceback__ is not None


def test_a_compiled_part_inside_of_a_compiled_model() -> None:
    inner = Net("last")
    fast_inner = compiled(inner)

    def fn(x: Tensor) -> Tensor:
        return eager(fast_inner, x, seen)

    seen: list[torch.dtype] = []
    compiled(fn)(X)
    assert inner.seen == [torch.bfloat16]
    assert is_clean()


# --- warnings -----------------------------------------------------------------------------------------------------


def said(fn: Callable[[], Any]) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", polyamp.PolyampWarning)
        fn()
    return [str(one.message) for one in caught if issubclass(one.category, polyamp.PolyampWarning)]


class Moving(nn.Module):
    """A first part without a product, as where sequences are packed."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = x.flip(0) + 1
        torch._dynamo.graph_break()
        return self.linear(x)


@pytest.mark.parametrize("kind", [Moving, lambda: Net("first"), lambda: Net("all")])
def test_a_part_that_has_nothing_to_lower_is_not_reported(kind: Callable[[], nn.Module]) -> None:
    fast = compiled(kind())
    assert said(lambda: (fast(X), fast(X))) == []


def test_one_graph_that_has_nothing_to_lower_is_reported_once() -> None:
    fast = compiled(lambda x: x + 1)
    (message,) = said(lambda: (fast(X), fast(X)))
    assert "changed nothing in the compiled graph" in message


def test_a_rule_is_unused_where_no_part_has_it() -> None:
    policy = polyamp.policy("mixed_bfloat16", rules={"a": "full", "c": "full", "nowhere": "full", "softmax": "full"})
    fast = compiled(Net("middle"), policy)
    messages = said(lambda: (fast(X), fast(X)))
    old = [message for message in messages if message.startswith("before torch 2.11")]
    (message,) = (message for message in messages if message not in old)
    assert "'nowhere'" in message
    assert bool(old) == (not unstable.traces_dtype_of_autocast())


# --- the graphs ------------------------------------------------------------------------------------------------------

ROWS = torch.ones(3, 8)


class Seeing:
    """An inner backend that keeps the dtypes in which products were compiled."""

    def __init__(self) -> None:
        self.seen: list[list[torch.dtype]] = []

    def __call__(self, module: GraphModule, inputs: Any) -> Callable[..., Any]:
        products = [node for node in module.graph.nodes if "linear" in str(node.target)]
        self.seen.append([node.meta["example_value"].dtype for node in products])
        return module.forward


def test_its_name_is_registered() -> None:
    assert "polyamp" in torch.compiler.list_backends()
    seeing = Seeing()
    torch.compile(mlp(), backend="polyamp", options={"policy": "mixed_bfloat16", "backend": seeing})(ROWS)
    assert seeing.seen == [[torch.bfloat16] * 3]


@pytest.mark.parametrize("name", ["mlp", "conv", "gpt"])
def test_values_and_gradients_are_those_of_the_rewrite(name: str) -> None:
    model, args = case(name)
    results = []
    for fn in (rewrite(model, *args, policy="mixed_bfloat16"), compiled(model, inner="aot_eager")):
        model.zero_grad()
        result = fn(*args)
        result.square().mean().backward()
        results.append([result.detach(), *(param.grad for param in model.parameters())])
    for ours, theirs in zip(*results, strict=True):
        assert ours.dtype == theirs.dtype == torch.float32
        torch.testing.assert_close(ours, theirs, rtol=0.03, atol=0.003)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # inductor's own
def test_inductor_compiles_it() -> None:
    model, x = mlp(), torch.randn(6, 8)
    fast = torch.compile(model, backend="polyamp", options={"policy": "mixed_bfloat16"})
    fast(x).square().mean().backward()
    ours = [param.grad.clone() for param in model.parameters()]
    model.zero_grad()
    model(x).square().mean().backward()
    for one, param in zip(ours, model.parameters(), strict=True):
        torch.testing.assert_close(one, param.grad, rtol=0.05, atol=0.005)
    torch.testing.assert_close(fast(x), rewrite(model, x, policy="mixed_bfloat16")(x), rtol=0.02, atol=0.005)


def test_the_current_policy_at_each_call_holds() -> None:
    seeing = Seeing()
    model = mlp()
    fast = compiled(model, None, seeing)
    for name in ("mixed_bfloat16", "mixed_float16", "mixed_bfloat16", "float32", "mixed_float16"):
        with polyamp.policy(name):
            fast(ROWS).sum().backward()
    assert seeing.seen == [[torch.bfloat16] * 3, [torch.float16] * 3, [torch.float32] * 3]


def test_ambient_autocast_is_refused() -> None:
    with torch.autocast("cpu"), pytest.raises(Exception, match="already under another autocast"):
        compiled(mlp())(ROWS)


@pytest.mark.parametrize(
    ("inner", "error"), [("polyamp", InvalidValueError), ("no such", InvalidValueError), (3, InvalidTypeError)]
)
def test_backends_that_there_are_not(inner: Any, error: type[Exception]) -> None:
    with pytest.raises(Exception, match=r"backend of torch\.compile") as caught:
        compiled(mlp(), inner=inner)(ROWS)
    assert isinstance(getattr(caught.value, "inner_exception", caught.value), error)
