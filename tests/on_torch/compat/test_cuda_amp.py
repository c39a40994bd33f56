"""`torch.cuda.amp` on polyamp: its regions, scalers and custom functions, and the real modules' names."""

import importlib
import pickle
import sys
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from polyamp.backends.torch.compat import cuda_amp
from polyamp.errors import PolyampDeprecationWarning, PolyampWarning
from polyamp.run import Session

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
X = torch.randn(4, 4, device=DEVICE)

old_interface = pytest.mark.filterwarnings("ignore::polyamp.errors.PolyampWarning")


@pytest.fixture
def session() -> Iterator[Session]:
    with Session() as one:
        cuda_amp.install(one)
        yield one


def native_state() -> tuple[Any, ...]:
    return (
        torch.is_autocast_enabled("cpu"),
        torch.is_autocast_enabled("cuda"),
        torch.get_autocast_dtype("cpu"),
        torch.is_autocast_cache_enabled(),
    )


@old_interface
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_products_run_in_the_type_of_the_region(dtype: torch.dtype) -> None:
    before = native_state()
    region = cuda_amp.autocast(dtype=dtype)
    for _ in range(2):  # an object can be entered again
        with region:
            assert (X @ X).dtype == dtype
    assert region(lambda: X @ X)().dtype == dtype  # a decorator
    assert native_state() == before


@old_interface
def test_a_disabled_region_is_the_native_one() -> None:
    with cuda_amp.autocast():
        with cuda_amp.autocast(enabled=False):
            assert (X @ X).dtype == torch.float32
            inside = native_state()
        with torch.autocast(DEVICE, enabled=False, dtype=torch.float16):
            assert native_state() == inside
        assert (X @ X).dtype == torch.float16
    with cuda_amp.autocast(enabled=False):
        assert torch.equal(torch.mm(X, X), X @ X)


@old_interface
@pytest.mark.parametrize("at", ["torch.cuda.amp", "torch.cuda.amp.autocast_mode"])
def test_compiled_code_enters_the_region(at: str, session: Session) -> None:
    autocast = importlib.import_module(at).autocast

    @torch.compile(backend="eager")
    def product(x: Tensor) -> Tensor:
        with autocast():
            return x @ x

    assert product(X).dtype == torch.float16
    assert (X @ X).dtype == torch.float32
    torch._dynamo.reset()


@pytest.mark.skipif(CUDA, reason="nothing is missing")
def test_without_cuda_it_says_where_the_script_runs() -> None:
    with warnings.catch_warnings(record=True, action="always") as caught:
        for _ in range(3):
            with cuda_amp.autocast():
                pass
            cuda_amp.GradScaler()
            cuda_amp.autocast(enabled=False)
    polyamps = [(one.category, str(one.message)) for one in caught if issubclass(one.category, PolyampWarning)]
    (here,) = [text for category, text in polyamps if category is PolyampWarning]
    assert "run in float16 on cpu" in here
    assert "enabled=False" in here
    old = [text for category, text in polyamps if category is PolyampDeprecationWarning]
    assert ['polyamp.autocast("mixed_float16")' in old[0], "polyamp.wrap_optimizer" in old[1]] == [True, True]
    assert all(one.filename == __file__ for one in caught)
    assert len(caught) == 4  # one line for each: enabled, disabled, the scaler, the device


def test_what_is_disabled_does_not_mention_devices() -> None:
    with warnings.catch_warnings(record=True, action="always") as caught:
        cuda_amp.GradScaler(enabled=False)
        cuda_amp.autocast(enabled=False)
    assert [one.category for one in caught] == [PolyampDeprecationWarning] * 2


# Scalers.


@old_interface
def test_settings_are_positional_as_in_torch() -> None:
    scaler = cuda_amp.GradScaler(8.0, 3.0, 0.25, 7)
    assert (scaler.get_scale(), scaler.get_growth_factor(), scaler.get_backoff_factor()) == (8.0, 3.0, 0.25)
    assert scaler.get_growth_interval() == 7
    assert isinstance(scaler, torch.amp.GradScaler)
    assert pickle.loads(pickle.dumps(scaler)).state_dict() == scaler.state_dict()
    with pytest.raises(TypeError):
        cuda_amp.GradScaler("cuda")


# Custom functions.


def function(**options: Any) -> Any:
    class Exp(torch.autograd.Function):
        @staticmethod
        @cuda_amp.custom_fwd(**options)
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.seen = [x.dtype, (x @ x).dtype]
            return x.clone()

        @staticmethod
        @cuda_amp.custom_bwd
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            y = X @ X
            ctx.seen += [y.dtype, torch.exp(y).dtype]
            SEEN[:] = ctx.seen
            return grad

    return Exp


SEEN: list[torch.dtype] = []
HALF, FULL = torch.float16, torch.float32


@old_interface
@pytest.mark.parametrize(
    ("options", "expected"),
    [({}, [FULL, HALF, HALF, FULL]), ({"cast_inputs": torch.float64}, [torch.float64, torch.float64, FULL, FULL])],
)
def test_a_custom_function_runs_backward_as_forward(options: Any, expected: list[torch.dtype]) -> None:
    x = torch.randn(4, 4, device=DEVICE, requires_grad=True)
    custom = function(**options)
    with cuda_amp.autocast():
        out = custom.apply(x)
    out.sum().backward()  # outside of the region
    assert expected == SEEN
    SEEN.clear()
    custom.apply(x).sum().backward()
    assert SEEN == [FULL] * 4  # nothing is cast outside of a region


# Real modules.


def names() -> dict[tuple[str, str], Any]:
    return {
        (module, name): getattr(importlib.import_module(module), name)
        for module, values in cuda_amp._NAMES.items()
        for name in values
    }


def test_the_real_modules_have_the_names_until_the_run_ends() -> None:
    before = names()
    with Session() as session:
        cuda_amp.install(session)
        assert names() == {(module, name): v for module, some in cuda_amp._NAMES.items() for name, v in some.items()}
    assert names() == before


def test_modules_that_a_later_pytorch_lacks_are_created(monkeypatch: pytest.MonkeyPatch) -> None:
    gone = [name for name in sys.modules if name == "torch.cuda.amp" or name.startswith("torch.cuda.amp.")]
    for name in gone:
        monkeypatch.setitem(sys.modules, name, None)  # type: ignore[arg-type]  # an import of None fails
    monkeypatch.delattr(torch.cuda, "amp")
    with Session() as session:
        cuda_amp.install(session)
        from torch.cuda.amp import GradScaler
        from torch.cuda.amp.grad_scaler import OptState

        assert GradScaler is cuda_amp.GradScaler
        assert OptState is torch.amp.grad_scaler.OptState
    assert not hasattr(torch.cuda, "amp")


@old_interface
def test_a_run_is_told_of_a_scaler_that_is_enabled(session: Session) -> None:
    torch.cuda.amp.autocast(enabled=False)
    torch.cuda.amp.GradScaler(enabled=False)
    assert session.holders == []
    scaler = torch.cuda.amp.GradScaler()
    assert session.holders == [scaler]
