"""`apex.amp` on polyamp: the region of O1, and functions that choose their format."""

import threading
import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import polyamp
from polyamp.backends.torch.apex import amp

STATE = amp._amp_state
pytestmark = pytest.mark.filterwarnings("ignore::polyamp.errors.PolyampDeprecationWarning")

X = torch.ones(4, 4)
HALF = X.half()


@pytest.fixture(autouse=True)
def _levels_end_with_their_test() -> Iterator[None]:
    yield
    if STATE.handle is not None:
        STATE.handle._deactivate()


def turn_on() -> Any:
    amp.initialize(nn.Linear(4, 4), opt_level="O1")
    assert STATE.handle is not None
    return STATE.handle


def native_state() -> tuple[Any, ...]:
    return (
        torch.is_autocast_enabled("cpu"),
        torch.get_autocast_dtype("cpu"),
        torch.is_autocast_cache_enabled(),
        torch.sigmoid,
    )


def test_the_handle_turns_everything_off_again() -> None:
    before = native_state()
    amp.register_half_function(torch, "sigmoid")
    handle = turn_on()
    assert (X @ X).dtype == torch.sigmoid(X).dtype == torch.float16
    assert functional.mse_loss(HALF, HALF).dtype == torch.float32  # a loss outside of any model
    with polyamp.autocast("float32"):
        assert (X @ X).dtype == torch.sigmoid(X).dtype == torch.float32
    for _ in range(2):
        handle._deactivate()
        assert native_state() == before


@pytest.mark.parametrize(
    ("register", "name", "expected"),
    [
        (amp.register_half_function, "softmax", torch.float16),  # float32 by the table
        (amp.register_float_function, "mm", torch.float32),  # float16 by the table
        (amp.register_promote_function, "maximum", torch.float32),
    ],
)
def test_registered_functions_of_torch_run_in_their_format(register: Any, name: str, expected: torch.dtype) -> None:
    original = getattr(torch, name)
    arguments = {"softmax": (X, 0), "mm": (HALF, HALF), "maximum": (HALF, X)}[name]
    register(torch, name)
    assert getattr(torch, name) is original  # until amp is active
    handle = turn_on()
    assert getattr(torch, name)(*arguments).dtype == expected
    handle._deactivate()
    assert getattr(torch, name) is original


def test_registered_functions_of_a_program() -> None:
    module = types.ModuleType("program")
    seen: list[torch.dtype] = []

    def own(tensor: Tensor, *, other: Tensor) -> Tensor:
        seen.extend((tensor.dtype, other.dtype))
        return tensor @ other

    module.own = own  # type: ignore[attr-defined]
    amp.register_float_function(module, "own")
    model = nn.Linear(4, 4)
    amp.initialize(model, opt_level="O1")
    assert module.own(HALF, other=X).dtype == torch.float16  # the operations inside have O1's formats
    assert seen == [torch.float32, torch.float32]
    with pytest.raises(polyamp.errors.InvalidValueError, match="no function of this name"):
        amp.register_half_function(module, "missing")


def test_decorated_functions() -> None:
    seen: list[set[torch.dtype]] = []

    def note(first: Tensor, second: Tensor, number: int) -> tuple[torch.dtype, int]:
        """Note the types."""
        seen.append({first.dtype, second.dtype})
        return first.dtype, number

    half, full, widest = amp.half_function(note), amp.float_function(note), amp.promote_function(note)
    assert half.__name__ == "note"
    assert half(X, HALF, 3) == (torch.float32, 3)
    handle = turn_on()
    assert (half(X, HALF, 3), full(HALF, HALF, 3)) == ((torch.float16, 3), (torch.float32, 3))
    assert widest(HALF, X, 3) == (torch.float32, 3)
    handle._deactivate()
    assert full(HALF, HALF, 3) == (torch.float16, 3)
    low, wide = {torch.float16}, {torch.float32}
    assert seen == [low | wide, low, wide, wide, low]
    assert amp.half_function(nn.ReLU())(X).dtype == torch.float32  # outside


@pytest.mark.parametrize("others", [0, 1])
def test_another_thread_that_calls_the_model_is_covered(others: int) -> None:
    model = nn.Linear(4, 4)
    amp.initialize(model, opt_level="O1")
    for _ in range(others):  # later calls share the region
        amp.initialize(nn.Linear(4, 4), opt_level="O1")
    seen: list[torch.dtype] = []

    def run() -> None:
        seen.append((X @ X).dtype)
        seen.append(model(X).dtype)
        seen.append((X @ X).dtype)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert seen == [torch.float32, torch.float16, torch.float16]


def test_casts_of_weights_made_without_gradients_are_not_used_with_them() -> None:
    model = nn.Linear(4, 4)
    opt = torch.optim.SGD(model.parameters(), lr=0.5)
    amp.initialize(model, opt, opt_level="O1", loss_scale=8.0)
    for _ in range(2):
        with torch.no_grad():
            model(X)
            functional.linear(X, model.weight)
        model.weight.grad = None
        functional.linear(X, model.weight).float().sum().backward()
        assert model.weight.grad is not None
        model.weight.grad = None
        with amp.scale_loss(model(X).float().sum(), opt) as scaled:
            scaled.backward()
        assert model.weight.grad.tolist() == [[4.0] * 4] * 4
        opt.zero_grad()


def test_a_weight_is_cast_once_in_a_call() -> None:
    class Twice(nn.Linear):
        def forward(self, tensor: Tensor) -> Tensor:
            return super().forward(super().forward(tensor))

    model = Twice(4, 4, bias=False)
    amp.initialize(model, opt_level="O1")
    product = model(X)
    nodes, casts = [product.grad_fn], set()
    while nodes:
        node = nodes.pop()
        if node.name() == "ToCopyBackward0":
            casts.add(node)
        nodes += [child for child, _ in node.next_functions if child is not None]
    assert len(casts) == 1


def test_an_optimizers_step_is_not_cast() -> None:
    class Squares(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            for group in self.param_groups:
                for param in group["params"]:
                    products.append((param @ param).dtype)

    products: list[torch.dtype] = []
    model = nn.Linear(4, 4, bias=False)
    opt = Squares(model.parameters(), lr=0.5)
    amp.initialize(model, opt, opt_level="O1", loss_scale=8.0)
    with amp.scale_loss(model(X).sum(), opt) as scaled:
        scaled.backward()
    opt.step()
    assert products == [torch.float32]
    assert (X @ X).dtype == torch.float16
