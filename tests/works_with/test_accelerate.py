"""accelerate's own code drives polyamp: `integrations.accelerate.prepare`, and wrapped optimizers without it."""

import copy
import pickle
import socket
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
from accelerate.utils import AutocastKwargs, DistributedType, GradientAccumulationPlugin

import polyamp
from polyamp.backends.torch.integrations.accelerate import prepare
from works_with.accelerate_ranks import CASES, SCALE, network, run_rank

BATCHES = 8
WITHIN = {"mixed_float16": 2e-3, "O2": 2e-3, "mixed_bfloat16": 2e-2, "float32": 0.0}


@pytest.fixture(autouse=True)
def _fresh_state() -> Iterator[None]:
    """Ignore the trainers' own warnings, keep polyamp's as errors, and forget accelerate's shared state."""
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerate.state.GradientState._reset_state()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.simplefilter("error", polyamp.PolyampWarning)
        yield


def data() -> torch.utils.data.TensorDataset:
    random = torch.Generator().manual_seed(1)
    return torch.utils.data.TensorDataset(
        torch.randn(8 * BATCHES, 8, generator=random), torch.randn(8 * BATCHES, 4, generator=random)
    )


class Run:
    """One training run as accelerate's examples write it. Nothing in it is polyamp's but the call of `prepare`."""

    def __init__(
        self, policy: str | None, accumulation: int = 1, fused: bool = False, folder: str | None = None
    ) -> None:
        plugin = GradientAccumulationPlugin(accumulation, sync_with_dataloader=False)
        self.accelerator: Any = accelerate.Accelerator(cpu=True, gradient_accumulation_plugin=plugin)
        if policy is not None:
            assert prepare(self.accelerator, policy, loss_scale=SCALE) is self.accelerator
        model = network()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=fused)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)
        loader = torch.utils.data.DataLoader(data(), batch_size=8)
        prepared = self.accelerator.prepare(optimizer, model, loader, schedule)
        self.optimizer, self.model, self.loader, self.schedule = prepared

    def train(self, clip: Callable[..., Any] | None = None, spoiled: int | None = None) -> list[float]:
        losses = []
        for number, (x, y) in enumerate(self.loader):
            with self.accelerator.accumulate(self.model):
                loss = (self.model(x) - y).square().mean()
                self.accelerator.backward(loss)
                if number == spoiled:
                    next(self.model.parameters()).grad.fill_(torch.inf)
                if clip is not None and self.accelerator.sync_gradients:
                    clip(self.accelerator, self.model.parameters())
                self.optimizer.step()
                self.schedule.step()
                self.optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    @property
    def weights(self) -> list[torch.Tensor]:
        return [param.detach().clone() for param in self.model.parameters()]


def by_norm(accelerator: Any, parameters: Any) -> None:
    norm = accelerator.clip_grad_norm_(parameters, 0.1)
    assert 0.1 < float(norm) < 10 or norm.isinf()  # that of unscaled gradients


def by_value(accelerator: Any, parameters: Any) -> None:
    accelerator.clip_grad_value_(parameters, 0.01)


@pytest.mark.parametrize(("clip", "accumulation"), [(None, 1), (by_norm, 2), (by_value, 1)])
@pytest.mark.parametrize("policy", WITHIN)
def test_trains_as_float32_does(policy: str, clip: Any, accumulation: int) -> None:
    plain = Run(None, accumulation)
    expected = plain.train(clip)
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    mixed = Run(policy, accumulation)
    assert mixed.train(clip) == pytest.approx(expected, abs=WITHIN[policy])
    assert mixed.schedule.get_last_lr() == plain.schedule.get_last_lr()


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("policy", ["mixed_float16", "O2"])
def test_a_skipped_step_is_seen_and_holds_the_schedule(policy: str, fused: bool) -> None:
    run = Run(policy, fused=fused)
    run.loader = list(run.loader)[:1]
    run.train()
    before, rate = run.weights, run.schedule.get_last_lr()
    run.train(spoiled=0)
    assert run.optimizer.step_was_skipped
    assert run.accelerator.optimizer_step_was_skipped
    assert all(map(torch.equal, before, run.weights))
    assert run.schedule.get_last_lr() == rate
    assert run.accelerator.scaler.get_scale() == SCALE.init / 2
    assert "0.weight (128 inf of 128)" in run.optimizer.optimizer.last_step.reason
    run.train()
    assert not run.accelerator.optimizer_step_was_skipped
    assert run.schedule.get_last_lr() < rate


@pytest.mark.parametrize("policy", ["mixed_float16", "O2"])
def test_a_saved_run_resumes_to_the_bit(policy: str, tmp_path: Path) -> None:
    run = Run(policy)
    run.train(by_norm, spoiled=3)
    run.accelerator.save_state(str(tmp_path))
    expected = run.train(by_norm)
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    again = Run(policy)
    again.accelerator.load_state(str(tmp_path))
    assert again.accelerator.scaler.get_scale() == SCALE.init / 2
    assert again.train(by_norm) == expected
    assert all(map(torch.equal, run.weights, again.weights))


def test_two_models_share_the_scale_that_multiplied_their_loss() -> None:
    accelerator: Any = prepare(accelerate.Accelerator(cpu=True), "mixed_float16", loss_scale=SCALE)
    models = [network(seed) for seed in (1, 2)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    schedules = [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5) for optimizer in optimizers]
    one, two, *optimizers = accelerator.prepare(*models, *optimizers)
    schedules = [accelerator.prepare(schedule) for schedule in schedules]
    x = torch.ones(2, 8)
    accelerator.backward((one(x) + two(x)).square().mean())
    expected = next(two.parameters()).grad / SCALE.init
    before = next(two.parameters()).detach().clone()
    next(one.parameters()).grad.fill_(torch.inf)
    for optimizer, schedule in zip(optimizers, schedules, strict=True):
        optimizer.step()  # the first halves the scale; the second divides by the scale of its own loss
        schedule.step()
    assert [optimizer.step_was_skipped for optimizer in optimizers] == [True, False]
    assert torch.allclose(before - next(two.parameters()), 0.1 * expected)
    assert [schedule.get_last_lr() for schedule in schedules] == [[0.1], [0.05]]
    assert {optimizer.optimizer.loss_scale for optimizer in optimizers} == {SCALE.init / 2}


def test_forward_passes_and_autocast_follow_the_policy_until_the_model_is_unwrapped() -> None:
    accelerator: Any = prepare(accelerate.Accelerator(cpu=True), "mixed_float16")
    own, seen, x = network(), [], torch.ones(1, 8)
    hook = own[0].register_forward_hook(lambda module, args, out: seen.append(out.dtype))
    model = accelerator.prepare(own)
    assert model(x).dtype == torch.float32
    copy.deepcopy(model)(x)
    with accelerator.autocast():
        assert torch.mm(x, x.T).dtype == torch.float16
    with accelerator.autocast(AutocastKwargs(enabled=False)):
        assert torch.mm(x, x.T).dtype == torch.float32
    unwrapped = accelerator.unwrap_model(model, keep_fp32_wrapper=False)
    unwrapped(x)
    assert seen == [torch.float16, torch.float16, torch.float32]
    hook.remove()
    assert pickle.dumps(unwrapped)


# --- two processes ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def ranks() -> dict[int, dict[tuple[str | None, bool], tuple[list[float], list[float], bool]]]:
    """Return the results of all cases by rank, from one pair of processes."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = torch.multiprocessing.get_context("spawn")
    queue = context.SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.start_processes(run_rank, (port, folder, queue), nprocs=2, start_method="spawn")
    return {rank: dict(zip(CASES, done, strict=True)) for rank, done in (queue.get() for _ in range(2))}


@pytest.mark.parametrize("fsdp", [False, True], ids=["ddp", "fsdp2"])
@pytest.mark.parametrize("policy", ["mixed_float16", "O2"])
def test_two_processes_train_as_float32_does_and_resume_to_the_bit(ranks: Any, policy: str, fsdp: bool) -> None:
    for results in ranks.values():
        expected, expected_after, _ = results[None, fsdp]
        losses, after, came_again = results[policy, fsdp]
        assert losses == pytest.approx(expected, abs=1e-3)
        assert losses != expected  # it is not float32
        assert after == pytest.approx(expected_after, abs=1e-3)
        assert came_again


# --- refusals ---------------------------------------------------------------------------------------------------------


def test_an_accelerator_with_a_precision_of_its_own_is_refused() -> None:
    with pytest.raises(polyamp.errors.UsageError, match="precision of its own"):
        prepare(accelerate.Accelerator(cpu=True, mixed_precision="bf16"), "mixed_float16")


@pytest.mark.parametrize("kind", [DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM, DistributedType.XLA])
def test_a_plugin_that_steps_by_itself_is_refused(kind: Any) -> None:
    accelerator = accelerate.Accelerator(cpu=True)
    accelerate.state.AcceleratorState._shared_state["distributed_type"] = kind
    with pytest.raises(polyamp.errors.UnsupportedError, match="steps by itself"):
        prepare(accelerator, "mixed_float16")


def test_a_used_accelerator_and_other_objects_are_refused() -> None:
    accelerator = prepare(accelerate.Accelerator(cpu=True), "mixed_float16")
    with pytest.raises(polyamp.errors.UsageError, match="prepared something already"):
        prepare(accelerator, "mixed_float16")
    with pytest.raises(polyamp.errors.InvalidTypeError, match="not one of accelerate's"):
        prepare(network(), "mixed_float16")  # type: ignore[arg-type]


def test_a_wrapped_optimizer_and_a_loss_without_an_optimizer_are_refused() -> None:
    accelerator: Any = prepare(accelerate.Accelerator(cpu=True), "mixed_float16")
    model = network()
    with pytest.raises(polyamp.errors.UsageError, match="no optimizer was prepared"):
        accelerator.backward(model(torch.ones(1, 8)).sum())
    wrapped = polyamp.wrap_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), "mixed_float16")
    with pytest.raises(polyamp.errors.UsageError, match="wrapped already"):
        accelerator.prepare(wrapped)


def test_without_prepare_a_wrapped_optimizer_is_refused_until_its_loss_is_scaled() -> None:
    accelerator: Any = accelerate.Accelerator(cpu=True)
    own = network()
    wrapped = polyamp.wrap_optimizer(torch.optim.SGD(own.parameters(), lr=0.1), "mixed_float16", loss_scale=SCALE)
    model, optimizer = accelerator.prepare(own, wrapped)

    def loss() -> torch.Tensor:
        with polyamp.autocast("mixed_float16"):
            value: torch.Tensor = model(torch.ones(1, 8)).square().mean()
        return value

    accelerator.backward(loss())
    with pytest.raises(polyamp.errors.UsageError, match="not scaled"):
        optimizer.step()
    optimizer.zero_grad()
    accelerator.backward(optimizer.optimizer.scale(loss()))
    with pytest.raises(polyamp.errors.UsageError, match="clipped while they were scaled"):
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    assert wrapped.last_step.applied
