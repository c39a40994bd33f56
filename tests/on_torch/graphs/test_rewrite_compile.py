"""``torch.compile(backend="polyamp")``: plans Dynamo's graphs by the policy, and passes them to another backend."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.fx import GraphModule

import polyamp
from polyamp.backends.torch.graphs.compiler import polyamp as backend
from polyamp.backends.torch.graphs.rewrite import rewrite
from polyamp.errors import InvalidTypeError, InvalidValueError
from support.torch_cases import case, mlp

pytestmark = pytest.mark.slow

X = torch.ones(3, 8)


@pytest.fixture(autouse=True)
def _fresh() -> None:
    torch._dynamo.reset()


class Seeing:
    """An inner backend that keeps the dtypes in which products were compiled."""

    def __init__(self) -> None:
        self.seen: list[list[torch.dtype]] = []

    def __call__(self, module: GraphModule, inputs: Any) -> Callable[..., Any]:
        products = [node for node in module.graph.nodes if "linear" in str(node.target)]
        self.seen.append([node.meta["example_value"].dtype for node in products])
        return module.forward


def compiled(model: Any, inner: Any = "aot_eager", policy: Any = None, **options: Any) -> Any:
    bound = {} if policy is None else {"policy": policy}
    return torch.compile(model, backend=backend, options={"backend": inner, **bound}, **options)


def test_its_name_is_registered() -> None:
    assert "polyamp" in torch.compiler.list_backends()
    seeing = Seeing()
    torch.compile(mlp(), backend="polyamp", options={"policy": "mixed_bfloat16", "backend": seeing})(X)
    assert seeing.seen == [[torch.bfloat16] * 3]


@pytest.mark.parametrize("name", ["mlp", "conv", "gpt"])
def test_values_and_gradients_are_those_of_the_rewrite(name: str) -> None:
    model, args = case(name)
    results = []
    for fn in (rewrite(model, *args, policy="mixed_bfloat16"), compiled(model, policy="mixed_bfloat16")):
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
    fast = torch.compile(model, backend=backend, options={"policy": "mixed_bfloat16"})
    fast(x).square().mean().backward()
    ours = [param.grad.clone() for param in model.parameters()]
    model.zero_grad()
    model(x).square().mean().backward()
    for one, param in zip(ours, model.parameters(), strict=True):
        torch.testing.assert_close(one, param.grad, rtol=0.05, atol=0.005)
    torch.testing.assert_close(fast(x), rewrite(model, x, policy="mixed_bfloat16")(x), rtol=0.02, atol=0.005)


# --- policies ---------------------------------------------------------------------------------------------------------


def test_the_current_policy_at_each_call_holds() -> None:
    seeing = Seeing()
    model = mlp()
    fast = compiled(model, seeing)
    for name in ("mixed_bfloat16", "mixed_float16", "mixed_bfloat16", "float32", "mixed_float16"):
        with polyamp.policy(name):
            fast(X).sum().backward()
    assert seeing.seen == [[torch.bfloat16] * 3, [torch.float16] * 3, [torch.float32] * 3]


# --- graphs -----------------------------------------------------------------------------------------------------------


# --- refusals ---------------------------------------------------------------------------------------------------------


def test_ambient_autocast_is_refused() -> None:
    with torch.autocast("cpu"), pytest.raises(Exception, match="already under another autocast"):
        compiled(mlp(), policy="mixed_bfloat16")(X)


@pytest.mark.parametrize(
    ("inner", "error"), [("polyamp", InvalidValueError), ("no such", InvalidValueError), (3, InvalidTypeError)]
)
def test_backends_that_there_are_not(inner: Any, error: type[Exception]) -> None:
    with pytest.raises(Exception, match=r"backend of torch\.compile") as caught:
        compiled(mlp(), inner, policy="mixed_bfloat16")(X)
    assert isinstance(getattr(caught.value, "inner_exception", caught.value), error)
