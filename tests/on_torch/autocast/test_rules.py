"""Autocast by a policy's own rules: every class, CUDA's list in float16 on the CPU, promotion, nesting, threads."""

import contextlib
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.testing._internal.autocast_test_lists import AutocastCPUTestLists, AutocastTestLists

import polyamp
from polyamp.backends.torch import autocast
from polyamp.operations import OPERATIONS

X = torch.arange(16.0).reshape(4, 4) / 16
B, H = X.bfloat16(), X.half()


def policy(rules: dict[str, str] | None = None, name: str = "mixed_bfloat16") -> polyamp.Policy:
    return polyamp.policy(name, rules=rules)


def softmax(x: Tensor) -> Tensor:
    return torch.softmax(x, -1)


def norm(x: Tensor) -> Tensor:
    return functional.layer_norm(x, (4,), torch.ones(4), torch.ones(4))


@pytest.mark.parametrize(
    ("rules", "run", "given", "dtype"),
    [
        ({"softmax": "lower"}, softmax, X, torch.bfloat16),
        ({"softmax": "full"}, softmax, B, torch.float32),
        ({"softmax": "follow"}, softmax, B, torch.bfloat16),
        ({"softmax": "keep"}, softmax, X, torch.float32),
        ({"layer_norm": "lower"}, norm, X, torch.bfloat16),
        ({"*_norm": "lower"}, norm, X, torch.bfloat16),
        ({"layer_norm": "promote"}, norm, B, torch.float32),  # its weights are float32
        ({"matmul": "full"}, lambda x: x @ x, B, torch.float32),
        ({"matmul": "follow"}, lambda x: x @ B, X, torch.float32),
        ({"matmul": "neutral"}, lambda x: x @ B, B, torch.bfloat16),
        ({"matmul": "keep"}, lambda x: x @ x, X, torch.float32),
        ({"matmul": "promote"}, lambda x: x @ H, B, torch.float32),
        ({"sum": "full"}, torch.sum, B, torch.float32),
        ({"sum": "full"}, lambda x: torch.sum(x, 0, dtype=torch.float16), B, torch.float16),
        ({"mse_loss": "lower"}, lambda x: functional.mse_loss(x, x), X, torch.bfloat16),
        (
            {"cross_entropy": "lower"},
            lambda x: functional.cross_entropy(x, torch.tensor([0, 1, 2, 3])),
            X,
            torch.bfloat16,
        ),
        ({"gelu": "full"}, functional.gelu, B, torch.float32),
        ({"concat": "lower"}, lambda x: torch.cat([x, x]), X, torch.bfloat16),
        ({"embedding": "lower"}, lambda x: functional.embedding(torch.tensor([0, 1]), x), X, torch.bfloat16),
        ({"*": "full"}, lambda x: functional.gelu(x @ x) + x, B, torch.float32),
        ({"softmax": "inner"}, softmax, X, torch.bfloat16),
        ({"layer_norm": "inner"}, norm, B, torch.bfloat16),
        ({"matmul": "inner"}, lambda x: x @ x, B, torch.bfloat16),
        ({"batch_norm": "lower"}, lambda x: functional.batch_norm(x, torch.zeros(4), torch.ones(4)), X, torch.bfloat16),
    ],
)
def test_each_class_does_what_it_says(
    rules: dict[str, str], run: Callable[[Tensor], Tensor], given: Tensor, dtype: torch.dtype
) -> None:
    with polyamp.autocast(policy(rules)):
        assert run(given).dtype == dtype
    with polyamp.autocast("mixed_bfloat16"):  # where polyamp has kernels now, but there are no rules
        ours = run(given) if "promote" not in rules.values() else None
    with torch.autocast("cpu", torch.bfloat16):
        native = run(given) if ours is not None else None
    assert ours is None or native is None or ours.dtype == native.dtype


@pytest.mark.parametrize("name", ["mixed_bfloat16", "mixed_float16"])
@pytest.mark.parametrize("spread", [torch.var, torch.std, lambda x: torch.var_mean(x)[0], lambda x: x.std(0).max()])
def test_variances_run_in_float32_as_the_table_has_them(spread: Callable[[Tensor], Tensor], name: str) -> None:
    x = 1000 + 300 * torch.linspace(-1, 1, 64).reshape(8, 8)
    with polyamp.autocast(name):
        low = x @ torch.eye(8)
        found = spread(low)
    with polyamp.autocast(policy({"variance": "keep"}, name)):
        assert spread(low).dtype == low.dtype
    assert low.dtype != torch.float32 == found.dtype
    torch.testing.assert_close(found, spread(x), rtol=2e-2, atol=0)


def test_inner_work_is_float32_inside_where_a_rule_asks_for_it() -> None:
    x = torch.tensor([[300.0, 1.0]])
    with polyamp.autocast(policy({"square": "inner", "mean": "inner", "layer_norm": "inner"}, "mixed_float16")):
        assert torch.square(x).dtype == torch.mean(x.half()).dtype == torch.float16
        assert torch.mean(x.half(), dtype=torch.float32).dtype == torch.float32
        first, *statistics = torch.native_layer_norm(x, (2,), None, None, 1e-5)
    assert (first.dtype, {one.dtype for one in statistics}) == (torch.float16, {torch.float32})


@pytest.mark.parametrize("kept", [X.double(), torch.arange(4), torch.ones(2, dtype=torch.complex64)])
def test_other_types_are_never_touched(kept: Tensor) -> None:
    with autocast(policy({"*": "lower"})):
        assert torch.abs(kept).dtype == kept.abs().dtype
        assert torch.cat([kept, kept]).dtype == kept.dtype


def test_running_statistics_are_updated_under_a_lower_batch_norm() -> None:
    module = nn.BatchNorm1d(4)
    with autocast(policy({"batch_norm": "lower"})):
        assert module(X + 1).dtype == torch.bfloat16
    assert module.running_mean is not None
    assert (module.running_mean > 0).all()
    assert module.running_mean.dtype == torch.float32


def test_views_alias_what_they_view() -> None:
    with autocast(policy({"*": "full"})):
        base = B.clone()
        base.view(-1)[0] = 7
    assert base[0, 0] == 7


# The tables that PyTorch tests its own lists with.

CPU_LISTS, CUDA_LISTS = AutocastCPUTestLists(torch.device("cpu")), AutocastTestLists(torch.device("cpu"))


def call(module: Any, case: tuple[Any, ...]) -> Any:
    name, args, *rest = case
    return getattr(module, name)(*args, **(rest[0] if rest else {}))


@pytest.mark.parametrize("case", CPU_LISTS.torch_16, ids=lambda case: case[0])
def test_the_cpu_list_is_lowered_as_natively(case: tuple[Any, ...]) -> None:
    with polyamp.autocast("mixed_bfloat16"):
        result = call(torch, case)
    assert (result[0] if isinstance(result, tuple) else result).dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("module", "case"),
    [(torch, case) for case in CUDA_LISTS.torch_fp32] + [(torch._C._nn, case) for case in CUDA_LISTS.nn_fp32],
    ids=lambda value: value[0] if isinstance(value, tuple) else "",
)
@pytest.mark.filterwarnings("ignore")  # of losses whose shapes broadcast
def test_float16_on_the_cpu_follows_the_list_of_cuda(module: Any, case: tuple[Any, ...]) -> None:
    with polyamp.autocast("mixed_float16"):
        assert call(module, case).dtype == torch.float32


# Promotion, regions within regions, threads.


@pytest.mark.parametrize("name", ["mixed_float16", "mixed_bfloat16"])
@pytest.mark.parametrize("join", [torch.cat, torch.stack])
def test_float16_beside_bfloat16_gives_float32(name: str, join: Callable[[list[Tensor]], Tensor]) -> None:
    with polyamp.autocast(name):
        assert join([H, B]).dtype == torch.float32
        assert join([B, B]).dtype == torch.bfloat16
        assert join([H, X]).dtype == torch.float32


def test_a_region_of_native_autocast_inside_is_native() -> None:
    with polyamp.autocast(policy({"softmax": "lower"})):
        with torch.autocast("cpu", torch.bfloat16):
            assert softmax(X).dtype == torch.float32
            with polyamp.autocast(policy({"softmax": "lower"})):
                assert softmax(X).dtype == torch.bfloat16
            assert softmax(X).dtype == torch.float32
        assert softmax(X).dtype == torch.bfloat16
    assert softmax(X).dtype == torch.float32


def test_the_innermost_policy_decides() -> None:
    seen = []
    with polyamp.autocast(policy({"softmax": "lower"})):
        for inner in (policy(), policy(name="float32"), policy({"softmax": "lower"}, "mixed_float16")):
            with polyamp.autocast(inner):
                seen.append(softmax(X).dtype)
            seen.append(softmax(X).dtype)
    low = torch.bfloat16
    assert seen == [torch.float32, low, torch.float32, low, torch.float16, low]


def test_threads_have_policies_of_their_own() -> None:
    seen: dict[str, tuple[torch.dtype, torch.dtype]] = {}
    barrier = threading.Barrier(3)

    def run(op_class: str) -> None:
        with polyamp.autocast(policy({"softmax": op_class})) if op_class else contextlib.nullcontext():
            barrier.wait(10)
            seen[op_class] = softmax(B).dtype, (X @ X).dtype
            barrier.wait(10)

    threads = [threading.Thread(target=run, args=(op_class,)) for op_class in ("lower", "full", "")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    low, full = torch.bfloat16, torch.float32
    assert seen == {"lower": (low, low), "full": (full, low), "": (low, full)}


@pytest.mark.parametrize(
    "transformed",
    [
        lambda fn: torch.func.vmap(fn)(X),
        lambda fn: torch.func.jacrev(fn)(X[0]),
        lambda fn: torch.func.vmap(torch.func.grad(lambda x: fn(x).float().square().sum()))(X),
        lambda fn: torch.func.jacfwd(torch.func.jacrev(fn))(X[0]),
    ],
    ids=["vmap", "jacrev", "vmap of grad", "jacfwd of jacrev"],
)
@pytest.mark.filterwarnings("ignore:.*torch.jit.script")
def test_transforms_of_torch_func_see_the_rules(transformed: Callable[[Callable[[Tensor], Tensor]], Tensor]) -> None:
    seen = []

    def fn(x: Tensor) -> Tensor:
        seen.append(softmax(x).dtype)
        return softmax(x)

    with polyamp.autocast(policy({"softmax": "lower"})):
        assert transformed(fn).isfinite().all()
    assert set(seen) == {torch.bfloat16}


# Rules that are about nothing.


@pytest.mark.parametrize("pattern", ["sofmax", "bits"])
def test_a_name_of_nothing_is_reported_once(pattern: str) -> None:
    said = pytest.warns(polyamp.PolyampWarning, match=f"the rule {pattern!r} matched nothing in autocast to")
    with said, polyamp.autocast(policy({pattern: "full"})):
        pass
    with polyamp.autocast(policy({pattern: "full"})):
        pass


def test_an_operator_that_the_table_does_not_know_is_left_native_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(OPERATIONS, "trace", OPERATIONS["trace"]._replace(sources={}))
    said = pytest.warns(polyamp.PolyampWarning, match=r"aten::trace .* rule 'trace' has no effect on it")
    with said, autocast(policy({"trace": "lower"})):
        assert torch.trace(B).dtype == torch.float32
