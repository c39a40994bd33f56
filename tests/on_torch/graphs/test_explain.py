"""Plans of code that is not one graph, and of autocast: one run is recorded, and its changes are undone."""

import logging
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import polyamp
from polyamp.errors import InvalidValueError
from support.torch_cases import GPT, mlp

X = torch.ones(3, 8)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)


class Masked(Layer):
    """Takes the rows that a value chooses: a size that nobody knows before."""

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x[x[:, 0] > 0]).sum()


class Packed(nn.Module):
    """A recurrent layer over sequences of several lengths."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(8, 4, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        lengths = torch.tensor([2, 1])
        packed = nn.utils.rnn.pack_padded_sequence(x.expand(2, 3, 8), lengths, batch_first=True)
        return nn.utils.rnn.pad_packed_sequence(self.lstm(packed)[0])[0]


class Speech(nn.Module):
    """A CTC loss."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(8, 5, 1)

    def forward(self, x: Tensor) -> Tensor:
        scores = F.log_softmax(self.conv(x.T.expand(2, 8, 3)).permute(2, 0, 1), -1)
        return F.ctc_loss(scores, torch.ones(2, 2, dtype=torch.long), torch.tensor([3, 3]), torch.tensor([2, 1]))


class Detecting(nn.Module):
    """Loops over what it finds, as detectors do; with batch statistics, random numbers and counters."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear, self.calls = nn.BatchNorm1d(8), nn.Linear(8, 8), 0

    def forward(self, x: Tensor) -> dict[str, Any]:
        self.calls += 1
        features = self.linear(self.norm(x))
        found = [row @ row for row in features if float(row.sum() + torch.rand(())) > -1e6]
        return {"boxes": torch.stack(found), "count": len(found)}


class ThroughNumPy(Layer):
    def forward(self, x: Tensor) -> Tensor:
        return torch.from_numpy(self.linear(x).detach().float().numpy())


class Assigning(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("average", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        self.average = 0.9 * self.average + 0.1 * x.mean(0)
        self.last = self.linear(x)
        return self.last


MODELS = [Masked, Packed, Speech, Detecting, ThroughNumPy, Assigning]
UNCAPTURED = [Packed, Speech, Detecting, Assigning]


def state(model: nn.Module) -> Any:
    tensors = [value.clone() for value in model.state_dict().values()]
    return tensors, {name: value for name, value in vars(model).items() if name[0] != "_"}, torch.get_rng_state()


def same(one: Any, other: Any) -> bool:
    tensors = zip(one[0], other[0], strict=True)
    return all(torch.equal(*pair) for pair in tensors) and one[1] == other[1] and torch.equal(one[2], other[2])


@pytest.mark.parametrize("engine", [None, "autocast"])
@pytest.mark.parametrize("kind", MODELS)
def test_every_model_has_a_plan_and_stays_what_it_is(kind: Any, engine: str | None) -> None:
    model = kind()
    before = state(model)
    plan = polyamp.explain(model, X, policy="mixed_bfloat16", engine=engine)
    assert same(before, state(model))
    assert all(param.grad is None for param in model.parameters())
    assert "bfloat16" in {op.format for op in plan.operations}
    assert str(plan).splitlines()[0].startswith("mixed_bfloat16")
    if engine is None and kind in UNCAPTURED:
        assert plan.engine.startswith("autocast, recorded: the code ")
        assert plan.engine in str(plan)
        assert plan.as_dict()["engine"] == plan.engine


def test_a_size_that_depends_on_values_is_rewritten() -> None:
    model, x = Masked(), torch.randn(16, 8)
    rewritten = polyamp.rewrite(model, X, policy="mixed_bfloat16")
    torch.testing.assert_close(rewritten(x), model(x), atol=1e-1, rtol=1e-1)


class Native(TorchDispatchMode):
    """The dtypes that operations really run in."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, str]] = []

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = op(*args, **(kwargs or {}))
        first = out[0] if isinstance(out, tuple | list) else out
        if isinstance(first, Tensor) and first.is_floating_point() and not op.is_view and "_to_copy" not in op.name():
            name = op.name().removeprefix("aten::").partition(".")[0]
            self.seen.append((name, str(first.dtype).removeprefix("torch.")))
        return out


@pytest.mark.parametrize("kind", [mlp, lambda: GPT().eval(), Packed, Speech])
def test_autocasts_plan_is_what_runs_there(kind: Callable[[], nn.Module]) -> None:
    model = kind()
    x = torch.randint(0, 32, (2, 4)) if isinstance(model, GPT) else X
    plan = polyamp.explain(model, x, policy="mixed_bfloat16", engine="autocast")
    with torch.autocast("cpu", torch.bfloat16), Native() as native:
        model(x)
    planned = [(op.native, op.format) for op in plan.operations if op.format != "as written"]
    ran = [pair for pair in native.seen if pair[0] in {name for name, _ in planned}]
    assert planned == ran
    assert plan.engine == "autocast"


def test_reasons_name_the_table_the_list_and_the_rule() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Softmax(-1), nn.Linear(8, 8), nn.Softmax(-1))
    policy = polyamp.policy("mixed_bfloat16", rules={"3": "full", "nothing": "full"})
    plan = polyamp.explain(model, X, policy=policy, engine="autocast")
    said = [(op.name, op.where.split()[0], op.op_class, op.format, op.reason) for op in plan.operations]
    assert said == [
        ("matmul", "0", "lower", "bfloat16", "table"),
        ("softmax", "1", "full", "bfloat16", "not in native autocast's list for cpu (on a GPU: full)"),
        ("matmul", "2", "lower", "bfloat16", "table"),
        ("softmax", "3", "full", "float32", "rule '3'"),
    ]
    assert plan.unused_rules == ("nothing",)


def test_casts_and_bytes_are_counted() -> None:
    plan = polyamp.explain(nn.Linear(8, 4), X, policy="mixed_bfloat16", engine="autocast")
    (op,) = plan.operations
    assert (op.casts, op.bytes_cast) == (3, 4 * (3 * 8 + 8 * 4 + 4))
    assert op.bytes_moved_float32 == 4 * (24 + 32 + 4 + 12)
    assert plan.bytes_saved > 0


def test_a_recurrent_layer_keeps_what_its_kernel_keeps() -> None:
    model, x, kept = nn.LSTM(8, 8, num_layers=2), torch.ones(5, 3, 8), dict[int, Tensor]()
    plan = polyamp.explain(model, x, policy="mixed_bfloat16", engine="autocast")
    keep = torch.autograd.graph.saved_tensors_hooks(lambda one: kept.setdefault(one.data_ptr(), one), lambda one: one)
    with polyamp.autocast("mixed_bfloat16"), keep:
        model(x)
    assert plan.bytes_saved == sum(one.untyped_storage().nbytes() for one in kept.values())


def test_nothing_is_computed_where_the_code_allows_that() -> None:
    long = torch.ones(1, 1).expand(10**5, 10**5)
    plan = polyamp.explain(lambda x: x.softmax(-1) @ x, long, policy="mixed_bfloat16", engine="autocast")
    assert [op.name for op in plan.operations] == ["softmax", "matmul"]


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["rewrite", "autocast"])
@pytest.mark.parametrize("device", ["meta", "fake"])
def test_tensors_without_data(device: str, engine: str) -> None:
    from torch._subclasses import FakeTensorMode

    with FakeTensorMode() if device == "fake" else torch.device("meta"):
        model, x = mlp(), torch.ones(3, 8)
    plan = polyamp.explain(model, x, policy="mixed_bfloat16", engine=engine)
    assert plan.totals["by_format"].keys() >= {"bfloat16"}


@pytest.mark.parametrize("looks", [False, True])
def test_no_cache_of_the_users_is_left_with_tensors_without_data(looks: bool) -> None:
    @lru_cache
    def bounded(size: int) -> Tensor:
        return torch.ones(size)

    @lru_cache(maxsize=None)  # noqa: UP033 # another structure than the one above
    def unbounded(size: int) -> tuple[Tensor, int]:
        return torch.ones(size), size

    def model(x: Tensor) -> Tensor:
        product = x @ x.T * bounded(3) + unbounded(3)[0]
        return product if not looks or product.sum().item() > 0 else x

    polyamp.explain(model, X, policy="mixed_bfloat16", engine="autocast")
    assert type(bounded(3)) is type(unbounded(3)[0]) is Tensor


def test_logging_is_no_graph_break() -> None:
    log = logging.getLogger("a.model")

    def once(self: logging.Logger, text: str) -> None:
        self.warning(text)

    def model(x: Tensor) -> Tensor:
        log.warning("said %s", 1)
        log.warning_once("said once")  # type: ignore[attr-defined]
        return x @ x.T

    logging.Logger.warning_once = lru_cache(once)  # type: ignore[attr-defined]
    try:
        assert polyamp.explain(model, X, policy="mixed_bfloat16").engine == "rewrite"
        assert polyamp.rewrite(model, X, policy="mixed_bfloat16")(X).shape == (3, 3)
    finally:
        del logging.Logger.warning_once  # type: ignore[attr-defined]


def test_another_engine_and_arguments_that_do_not_fit() -> None:
    with pytest.raises(InvalidValueError, match="unknown engine"):
        polyamp.explain(mlp(), X, policy="mixed_bfloat16", engine="graph")
    for engine in (None, "autocast"):
        with pytest.raises(InvalidValueError, match="without polyamp"):
            polyamp.explain(mlp(), torch.ones(3, 9), policy="mixed_bfloat16", engine=engine)


def test_it_may_be_asked_inside_of_a_region() -> None:
    model = mlp()
    with polyamp.autocast("mixed_bfloat16"):
        assert polyamp.explain(model, X, policy="mixed_float16", engine="autocast").totals["by_format"]["float16"]
        assert model(X).dtype == torch.bfloat16
