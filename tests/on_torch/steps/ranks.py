"""Two ranks that step together, run by test_ranks.py in two processes: every test runs on both at once."""

import contextlib
import io
import math
import os
import re
import warnings
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Join
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

import polyamp
from polyamp import LossScale
from polyamp.backends.torch import GradScaler, LossScaledOptimizer
from polyamp.backends.torch.kernels.control import on_device as tensors_of
from polyamp.backends.torch.step.ranks import decide, has_peers
from support.forked_ranks import default_group
from support.harness_torch import OPTIMIZERS, X, Y, skipping_on_device
from support.torch_kinds import bits, memory
from support.unlike_ranks import check_that_ranks_choose_the_same

RANK = int(os.environ["RANK"])
# An optimizer, and what skips: the host, the optimizer's kernel, or polyamp's operators.
PATHS = pytest.mark.parametrize(
    ("name", "skips"),
    [
        ("adamw", "host"),
        ("sgd_fused", "kernel"),
        ("adamw", "operators"),
        ("third_party", "operators"),
    ],
)
DTYPES = [torch.float32, torch.bfloat16]  # without masters, and with them
STATE = LossScale().initial_state()


@pytest.fixture(scope="module", autouse=True)
def group() -> Iterator[None]:
    with default_group(RANK, 2, os.environ["POLYAMP_TEST_RENDEZVOUS"], timeout=timedelta(seconds=60)):
        yield


@pytest.fixture(scope="module")
def mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (2,))


def model_of(dtype: torch.dtype) -> torch.nn.Sequential:
    """A float32 norm between two layers of ``dtype``: gradients of two dtypes."""
    torch.manual_seed(0)
    return torch.nn.Sequential(Layer(3, 8, dtype), torch.nn.LayerNorm(8), Layer(8, 1, dtype))


class Layer(torch.nn.Linear):
    """A layer that takes inputs of any dtype and gives float32."""

    def __init__(self, inputs: int, outputs: int, dtype: torch.dtype) -> None:
        super().__init__(inputs, outputs, dtype=dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.to(self.weight.dtype)).float()


def loss_of(model: torch.nn.Module) -> torch.Tensor:
    rows = slice(RANK, None, 2)  # each rank its own data
    return (model(X[rows]).squeeze(1) - Y[rows]).square().mean()


def wrap(model: torch.nn.Module, name: str, skips: str, **options: Any) -> LossScaledOptimizer:
    return skipping_on_device(
        polyamp.wrap_optimizer(
            OPTIMIZERS[name](model.parameters()),
            loss_scale=LossScale(init=1024.0),
            fused_step=skips == "operators",
            **options,
        ),
        skips == "kernel" or None,
    )


def backward(model: torch.nn.Module, opt: LossScaledOptimizer) -> None:
    opt.zero_grad()
    opt.backward(loss_of(model))


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def ranks_agree(*values: float) -> bool:
    here = torch.tensor(values)
    both = [torch.empty_like(here) for _ in range(2)]
    dist.all_gather(both, here)
    return torch.equal(*both)


def break_gradient(model: torch.nn.Module, value: float = math.inf) -> None:
    """On one rank, after gradients were averaged, as noise in one rank's memory would."""
    if RANK == 1:
        grad = local(model[2].weight.grad)
        assert grad.numel()
        grad.view(-1)[0] = value


def check_skip_and_resume(model: torch.nn.Module, opt: LossScaledOptimizer, break_it: Callable[..., None]) -> None:
    for _ in range(2):  # the first applied step is decided on the host
        backward(model, opt)
        opt.step()
        assert opt.last_step.applied
    before, scale = memory(model, opt), opt.loss_scale
    backward(model, opt)
    break_it(model)
    opt.step()
    assert not opt.last_step.applied
    assert memory(model, opt) == before
    assert opt.loss_scale == scale / 2
    backward(model, opt)
    opt.step()
    assert opt.last_step.applied
    assert memory(model, opt) != before
    assert ranks_agree(opt.loss_scale)


def test_ranks_with_unlike_devices_choose_the_same_policy() -> None:
    check_that_ranks_choose_the_same("torch", RANK)


@pytest.mark.parametrize("flags", [(0.0, 0.0), (2.0, 1.0), (math.nan, 0.0)])
def test_the_flag_of_a_decision_is_exactly_zero_or_one(flags: tuple[float, float]) -> None:
    flag = torch.tensor(flags[RANK], dtype=torch.float64)
    found = decide(flag, STATE).flag(flag.device)
    assert found.dtype == torch.float32
    assert found.item() == float(any(flags))
    assert torch.equal(flag, torch.tensor(flags[RANK], dtype=flag.dtype)) or math.isnan(flags[RANK])


def test_only_the_ranks_of_the_group_are_asked() -> None:
    alone = [dist.new_group([rank]) for rank in range(2)]
    assert not any(map(has_peers, (False, *alone)))
    assert decide(torch.tensor(float(RANK)), STATE, process_group=dist.group.WORLD).overflowed.ranks() == [1]


@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("scale", (2.0**-14, 2.0**-13)),
        ("scale", (2.0**16, 2.0**24)),
        ("scale", (1000.0, 1000.0001)),
        ("good_steps", (0, 70000)),
        ("good_steps", (-1, 0)),
        ("scale", (3.0, 3.0)),
        ("good_steps", (2**31 - 1, 2**31 - 1)),
        ("good_steps", (-1, -1)),
    ],
)
def test_states_agree_only_if_they_are_equal(field: str, values: tuple[float, float], on_device: bool) -> None:
    state = STATE._replace(**{field: values[RANK]})
    flag = torch.zeros(())
    decision = decide(flag, tensors_of(state, flag.device) if on_device else state)
    assert decision.agree() == (values[0] == values[1])
    assert decision.flag(flag.device) == float(values[0] != values[1])


@PATHS
@pytest.mark.parametrize("dtype", DTYPES)
def test_ranks_of_a_plain_group_skip_together(name: str, skips: str, dtype: torch.dtype) -> None:
    """Each has a model of its own: nothing but the flag is combined."""
    model = model_of(dtype)
    opt = wrap(model, name, skips)
    check_skip_and_resume(model, opt, break_gradient)


@PATHS
@pytest.mark.filterwarnings("ignore:the loss was not finite")
@pytest.mark.parametrize("in_loss", [False, True])
def test_every_rank_knows_which_rank_overflowed(name: str, skips: str, in_loss: bool) -> None:
    model = model_of(torch.float32)
    opt = wrap(model, name, skips)
    for broken in (False, False, True):
        opt.zero_grad()
        opt.backward(loss_of(model) * (math.inf if broken and in_loss and RANK else 1.0))
        if broken and not in_loss:
            break_gradient(model)
        opt.step()
        assert bool(opt.last_step) != broken
    if RANK == 0:
        assert opt.last_step.reason == "gradients were not finite: rank 1"
    elif in_loss:
        assert "not finite before scaling: a smaller scale cannot help; rank 1: 0.weight (" in opt.last_step.reason
    else:
        assert "not finite: rank 1: 2.weight (1 inf of 8)" in opt.last_step.reason


def test_a_rank_that_is_asked_alone_skips_alone() -> None:
    model = model_of(torch.float32)
    opt = wrap(model, "adamw", "host", process_group=False)
    backward(model, opt)
    break_gradient(model)
    opt.step()
    assert opt.last_step.applied == (RANK == 0)


@pytest.mark.parametrize(("broken", "dtype"), [(False, torch.bfloat16), (True, torch.float32)])
def test_a_rank_without_gradients_takes_part(broken: bool, dtype: torch.dtype) -> None:
    model = model_of(dtype)
    opt = wrap(model, "adamw", "host", max_grad_norm=1.0)
    before = memory(model, opt)
    if RANK == 1:
        backward(model, opt)
        if broken:
            break_gradient(model)
    opt.step()
    assert opt.last_step.applied == (not broken)
    assert opt.loss_scale == (512.0 if broken else 1024.0)
    assert (memory(model, opt) == before) == (broken or RANK == 0)


ONE_SCALE = pytest.mark.filterwarnings("ignore:loss_id= has no effect")


@ONE_SCALE
@pytest.mark.parametrize("broken", [None, 0, 1])
@pytest.mark.parametrize("static_graph", [False, True])
def test_ranks_that_draw_different_losses_have_one_scale(broken: int | None, static_graph: bool) -> None:
    """Each rank draws a task at every step, and one rank alone has one more loss, without a reduction."""
    models = [DistributedDataParallel(model_of(torch.float32), static_graph=static_graph) for _ in range(2)]
    plain = torch.optim.SGD(models[0].parameters(), lr=0.1)
    opt = polyamp.wrap_optimizer(
        torch.optim.SGD(models[1].parameters(), lr=0.1), "mixed_float16", loss_scale=LossScale(init=256.0, interval=2)
    )
    for step, tasks in enumerate(["ab", "ab", "ba", "aa", "bb"]):
        for model, backward in zip(models, (torch.Tensor.backward, opt.backward), strict=True):
            model.zero_grad()
            own = {} if backward is torch.Tensor.backward else {"loss_id": tasks[RANK]}
            if RANK == 0 and step % 2 and not static_graph:
                with model.no_sync():
                    backward(loss_of(model), **(own and {"loss_id": "more"}))
            loss = loss_of(model) * (2.0 if tasks[RANK] == "b" else 1.0)
            backward(loss * (1e37 if step == 2 and broken == RANK and own else 1.0), **own)
        opt.step()
        assert bool(opt.last_step) == (broken is None or step != 2)
        if opt.last_step:
            plain.step()
        for mine, other in zip(models[1].parameters(), models[0].parameters(), strict=True):
            torch.testing.assert_close(mine, other)
            assert ranks_agree(*mine.detach().flatten().tolist())
    assert ranks_agree(opt.loss_scale)
    assert opt.loss_scale == (1024.0 if broken is None else 512.0)
    assert [*opt.state_dict()["loss_scale"]] == [*LossScale().to_state_dict(STATE)]


@ONE_SCALE
def test_optimizers_of_one_model_that_see_different_losses() -> None:
    """Each half of the model has an optimizer; the first rank's loss has another id than the second's."""
    model = DistributedDataParallel(model_of(torch.float32))
    halves = [list(model.parameters())[:2], list(model.parameters())[2:]]
    opts = polyamp.wrap_optimizer([torch.optim.SGD(half, lr=0.1) for half in halves], loss_scale=LossScale(init=64.0))
    for broken in (False, True, False):
        model.zero_grad()
        opts[0].backward(loss_of(model) * (1e37 if broken and RANK else 1.0), loss_id=f"task {RANK}")
        for opt in opts:
            opt.step()
            assert bool(opt.last_step) != broken
    assert opts[0].loss_scale == opts[1].loss_scale == 32.0
    assert ranks_agree(*(value for param in model.parameters() for value in param.detach().flatten().tolist()))


def test_without_loss_scaling_a_loss_id_is_no_news() -> None:
    model = DistributedDataParallel(model_of(torch.float32))
    opt = polyamp.wrap_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), "mixed_bfloat16")
    opt.backward(loss_of(model), loss_id=f"task {RANK}")
    opt.step()
    assert opt.last_step


UNLIKE = {
    "a state that rank 0 loaded": lambda opt: RANK or opt.load_state_dict(stepped().state_dict()),
    "a scale that rank 0 loaded": lambda opt: RANK or polyamp.load_loss_scale(opt, polyamp.save_loss_scale(stepped())),
    "settings": lambda opt: setattr(opt.scaler, "state", LossScale(init=[96.0, 97.0][RANK]).initial_state()),
    "a scale that was set": lambda opt: setattr(opt, "loss_scale", 2.0 ** (8 + RANK)),
}


def stepped() -> LossScaledOptimizer:
    """An optimizer that has made a step alone."""
    model = model_of(torch.float32)
    opt = wrap(model, "adamw", "host", process_group=False)
    backward(model, opt)
    opt.step()
    return opt


@pytest.mark.parametrize("name", UNLIKE)
@pytest.mark.parametrize("skips", ["host", "operators"])
def test_ranks_with_different_loss_scales_are_refused(name: str, skips: str) -> None:
    model = DistributedDataParallel(model_of(torch.float32))
    opt = wrap(model, "adamw", skips, max_grad_norm=1.0)
    UNLIKE[name](opt)
    backward(model, opt)
    before = bits([list(model.parameters()), opt.state_dict()])
    with pytest.raises(polyamp.errors.UsageError, match=r"the ranks have different loss scales(.|\n)*on every rank"):
        opt.step()
    assert bits([list(model.parameters()), opt.state_dict()]) == before
    opt.load_state_dict(wrap(model, "adamw", "host").state_dict())
    backward(model, opt)
    opt.step()
    assert opt.last_step


def test_a_bfloat16_state_that_rank_0_loaded_is_refused() -> None:
    """There the scale is 1 on every rank, and the moments differ."""
    model = DistributedDataParallel(model_of(torch.float32))
    opt = polyamp.wrap_optimizer(torch.optim.AdamW(model.parameters()), "mixed_bfloat16")
    for steps in range(2):
        opt.zero_grad()
        opt.backward(loss_of(model))
        if steps:
            with pytest.raises(polyamp.errors.UsageError, match="different loss scales"):
                opt.step()
        else:
            opt.step()
            polyamp.load_loss_scale(opt, LossScale().to_state_dict(STATE._replace(scale=1.0, good_steps=7 * RANK)))


def test_scalers_with_different_scales_are_refused() -> None:
    model = model_of(torch.float32)
    plain, scaler = OPTIMIZERS["adamw"](model.parameters()), GradScaler("cpu", init_scale=1024.0 * (1 + RANK))
    scaler.scale(loss_of(model)).backward()
    with pytest.raises(polyamp.errors.UsageError, match="different loss scales"):
        scaler.step(plain)


@pytest.mark.parametrize("name", ["mixed_float16", "mixed_bfloat16"])
def test_ranks_with_uneven_inputs(name: str) -> None:
    """A rank that has joined takes part in the decisions of the other, and keeps its loss scale."""
    model = DistributedDataParallel(model_of(torch.float32))
    scale = LossScale(init=256.0, interval=2) if name == "mixed_float16" else None
    opt = polyamp.wrap_optimizer(torch.optim.SGD(model.parameters(), lr=0.01), name, loss_scale=scale)
    for joinables in ([model], [opt, model]):
        with pytest.raises(polyamp.errors.UsageError, match=r"write Join\(\[model, opt\]\)"), Join(joinables):
            pass
    for epoch in range(2):
        with Join([model, opt]):
            for batch in range(2 + 2 * RANK):
                opt.zero_grad()
                opt.backward(loss_of(model))
                if epoch and batch == 3:
                    break_gradient(model.module)
                opt.step()
                assert bool(opt.last_step) != (epoch == 1 and batch == 3)
        assert opt.scaler.state.steps == 4 * (epoch + 1)
    assert opt.loss_scale == (1024.0 if scale else 1.0)
    assert ranks_agree(opt.loss_scale, opt.scaler.state.skipped)
    assert ranks_agree(*(value for param in model.parameters() for value in param.detach().flatten().tolist()))


def scaled_by_nobody(model: torch.nn.Module, opt: LossScaledOptimizer) -> None:
    loss_of(model).backward() if RANK else opt.backward(loss_of(model))
    opt.step()


def unscaled_twice(model: torch.nn.Module, opt: LossScaledOptimizer) -> None:
    backward(model, opt)
    opt.unscale_()
    if RANK:
        opt.unscale_()
    opt.step()


def set_by_hand(model: torch.nn.Module, opt: LossScaledOptimizer) -> None:
    """As in the stage of a pipeline that never sees a loss."""
    if RANK:
        for param in model.parameters():
            param.grad = torch.ones_like(param)
    else:
        backward(model, opt)
    opt.step()


@pytest.mark.parametrize("skips", ["host", "operators"])
@pytest.mark.parametrize("max_grad_norm", [None, 1.0])
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (scaled_by_nobody, "the loss of this step was not scaled"),
        (unscaled_twice, "unscaled already"),
        (set_by_hand, "was not scaled"),
    ],
)
def test_a_step_that_one_rank_refuses_is_refused_by_all(
    make: Callable[..., None], message: str, max_grad_norm: float | None, skips: str
) -> None:
    model = model_of(torch.float32)
    opt = wrap(model, "adamw", skips, max_grad_norm=max_grad_norm)
    backward(model, opt)
    opt.step()
    before = memory(model, opt)
    opt.zero_grad()
    with pytest.raises(polyamp.errors.UsageError, match=message if RANK else "read the error of rank 1"):
        make(model, opt)
    assert memory(model, opt) == before
    backward(model, opt)
    opt.step()
    assert opt.last_step
    assert ranks_agree(opt.loss_scale)


@pytest.mark.parametrize("kind", ["wrapped", "scaler"])
def test_all_ranks_raise_for_a_loss_that_is_not_finite(kind: str) -> None:
    model, settings = DistributedDataParallel(model_of(torch.float32)), LossScale(init=64.0, nonfinite_loss="raise")
    plain = torch.optim.SGD(model.parameters(), lr=0.1)
    opt = polyamp.wrap_optimizer(plain, loss_scale=settings) if kind == "wrapped" else plain
    scaler = GradScaler("cpu", loss_scale=settings, optimizers=opt if opt is not plain else None)
    for broken in (False, True, False):
        opt.zero_grad()
        before = bits(list(model.parameters()))
        scaler.scale(loss_of(model) * (math.nan if broken and RANK else 1.0)).backward()
        if broken:
            with pytest.raises(polyamp.errors.NonFiniteLossError, match="inf or NaN on rank 1"):
                scaler.step(opt)
            assert bits(list(model.parameters())) == before
            scaler._seen.clear()
        else:
            scaler.step(opt)
            scaler.update()
            assert scaler.last_step
    assert scaler.get_scale() == 64.0


@pytest.mark.parametrize("fused_step", [False, True])
@pytest.mark.parametrize("without", [slice(None), slice(1), slice(2, 4)])
def test_shards_are_clipped_alike_where_one_rank_has_fewer_gradients(
    without: slice, fused_step: bool, mesh: DeviceMesh
) -> None:
    model, whole = shard(model_of(torch.float32), mesh), model_of(torch.float32)
    opt = polyamp.wrap_optimizer(
        torch.optim.SGD(model.parameters(), lr=0.5), loss_scale=64.0, max_grad_norm=0.1, fused_step=fused_step
    )
    backward(model, opt)
    plain = torch.optim.SGD(whole.parameters(), lr=0.5)
    ((whole(X).squeeze(1) - Y).square().mean()).backward()
    params = [*model.parameters()]
    for param, one in zip(params[without], [*whole.parameters()][without], strict=True):
        if RANK == 1:
            param.grad = None
        for part in one.grad.chunk(2)[1:]:  # the shard of rank 1, if it has one
            part.zero_()
    norm = torch.nn.utils.clip_grad_norm_(whole.parameters(), 0.1)
    plain.step()
    opt.step()
    assert opt.last_step
    assert norm > 0.1
    for param, one in zip(params, whole.parameters(), strict=True):
        torch.testing.assert_close(param.full_tensor(), one)


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_errors_that_powersgd_keeps_are_told_and_can_be_cleared() -> None:
    from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

    state = PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2, min_compression_rate=0.1)
    model = DistributedDataParallel(torch.nn.Linear(16, 16))
    model.register_comm_hook(state, powerSGD_hook)
    opt = polyamp.wrap_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), loss_scale=LossScale(init=64.0))
    data = torch.ones(2, 16)
    for step in range(5):
        opt.zero_grad()
        opt.backward(model(data).square().mean() * (1e38 if step == 3 and RANK else 1.0))
        with pytest.warns(polyamp.PolyampWarning, match="clear") if step == 4 else contextlib.nullcontext():
            opt.step()
        assert bool(opt.last_step) == (step < 3)
    for kept in (state.error_dict, state.p_memory_dict, state.q_memory_dict):
        kept.clear()
    opt.zero_grad()
    opt.backward(model(data).square().mean())
    opt.step()
    assert opt.last_step


class Rows(torch.nn.Module):
    """A model as in the tutorial of several GPUs."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        linear, norm = torch.nn.Linear, torch.nn.LayerNorm
        self.layers = torch.nn.Sequential(linear(3, 16), torch.nn.GELU(), norm(16), linear(16, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


TUTORIAL = Path(__file__).parents[3] / "docs/tutorials/several_gpus.md"


@pytest.mark.parametrize("name", ["mixed_float16", "mixed_bfloat16"])
def test_the_tutorials_lines_for_fsdp(name: str) -> None:
    blocks = re.findall(r"```text\n(.*?)```", TUTORIAL.read_text(), re.DOTALL)
    (lines,) = [block for block in blocks if "fully_shard" in block]
    whole = Rows()
    known: dict[str, Any] = {"policy": polyamp.policy(name), "model": Rows(), "polyamp": polyamp, "torch": torch}
    exec(lines, known)
    model, opt, plain = known["model"], known["opt"], torch.optim.AdamW(whole.parameters())
    if name == "mixed_float16":
        opt.loss_scale = 1024.0  # the first one overflows
    for _ in range(3):
        opt.zero_grad()
        with polyamp.autocast(name):
            loss = loss_of(model)
        opt.backward(loss)
        opt.step()
        assert opt.last_step
        plain.zero_grad()
        (whole(X).squeeze(1) - Y).square().mean().backward()
        torch.nn.utils.clip_grad_norm_(whole.parameters(), 1.0)
        plain.step()
    for mine, other in zip(model.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(mine.full_tensor(), other, rtol=0.05, atol=0.004)


def test_rewrite_names_the_module_inside_ddp() -> None:
    model = DistributedDataParallel(model_of(torch.float32))
    with pytest.raises(polyamp.errors.UsageError, match="rewrite the module inside"):
        polyamp.rewrite(model, X, policy="mixed_float16")


def test_a_step_that_reevaluates_its_closure_is_taken_back_on_all_ranks() -> None:
    model = model_of(torch.float32)
    parallel = DistributedDataParallel(model)
    opt = polyamp.wrap_optimizer(torch.optim.LBFGS(model.parameters(), max_iter=4), loss_scale=LossScale(init=1024.0))
    evaluations = 0

    def closure() -> torch.Tensor:
        nonlocal evaluations
        evaluations += 1
        backward(parallel, opt)
        if evaluations == 3:
            break_gradient(model)
        return loss_of(model)

    before = memory(model, opt)
    opt.step(closure)
    assert evaluations == 3
    assert not opt.last_step.applied
    assert memory(model, opt) == before
    assert ranks_agree(opt.loss_scale)


@pytest.mark.parametrize("name", ["adamw", "adamw_fused"])
@pytest.mark.parametrize("unscales", [False, True])
def test_the_scaler_in_the_place_of_torchs_skips_on_all_ranks(name: str, unscales: bool) -> None:
    model = model_of(torch.float32)
    plain, scaler = OPTIMIZERS[name](model.parameters()), GradScaler("cpu", init_scale=1024.0)
    for broken in (False, True, False):
        plain.zero_grad()
        scaler.scale(loss_of(model)).backward()
        if broken:
            break_gradient(model)
        before = bits([list(model.parameters()), plain.state_dict()])
        if unscales:
            scaler.unscale_(plain)
        scaler.step(plain)
        scaler.update()
        assert scaler.last_step.applied != broken
        assert ("rank 1" in scaler.last_step.reason) == broken
        assert (bits([list(model.parameters()), plain.state_dict()]) == before) == broken
    assert scaler.get_scale() == 512.0


@PATHS
@pytest.mark.parametrize("dtype", DTYPES)
def test_ddp(name: str, skips: str, dtype: torch.dtype) -> None:
    model = model_of(dtype)
    opt = wrap(model, name, skips, max_grad_norm=1.0)
    parallel = DistributedDataParallel(model, gradient_as_bucket_view=True)
    check_skip_and_resume(parallel, opt, lambda ddp: break_gradient(ddp.module))
    assert ranks_agree(*(value for param in model.parameters() for value in param.detach().float().flatten().tolist()))


@pytest.mark.parametrize("unscales", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_ddp_reduces_what_it_accumulated_with_the_next_loss(dtype: torch.dtype, unscales: bool) -> None:
    """The next loss has another scale; what was unscaled before it is reduced too."""
    model, whole = model_of(dtype), model_of(dtype)
    opts = [wrap(each, "adamw", "host") for each in (model, whole)]
    opt, parallel = opts[0], DistributedDataParallel(model)
    with parallel.no_sync():
        opt.backward(loss_of(parallel))
        if unscales:
            opt.unscale_()
    opt.loss_scale = 256.0
    opt.backward(loss_of(parallel))
    for rows, scale in ((slice(0, None, 2), 1024.0), (slice(1, None, 2), 256.0)):
        opts[1].loss_scale = scale
        opts[1].backward((whole(X[rows]).squeeze(1) - Y[rows]).square().mean())
    for each in opts:
        each.unscale_()
    grads = [[param.grad for group in each.param_groups for param in group["params"]] for each in opts]
    close = 0.02 if dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(*grads, rtol=close, atol=close)
    break_gradient(model)  # after unscale_, on one rank: none of them steps
    opt.step()
    assert not opt.last_step.applied


@pytest.mark.parametrize("scaled_first", [True, False])
def test_half_scaled_windows_are_refused_under_ddp(scaled_first: bool) -> None:
    model = DistributedDataParallel(model_of(torch.float32))
    opt = wrap(model, "sgd_foreach", "host")
    for turns in ((scaled_first, not scaled_first), (True, True)):
        opt.zero_grad()
        for scaled in turns:
            opt.backward(loss_of(model)) if scaled else loss_of(model).backward()
        if all(turns):
            opt.step()
            assert opt.last_step
        else:
            with pytest.raises(polyamp.errors.UsageError, match="another was not"):
                opt.step()


def with_sharded_state(params: Any, kind: type, **options: Any) -> torch.optim.Optimizer:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's module warns of itself when it is imported
        from torch.distributed.optim import ZeroRedundancyOptimizer
    return ZeroRedundancyOptimizer(params, kind, **options)


@pytest.mark.parametrize("fused_step", [False, True])
def test_an_optimizer_with_sharded_state(fused_step: bool) -> None:
    """ShardedGradScaler and a fused AdamW let such ranks drift apart."""
    models = [DistributedDataParallel(model_of(torch.float32)) for _ in range(2)]
    sharded = with_sharded_state(models[0].parameters(), torch.optim.AdamW, lr=0.1, fused=True)
    opts = [
        LossScaledOptimizer(plain, LossScale(init=1024.0), max_grad_norm=0.1, fused_step=fused_step)
        for plain in (sharded, torch.optim.AdamW(models[1].parameters(), lr=0.1, fused=True))
    ]
    for broken in (False, True, False):
        for model, opt in zip(models, opts, strict=True):
            backward(model, opt)
            if broken:
                break_gradient(model.module)
            opt.step()
            assert bool(opt.last_step) != broken
    torch.testing.assert_close(*([*model.parameters()] for model in models))
    opts[0].consolidate_state_dict()
    assert RANK or opts[0].state_dict()["loss_scale"] == opts[1].state_dict()["loss_scale"]


def test_masters_that_an_optimizer_inside_would_not_see_are_refused() -> None:
    params = [*model_of(torch.bfloat16).bfloat16().parameters()]
    sharded = with_sharded_state(params, torch.optim.SGD, lr=0.1)
    with pytest.raises(polyamp.errors.UnsupportedError, match="its own lists of 16-bit parameters"):
        polyamp.wrap_optimizer(sharded, "bfloat16")
    assert all(mine is one for mine, one in zip(sharded.param_groups[0]["params"], params, strict=True))


def shard(model: torch.nn.Module, mesh: DeviceMesh, **options: Any) -> torch.nn.Module:
    for layer in model:
        fully_shard(layer, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


@pytest.mark.parametrize(
    ("name", "skips"),
    [("momentum", "host"), ("adamw_fused", "kernel"), ("adamw", "operators")],
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_fsdp(name: str, skips: str, dtype: torch.dtype, mesh: DeviceMesh) -> None:
    model = shard(model_of(dtype), mesh)
    opt = wrap(model, name, skips, max_grad_norm=1.0)
    check_skip_and_resume(model, opt, lambda model: break_shard(model[0].weight))


@pytest.mark.parametrize("autocasts", [False, True])
@pytest.mark.parametrize("name", ["O2", "bfloat16", "mixed_float16", "float32"])
def test_fsdp_by_policy_trains_as_one_process_does(name: str, autocasts: bool, mesh: DeviceMesh) -> None:
    policy = polyamp.policy(name)
    models = [plain_model(), plain_model()]
    if policy.needs_master_weights:
        polyamp.convert(models[0], policy)
    inner = policy.to_fsdp() if autocasts or name == "O2" else policy.to_fsdp(output=policy.compute)
    for layer in models[0][:2]:  # the last one is the whole model's
        fully_shard(layer, mesh=mesh, mp_policy=inner)
    fully_shard(models[0], mesh=mesh, mp_policy=policy.to_fsdp())
    opts = [
        polyamp.wrap_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), chosen, loss_scale=scale)
        for model, chosen, scale in zip(models, (policy, "float32"), (LossScale(init=1024.0), None), strict=True)
    ]
    region = polyamp.autocast(policy) if autocasts and name != "float32" else contextlib.nullcontext()
    for _ in range(3):
        opts[0].zero_grad()
        with region:
            loss = loss_of(models[0])
        opts[0].backward(loss)
        opts[0].step()
        assert opts[0].last_step
        whole = (models[1](X).squeeze(1) - Y).square().mean()
        opts[1].zero_grad()
        opts[1].backward(whole)
        opts[1].step()
    both = loss.detach()
    dist.all_reduce(both)
    assert both.item() / 2 == pytest.approx(whole.item(), rel=1e-5 if name == "float32" else 0.03)


def plain_model() -> torch.nn.Sequential:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.LayerNorm(8), torch.nn.Linear(8, 1))


@pytest.mark.parametrize("trains_norms", [True, False])
def test_a_group_of_two_dtypes_is_refused(trains_norms: bool, mesh: DeviceMesh) -> None:
    model = polyamp.convert(plain_model(), "O2")
    model[1].requires_grad_(trains_norms)
    fully_shard(model, mesh=mesh)
    trained = [param for param in model.parameters() if param.requires_grad]
    if trains_norms:
        with pytest.raises(polyamp.errors.UsageError, match="several dtypes together"):
            polyamp.wrap_optimizer(torch.optim.SGD(trained, lr=0.1), "O2")
        return
    backward(model, polyamp.wrap_optimizer(torch.optim.SGD(trained, lr=0.1), "O2"))


@pytest.mark.parametrize("kind", [torch.optim.Muon, torch.optim.LBFGS])
def test_optimizers_that_compute_with_whole_shards_step_as_by_themselves(kind: Any, mesh: DeviceMesh) -> None:
    def train(wrap: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = shard(
            torch.nn.Sequential(*(torch.nn.Linear(8, 4, bias=False), torch.nn.Linear(4, 2, bias=False))), mesh
        )
        inner = kind(model.parameters(), lr=0.1, **({"max_iter": 6} if kind is torch.optim.LBFGS else {}))
        opt = polyamp.wrap_optimizer(inner, "mixed_float16", loss_scale=1024.0) if wrap else inner

        def closure() -> torch.Tensor:
            opt.zero_grad()
            loss = model(torch.ones(2, 8)).square().mean()
            opt.backward(loss) if wrap else loss.backward()
            return loss

        for _ in range(3):
            opt.step(closure)
        return [param.full_tensor() for param in model.parameters()]

    for mine, plain in zip(train(wrap=True), train(wrap=False), strict=True):
        torch.testing.assert_close(mine, plain)


def break_shard(param: torch.Tensor) -> None:
    if RANK == 1:
        local(param.grad)[-1, -1] = math.nan


@pytest.mark.parametrize("broken", [None, 0, 1, 2])
def test_parameters_that_lie_over_ranks_in_different_ways(broken: int | None, mesh: DeviceMesh) -> None:
    def spread(value: float) -> list[torch.Tensor]:
        wholes = [torch.full((4, 2), value) for _ in range(3)]  # a replicate may share its memory
        return [*map(distribute_tensor, wholes, [mesh] * 2, ([Shard(0)], [Replicate()])), wholes[2]]

    params = [torch.nn.Parameter(param) for param in spread(1.0)]
    plain = torch.optim.SGD(params, lr=1.0, foreach=False)
    opt = LossScaledOptimizer(plain, LossScale(init=4.0), max_grad_norm=math.sqrt(24.0))
    for param, grad in zip(params, spread(16.0), strict=True):
        param.grad = grad
    if broken is not None and RANK == 1:
        local(params[broken].grad)[-1, -1] = math.inf
    opt.step(scaled=True)
    assert opt.last_step.applied == (broken is None)
    expected = 0.0 if broken is None else 1.0  # 24 elements of 4, clipped to a norm of sqrt(24)
    for param in params:
        torch.testing.assert_close(local(param.detach()), torch.full(local(param).shape, expected))


def test_the_state_of_shards_resumes_bit_for_bit(mesh: DeviceMesh) -> None:
    """In the form of torch.distributed.checkpoint too; see test_resharding.py."""
    model, resumed = (shard(model_of(torch.bfloat16), mesh) for _ in range(2))
    opt, other = (wrap(each, "adamw_fused", "host") for each in (model, resumed))
    for broken in (False, True, False):
        backward(model, opt)
        if broken:
            break_shard(model[0].weight)
        opt.step()
    buffer = io.BytesIO()
    torch.save({"model": model.state_dict(), "opt": opt.state_dict()}, buffer)
    saved = torch.load(io.BytesIO(buffer.getvalue()), weights_only=True)
    resumed.load_state_dict(saved["model"])
    other.load_state_dict(saved["opt"])
    assert polyamp.save_loss_scale(other) == polyamp.save_loss_scale(opt)
    assert opt.loss_scale < opt.scaler.settings.init
    for _ in range(2):
        assert memory(resumed, other) == memory(model, opt)
        for each, its in ((model, opt), (resumed, other)):
            backward(each, its)
            its.step()


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.filterwarnings("ignore:.*FSDP:UserWarning")
@pytest.mark.parametrize(("explicitly", "fused_step"), [(True, False), (False, True)])
@pytest.mark.parametrize(
    ("keeps_params", "strategy"),
    [(True, ShardingStrategy.FULL_SHARD), (False, ShardingStrategy.FULL_SHARD), (True, ShardingStrategy.NO_SHARD)],
)
def test_flattened_shards_are_clipped_by_their_global_norm(
    keeps_params: bool, strategy: ShardingStrategy, fused_step: bool, explicitly: bool
) -> None:
    whole = DistributedDataParallel(model_of(torch.float32))
    plain = torch.optim.SGD(whole.parameters(), lr=0.1)
    model = model_of(torch.float32)
    wrapping = {"sharding_strategy": strategy, "use_orig_params": keeps_params, "device_id": torch.device("cpu")}
    for index, layer in enumerate(model):
        model[index] = FullyShardedDataParallel(layer, **wrapping)
    model = FullyShardedDataParallel(model, **wrapping)
    opt = LossScaledOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1),
        LossScale(init=256.0),
        max_grad_norm=None if explicitly else 0.1,
        fused_step=fused_step,
    )
    for _ in range(3):
        plain.zero_grad()
        loss_of(whole).backward()
        norm = torch.nn.utils.clip_grad_norm_(whole.parameters(), 0.1)
        plain.step()
        opt.zero_grad()
        opt.backward(loss_of(model))
        with pytest.raises(polyamp.errors.UsageError, match="clipped while they were scaled"):
            model.clip_grad_norm_(0.1)
        if explicitly:
            torch.testing.assert_close(opt.clip_grad_norm_(0.1), norm)
        opt.step()
        assert opt.last_step
    with FullyShardedDataParallel.summon_full_params(model):
        for param, expected in zip(model.parameters(), whole.parameters(), strict=True):
            torch.testing.assert_close(param.view(-1), expected.view(-1))


@ONE_SCALE
def test_a_loss_that_reaches_one_rank_alone_is_combined_with_the_others() -> None:
    weight = torch.ones(2, requires_grad=True)
    opt = LossScaledOptimizer(torch.optim.SGD([weight], lr=0.5), LossScale(init=8.0))
    with contextlib.suppress(RuntimeError):
        opt.backward(weight.sum() if RANK == 0 else torch.zeros(()))
    opt.backward(weight.sum(), loss_id="b")
    opt.step()
    assert weight.tolist() == [0.0 if RANK == 0 else 0.5] * 2
