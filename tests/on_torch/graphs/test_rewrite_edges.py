"""A graph keeps the meaning of the code: changes in place, users' own derivatives, checkpoints, branches."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch.utils._pytree as pytree
from hypothesis import example, given, reject, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import polyamp
from polyamp.backends.torch import explain, rewrite

W = torch.randn(8, 8, generator=torch.Generator().manual_seed(0)) / 3
X = torch.randn(4, 8, generator=torch.Generator().manual_seed(1))


def same(fn: Callable[..., Any], *args: Any, tolerance: float = 0.03) -> Any:
    """Rewrite, call both on copies, and compare results and what became of the arguments."""
    rewritten = rewrite(fn, *args, policy="mixed_bfloat16")
    ours_in, theirs_in = (pytree.tree_map_only(Tensor, torch.clone, args) for _ in range(2))
    ours, theirs = rewritten(*ours_in), fn(*theirs_in)
    pairs = zip(pytree.tree_leaves((ours, ours_in)), pytree.tree_leaves((theirs, theirs_in)), strict=True)
    for one, other in pairs:
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)
    return rewritten


# --- memory -----------------------------------------------------------------------------------------------------------


def item(x: Tensor) -> tuple[Tensor, Tensor]:
    y = x @ W
    y[:, 0] = 3.0
    return y @ W, y


def two_names(x: Tensor) -> tuple[Tensor, Tensor]:
    y = x @ W
    z = y
    y += y @ W
    return z, z @ W


def wider(x: Tensor) -> Tensor:
    y = x @ W
    y += x.exp()
    return y


def its_first_name(x: Tensor) -> Tensor:
    y = x @ W
    z = y.add_(1)
    z.sin_()  # in float32
    return y


def through_a_view(x: Tensor) -> tuple[Tensor, Tensor]:
    y = x * 1.0
    before, view = y @ W, y.view(-1)
    view.add_(1)
    return before, y @ W


@pytest.mark.parametrize("fn", [two_names, its_first_name, through_a_view])
def test_a_change_in_place_is_seen_under_every_name(fn: Callable[..., Any]) -> None:
    same(fn, X)


@pytest.mark.parametrize("fn", [two_names, wider, item, F.relu_])
def test_gradients_of_changes_in_place(fn: Callable[..., Any]) -> None:
    def total(x: Tensor) -> Tensor:
        results = fn(x @ W @ W)
        return sum((leaf.float().sum() for leaf in pytree.tree_leaves(results)), torch.zeros(()))

    x, y = X.clone().requires_grad_(), X.clone().requires_grad_()
    total(x).backward()
    rewrite(total, y, policy="mixed_bfloat16")(y).backward()
    torch.testing.assert_close(y.grad, x.grad, rtol=0.05, atol=0.05)


def test_what_a_product_keeps_for_its_derivative_is_not_changed() -> None:
    """The sum is in 16 bits, and so is what the product took of the same value."""
    layer = nn.Linear(8, 8)

    def fn(x: Tensor) -> Tensor:
        y = x * 2
        y += layer(y)
        return y.sum()

    rewrite(fn, X, policy="mixed_bfloat16")(X).backward()
    torch.testing.assert_close(layer.weight.grad, (2 * X).sum(0).expand(8, 8), rtol=0.03, atol=0.03)


def test_activations_in_place_stay_in_16_bits() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(inplace=True), nn.Dropout(0.0, inplace=True), nn.Linear(8, 8))
    assert explain(model, X, policy="mixed_bfloat16").totals["by_format"] == {"bfloat16": 4, "as written": 1}


@pytest.mark.parametrize(("name", "kind"), [("batch_norm", nn.BatchNorm1d), ("instance_norm", nn.InstanceNorm1d)])
def test_statistics_are_kept_also_where_a_rule_lowers_their_norm(name: str, kind: Any) -> None:
    model = nn.Sequential(nn.Conv1d(2, 4, 3), kind(4, track_running_stats=True, affine=True))
    policy = polyamp.policy("mixed_bfloat16", rules={name: "lower"})
    rewritten = rewrite(model, torch.ones(3, 2, 8), policy=policy)
    rewritten(torch.randn(3, 2, 8) + 5)
    assert model[1].running_mean.abs().sum() > 0.01
    assert model[1].running_mean.dtype == torch.float32


# Random programs with views and changes in place, over small integers that every format holds: equal to the bit.

SIZE = 4
P = torch.eye(SIZE)[[2, 0, 3, 1]]  # a product with it moves columns
Step = tuple[str, int, int]


def changed(change: Callable[[Tensor], Any]) -> Callable[[Tensor, Tensor], Tensor]:
    def run(x: Tensor, _: Tensor) -> Tensor:
        change(x)
        return x

    return run


STEPS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "matmul": lambda x, y: x @ P,
    "add": lambda x, y: (x + y).clamp(-8, 8),
    "where": lambda x, y: torch.where(y > 0, x, y),
    "full": lambda x, y: torch.cumsum(x.clamp(-1, 1), 0),
    "relu_": lambda x, y: x.relu_(),
    "add_": lambda x, y: x.add_(y).clamp_(-8, 8),
    "iadd": changed(lambda x: x.__iadd__(1).clamp_(-8, 8)),
    "neg_": changed(lambda x: x.neg_()),
    "transpose": lambda x, y: x.t(),
    "view": lambda x, y: x.reshape(-1).view(SIZE, SIZE),
    "row": changed(lambda x: x[1].fill_(3)),
    "item": changed(lambda x: x.__setitem__((slice(None), 0), 2)),
    "item of another": lambda x, y: changed(lambda z: z.__setitem__(0, y[1]))(x, y),
    "copy_": lambda x, y: x.copy_(y),
    "part": changed(lambda x: x.chunk(2, -1)[0].mul_(-1)),
    "clone": lambda x, y: x.clone(),
    "round": lambda x, y: x.float(),
    "concat": lambda x, y: torch.cat([x[:2], y[2:]]),
}


def program(steps: list[Step]) -> Callable[[Tensor, Tensor], tuple[Tensor, ...]]:
    """Each step makes a new value from two earlier ones; all of them are returned, as they are at the end."""

    def run(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        values = [x, w, x @ P, w + 1]
        for name, one, other in steps:
            values.append(STEPS[name](values[one % len(values)], values[other % len(values)]))
        return tuple(values[2:])

    return run


STEP = st.tuples(st.sampled_from(sorted(STEPS)), st.integers(0, 9), st.integers(0, 9))


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@example(steps=[("transpose", 1, 0), ("add_", 4, 1)], low="mixed_bfloat16")  # refused
@given(steps=st.lists(STEP, min_size=3, max_size=9), low=st.sampled_from(["mixed_bfloat16", "mixed_float16"]))
def test_programs_give_what_they_give(steps: list[Step], low: str) -> None:
    fn = program(steps)
    x, w = torch.arange(16.0).reshape(SIZE, SIZE) % 5 - 2, torch.arange(16.0).reshape(SIZE, SIZE) % 3
    ours_in, theirs_in = (x.clone(), w.clone()), (x.clone(), w.clone())
    try:
        theirs = fn(*theirs_in)
    except RuntimeError:  # torch itself refuses to add a matrix to its own transpose in place
        reject()
    ours = rewrite(fn, x, w, policy=low)(*ours_in)
    for one, other in zip((*ours, *ours_in), (*theirs, *theirs_in), strict=True):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)


# --- the user's own operations ----------------------------------------------------------------------------------------


class Doubled(torch.autograd.Function):
    """A derivative that is not the forward's."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 100


def test_derivatives_of_the_users_are_kept() -> None:
    x = X.clone().requires_grad_()
    rewritten = rewrite(lambda x: Doubled.apply(x @ W).sum(), x, policy="mixed_bfloat16")
    rewritten(x).backward()
    torch.testing.assert_close(x.grad, 100 * W.sum(1).expand(4, 8), rtol=0.02, atol=1)


@pytest.fixture
def own_operator() -> Iterator[Any]:
    with torch.library._scoped_library("polyamp_test", "FRAGMENT") as library:
        library.define("scaled(Tensor x, float by) -> Tensor")
        library.impl("scaled", lambda x, by: x * by if x.dtype == torch.float32 else 1 / 0, "CompositeExplicitAutograd")
        library.define("put_(Tensor(a!) x, Tensor(b!) y) -> ()")
        library.impl("put_", lambda x, y: (x.fill_(7.0), y.fill_(8.0), None)[2], "CompositeExplicitAutograd")
        yield torch.ops.polyamp_test


def test_unknown_operators_run_as_written(own_operator: Any) -> None:
    rewritten = same(lambda x: own_operator.scaled(x @ W, 3.0) @ W, X)
    (unknown,) = [op for op in rewritten.plan.operations if op.name.startswith("polyamp_test")]
    assert (unknown.format, unknown.reason) == ("as written", "unknown operation: runs as written")


def test_operators_that_change_their_arguments_change_them(own_operator: Any) -> None:
    def fn(x: Tensor) -> tuple[Tensor, Tensor]:
        y, z = x @ W, x @ W.T
        own_operator.put_(y, z)
        return y, z

    same(fn, X)


def test_other_dtypes_are_left_alone() -> None:
    def fn(x: Tensor) -> dict[str, Tensor]:
        y = x @ W
        return {
            "double": y.double() @ W.double(),
            "half": y.half() @ W.half(),
            "complex": torch.fft.rfft(y),
            "integer": y.argmax(-1) * 2,
            "bool": y > 0.1,
            "float": y.float() * 2,
        }

    formats = {op.name: op.format for op in same(fn, X, tolerance=0.05).plan.operations}
    assert formats["fft"] == "float32"
    assert formats["mul"] == "float32"


def test_float32_that_the_user_asked_for_is_float32() -> None:
    def fn(x: Tensor) -> Tensor:
        y = x @ W
        return y.float() * y.relu() + y.sum(dtype=torch.float32) + y.to(torch.float32)

    policy = polyamp.policy("mixed_bfloat16", rules={"sum": "lower"})
    decided = {op.name: (op.format, op.reason) for op in explain(fn, X, policy=policy).operations}
    assert decided["mul"] == ("float32", "after cast")
    assert decided["sum"] == ("float32", "dtype=torch.float32 was asked for")


# --- bodies -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints_are_recomputed_in_the_same_formats(reentrant: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.3), nn.GELU(), nn.Linear(8, 8))
    x = X.clone().requires_grad_()

    def called(x: Tensor) -> Tensor:
        return x + checkpoint(model, x, use_reentrant=reentrant)

    rewritten = rewrite(called, x, policy="mixed_bfloat16")
    assert rewritten.plan.totals["by_format"]["bfloat16"] == 4
    gradients = []
    for fn in (rewritten, called):
        torch.manual_seed(1)
        model.zero_grad()
        fn(x).square().sum().backward()
        gradients.append([param.grad.clone() for param in model.parameters()])
    torch.testing.assert_close(*gradients, rtol=0.05, atol=0.05)


def test_both_branches_are_decided_and_agree() -> None:
    def fn(x: Tensor) -> Tensor:
        return torch.cond(x.sum() > 0, lambda y: (y @ W) @ W, lambda y: y.exp(), (x,)) + 1

    rewritten = same(fn, X + 1, tolerance=0.2)
    torch.testing.assert_close(rewritten(X - 1), fn(X - 1))
    assert [op.format for op in rewritten.plan.operations if op.name == "matmul"] == ["bfloat16"] * 2


def test_parametrisations_hooks_and_plain_tensors() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.utils.parametrizations.weight_norm(nn.Linear(8, 8))
            self.plain = torch.arange(8.0)
            self.layer.register_forward_hook(lambda module, args, result: result * 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x) + self.plain

    model = Odd()
    rewritten = same(model, X)
    assert list(rewritten.state_dict()) == list(model.state_dict())
    rewritten(X).sum().backward()
    assert all(param.grad is not None for param in model.parameters())
