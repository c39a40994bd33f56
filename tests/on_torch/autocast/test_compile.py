"""Regions around and inside compiled code, and the caches of such code."""

import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import polyamp
from polyamp.backends.torch import autocast
from polyamp.backends.torch.autocast import regions

X = torch.arange(16.0).reshape(2, 8) / 16
LOW, FULL = torch.bfloat16, torch.float32
LOWER, RAISE, NATIVE = (
    polyamp.policy("mixed_bfloat16", rules=rules) for rules in ({"softmax": "lower"}, {"softmax": "full"}, None)
)
EXPECTED = {LOWER: LOW, RAISE: FULL, NATIVE: FULL}
BACKENDS = pytest.mark.parametrize("backend", ["eager", pytest.param("aot_eager", marks=pytest.mark.slow)])

pytestmark = [
    pytest.mark.usefixtures("module_hooks_of_its_own"),
    pytest.mark.filterwarnings("ignore:.*autograd.function.Function.* should not be instantiated"),  # Dynamo does it
    pytest.mark.filterwarnings("ignore:.*torch.jit.script"),
    pytest.mark.filterwarnings("ignore:Using `torch.compile"),  # polyamp's own filter is gone with an earlier test
]


@pytest.fixture(autouse=True)
def _compiled_anew() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def softmax(x: Tensor) -> Tensor:
    return torch.softmax(x, -1)


@BACKENDS
def test_compiled_code_is_that_of_the_region_around_it(backend: str) -> None:
    compiled = torch.compile(softmax, backend=backend, fullgraph=True)
    for policy in (LOWER, NATIVE, RAISE, LOWER):
        with polyamp.autocast(policy):
            assert compiled(X).dtype == EXPECTED[policy]
    with torch.autocast("cpu", LOW):
        assert compiled(X).dtype == FULL
    assert compiled(X).dtype == FULL


@BACKENDS
@pytest.mark.parametrize("enter", [autocast, polyamp.autocast])
def test_a_region_inside_ends_inside(backend: str, enter: Callable[[polyamp.Policy], Any]) -> None:
    def fn(x: Tensor, policy: polyamp.Policy) -> tuple[Tensor, Tensor]:
        with enter(policy):
            inside = softmax(x)
        return inside, softmax(x)

    compiled = torch.compile(fn, backend=backend, fullgraph=True)
    for policy in (LOWER, NATIVE, LOWER):
        inside, outside = compiled(X, policy)
        assert (inside.dtype, outside.dtype) == (EXPECTED[policy], FULL)
    assert regions.marks_here() == regions.mark_of(None)


@BACKENDS
def test_the_public_names_compile(backend: str) -> None:
    @polyamp.autocast(LOWER)
    def decorated(x: Tensor) -> Tensor:
        return softmax(x)

    model = polyamp.autocast(nn.Linear(8, 8), "mixed_bfloat16")

    def fn(x: Tensor) -> tuple[Tensor, ...]:
        with polyamp.autocast("mixed_bfloat16"):
            product = x @ x.t()
        return product, decorated(x), model(x), *LOWER.cast_to_compute([x]), softmax(x)

    found = torch.compile(fn, backend=backend, fullgraph=True)(X)
    assert [value.dtype for value in found] == [LOW, LOW, LOW, LOW, FULL]


@BACKENDS
def test_regions_within_regions(backend: str) -> None:
    def fn(x: Tensor) -> list[Tensor]:
        with autocast(RAISE):
            first = softmax(x.bfloat16())
            with autocast(polyamp.policy("float32")):
                second = softmax(x.bfloat16())
            return [first, second, softmax(x.bfloat16())]

    with polyamp.autocast(LOWER):
        found = torch.compile(fn, backend=backend, fullgraph=True)(X)
        assert [value.dtype for value in found] == [FULL, LOW, FULL]
        assert softmax(X).dtype == LOW


def test_graph_breaks_inside_a_region_keep_its_policy() -> None:
    @torch.compile(backend="aot_eager")
    def fn(x: Tensor, policy: polyamp.Policy) -> tuple[Tensor, Tensor]:
        with autocast(policy):
            before = softmax(x)
            torch._dynamo.graph_break()
            return before, softmax(x * 2)

    for policy in (LOWER, NATIVE, LOWER):
        assert [value.dtype for value in fn(X, policy)] == [EXPECTED[policy]] * 2
    assert not torch.is_autocast_enabled("cpu")


# Programs in which autocast and Dynamo are used for the first time.

FIRST = """
low = polyamp.policy("mixed_bfloat16")
def fn(x):
    with {region}:
        return {value}
assert torch.compile(fn, backend="eager", fullgraph=True)(torch.ones(2, 2)).dtype == torch.bfloat16
"""
FRESH = """
{before}
def is_marked():
    return any(map(torch.is_autocast_enabled, ("ipu", "maia", "hpu")))
def softmax(x):
    return torch.softmax(x, -1)
x, low = torch.ones(2, 4), polyamp.policy("mixed_bfloat16", rules={{"softmax": "lower"}})
with polyamp.autocast(low), polyamp.autocast(low):
    softmax(x)
    assert not is_marked()
    compiled = torch.compile(softmax, backend="eager", fullgraph=True)
    assert is_marked()
    assert compiled(x).dtype == torch.bfloat16
    assert torch._functorch.config.backward_pass_autocast == "off"
assert not is_marked()
assert torch._functorch.config.backward_pass_autocast == "same_as_forward"
assert not any(type(finder).__module__.startswith("polyamp.") for finder in sys.meta_path)
with torch.autocast("cpu", torch.bfloat16):
    assert compiled(x).dtype == torch.float32
"""
PROGRAMS = {
    "the first use of a region is in compiled code": FIRST.format(region="polyamp.autocast(low)", value="x @ x"),
    "the first use of a policy is in compiled code": FIRST.format(
        region="torch.no_grad()", value="low.cast_to_compute([x])[0]"
    ),
    # without a compiled function, a region changes nothing but what torch.autocast changes
    "only a program that compiles marks its regions": FRESH.format(before=""),
    "an optimizer imports Dynamo": FRESH.format(before="torch.optim.SGD([torch.ones(1, requires_grad=True)], lr=0.1)"),
}
EACH_IN_A_FORK = """
import os, sys, torch, polyamp  # the adapter is not loaded yet
failed = []
for name, program in {programs!r}.items():
    child = os.fork()
    if not child:
        exec(compile(program, name, "exec"), dict(globals()))
        os._exit(0)
    if os.waitpid(child, 0)[1]:
        failed.append(name)
assert not failed, failed
"""


def test_programs_that_use_autocast_and_dynamo_for_the_first_time() -> None:
    subprocess.run([sys.executable, "-c", EACH_IN_A_FORK.format(programs=PROGRAMS)], check=True)


class Model(nn.Module):
    """A linear layer in the region, then one in float32: the gradient of the first leaves float16 (pytorch #153044)."""

    def __init__(self) -> None:
        super().__init__()
        self.first: Tensor
        self.register_buffer("first", torch.ones(4, 4))
        self.second = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = x @ self.first
        with autocast(polyamp.policy("float32")):
            result: Tensor = self.second(y.float())
        return result


@BACKENDS
@pytest.mark.parametrize("where", ["around", "inside"])
def test_backward_passes_are_traced_without_autocast(backend: str, where: str) -> None:
    model = Model()

    def fn(x: Tensor) -> Tensor:
        with autocast(polyamp.policy("mixed_float16")):
            result: Tensor = model(x)
        return result

    compiled = torch.compile(model if where == "around" else fn, backend=backend, fullgraph=True)
    with polyamp.autocast("mixed_float16" if where == "around" else "float32"):
        loss = (compiled(torch.ones(1, 4)).float() * 16384).sum()
    loss.backward()
    assert model.second.weight.grad is not None
    assert (model.second.weight.grad == 65536).all()
    assert torch._functorch.config.backward_pass_autocast == "same_as_forward"


def test_a_users_setting_for_backward_passes_stays() -> None:
    import torch._functorch.config as config

    with config.patch(backward_pass_autocast=[]), polyamp.autocast(LOWER):
        assert config.backward_pass_autocast == []


class Net(nn.Module):
    def __init__(self, checkpointed: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.GELU()) for _ in range(2)])
        self.checkpointed = checkpointed

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.checkpointed else layer(x)
        return x


@BACKENDS
@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("rules", [{"layers.1": "full"}, {"layers.*.1": "lower"}, {"layer_norm": "lower"}], ids=str)
def test_compiled_training_under_rules_is_eager_training(
    backend: str, checkpointed: bool, rules: dict[str, str], request: pytest.FixtureRequest
) -> None:
    if checkpointed and "layer_norm" not in rules and torch.__version__ >= "2.15":
        request.applymarker(pytest.mark.xfail(strict=True, reason="Dynamo traces no set_autocast_dtype in a subgraph"))
    net, policy = Net(checkpointed), polyamp.policy("mixed_bfloat16", rules=rules)

    def train(run: Callable[[Tensor], Tensor]) -> list[Tensor]:
        net.zero_grad()
        with polyamp.autocast(policy):
            result = run(X)
        result.float().square().sum().backward()
        return [result.detach(), *(parameter.grad for parameter in net.parameters() if parameter.grad is not None)]

    expected = train(net)
    if "layer_norm" not in rules and torch.__version__ < "2.13":
        with pytest.raises(Exception, match=r"compile polyamp\.rewrite\(model, "):
            train(torch.compile(net, backend=backend, fullgraph=True))
        return
    assert all(map(torch.equal, train(torch.compile(net, backend=backend, fullgraph=True)), expected))


def test_layers_that_are_compiled_one_by_one_have_rules_of_their_own() -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8)) for _ in range(3)))
    for layer in model:
        layer.compile(backend="eager", fullgraph=True)
    found = []
    for layer in model:
        layer.register_forward_hook(lambda module, inputs, output: found.append(output.dtype))
    with torch.no_grad(), polyamp.autocast(polyamp.policy("mixed_bfloat16", rules={"1": "full"})):
        model(X)
    assert found == [LOW, FULL, LOW]


@pytest.mark.slow
def test_code_that_is_cached_on_disk_belongs_to_its_policy() -> None:
    """AOTAutograd's cache does not know polyamp's kernels."""
    from torch._inductor.utils import fresh_cache

    found = []
    with fresh_cache():
        for policy in (NATIVE, RAISE, NATIVE):
            torch._dynamo.reset()
            with polyamp.autocast(policy):
                found.append(torch.compile(lambda x: softmax(x) * 2, fullgraph=True)(X.bfloat16()).dtype)
    assert found == [LOW, FULL, LOW]
