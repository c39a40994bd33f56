"""What only a GPU can show of fused steps: no waiting, few launches, graphs, streams and sizes.

Run with ``--gpu``, after ``python -m polyamp.backends.torch.build`` or where a compiler is found.
"""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch_device import kernels

import polyamp
from support.torch_steps import (
    COVERED,
    SCALE,
    Way,
    close,
    network,
    operators,
    same,
    train,
    wrapped,
)
from support.torch_waits import waits_are_errors

pytestmark = pytest.mark.gpu

KINDS: list[tuple[str, torch.dtype, Any]] = [
    ("adamw", torch.float32, None),
    ("adamw", torch.float16, True),
    ("adamw", torch.bfloat16, True),
    ("adam-l2", torch.float32, None),
    ("momentum", torch.float32, None),
    ("momentum", torch.float16, True),
    ("nesterov", torch.float32, None),
    ("sgd", torch.float32, None),
]
each_kind = pytest.mark.parametrize(("name", "dtype", "storage"), KINDS)


class Task:
    """A step of training on one batch that stays on the device, with a gradient that can be spoiled there."""

    def __init__(self, name: str, dtype: torch.dtype, storage: Any, **options: Any) -> None:
        self.model = network("cuda", dtype)
        self.lr = torch.tensor(0.02, device="cuda")
        inner = COVERED[name](self.model.parameters(), lr=self.lr, fused=True)
        options = {"max_grad_norm": 1.0, "master_weights": storage} | options
        self.opt = wrapped(inner, options.pop("fused", None), **options)
        self.poison = torch.zeros((), device="cuda", dtype=dtype)
        generator = torch.Generator("cuda").manual_seed(0)
        self.x = torch.randn(8, 4, device="cuda", dtype=dtype, generator=generator)

    def step(self) -> None:
        self.opt.zero_grad()
        self.opt.backward(self.model(self.x).float().square().mean())
        self.model[2].bias.grad[:1].add_(self.poison)
        self.opt.step()

    def prepare(self, turn: int) -> None:
        """What changes from step to step: the learning rate, and some overflows."""
        self.poison.fill_({3: math.inf, 4: math.nan, 11: -math.inf, 30: math.inf}.get(turn % 40, 0.0))
        if turn % 10 == 0:
            self.lr.fill_(0.02 / (1 + turn // 10))

    def result(self) -> list[Tensor]:
        return [param.detach().clone() for param in self.model.parameters()]


def test_the_compiled_kernels_are_in_use() -> None:
    from polyamp.backends.torch import extension

    assert extension.available("cuda"), extension.status()
    way = Way(model := network("cuda"), wrapped(COVERED["adamw"](model.parameters()), None))
    train(way, range(2), overflows={})
    assert operators(lambda: train(way, [2], overflows={}))[:2] == ["grad_stats", "adam_step_"]


@each_kind
def test_a_step_waits_for_nothing(name: str, dtype: torch.dtype, storage: Any) -> None:
    task = Task(name, dtype, storage)
    for turn in range(2):
        task.prepare(turn)
        task.step()
    with waits_are_errors():
        for turn in range(2, 8):
            task.prepare(turn)
            task.step()
            _ = task.opt.last_step
    assert task.opt.loss_scale < SCALE.init * 2


@each_kind
def test_fifty_replays_of_a_graph_are_fifty_steps(name: str, dtype: torch.dtype, storage: Any) -> None:
    eager, graphed = Task(name, dtype, storage), Task(name, dtype, storage)
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            graphed.step()
    torch.cuda.current_stream().wait_stream(stream)
    with torch.cuda.graph(graph):
        graphed.step()
    for _ in range(3):
        eager.step()
    for turn in range(50):
        for task, run in ((eager, eager.step), (graphed, graph.replay)):
            task.prepare(turn)
            run()
        if turn % 10 in (4, 9):
            same(graphed.result(), eager.result())
    assert graphed.opt.loss_scale == eager.opt.loss_scale
    same(*([p.detach() for p in task.opt.param_groups[0]["params"]] for task in (graphed, eager)))


@pytest.fixture(scope="module")
def profiler() -> None:
    """The profiler; not every machine lets programs look at what the GPU runs."""
    there = torch.ones(8, device="cuda")
    if not kernels(lambda: there.add_(1)):
        pytest.skip("PyTorch's profiler sees no kernel here at all")


def many(count: int, dtype: torch.dtype = torch.float32) -> nn.ParameterList:
    torch.manual_seed(0)
    sizes = (1, 33, 8, 260, 4096)
    return nn.ParameterList([torch.randn(sizes[place % 5], device="cuda").to(dtype) for place in range(count)])


def sum_of_sines(model: Any, step: int) -> Tensor:
    return torch.stack([((step + 1) * param.float()).sin().sum() for param in model]).sum()


@pytest.mark.usefixtures("profiler")
@pytest.mark.parametrize(
    ("name", "dtype", "count", "expected"),
    [
        *(("adamw", torch.float32, count, 2 + (count > 576)) for count in (1, 148, 576, 577, 1152)),
        ("momentum", torch.float32, 576, 2),
        ("adamw", torch.bfloat16, 148, 2),
    ],
)
@pytest.mark.parametrize("max_norm", [None, 1.0])
def test_a_step_is_two_launches(
    name: str, dtype: torch.dtype, max_norm: float | None, count: int, expected: int
) -> None:
    way = Way(model := many(count, dtype), wrapped(COVERED[name](model.parameters()), None, max_grad_norm=max_norm))
    train(way, range(2), overflows={}, loss=sum_of_sines)
    way.opt.zero_grad()
    way.opt.backward(sum_of_sines(model, 2))
    found = kernels(way.opt.step)
    own = [name for name in found if "polyamp" in name]
    assert len(own) == expected, found
    assert len(found) <= expected + 1, found  # the one: whether the loss was finite, for the report


def test_a_step_on_another_stream_follows_its_gradients() -> None:
    def run(stream: torch.cuda.Stream) -> list[Any]:
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            model = nn.ParameterList([torch.linspace(-1, 1, 5_000_000, device="cuda")])
            opt = wrapped(COVERED["adamw"](model.parameters()), None, max_grad_norm=1.0)
            history = train(Way(model, opt), range(4), overflows={2: math.inf}, loss=sum_of_sines)
        torch.cuda.current_stream().wait_stream(stream)
        return history

    same(run(torch.cuda.Stream()), run(torch.cuda.default_stream()))


HUGE = 2**31 + 17
PLACES = [0, 1, 2**31 - 1, 2**31, 2**31 + 1, HUGE - 1]


@pytest.mark.parametrize(
    ("name", "dtype", "storage", "bytes_each"),
    [("sgd", torch.float32, None, 8), ("adamw", torch.float32, None, 16), ("adamw", torch.bfloat16, True, 16)],
)
def test_a_tensor_beyond_32_bits(name: str, dtype: torch.dtype, storage: Any, bytes_each: int) -> None:
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info()
    if free < (needed := HUGE * bytes_each + 2**30):
        pytest.skip(f"{free / 1e9:.0f} GB of {needed / 1e9:.0f} GB are free")
    huge = nn.Parameter(torch.ones(HUGE, device="cuda", dtype=dtype))
    huge.grad = torch.zeros(HUGE, device="cuda", dtype=dtype)
    small = nn.Parameter(torch.ones(len(PLACES), dtype=dtype))
    small.grad = torch.arange(1.0, 1 + len(PLACES)).to(dtype)
    huge.grad[PLACES] = small.grad.cuda()
    opts = [
        wrapped(COVERED[name]([param]), True, master_weights=storage, max_grad_norm=1.0, loss_scale=_ONE)
        for param in (huge, small)
    ]
    for opt in opts:
        opt.step(scaled=True)
    close(huge.detach()[PLACES].cpu(), small.detach())
    before = huge.detach()[PLACES].clone()
    huge.grad[-1] = math.nan
    opts[0].step(scaled=True)
    same(huge.detach()[PLACES], before)
    assert not opts[0].last_step


_ONE = polyamp.LossScale(init=1.0)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("bad", [(), (0,), (1,), (0, 1)])
def test_parameters_on_two_devices_step_or_skip_together(bad: tuple[int, ...]) -> None:
    """torch's fused kernels compare the flag with 1: two overflows, added up to 2, would step."""
    model = nn.ParameterList([nn.Parameter(torch.ones(5, device=f"cuda:{index}")) for index in (0, 1)])
    opt = wrapped(COVERED["adamw"](model.parameters()), None, max_grad_norm=1.0)
    for step in range(3):
        opt.zero_grad()
        opt.backward((model[0].sum() + model[1].sum().to("cuda:0")) * (step + 1))
        for index in bad:
            model[index].grad[0] = math.inf
        opt.step()
    assert all(bool((param == 1).all()) == bool(bad) for param in model)
    assert opt.last_step.skipped_in_a_row == (3 if bad else 0)
