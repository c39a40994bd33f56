"""Which call changes which tensors in place: a rewritten graph knows it of every function that PyTorch has."""

import itertools
import random
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.guards import CheckFunctionManager
from torch.nn.utils import parametrizations, prune, spectral_norm, weight_norm
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils.checkpoint import checkpoint

from polyamp.backends.torch import rewrite
from polyamp.backends.torch.graphs.graph import changed_in_place  # noqa: TID251
from polyamp.errors import UsageError
from support.torch_cases import mlp
from support.torch_changes import ANY_NUMBERS, PLACES, Call, calls_of, difference, judged, program

POLICIES = ["mixed_bfloat16", "mixed_float16"]
W = torch.randn(8, 8, generator=torch.Generator().manual_seed(0)) / 3
V = torch.full((8, 8), 0.125)  # a product with it is an average, which a reader computes again in float32
X = torch.randn(4, 8, generator=torch.Generator().manual_seed(1))


# --- programs ---------------------------------------------------------------------------------------------------------


def masks(x: Tensor) -> Any:
    mask, other = x[:, :1] > 0, x[:, 1:2] > 0
    hidden = (torch.where(~mask, x @ W, x) - x) * mask
    return hidden, mask & ~other, ~mask & other, mask & other, (x @ W).masked_fill(~mask, -1e4), mask.sum(-1)


def rows(x: Tensor) -> Any:
    index = torch.arange(4)
    return (x @ W)[~index] * 2 + (x @ W)[index]


def scaled(x: Tensor) -> Any:
    y = x @ V
    y *= 0.5
    return torch.softmax(y, 0)


def chained(x: Tensor) -> Any:
    y = (x @ V).mul_(2).add_(1)
    return torch.logsumexp(y, -1), x


def after_an_activation(x: Tensor) -> Any:
    return F.relu(x @ V, inplace=True).add_(1).exp()


def residual(x: Tensor) -> Any:
    y = x @ V
    y *= 2
    y += x
    return y.exp(), (y * y).sum(-1)


def into_its_own_value(x: Tensor) -> Any:
    y = x @ W
    z = torch.mul(y, 2, out=y)
    return torch.softmax(z, -1), y


def product_assigned(x: Tensor) -> Any:
    y = z = x @ W
    y @= W
    return y, z * 2


def shifted(x: Tensor) -> Any:
    i = j = (x * 4).long()
    i <<= 2
    k = j >> 1
    j >>= 1
    return i, j, k, x @ W


def size_assigned(x: Tensor) -> Any:
    n = m = x.shape[0]
    n += 1
    return x.new_zeros(n), x[:m] @ W


def bits(x: Tensor) -> Any:
    y, z = (x > 0), (x @ W > 0)
    view = y[:2]
    y &= z
    y ^= view.any()
    return y, view, y.__ior__(z), view


def two_results(x: Tensor) -> Any:
    values, indices = torch.empty(8), torch.empty(8, dtype=torch.long)
    result = torch.max(x @ W, 0, out=(values, indices))
    return values @ W, indices, result.values * 2, result.indices


def sorted_into(x: Tensor) -> Any:
    values, indices = torch.empty(4, 8), torch.empty(4, 8, dtype=torch.long)
    torch.sort(x @ W, 0, out=(values, indices))
    return values @ W, values, indices


def without_symbolic_sizes(x: Tensor) -> Any:
    y, z, line = x @ W, torch.empty(4, 2), torch.empty(5)
    torch.gather(y, 1, torch.arange(8).view(4, 2), out=z)
    torch.linspace(0, 1, 5, out=line[:])
    return z, y, line


def methods(x: Tensor) -> Any:
    y = (x @ W).clone()
    view = y[0]
    y.__iadd__(1.0)
    return y, view, y @ W


def lists(x: Tensor) -> Any:
    y = x @ W
    z = y.clone()
    view = z[0]
    result = torch._foreach_mul_([z, y], 2)
    torch._foreach_add_([z], [x])
    return z, view, y, result[0] @ W


def out_of_python(x: Tensor) -> Any:
    y, z = x @ W, torch.zeros(4, 8)
    F.normalize(y, out=z)
    return z, z @ W, F.elu(y, 1.0, True) @ W, y


def checkpointed(x: Tensor) -> Any:
    y = x @ W
    before = y @ W
    z = checkpoint(lambda y: y.mul_(2) * 1, y, use_reentrant=False)
    return before, y @ W, z


def views_of_views(x: Tensor) -> Any:
    y = x @ W
    view = y.t()[1:3].diagonal()
    part = y.unflatten(1, (2, 4))[:, 0]
    view.add_(1)
    with torch.no_grad():
        part.masked_fill_(part > 0.5, 0.0)
    y.T[0].copy_(y[0, :4])
    return y @ W, view, part


def out_of_an_input(x: Tensor) -> Any:
    y = x @ W
    torch.add(y, 1, out=y)
    torch.mul(x, 2, out=x[:])
    return y.exp(), x @ W, torch.cumsum(y, 0, out=y[:]), y


PROGRAMS: list[Callable[[Tensor], Any]] = [
    *(masks, rows, scaled, chained, after_an_activation, residual, into_its_own_value, product_assigned, shifted),
    *(size_assigned, bits, two_results, sorted_into, methods, lists, out_of_python, checkpointed, views_of_views),
    *(out_of_an_input, without_symbolic_sizes),
]


@pytest.mark.parametrize(("fn", "policy"), [*zip(PROGRAMS, itertools.cycle(POLICIES), strict=False)])
def test_a_program_that_changes_values_computes_what_it_did(fn: Callable[[Tensor], Any], policy: str) -> None:
    ours, theirs = X.clone(), X.clone()
    assert difference((rewrite(fn, X, policy=policy)(ours), ours), (fn(theirs), theirs)) < 0.03


@pytest.mark.parametrize(("fn", "policy"), [*zip([scaled, chained, residual], itertools.cycle(POLICIES), strict=False)])
def test_a_change_in_place_has_one_gradient(fn: Callable[[Tensor], Any], policy: str) -> None:
    def total(x: Tensor) -> Tensor:
        results = fn(x)
        return sum((one.sum() for one in (results if isinstance(results, tuple) else (results * x,))), torch.zeros(()))

    ours, theirs = X.clone().requires_grad_(), X.clone().requires_grad_()
    rewrite(total, ours, policy=policy)(ours).backward()
    total(theirs).backward()
    assert difference(ours.grad, theirs.grad) < 0.05


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of Dynamo
@pytest.mark.parametrize("fn", [residual, two_results])
def test_torch_compile_of_such_a_program(fn: Callable[[Tensor], Any]) -> None:
    compiled = torch.compile(rewrite(fn, X, policy="mixed_bfloat16"), backend="aot_eager", fullgraph=True)
    assert difference(compiled(X.clone()), fn(X.clone())) < 0.03


# --- PyTorch's own operators ------------------------------------------------------------------------------------------

# They update statistics, or change the size alone, which they do not for these samples.
_APART = {"_native_batch_norm_legit", "instance_norm", "batch_norm", "resize_", "resize_as_", "empty", "kron"}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")  # PyTorch's own, of some operators
def test_what_a_call_changes_is_what_pytorch_changes() -> None:
    """Whatever a call changed has another version afterwards."""
    wrong, changing = [], 0
    for call in (one.copied() for info in op_db for one in calls_of(info)):
        node, tensors = call.node()
        before = {one: tensor._version for one, tensor in tensors.items()}
        try:
            with torch.no_grad():
                call(*call.args, **call.kwargs)
        except (RuntimeError, TypeError):  # the method or result does not take this sample
            continue
        changed = {one for one, tensor in tensors.items() if tensor._version != before[one]}
        changing += bool(changed)
        if changed != set(changed_in_place(node)) and not any(name in str(call) for name in _APART):
            wrong.append(str(call))
    assert wrong == []
    assert changing > 400


def sampled(count: int | None) -> Iterator[tuple[Call, str, str]]:
    """Yield calls with a place and a policy for each."""
    draw = random.Random(0)
    infos = [info for info in op_db if info.name not in ANY_NUMBERS]
    draw.shuffle(infos)
    for call in itertools.islice((call for info in infos for call in calls_of(info)), count):
        yield call, draw.choice([*PLACES]), draw.choice(POLICIES)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("count", [60, pytest.param(None, marks=pytest.mark.long)])
def test_programs_around_pytorchs_operators_compute_what_they_did(count: int | None) -> None:
    found = Counter[str]()
    for call, place, policy in sampled(count):
        fn, args = program(call, place)
        was = judged(fn, args, partial(rewritten_at_the_call, policy=policy), UsageError)
        found[was if was in ("right", "refused", "untaken") else f"{call}, {place}, {policy}: {was}"] += 1
    assert found.keys() <= {"right", "refused", "untaken"}
    assert found["right"] > 0.9 * found.total()


def rewritten_at_the_call(fn: Callable[..., Any], policy: str) -> Callable[..., Any]:
    return lambda *args: rewrite(fn, *args, policy=policy)(*args)


# --- what modules assign ----------------------------------------------------------------------------------------------


class State(nn.Module):
    """Buffers that are read, changed in place, saved for the backward pass, assigned, swapped and returned."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        for name in ("average", "one", "other", "last"):
            self.register_buffer(name, torch.ones(8))
        self.register_buffer("count", torch.tensor(0))

    def forward(self, x: Tensor) -> Any:
        y = self.layer(x) * self.average
        before = self.average
        with torch.no_grad():
            self.average = torch.lerp(self.average, y.mean(0), 0.001)
        self.one.mul_(0.5)
        self.one, self.other = self.other, self.one
        self.other = self.other + y.mean(0).detach()
        self.count = self.count + 1
        self.last = x[0]
        return y, before, self.other


def layers(wrap: Callable[[nn.Module], nn.Module]) -> nn.Module:
    return nn.Sequential(wrap(nn.Linear(8, 8)), nn.ReLU(), nn.Sequential(wrap(nn.Linear(8, 4))))


ASSIGNING: dict[str, Callable[[], nn.Module]] = {
    "buffers": State,
    "spectral norm": lambda: layers(parametrizations.spectral_norm),
    "old spectral norm": lambda: layers(spectral_norm),
    "old weight norm": lambda: layers(weight_norm),
    "pruned": lambda: layers(lambda layer: prune.l1_unstructured(layer, "weight", 0.3)),
}


def steps(fn: Callable[[Tensor], Any], model: nn.Module, count: int = 4) -> dict[str, Tensor]:
    """Train, with a call in evaluation mode in between; return everything that the module saves."""
    optimizer, random = torch.optim.SGD(model.parameters(), lr=0.05), torch.Generator().manual_seed(0)
    for step in range(count):
        model.train(step != 2)
        results = fn(torch.randn(4, 8, generator=random))
        result = results[0] if isinstance(results, tuple) else results
        optimizer.zero_grad()
        result.square().mean().backward()
        optimizer.step()
    return model.state_dict()


@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")  # the old one
@pytest.mark.parametrize(("policy", "bound"), [("float32", 0.0), ("mixed_bfloat16", 0.02)])
@pytest.mark.parametrize("name", ASSIGNING)
def test_tensors_that_a_module_assigns_are_assigned(name: str, policy: str, bound: float) -> None:
    torch.manual_seed(0)
    model = ASSIGNING[name]()
    twin = ASSIGNING[name]()
    twin.load_state_dict(model.state_dict())
    before = {key: value.clone() for key, value in model.state_dict().items()}
    rewritten = rewrite(model, X, policy=policy)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    ours, theirs = steps(rewritten, model), steps(twin, twin)
    assert list(ours) == list(theirs) == list(rewritten.state_dict())
    assert all(difference(ours[key], theirs[key]) <= bound for key in theirs)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of Dynamo
def test_a_compiled_graph_assigns_them_too() -> None:
    model, twin = State(), State()
    twin.load_state_dict(model.state_dict())
    compiled = torch.compile(rewrite(model, X, policy="float32"), backend="aot_eager", fullgraph=True)
    for x in (X, X + 1):
        assert difference(compiled(x), twin(x)) < 1e-6
    assert difference(model.state_dict(), twin.state_dict()) < 1e-6
    assert model.count == 2


# --- interruptions ----------------------------------------------------------------------------------------------------


def test_a_capture_that_is_interrupted_leaves_nothing_that_later_ones_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    build = CheckFunctionManager.build_guards

    def interrupted(*args: Any, **kwargs: Any) -> Any:
        build(*args, **kwargs)
        raise KeyboardInterrupt

    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
    with monkeypatch.context() as patch:
        patch.setattr(CheckFunctionManager, "build_guards", interrupted)
        with pytest.raises(KeyboardInterrupt):
            rewrite(model, X, policy="mixed_bfloat16")
    assert rewrite(mlp(), X, policy="mixed_bfloat16")(X).shape == (4, 4)
