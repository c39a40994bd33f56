"""The largest batch that fits in some memory, against real training under a limit."""

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import polyamp
from polyamp import explain
from polyamp.errors import InvalidValueError, UnsupportedError

WORDS, LENGTH, LIMIT = 400, 24, 2**24


def cnn(blocks: int = 3) -> nn.Module:
    layers: list[nn.Module] = []
    for before, after, stride in [(3, 16, 1), (16, 32, 2), (32, 32, 1)][:blocks]:
        conv = nn.Conv2d(before, after, 3, stride, padding=1, bias=False)
        layers += [conv, nn.BatchNorm2d(after), nn.ReLU(inplace=True)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(after, 10))


def transformer(width: int = 64) -> nn.Module:
    layer = nn.TransformerEncoderLayer(width, 4, 4 * width, batch_first=True, norm_first=True)
    encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    return nn.Sequential(nn.Embedding(WORDS, width), encoder, nn.Linear(width, WORDS))


class Lstm(nn.Module):
    """A language model whose batch is axis 1."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.words, self.out = nn.Embedding(WORDS, width), nn.Linear(width, WORDS)
        self.lstm = nn.LSTM(width, width, num_layers=2)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.out(self.lstm(self.words(x))[0])
        return logits


def images(batch: int) -> tuple[Tensor, Tensor]:
    return torch.randn(batch, 3, 16, 16), torch.zeros(batch, dtype=torch.long)


def sentences(batch: int) -> tuple[Tensor, Tensor]:
    x = torch.zeros(batch, LENGTH, dtype=torch.long)
    return x, x.clone()


def in_columns(batch: int) -> tuple[Tensor, Tensor]:
    x = torch.zeros(LENGTH, batch, dtype=torch.long)
    return x, x.clone()


Case = tuple[Callable[[], nn.Module], Callable[[int], tuple[Tensor, Tensor]]]
CASES: dict[str, Case] = {"cnn": (cnn, images), "transformer": (transformer, sentences), "lstm": (Lstm, in_columns)}


def loss_of(model: nn.Module) -> Callable[[Tensor, Tensor], Tensor]:
    def loss(x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.cross_entropy(model(x).flatten(0, -2), y.flatten())

    return loss


class Limit(TorchDispatchMode):
    """Raises MemoryError where the tensors in use take more bytes than this."""

    def __init__(self, limit: int, held: Any) -> None:
        super().__init__()
        self.limit, self.used, self.known = limit, 0, set[int]()
        self.take(held)

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = op(*args, **(kwargs or {}))
        self.take(out)
        return out

    def take(self, tree: Any) -> None:
        for tensor in pytree.tree_leaves(tree):
            storage = tensor.untyped_storage() if isinstance(tensor, Tensor) else None
            if storage is not None and storage.data_ptr() not in self.known:
                self.known.add(storage.data_ptr())
                self.used += storage.nbytes()
                weakref.finalize(storage, self.give_back, storage.data_ptr(), storage.nbytes())
        if self.used > self.limit:
            raise MemoryError(self.used)

    def give_back(self, place: int, size: int) -> None:
        self.known.discard(place)
        self.used -= size


def trains(
    model: nn.Module, loss: Callable[..., Tensor], policy: str, batch: tuple[Tensor, Tensor], limit: int
) -> bool:
    """Whether two real steps with AdamW fit in so many bytes."""
    opt = torch.optim.AdamW(model.parameters())
    try:
        with Limit(limit, [*model.parameters(), *model.buffers(), *batch]):
            for _ in range(2):
                with polyamp.autocast(policy):
                    value = loss(*batch)
                opt.zero_grad()
                value.backward()
                del value
                opt.step()
    except MemoryError:
        return False
    return True


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_the_largest_batch_trains_in_that_memory_and_a_larger_one_does_not(name: str) -> None:
    made, batch_of = CASES[name]
    model = made()
    loss = loss_of(model)
    largest = explain(loss, *batch_of(3), policy="mixed_bfloat16", engine="autocast", examples=3).largest_batch(LIMIT)
    assert largest.policy > largest.float32 > 0
    for policy, predicted in zip(("float32", "mixed_bfloat16"), largest, strict=True):
        assert trains(model, loss, policy, batch_of(int(predicted / 1.15)), LIMIT)
        assert not trains(model, loss, policy, batch_of(int(predicted * 1.15) + 1), LIMIT)


@pytest.mark.slow
def test_the_plan_of_a_rewritten_model_has_the_batch_of_its_own_graph() -> None:
    model = cnn(1)
    loss = loss_of(model)
    predicted = explain(loss, *images(4), policy="mixed_bfloat16", examples=4).largest_batch(LIMIT).policy
    for batch, fits in [(images(int(predicted / 1.15)), True), (images(int(predicted * 1.15) + 1), False)]:
        assert trains(model, polyamp.rewrite(loss, *batch, policy="mixed_bfloat16"), "float32", batch, LIMIT) == fits


# --- what is counted --------------------------------------------------------------------------------------------------


def test_parts_add_up_and_only_the_batch_grows() -> None:
    model = nn.Linear(8, 16)
    plans = [
        explain(lambda x: model(x).relu(), torch.ones(50, 8)[:batch], policy="mixed_bfloat16", examples=batch)
        for batch in (4, 12)
    ]
    for plan, batch in zip(plans, (4, 12), strict=True):
        each, each32 = plan.batch["bytes_saved_each"], plan.batch["bytes_saved_each_float32"]
        assert (each, each32) == (2 * (8 + 16), 4 * (8 + 16))  # the input and the result, not the weights
        assert ((plan.bytes_saved or 0) - batch * each) == (plans[0].bytes_saved or 0) - 4 * each
        assert plan.batch["examples"] == batch
    assert plans[0].largest_batch(2**20) == plans[1].largest_batch(2**20)
    assert f"; {2 * 24} B for each of 4 examples (float32: {4 * 24} B)" in str(plans[0])


def test_all_parameters_are_counted_for_the_optimizer() -> None:
    plan = explain(nn.Linear(512, 512), torch.ones(4, 512), policy="mixed_bfloat16", engine="autocast", examples=4)
    taken = 512 * 513 * 12
    assert plan.largest_batch(2**24 + taken, optimizer_bytes=12) == plan.largest_batch(2**24, optimizer_bytes=0)


def test_twice_the_batch_leaves_the_model_and_its_gradients_as_they_are() -> None:
    model = cnn()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    explain(loss_of(model), *images(4), policy="mixed_bfloat16", engine="autocast", examples=4)
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name
    assert all(param.grad is None and type(param) is nn.Parameter for param in model.parameters())
    gone = weakref.ref(model)
    del model, value
    gc.collect()
    assert gone() is None


# --- the batch axis ---------------------------------------------------------------------------------------------------


def test_arguments_without_a_batch_axis_stay_as_they_are() -> None:
    layer = nn.Linear(16, 16)
    given = torch.ones(3, LENGTH, 16), torch.zeros(LENGTH, 16)
    plans = [
        explain(lambda x, mask: layer(x + mask), *given, policy="mixed_bfloat16", engine="autocast", examples=examples)
        for examples in (None, 3)
    ]
    assert [plan.batch.get("examples") for plan in plans] == [None, 3]
    assert plans[1].largest_batch(2**30).policy > 0
    with pytest.raises(UnsupportedError, match="examples=N"):
        plans[0].largest_batch(2**30)


@pytest.mark.parametrize("examples", [0, -1, 5, True, 3.0, "3"])
def test_a_number_that_is_no_axis_is_refused(examples: Any) -> None:
    with pytest.raises(InvalidValueError, match=r"shapes \(3, 8\)"):
        explain(nn.Linear(8, 8), torch.ones(3, 8), policy="mixed_bfloat16", engine="autocast", examples=examples)


def test_a_function_that_fixes_its_batch_is_explained_without_the_largest() -> None:
    weight = nn.Parameter(torch.ones(8, 8))
    plan = explain(lambda x: (x @ weight) + torch.ones(3, 8), torch.ones(3, 8), policy="mixed_bfloat16", examples=3)
    assert plan.bytes_saved is not None
    with pytest.raises(UnsupportedError, match="unknown how the memory"):
        plan.largest_batch(2**30)


def test_passes_that_differ_in_more_than_sizes_say_nothing() -> None:
    """Twice the batch runs another operation."""
    weight = nn.Parameter(torch.ones(8, 8))

    def grows(x: Tensor) -> Tensor:
        return (x @ weight).relu() if len(x) > 3 else x @ weight

    plan = explain(grows, torch.ones(3, 8), policy="mixed_bfloat16", engine="autocast", examples=3)
    assert plan.batch == {}


# --- on a GPU ---------------------------------------------------------------------------------------------------------

WIDE: dict[str, Case] = {
    "cnn": (cnn, lambda batch: (torch.randn(batch, 3, 64, 64), torch.zeros(batch, dtype=torch.long))),
    "transformer": (lambda: transformer(512), sentences),
    "lstm": (lambda: Lstm(512), in_columns),
}
GPU_LIMIT = 4 * 2**30


@contextmanager
def limited() -> Iterator[None]:
    """Let PyTorch allocate `GPU_LIMIT` bytes at most."""
    free_to_all = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(GPU_LIMIT / free_to_all)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def largest_on_gpu(model: nn.Module, batch_of: Callable[[int], tuple[Tensor, Tensor]], policy: str, begin: int) -> int:
    """The largest batch that trains under the limit, to 3 %, by bisection."""

    def fits(batch: int) -> bool:
        opt = torch.optim.AdamW(model.parameters())
        try:
            given = [one.cuda() for one in batch_of(batch)]
            for _ in range(2):
                with polyamp.autocast(policy):
                    value = loss_of(model)(*given)
                opt.zero_grad()
                value.backward()
                del value
                opt.step()
        except torch.OutOfMemoryError:
            return False
        finally:
            opt.zero_grad()
            del opt
            gc.collect()
            torch.cuda.empty_cache()
        return True

    low, high = (begin, 2 * begin) if fits(begin) else (begin // 4, begin)
    while high - low > 0.03 * low:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


@pytest.mark.gpu
@pytest.mark.parametrize("policy", ["float32", "mixed_bfloat16", "mixed_float16"])
@pytest.mark.parametrize("name", WIDE)
def test_the_largest_batch_on_a_gpu(name: str, policy: str) -> None:
    made, batch_of = WIDE[name]
    model = made().cuda()
    given = [one.cuda() for one in batch_of(3)]
    plan = explain(loss_of(model), *given, policy=policy, engine="autocast", examples=3)
    predicted = plan.largest_batch(int(0.9 * GPU_LIMIT)).policy  # the rest is for gaps between tensors
    with limited():
        measured = largest_on_gpu(model, batch_of, policy, predicted)
    print(f"{name} {policy}: predicted {predicted}, measured {measured}")
    assert predicted / 1.15 <= measured <= predicted * 1.15
