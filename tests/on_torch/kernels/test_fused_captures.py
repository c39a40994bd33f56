"""What fused steps refuse before anything is changed, and what they must not share: captures, devices, streams."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import polyamp
from polyamp.backends.torch.kernels import control
from polyamp.backends.torch.kernels.control import constant
from polyamp.backends.torch.step import scale
from polyamp.errors import InvalidValueError, UsageError
from support.torch_steps import COVERED, DEVICES, Way, close, everything, loss_of, network, same, train, wrapped

CPU = torch.device("cpu")


@pytest.fixture
def capture(monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], None]:
    """Says whether a CUDA graph is captured, which on a CPU nothing else can."""

    def say(captured: bool) -> None:
        for module in (control, scale):
            monkeypatch.setattr(module, "is_captured", lambda: captured)

    return say


@pytest.fixture
def no_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "_constants", {})


@pytest.mark.usefixtures("no_numbers")
def test_a_number_that_is_made_in_a_capture_is_not_kept(capture: Callable[[bool], None]) -> None:
    capture(True)
    in_graph = constant(3.0, torch.float32, CPU)
    assert constant(3.0, torch.float32, CPU) is not in_graph
    capture(False)
    eager = constant(3.0, torch.float32, CPU)
    assert eager is not in_graph
    assert constant(3.0, torch.float32, CPU) is eager
    capture(True)
    assert constant(3.0, torch.float32, CPU) is eager  # made before, it has its value


@pytest.mark.parametrize("name", ["adamw", "momentum", "sgd"])
def test_a_first_step_in_a_capture_is_refused_and_changes_nothing(name: str, capture: Callable[[bool], None]) -> None:
    way = Way(model := network(), wrapped(COVERED[name](model.parameters()), True, max_grad_norm=1.0))
    way.opt.backward(loss_of(model))
    before = everything(way)
    capture(True)
    with pytest.raises(UsageError, match="before the capture"):
        way.opt.step()
    capture(False)
    same(everything(way), before)
    way.opt.step()
    assert way.opt.last_step


@pytest.mark.parametrize("name", ["adamw", "momentum"])
def test_later_steps_may_be_captured(name: str, capture: Callable[[bool], None]) -> None:
    ways = [Way(model := network(), wrapped(COVERED[name](model.parameters()), True)) for _ in range(2)]
    for way in ways:
        train(way, range(2), overflows={})
    capture(True)
    train(ways[0], [2], overflows={})
    capture(False)
    train(ways[1], [2], overflows={})
    same([*ways[0].model.parameters()], [*ways[1].model.parameters()])


def test_a_parameter_whose_first_gradient_comes_in_a_capture_is_refused(capture: Callable[[bool], None]) -> None:
    model = nn.ParameterList([torch.ones(3), torch.ones(4)])
    opt = wrapped(COVERED["adamw"](model.parameters()), True)
    opt.backward(model[0].sum())
    opt.step()
    opt.zero_grad()
    opt.backward(model[0].sum() + model[1].sum())
    capture(True)
    with pytest.raises(UsageError, match="before the capture"):
        opt.step()
    capture(False)
    assert set(opt.state) == {model[0]}
    opt.step()
    assert set(opt.state) == {*model}


def test_a_first_unscaling_in_a_capture_is_refused(capture: Callable[[bool], None]) -> None:
    """For optimizers of all kinds the operators unscale and clip."""
    model = network()
    opt = wrapped(torch.optim.Adagrad(model.parameters()), True, max_grad_norm=1.0)
    opt.backward(loss_of(model))
    capture(True)
    with pytest.raises(UsageError, match="before the capture"):
        opt.step()


@pytest.mark.gpu
def test_a_real_capture_of_a_first_step_is_refused() -> None:
    model = network("cuda")
    opt = polyamp.wrap_optimizer(torch.optim.AdamW(model.parameters(), fused=True), "mixed_float16")
    opt.backward(loss_of(model))
    before = [param.detach().clone() for param in model.parameters()]
    with pytest.raises(UsageError, match="before the capture"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        opt.step()
    same([param.detach() for param in model.parameters()], before)


# Learning rates.


@pytest.mark.parametrize("name", ["adamw", "momentum"])
def test_a_learning_rate_on_another_device_is_refused_and_changes_nothing(name: str) -> None:
    way = Way(model := network(), wrapped(COVERED[name](model.parameters()), True))
    way.opt.backward(loss_of(model))
    before = everything(way)
    lr = way.opt.param_groups[0]["lr"]
    way.opt.param_groups[0]["lr"] = torch.tensor(0.1, device="meta")
    with pytest.raises(InvalidValueError) as told:
        way.opt.step()
    for part in ("param_groups[0]['lr']", "a tensor on meta", "or one on cpu", "group['lr'].to('cpu')"):
        assert part in str(told.value)
    way.opt.param_groups[0]["lr"] = lr
    same(everything(way), before)
    way.opt.step()
    assert way.opt.last_step


def test_learning_rates_of_groups_without_gradients_do_not_matter() -> None:
    """They may belong to parameters on another GPU, which a call of their own steps."""
    model = nn.ParameterList([torch.ones(3), torch.ones(4)])
    opt = wrapped(torch.optim.AdamW([{"params": [param], "lr": 0.5} for param in model], weight_decay=0.0), True)
    opt.param_groups[1]["lr"] = torch.tensor(0.1, device="meta")
    opt.backward(model[0].sum())
    opt.step()
    close(model[0].detach(), torch.full((3,), 0.5))
    assert torch.equal(model[1].detach(), torch.ones(4))


# Workspaces.


class Workspaces(TorchDispatchMode):
    """Notes where the workspaces lie of the operators that it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[str, set[int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "polyamp":
            names = [argument.name for argument in func._schema.arguments]
            found: Tensor = args[names.index("workspace")]
            self.seen.setdefault(func.name(), set()).add(found.data_ptr())
        return func(*args, **(kwargs or {}))


def sharing(model: nn.ParameterList) -> Any:
    """Two optimizers on one loss, and so with one loss scale."""
    inner = [COVERED["adamw"]([param]) for param in model]
    return polyamp.wrap_optimizer(inner, "mixed_float16", fused_step=True)


@pytest.mark.parametrize("device", DEVICES)
def test_optimizers_that_share_a_loss_scale_have_workspaces_of_their_own(device: str) -> None:
    """The ticket in a workspace counts the blocks of one launch: two launches at once, on two streams, would mix."""
    model = nn.ParameterList([torch.ones(3, device=device), torch.ones(4, device=device)])
    opts = sharing(model)
    opts[0].backward(model[0].sum() + model[1].sum())
    with Workspaces() as noted:
        for opt in opts:
            opt.step()
    assert all(opt.last_step for opt in opts)
    assert {name: len(places) for name, places in noted.seen.items()} == {
        "polyamp::grad_stats": 2, "polyamp::adam_step_": 2
    }  # fmt: skip
