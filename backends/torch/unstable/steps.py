"""Private interfaces of PyTorch for optimizers, shards and checkpoints.

Each function states why there is no public way.
"""

from __future__ import annotations

import gc
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import wraps
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor


def local_shard(tensor: Tensor) -> Tensor:
    """Return the tensor object with this rank's shard of a distributed tensor (DTensor); else the tensor itself."""
    # ``DTensor.to_local()`` returns a view, which shares the memory but cannot be pointed at other memory.
    local: Any = getattr(tensor, "_local_tensor", tensor)
    return local  # type: ignore[no-any-return]


def note_step(optimizer: torch.optim.Optimizer) -> None:
    """Tell schedulers that a step was made or skipped without the ``step`` that they watch."""
    # Otherwise they warn about a wrong order. They keep this in a private attribute.
    optimizer._opt_called = True  # type: ignore[attr-defined]


def run_with_step_hooks(optimizer: torch.optim.Optimizer, function: Callable[[], Any]) -> Any:
    """Run a function in place of an optimizer's own step: in its profiler range, between all its hooks."""
    # torch's function for this is public, but undocumented.
    note_step(optimizer)
    return torch.optim.Optimizer.profile_hook_step(lambda _: function())(optimizer)


def has_step_pre_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether hooks run before an optimizer's step, except polyamp's own, which have ``is_polyamps``."""
    # Hooks can be added and removed publicly, but not listed.
    from torch.optim.optimizer import _global_optimizer_pre_hooks

    hooks = [*_global_optimizer_pre_hooks.values(), *optimizer._optimizer_step_pre_hooks.values()]
    return any(not hasattr(hook, "is_polyamps") for hook in hooks)


def gathers_16_bits(module: torch.nn.Module) -> bool:
    """Return whether ``fully_shard`` gathers a module's parameters in 16 bits; only private state tells."""
    state = getattr(module, "_get_fsdp_state", None)
    policy = None if state is None else state()._mp_policy
    return getattr(policy, "param_dtype", None) in (torch.float16, torch.bfloat16)


def fsdp_groups() -> Iterator[list[Tensor]]:
    """Yield the parameters of each group that ``fully_shard`` gathers together; only its private state has them."""
    for module in [obj for obj in gc.get_objects() if issubclass(type(obj), torch.nn.Module)]:
        state = getattr(module, "_get_fsdp_state", None)
        if state is not None:
            groups: Any = getattr(state(), "_fsdp_param_groups", None) or [state()._fsdp_param_group]
            yield from ([one.sharded_param for one in group.fsdp_params] for group in groups if group is not None)


def is_transformed() -> bool:
    """Return whether a transform of `torch.func` is active; it is hidden inside tensors of the plain type."""
    return torch._C._functorch.peek_interpreter_stack() is not None


running_task: Callable[[], int] = torch._C._current_graph_task_id
"""Return autograd's number of the backward pass that the caller runs in; -1 outside. Numbers are not used again."""


class BackwardCall(NamedTuple):
    """The call of a backward pass: what it starts from, its ``inputs=``, and whether it adds to ``grad``."""

    roots: Sequence[Any] = ()
    gradients: Sequence[Tensor | None] = ()  # of the roots; that of a loss is 1
    inputs: Sequence[Any] = ()
    accumulates: bool = True
    create_graph: bool = False


def running_backward() -> BackwardCall | None:
    """Return the call of the running backward pass, if it can be found."""
    # The engine knows only nodes, and hooks can run in its own threads. The caller of the pass waits in this frame.
    code = torch.autograd.graph._engine_run_backward.__code__
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not code:
        frame = frame.f_back
    if frame is None:
        frame = next((one for one in sys._current_frames().values() if one.f_code is code), None)
    if frame is None:
        return None
    given = frame.f_locals
    gradients, _, create_graph, inputs, *_ = given["args"]
    accumulates = given["kwargs"].get("accumulate_grad", True)
    return BackwardCall(given["t_outputs"], gradients, inputs, accumulates, create_graph)


def gradient_hooks(param: Tensor) -> list[Any]:
    """Return the functions that run in backward passes and may change a parameter's gradient."""
    return [*(param._backward_hooks or {}).values(), *(param._post_accumulate_grad_hooks or {}).values()]


def until_backward_ends(held: Callable[[], None]) -> None:
    """Make the running backward pass hold a function, and call it when the pass ends. Only the engine can do this."""
    Variable: Any = torch.autograd.Variable
    Variable._execution_engine.queue_callback(held)


_FSDP = "torch.distributed.fsdp.fully_sharded_data_parallel"
_CLIPPING = ("clip_grad_norm_", "clip_grad_value_", "_clip_grads_with_norm_")


Choose = Callable[[list[Tensor], float, bool], list[Tensor]]
"""Chooses the parameters to clip to a limit in place of the given ones; not others if their norm is known already."""

_CHOOSING: dict[str, Choose] = {}
_USERS: Counter[str] = Counter()
_REPLACED: list[tuple[Any, str, Any]] = []  # where a function of torch was replaced, its name there, and the function


def ask_before_clipping(name: str, choose: Choose) -> None:
    """Ask ``choose`` from now on which parameters to clip, before torch clips; a name keeps its first function."""
    # There is no hook for clipping, so torch's functions are replaced. `clip_grad_norm_` calls the private function by
    # its name in its module, so replacing that one works even if `clip_grad_norm_` was imported before.
    from torch.nn import utils
    from torch.nn.utils import clip_grad

    _CHOOSING.setdefault(name, choose)
    _USERS[name] += 1
    for name in _CLIPPING:
        original = getattr(clip_grad, name, None)
        if original is None or hasattr(original, "asks_polyamp"):
            continue
        asking = _asking(original, measured=name.startswith("_"))
        for module in (clip_grad, utils):
            for known in [known for known, value in vars(module).items() if value is original]:
                _replace(module, known, asking)
    fsdp = sys.modules.get(_FSDP)
    if fsdp is not None and not hasattr(fsdp.FullyShardedDataParallel.clip_grad_norm_, "asks_polyamp"):
        kind = fsdp.FullyShardedDataParallel
        _replace(kind, "clip_grad_norm_", _asking(kind.clip_grad_norm_, measured=True))


def leave_clipping(name: str) -> None:
    """Undo one call of `ask_before_clipping`; after the last one torch has its own functions again."""
    _USERS[name] -= 1
    if _USERS[name] == 0:
        del _CHOOSING[name]
    while _REPLACED and not _CHOOSING:
        holder, known, original = _REPLACED.pop()
        setattr(holder, known, original)


def _replace(holder: Any, name: str, function: Any) -> None:
    _REPLACED.append((holder, name, getattr(holder, name)))
    setattr(holder, name, function)


def _asking(original: Callable[..., Any], *, measured: bool) -> Callable[..., Any]:
    @wraps(original)
    def asks(parameters: Any, limit: Any = None, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return original(parameters, *(() if limit is None else (limit,)), *args, **kwargs)
        owner = parameters.parameters() if isinstance(parameters, torch.nn.Module) else parameters
        given = [owner] if isinstance(owner, Tensor) else list(owner)
        most = kwargs.get("max_norm", kwargs.get("clip_value")) if limit is None else limit
        chosen = given
        if isinstance(most, int | float):
            for choose in tuple(_CHOOSING.values()):
                chosen = choose(chosen, float(most), measured)
        if chosen is not given:
            again: Any = chosen
        else:
            again = (one for one in given) if isinstance(parameters, Iterator) else parameters
        return original(again, *(() if limit is None else (limit,)), *args, **kwargs)

    asks.asks_polyamp = True  # type: ignore[attr-defined]
    return asks


def ask_before_joining(check: Callable[[Sequence[Any]], None]) -> None:
    """Call ``check`` with what takes part whenever torch's ``Join``, for ranks with uneven inputs, is entered."""
    from torch.distributed.algorithms.join import Join

    if hasattr(Join.__enter__, "asks_polyamp"):
        return
    original: Any = Join.__enter__

    @wraps(original)
    def enter(join: Any) -> None:
        check(join._joinables if join._enable else ())
        original(join)

    enter.asks_polyamp = True  # type: ignore[attr-defined]
    Join.__enter__ = enter  # type: ignore[method-assign]


def asked_by_checkpoint() -> bool:
    """Return whether `torch.distributed.checkpoint` called the caller, which cannot be found out otherwise."""
    # It treats an optimizer's parameters as the model's own, and keeps two keys of its state. Callers in accelerate's
    # optimizers, which pass the call on, do not count.
    name = "torch.distributed.checkpoint.state_dict"
    if name not in sys.modules:
        return False
    frame = sys._getframe(2)
    while frame.f_globals.get("__name__") == "accelerate.optimizer" and frame.f_back is not None:
        frame = frame.f_back
    return frame.f_globals.get("__name__") == name


def infers_pipeline() -> bool:
    """Return whether a pipeline schedule calls its loss function on uninitialised memory, to learn shapes."""
    # It does so before its first step, and nothing in the arguments shows it.
    stages = sys.modules.get("torch.distributed.pipelining.stage")
    frame = None if stages is None else sys._getframe(2)
    while frame is not None:
        if frame.f_code.co_name == "_backward_metadata_inference" and frame.f_globals is vars(stages):
            return True
        frame = frame.f_back
    return False


def have_flattened(params: Sequence[Tensor]) -> bool:
    """Return whether `FullyShardedDataParallel` flattened one of these parameters."""
    # A loop, since a generator is one more call for each parameter of each step.
    for param in params:  # noqa: SIM110
        if getattr(param, "_fsdp_flattened", False):
            return True
    return False


def flattened_shards() -> Iterator[tuple[Tensor, Any]]:
    """Yield each parameter that `FullyShardedDataParallel` flattened and split over ranks, with the ranks' group."""
    # Nothing public leads from such a parameter to its ranks, so the modules in this process are searched.
    fsdp = sys.modules.get(_FSDP)
    if fsdp is None:
        return
    kind = fsdp.FullyShardedDataParallel
    for module in [obj for obj in gc.get_objects() if issubclass(type(obj), kind)]:
        handle = module._handle
        if handle is not None and handle.uses_sharded_strategy:
            for param in (handle.flat_param, *(handle.flat_param._params or ())):
                yield param, handle.process_group


def is_flattened(param: Tensor) -> bool:
    """Return whether `FullyShardedDataParallel` flattened a parameter."""
    return bool(getattr(param, "_fsdp_flattened", False))
