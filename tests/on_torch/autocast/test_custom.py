"""Users' own functions and operators under a policy."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import polyamp
from polyamp.backends.torch.autocast.custom import custom_bwd, custom_fwd, register_autocast

X = torch.arange(16.0).reshape(4, 4) / 16
LOW, FULL = torch.bfloat16, torch.float32

seen: list[tuple[str, torch.dtype]] = []


class Product(torch.autograd.Function):
    @staticmethod
    @custom_fwd(op_class="lower")
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        ctx.save_for_backward(a, b)
        seen.append(("forward", (a @ b).dtype))
        return a @ b

    @staticmethod
    @custom_bwd
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        a, b = ctx.saved_tensors
        seen.append(("backward", (grad @ b.t()).dtype))
        return grad @ b.t(), a.t() @ grad


class Ambient(torch.autograd.Function):
    """Its own operations autocast, in the backward pass as in the forward pass."""

    @staticmethod
    @custom_fwd
    def forward(ctx: Any, a: Tensor) -> Tensor:
        ctx.save_for_backward(a)
        seen.append(("forward", torch.softmax(a, -1).dtype))
        return a.clone()

    @staticmethod
    @custom_bwd
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (a,) = ctx.saved_tensors
        seen.append(("backward", torch.softmax(a, -1).dtype))
        return grad


@pytest.fixture(autouse=True)
def _nothing_seen() -> None:
    seen.clear()


@pytest.mark.parametrize(
    ("rules", "dtype"), [(None, LOW), ({"Product": "full"}, FULL), ({"matmul": "full"}, LOW), ({"Prod*": "keep"}, FULL)]
)
@pytest.mark.parametrize("inside", [False, True])
def test_a_function_runs_in_the_format_of_its_class_both_ways(
    rules: dict[str, str] | None, dtype: torch.dtype, inside: bool
) -> None:
    x = X.clone().requires_grad_()
    with polyamp.autocast(polyamp.policy("mixed_bfloat16", rules=rules)):
        loss = Product.apply(x, x).float().sum()
        if inside:
            loss.backward()
    if not inside:
        loss.backward()
    assert seen == [("forward", dtype), ("backward", dtype)]
    assert x.grad is not None
    assert x.grad.dtype == FULL


def test_a_function_of_class_inner_is_16_bit_outside_alone() -> None:
    x = X.clone().requires_grad_()
    with polyamp.autocast(polyamp.policy("mixed_bfloat16", rules={"Product": "inner"})):
        result = Product.apply(x, x.bfloat16())
        result.float().sum().backward()
    assert (result.dtype, seen) == (LOW, [("forward", FULL), ("backward", FULL)])


def test_outside_of_regions_nothing_is_cast() -> None:
    Product.apply(X.double(), X.double())
    assert seen == [("forward", torch.float64)]


def test_native_regions_have_the_class_too() -> None:
    with torch.autocast("cpu", torch.float16):
        Product.apply(X, X)
    assert seen == [("forward", torch.float16)]


@pytest.mark.parametrize("reentrant", [None, True, False])
def test_a_function_without_a_class_has_its_region_in_the_backward_pass(reentrant: bool | None) -> None:
    x = X.clone().requires_grad_()
    with polyamp.autocast(polyamp.policy("mixed_bfloat16", rules={"softmax": "lower"})):
        run = Ambient.apply
        loss = (run(x) if reentrant is None else checkpoint(run, x, use_reentrant=reentrant)).sum()
    with polyamp.autocast("mixed_bfloat16"):
        loss.backward()
    assert {dtype for _, dtype in seen} == {LOW}
    assert torch.softmax(X, -1).dtype == FULL


class Quiet(torch.autograd.Function):
    """As `Product`, without the list, which Dynamo does not let functions change."""

    @staticmethod
    @custom_fwd(op_class="lower")
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        ctx.save_for_backward(a, b)
        return a @ b

    @staticmethod
    @custom_bwd
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        a, b = ctx.saved_tensors
        return grad @ b.t(), a.t() @ grad


@pytest.mark.filterwarnings("ignore:.*should not be instantiated")
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_functions_compile(backend: str) -> None:
    torch._dynamo.reset()
    x = X.clone().requires_grad_()
    compiled = torch.compile(lambda a: Quiet.apply(a, a * 2), backend=backend, fullgraph=True)
    for rules, dtype in ((None, LOW), ({"Quiet": "full"}, FULL)):
        with polyamp.autocast(polyamp.policy("mixed_bfloat16", rules=rules)):
            result = compiled(x)
        assert result.dtype == dtype
        result.float().sum().backward()


@torch.library.custom_op("polyamp_tests::total", mutates_args=())
def total(values: list[Tensor], scale: float = 1.0) -> Tensor:
    result = values[0].clone()
    for value in values[1:]:
        result = result + value * scale
    return result


torch.library.define("polyamp_tests::joined", "(Tensor x, *, Tensor y) -> Tensor")
torch.library.impl("polyamp_tests::joined", "CompositeExplicitAutograd", lambda x, *, y: x + y)
torch.library.register_fake("polyamp_tests::joined", lambda x, *, y: torch.empty_like(x + y))


@torch.library.custom_op("polyamp_tests::into", mutates_args=("out",))
def into(x: Tensor, out: Tensor) -> None:
    out.copy_(x)


register_autocast(total, "lower")
register_autocast("polyamp_tests::joined", "promote")
register_autocast(torch.ops.polyamp_tests.into, "lower")


def joined(x: Tensor, y: Tensor) -> Tensor:
    result: Tensor = torch.ops.polyamp_tests.joined(x, y=y)
    return result


def test_lists_of_tensors_are_cast() -> None:
    with polyamp.autocast("mixed_bfloat16"):
        assert total([X, X.half()]).dtype == LOW
        assert total([X.double(), X.double()]).dtype == torch.float64
    assert total([X, X]).dtype == FULL


def test_keyword_arguments_promote() -> None:
    with polyamp.autocast("mixed_bfloat16"):
        assert joined(X.half(), X.bfloat16()).dtype == FULL
        assert joined(X.bfloat16(), X.bfloat16()).dtype == LOW
    with torch.autocast("cpu", torch.bfloat16):
        assert joined(X.half(), X.bfloat16()).dtype == FULL


@pytest.mark.parametrize("pattern", ["polyamp_tests::joined", "polyamp_tests::*"])
def test_a_rule_gives_another_class(pattern: str) -> None:
    with polyamp.autocast(polyamp.policy("mixed_bfloat16", rules={pattern: "lower"})):
        assert joined(X, X).dtype == LOW


def test_what_an_operator_changes_is_not_cast() -> None:
    out = torch.zeros(4, 4)
    with polyamp.autocast("mixed_bfloat16"):
        into(X + 1e-4, out)
    assert torch.equal(out, (X + 1e-4).bfloat16().float())


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_operators_compile(backend: str) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(joined, backend=backend, fullgraph=True)
    for rules, dtype in ((None, FULL), ({"polyamp_tests::joined": "lower"}, LOW)):
        with polyamp.autocast(polyamp.policy("mixed_bfloat16", rules=rules)):
            assert compiled(X, X.bfloat16()).dtype == dtype


@pytest.mark.parametrize(
    ("op", "op_class", "error", "said"),
    [
        (total, "low", polyamp.errors.InvalidValueError, "unknown class"),
        ("polyamp_tests::nothing", "lower", polyamp.errors.InvalidTypeError, "polyamp_tests::nothing"),
        (len, "lower", polyamp.errors.InvalidTypeError, "not an operator"),
        (torch.ops.aten.softmax, "lower", polyamp.errors.InvalidValueError, "rules="),
    ],
)
def test_bad_registrations_are_refused(op: Any, op_class: str, error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        register_autocast(op, op_class)


def test_arguments_in_containers_are_cast_and_stay_where_they_are() -> None:
    seen: list[Any] = []

    class Contained(torch.autograd.Function):
        @staticmethod
        @custom_fwd(op_class="lower")
        def forward(ctx: Any, tree: Any) -> torch.Tensor:
            seen.append(tree)
            return torch.zeros(())

    with polyamp.autocast("mixed_bfloat16"):
        Contained.apply((X, {"a": [X, 3]}))
    (first, named) = seen[0]
    assert isinstance(seen[0], tuple)
    assert (first.dtype, named["a"][0].dtype, named["a"][1]) == (LOW, LOW, 3)


def test_unknown_classes_of_functions_are_refused() -> None:
    with pytest.raises(polyamp.errors.InvalidValueError, match="unknown class"):
        custom_fwd(op_class="fp16")
