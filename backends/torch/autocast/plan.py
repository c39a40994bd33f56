"""Records a run under `polyamp.autocast` as a plan, which is how `explain` works where there is no graph."""

from __future__ import annotations

import functools
import gc
import warnings
import weakref
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import FrameType
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor

from polyamp.backends.torch import unstable
from polyamp.backends.torch.autocast.behaviours import native_class
from polyamp.backends.torch.autocast.regions import DEVICE_TYPES
from polyamp.backends.torch.casting import leaves
from polyamp.backends.torch.dtypes import DTYPES, SIXTEEN_BIT, name_of
from polyamp.backends.torch.graphs.capture import copy_of
from polyamp.backends.torch.graphs.planning import Block, Memory, sizes_of
from polyamp.backends.torch.recording.mode import Operator, Watcher, operator_of
from polyamp.backends.torch.recording.reach import Reach
from polyamp.backends.torch.recording.record import Run
from polyamp.backends.torch.recording.widening import crosses_16_bits, tensors
from polyamp.backends.torch.user_code import users_line
from polyamp.errors import InvalidValueError
from polyamp.flow import AS_WRITTEN, NO_FLOATS, TABLE, Decision
from polyamp.plan import Plan, PlannedOperation, planned
from polyamp.policies import Policy
from polyamp.rules import unused


def plan_of_run(
    fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], policy: Policy, *, why: str = ""
) -> Plan:
    """Run a function once under `polyamp.autocast`, and return the format of every operation of its forward pass."""
    # It runs on tensors without data if its code allows that. Otherwise it really runs; afterwards parameters, buffers,
    # gradients, modes and random states are restored.
    try:
        try:
            explainer = run_on_fakes(fn, args, kwargs, policy, _Explainer)
        except Exception:  # its code reads values, or an operator has no kernel for tensors without data
            explainer = _run_really(fn, args, kwargs, policy)
    except Exception as error:
        raise InvalidValueError(
            "the function does not run with these arguments",
            where=getattr(fn, "__name__", type(fn).__name__),
            found=f"{type(error).__name__}: {str(error).partition(chr(10))[0]}",
            fix="use example arguments for which the call works without polyamp",
        ) from error
    operations, saved = tuple(explainer.operations), explainer.memory.saved
    engine = f"autocast, recorded: {why}" if why else "autocast"
    return Plan(str(policy), operations, saved, unused_rules=explainer.unused, engine=engine)


def run_on_fakes(
    fn: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    policy: Policy,
    watcher: Callable[[Run, Policy], OnFakes],
    grown: Callable[[Any, Any], Any] = lambda leaf, fake: fake,
) -> Any:
    """Run a function on tensors without data under a watcher; ``grown`` can replace the arguments' tensors."""
    mode = unstable.fake_mode_for([*leaves((args, kwargs)), *Reach(fn, args, dict(kwargs)).parameters()])

    def fake(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or unstable.fake_mode_of([leaf]):
            return leaf
        return unstable.on_a_device(leaf, DEVICE_TYPES[-1], mode) if leaf.is_meta else mode.from_tensor(leaf)

    with mode:
        fakes, named = pytree.tree_map(lambda leaf: copy_of(grown(leaf, fake(leaf)), fake), (tuple(args), dict(kwargs)))
    run = Run(fn, fakes, named, policy, False)
    with run.undone(), unstable.quietly():
        for module in (part for root in run.reach.modules() for part in root.modules()):
            for held in (module._parameters, module._buffers):
                held.update({name: fake(value) for name, value in held.items()})
        follower = watcher(run, policy)
        try:
            return follower.follow(mode)
        finally:
            _drop_from_caches([one for one in (made() for made in follower.made) if one is not None])


def _run_really(fn: Any, args: Sequence[Any], kwargs: Mapping[str, Any], policy: Policy) -> _Explainer:
    copies, named = pytree.tree_map(copy_of, (tuple(args), dict(kwargs)))
    run = Run(fn, copies, named, policy, False)
    with run.undone():
        return _Explainer(run, policy).follow(nullcontext())


def _drop_from_caches(left: Sequence[Tensor]) -> None:
    """Clear functions' caches that hold these fake tensors, or later calls would get them."""
    level: list[Any] = list(left)
    for _ in range(4 if level else 0):  # a function's result, its entry, a list or dictionary, the cache
        level = [one for one in gc.get_referrers(*level) if one is not level and not isinstance(one, FrameType)]
        for cache in level:
            if isinstance(cache, functools._lru_cache_wrapper):
                cache.cache_clear()


class OnFakes(Watcher):  # type: ignore[no-untyped-call]
    """Watches the memory of a run, on tensors with or without data."""

    def __init__(self, run: Run, policy: Policy) -> None:
        super().__init__(False, run.changes)
        self._run = self._run_on_fakes
        self._step, self._policy = run, policy
        self.memory = Memory()
        self.made: list[weakref.ref[Tensor]] = []

    def look(self, op: Any, args: Sequence[Any], out: Any) -> None:
        """Note the results, which the user's code may keep, and their memory."""
        self.memory.add(tensors([out]))
        self.made += map(weakref.ref, tensors([out]))

    @abstractmethod
    def follow(self, mode: AbstractContextManager[Any]) -> Any:
        """Watch the run under ``mode``."""

    def _run_on_fakes(self, op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run an operator; add the memory of recurrent layers, which fake tensors do not show."""
        if op is not _CUDNN_BACKWARD or not unstable.is_fake(args[0]):
            out = op(*args, **kwargs)
            return _with_reserve(out, op, args) if op in _RECURRENT and unstable.is_fake(out[0]) else out
        data, weights, hidden, cells, mode, width, layers, is_bidirectional = (
            args[place] for place in (0, 1, 4, 5, 10, 11, 13, 17)
        )
        grads = (
            *pytree.tree_map_only(Tensor, torch.empty_like, (data, hidden, cells)),
            [*map(torch.empty_like, weights)],
        )
        # The gradients of the gates of all layers are its workspace. Weights that autocast flattened have no shape.
        gates = _GATES.get(mode, 1) * width * layers * (1 + is_bidirectional)
        self.memory.add([*tensors([grads]), data.new_empty(gates, data.numel() // data.shape[-1])])
        return grads


_RECURRENT = {torch.ops.aten._cudnn_rnn.default, torch.ops.aten.mkldnn_rnn_layer.default}
_CUDNN_BACKWARD = torch.ops.aten._cudnn_rnn_backward.default
_GATES = {2: 4, 3: 3}  # by cuDNN's number of the layer: LSTM and GRU


def _with_reserve(out: Any, op: Any, args: Sequence[Any]) -> Any:
    """Return a recurrent layer's results with the memory it keeps, whose size a run on zeros shows."""
    with unstable.with_data(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about the memory of the weights
        real = op(*pytree.tree_map_only(Tensor, _zeros, args))
    return *out[:3], out[3].new_empty(real[3].numel()), *out[4:]


def _zeros(like: Tensor) -> Tensor:
    return torch.zeros(like.shape, dtype=like.dtype, device=like.device)


class _Explainer(OnFakes):  # type: ignore[no-untyped-call]
    """Records the operations of a forward pass."""

    def __init__(self, run: Run, policy: Policy) -> None:
        super().__init__(run, policy)
        self.operations: list[PlannedOperation] = []
        self._tracker = run.tracker
        self._seen: dict[tuple[str, str], None] = {}
        self._casts: dict[Block | None, tuple[int, int]] = {}  # bytes of casts that no operation has used yet

    def follow(self, mode: AbstractContextManager[Any]) -> _Explainer:
        """Record the run under ``mode``."""
        with mode, self.memory.counts_what_is_kept():
            self._step.forward(self)
        return self

    @property
    def unused(self) -> tuple[str, ...]:
        """The patterns of the policy's own rules that matched nothing."""
        return tuple(rule.pattern for rule in unused(self._policy.own_rules, self._seen))

    def look(self, op: Any, args: Sequence[Any], out: Any) -> None:
        """Record an operation; keep a cast for the one that uses its result."""
        super().look(op, args, out)
        operator, results = operator_of(op), list(tensors([out]))
        if unstable.running_node() is not None or not results or op.namespace == "prim" or operator.native == "detach":
            return
        given = list(tensors(args))
        if operator.native == "_to_copy" and crosses_16_bits(given[0], results[0]):
            self._note_cast(results[0], _bytes(given), _bytes(results))
        elif op.is_view:
            self._pass_on(given, results)
        else:
            self._add(operator, args, given, results)

    def _note_cast(self, made: Tensor, before: int, after: int) -> None:
        block = self.memory.of(made)
        if block is not None:
            self._casts[block] = before, after

    def _pass_on(self, given: Sequence[Tensor], results: Sequence[Tensor]) -> None:
        """Note a cast for a view of its result too, since fake tensors need not share memory."""
        for cast in self._casts_of(given)[:1]:
            self._note_cast(results[0], *cast)

    def _casts_of(self, given: Sequence[Tensor]) -> list[tuple[int, int]]:
        """Remove and return the noted casts that made these tensors."""
        used = dict.fromkeys(map(self.memory.of, given))
        return [self._casts.pop(block) for block in used if block in self._casts]

    def _add(self, operator: Operator, args: Sequence[Any], given: Sequence[Tensor], results: Sequence[Tensor]) -> None:
        path, format_name = self._tracker.path.replace("/", "."), _format_of(given, results)
        self._seen[operator.name, path] = None
        decision = self._policy.decide(operator.name, path)
        if decision.op_class == "keep":
            format_name = AS_WRITTEN
        reason = _reason(decision, format_name, results[0].device.type, self._policy)
        self.operations.append(
            planned(
                decision._replace(format=format_name, reason=reason),
                operator.native,
                f"{path} {users_line()}",
                casts=self._casts_of(given),
                moved=_bytes([*given, *results]),
                moved_float32=_bytes([*given, *results], wide=True),
                sizes=sizes_of(operator.name, operator.native, args, given, results[0]),
            )
        )


def _reason(decision: Decision, format_name: str, device_type: str, policy: Policy) -> str:
    """Return why an operation ran in a format: a rule or list, or the formats of its inputs."""
    if format_name == AS_WRITTEN:
        return decision.reason if decision.op_class == "keep" else NO_FLOATS
    wanted = {"lower": policy.compute, "full": "float32"}
    if decision.rule:
        agrees = wanted.get(decision.op_class, format_name) == format_name
        return decision.rule if agrees else f"{decision.rule} has no effect here"
    dtype = DTYPES[policy.compute]
    listed = native_class(decision.operation, device_type, dtype) if device_type in DEVICE_TYPES else ""
    on_gpus = native_class(decision.operation, "cuda", dtype) if device_type == "cpu" and not listed else ""
    elsewhere = f" (on a GPU: {on_gpus})" if on_gpus else ""
    if listed in wanted and wanted[listed] == format_name:
        return TABLE if listed == decision.op_class else f"native autocast's list for {device_type}"
    if decision.op_class == "inner":
        return f"inner, which native autocast runs in the format of its inputs{elsewhere}"
    if "promote" in (listed, decision.op_class):
        return "the widest of its inputs"
    if decision.op_class in wanted and not listed:
        return f"not in native autocast's list for {device_type}{elsewhere}"
    return "the format of its inputs"


def _format_of(given: Sequence[Tensor], results: Sequence[Tensor]) -> str:
    """Return the format of the first floating result, else of the first floating argument."""
    floating = [one.dtype for one in (*results, *given) if one.is_floating_point() or one.is_complex()]
    return name_of(floating[0]) if floating else AS_WRITTEN


def _bytes(given: Sequence[Tensor], *, wide: bool = False) -> int:
    """Return the size of tensors; if ``wide``, as if 16-bit ones were float32."""
    sizes = ((4 if wide and one.dtype in SIXTEEN_BIT else one.dtype.itemsize, one) for one in given)
    return sum(size * unstable.hint(one.numel()) for size, one in sizes)
