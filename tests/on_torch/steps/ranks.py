"""Two ranks that step together, run by test_ranks.py in two processes: every test runs on both at once."""

import contextlib
import io
import math
import os
import warnings
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

import polyamp
from polyamp import LossScale
from polyamp.backends.torch import GradScaler, LossScaledOptimizer
from polyamp.backends.torch.ranks import any_rank, has_peers
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
def test_any_rank_is_exactly_zero_or_one(flags: tuple[float, float]) -> None:
    flag = torch.tensor(flags[RANK], dtype=torch.float64)
    found, _ = any_rank(flag)
    assert found.dtype == torch.float32
    assert found.item() == float(any(flags))
    assert torch.equal(flag, torch.tensor(flags[RANK], dtype=flag.dtype)) or math.isnan(flags[RANK])


def test_only_the_ranks_of_the_group_are_asked() -> None:
    alone = [dist.new_group([rank]) for rank in range(2)]
    flag = torch.tensor(float(RANK))
    assert any_rank(flag, False)[0] is flag
    assert any_rank(flag, alone[RANK])[0] is flag
    assert not has_peers(alone[1 - RANK])
    assert any_rank(flag, dist.group.WORLD)[0].item() == 1.0


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


def test_losses_with_scales_of_their_own_agree() -> None:
    model = model_of(torch.float32)
    opt = wrap(model, "adamw", "host")
    opt.backward(loss_of(model), loss_id="good")
    opt.backward(loss_of(model) * (1e38 if RANK else 1.0), loss_id="bad")
    opt.step()
    assert not opt.last_step.applied
    assert opt.scaler.of("good").state.scale == 1024.0
    assert opt.scaler.of("bad").state.scale == 512.0


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
    for each in opts:
        each.scaler.of("second").set(256.0, where="")
    with parallel.no_sync():
        opt.backward(loss_of(parallel))
        if unscales:
            opt.unscale_()
    opt.backward(loss_of(parallel), "second")
    for rows, loss_id in ((slice(0, None, 2), None), (slice(1, None, 2), "second")):
        opts[1].backward((whole(X[rows]).squeeze(1) - Y[rows]).square().mean(), loss_id)
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


def test_a_loss_that_reaches_one_rank_alone_is_combined_with_the_others() -> None:
    weight = torch.ones(2, requires_grad=True)
    opt = LossScaledOptimizer(torch.optim.SGD([weight], lr=0.5), LossScale(init=8.0))
    with contextlib.suppress(RuntimeError):
        opt.backward(weight.sum() if RANK == 0 else torch.zeros(()))
    opt.backward(weight.sum(), loss_id="b")
    opt.step()
    assert weight.tolist() == [0.0 if RANK == 0 else 0.5] * 2
