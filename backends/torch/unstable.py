"""Every private name of PyTorch that polyamp uses, in one place, so that a new release can break only here.

Each function says why there is no public way.
"""

from __future__ import annotations

import ctypes
import gc
import inspect
import linecache
import logging
import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

Method = TypeVar("Method", bound=Callable[..., Any])


def local_shard(tensor: Tensor) -> Tensor:
    """The very tensor in which a distributed tensor (DTensor) keeps this rank's shard; any other tensor itself.

    ``DTensor.to_local()`` gives a view, which shares the memory but cannot be pointed at other memory.
    """
    local: Any = getattr(tensor, "_local_tensor", tensor)
    return local  # type: ignore[no-any-return]


def written_arguments(overload: Any) -> list[tuple[int, str]]:
    """Positions and names of the arguments that an operator changes: only its private schema says so."""
    arguments = enumerate(overload._schema.arguments)
    return [(index, one.name) for index, one in arguments if one.alias_info is not None and one.alias_info.is_write]


def registered_children(tree: Any) -> tuple[list[Any], Callable[[Sequence[Any]], Any]] | None:
    """One level of what is registered as a container, and what makes another one; None for everything else.

    `torch.utils.pytree` is public in newer releases alone.
    """
    import torch.utils._pytree as pytree

    parts, spec = pytree.tree_flatten(tree, is_leaf=lambda one: one is not tree)
    if len(parts) == 1 and parts[0] is tree:
        return None
    return parts, lambda others: pytree.tree_unflatten(list(others), spec)


def has_context(index: int) -> bool:
    """Whether this process uses a GPU: nothing public says so, and any other question starts CUDA on an idle one."""
    return bool(torch._C._cuda_hasPrimaryContext(index))  # type: ignore[attr-defined]


@contextmanager
def capturing(code: Any, backend: Any) -> Iterator[None]:
    """How Dynamo captures a function: recurrent layers too, numbers as constants, each size a symbol of its own.

    There are options of ``torch.compile`` for none of these. What Dynamo keeps of the two is dropped
    afterwards, since it counts the graphs of one function and refuses after some.
    """
    import torch._dynamo as dynamo
    import torch.fx.experimental._config as shapes

    settings: dict[str, Any] = {"allow_rnn": True, "specialize_float": True, "specialize_int": True}
    settings["fake_tensor_cache_enabled"] = False  # it would keep sizes, and all that they came from, for ever
    ignored = (
        "ignore_logging_functions" if hasattr(dynamo.config, "ignore_logging_functions") else "ignore_logger_methods"
    )
    settings[ignored] = {*getattr(dynamo.config, ignored), *_logging_methods()}
    try:
        with (
            _letting_go_of_failures(),
            dynamo.config.patch(settings),
            shapes.patch({"use_duck_shape": False}),  # type: ignore[attr-defined]
            warnings.catch_warnings(),
        ):
            warnings.filterwarnings("ignore", category=DeprecationWarning, module=r"torch\.")  # Dynamo's own calls
            yield
    finally:
        _forget_guards(code)
        dynamo.reset_code(code)  # type: ignore[attr-defined]
        kept: dict[int, Any] = getattr(dynamo.eval_frame, "cached_backends", {})
        for key in [key for key, one in kept.items() if _backend_in(one) is backend]:
            del kept[key]


def _forget_guards(code: Any) -> None:
    """Drop the guards of captured code: finalizers of what they know by identity hold them for ever."""
    from torch._C._dynamo.eval_frame import _debug_get_cache_entry_list
    from torch._dynamo.guards import CheckFunctionManager

    known = {id(entry.guard_manager) for entry in _debug_get_cache_entry_list(code)}
    for finalizer in list(getattr(weakref.finalize, "_registry", ())):
        found = finalizer.peek()
        manager = getattr(getattr(found[1], "func", None), "__self__", None) if found else None
        if isinstance(manager, CheckFunctionManager) and id(manager.guard_manager) in known:
            finalizer.detach()


def _logging_methods() -> Iterator[Any]:
    """What writes logs, libraries' additions to `logging.Logger` among it: in a graph they would be breaks."""
    for name, method in vars(logging.Logger).items():
        if callable(method) and (name in _LOGS or getattr(method, "__module__", "logging") != "logging"):
            yield method
    yield from (getattr(logging, name) for name in _LOGS)


_LOGS = ("debug", "info", "warning", "error", "exception", "critical", "log")


def capture_errors() -> tuple[tuple[type[Exception], ...], type[Exception]]:
    """Dynamo's exceptions: for code that is no single graph, and for operations that fail."""
    from torch._dynamo import exc

    return (exc.Unsupported, exc.UserError), exc.TorchRuntimeError


def give_context(backend: Any, context_for: Callable[[Any, Any], Callable[[], Any]]) -> None:
    """Have a context entered around each call of what a backend compiles.

    Dynamo's own way, an attribute ``backend_ctx_ctor``, is not open to what `torch.compile` is given, and the context
    is left where the state of autocast is restored once more. So this wraps the functions that Dynamo makes.

    Args:
        backend: as `torch.compile` looks it up by name.
        context_for: makes what makes contexts, of what ``torch.compile`` was given as keyword arguments of the backend
            and of the function that it was given.
    """
    from torch._dynamo.eval_frame import _TorchDynamoContext

    original = _TorchDynamoContext.__call__

    @wraps(original)
    def call(self: Any, fn: Any) -> Any:
        made, options = original(self, fn), _options_of(self, backend)
        if options is None or not inspect.isfunction(made):
            return made  # a module calls its own forward, which comes here too
        context = context_for(options, fn)

        @wraps(made)
        def called(*args: Any, **kwargs: Any) -> Any:
            with context():
                return made(*args, **kwargs)

        _leave_to_python(called.__code__)  # type: ignore[attr-defined]
        return called

    _TorchDynamoContext.__call__ = call  # type: ignore[method-assign]


def _options_of(context: Any, backend: Any) -> Any:
    """What a backend's keyword arguments are in one of Dynamo's contexts; None in those of other backends."""
    found = _innermost(getattr(context, "callback", None))
    return getattr(found, "kwargs", {}) if _backend_in(found) is backend else None


def _innermost(callback: Any) -> Any:
    """What stands for a backend under all that Dynamo puts around it."""
    while hasattr(callback, "_torchdynamo_orig_backend"):
        callback = callback._torchdynamo_orig_backend
    return callback


def _backend_in(callback: Any) -> Any:
    found = _innermost(callback)
    return getattr(found, "compiler_fn", found)


def call_around_tracing(begins: Callable[[], None], ends: Callable[[], None]) -> None:
    """Call functions when Dynamo begins to trace a frame and when it has traced it, or has given up.

    It has callbacks for its compilations, which ``torch._dynamo.reset`` drops. Before the last one it compares the
    thread's state with that at the start; the hook for bytecode comes before that.
    """
    import torch._dynamo as dynamo
    from torch._dynamo.convert_frame import register_bytecode_hook

    handler = dynamo.callback_handler  # type: ignore[attr-defined]
    if _begun not in handler.start_callbacks:
        handler.register_start_callback(_begun)
        handler.register_end_callback(_ended)
    if not _around:
        register_bytecode_hook(lambda code, new: _ended(None))
    _around[begins] = ends


_around: dict[Callable[[], None], Callable[[], None]] = {}


def _begun(_: Any) -> None:
    for begins in _around:
        begins()


def _ended(_: Any) -> None:
    for ends in _around.values():
        ends()


def traced_values() -> list[Any]:
    """What the variables of the frame hold that Dynamo is tracing: known where it calls back alone."""
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_code.co_name == "_compile" and "locals" in frame.f_locals:
            return [*frame.f_locals["locals"].values(), *(frame.f_locals.get("closure") or ())]
        frame = frame.f_back
    return []


def graph_breaks() -> int:
    """How often Dynamo has broken a graph in this process."""
    from torch._dynamo.utils import counters

    return sum(counters["graph_break"].values())


def fake_mode_of(values: Iterable[Any]) -> Any:
    """The mode that the fake tensors of a captured graph belong to; None where there are none."""
    from torch._subclasses import FakeTensor

    return next((value.fake_mode for value in values if isinstance(value, FakeTensor)), None)


@contextmanager
def on_fakes(mode: Any) -> Iterator[None]:
    """Run operations on fake tensors as Dynamo does: kernels written in Python see symbolic sizes."""
    from torch._dispatch.python import enable_python_dispatcher

    with mode, enable_python_dispatcher(), torch.no_grad():
        yield


def size_guards(fakes: Sequence[Tensor]) -> Callable[[Sequence[Tensor]], bool]:
    """Whether tensors have sizes for which a captured graph is right: the guards that Dynamo would make."""
    mode: Any = fake_mode_of(fakes)
    shapes: Any = None if mode is None else mode.shape_env
    said = None if shapes is None else shapes.produce_guards_expression(fakes)
    code = compile(said or "True", "<sizes>", "eval")
    sizes = ((place, dim, _fixed(length)) for place, fake in enumerate(fakes) for dim, length in enumerate(fake.shape))
    fixed = [(place, dim, length) for place, dim, length in sizes if length is not None]

    def fit(tensors: Sequence[Tensor]) -> bool:
        if any(tensors[place].shape[dim] != length for place, dim, length in fixed):
            return False
        return said is None or bool(shapes.evaluate_guards_expression(code, tensors))

    return fit


def _fixed(length: Any) -> int | None:
    """A size that is a number, also where Dynamo found that out later; None for an open one."""
    expression = length.node.expr if isinstance(length, torch.SymInt) else None
    return int(length) if expression is None else int(expression) if expression.is_number else None


def fake_mode_for(tensors: Iterable[Any]) -> Any:
    """A mode in which operations run on tensors without data: the one that tensors have, or a new one.

    It is entered as a context, and its ``from_tensor`` makes a fake. Tensors with data may stand beside.
    """
    from torch._subclasses import FakeTensorMode

    return fake_mode_of(tensors) or FakeTensorMode(allow_non_fake_inputs=True)


def on_a_device(meta: Tensor, device_type: str, mode: Any) -> Tensor:
    """A fake like a meta tensor, on a device: autocast does nothing for the device type ``meta``."""
    with mode:
        made = torch.empty_strided(meta.shape, meta.stride(), dtype=meta.dtype, device=device_type)
        if isinstance(meta, torch.nn.Parameter):
            return torch.nn.Parameter(made, requires_grad=meta.requires_grad)
        return made.requires_grad_(meta.requires_grad)


@contextmanager
def quietly() -> Iterator[None]:
    """Without the log that PyTorch writes of an operator which has no kernel for fakes, before it raises that."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    before, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = before


@contextmanager
def with_data() -> Iterator[None]:
    """Operate on tensors with data inside a mode of fakes."""
    from torch._subclasses.fake_tensor import unset_fake_temporarily

    with unset_fake_temporarily():
        yield


def is_fake(value: Any) -> bool:
    """Whether a tensor has no data and runs on none."""
    from torch._subclasses import FakeTensor

    return isinstance(value, FakeTensor) or (isinstance(value, Tensor) and value.is_meta)


def storage_of(value: Any) -> int | None:
    """A number that tensors share where they are views of the same memory; fake tensors have no data pointer."""
    return value.untyped_storage()._cdata if isinstance(value, Tensor) and value.layout == torch.strided else None


def drop_source(file: str) -> None:
    """Drop the code of a graph, which `torch.fx` keeps for tracebacks, for ever."""
    from torch.fx.graph_module import _loader

    if file.startswith("<eval_with_key>"):
        _loader.eval_cache.pop(file, None)
        linecache.cache.pop(file, None)


@contextmanager
def _letting_go_of_failures() -> Iterator[None]:
    """Where a capture ends in an error, have what it has made collected: see `let_go`. Nothing else leads to it."""
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    original, thread, made = ShapeEnv.__init__, threading.get_ident(), list[Any]()

    @wraps(original)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        if threading.get_ident() == thread:
            made.append(self)
        original(self, *args, **kwargs)

    ShapeEnv.__init__ = init  # type: ignore[method-assign]
    try:
        yield
    except BaseException:
        for one in made:
            one.tracked_fakes = []
        forget_sizes()
        raise
    finally:
        ShapeEnv.__init__ = original  # type: ignore[method-assign]
        made.clear()


def let_go(fakes: Iterable[Any]) -> None:
    """Let fake tensors be collected once nobody has them: the origin of their sizes lists them, and their sizes, which
    the garbage collector does not see in them, hold that. Guards of the sizes have to be made before."""
    mode: Any = fake_mode_of(fakes)
    if mode is not None and getattr(mode.shape_env, "tracked_fakes", None):
        mode.shape_env.tracked_fakes = []


def forget_sizes() -> None:
    """Drop what PyTorch remembers of symbolic sizes: its caches are those of methods, and keep whole captures alive."""
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    for method in vars(ShapeEnv).values():
        clear = getattr(method, "cache_clear", None)
        if clear is not None:
            clear()


def hint(number: Any) -> int:
    """A size as it was in the example; symbolic sizes hold it privately. One that depends on values is 0."""
    if not isinstance(number, torch.SymInt):
        return int(number)
    return int(number.node.hint) if number.node.has_hint() else 0


def same_symbol(one: Any, other: Any) -> bool:
    """Whether two symbolic numbers are the same expression; comparing them publicly would make that a guard."""
    return isinstance(one, torch.SymInt) and isinstance(other, torch.SymInt) and one.node.expr == other.node.expr


def is_static_input(node: Any) -> bool:
    """Whether Dynamo took a graph's input from a module's parameters and buffers, and not from a call."""
    return "_dynamo_static_input_type" in node.meta.get("tensor_dict", {})


def with_trees(graph: Any, names: Sequence[str], in_spec: Any, out_spec: Any) -> None:
    """Let a graph take arguments of these names and give results that are pytrees, as exported modules do."""
    from torch.fx.graph import _PyTreeCodeGen, _PyTreeInfo

    graph.set_codegen(_PyTreeCodeGen(_PyTreeInfo(list(names), in_spec, out_spec)))


def aten_graph(function: Callable[..., Any], fakes: Sequence[Any]) -> Any:
    """A function as a graph of aten operators, none of them taken apart."""
    from torch.fx.experimental.proxy_tensor import make_fx

    return make_fx(function, pre_dispatch=True)(*fakes)


def is_operator_of_bodies(target: Any, name: str) -> bool:
    """Whether a node calls the higher-order operator of that name; their classes are private."""
    from torch._ops import HigherOrderOperator

    return isinstance(target, HigherOrderOperator) and target.__name__ == name


def not_traced(method: Method) -> Method:
    """Leave a method to Python where Dynamo traces its caller, as torch's own optimizers are left.

    The public ``torch.compiler.disable`` imports Dynamo at once, which takes longer than torch itself.
    """
    untraced = torch._disable_dynamo(method)  # type: ignore[attr-defined]

    @wraps(method)
    def called(*args: Any, **kwargs: Any) -> Any:
        return (untraced if torch.compiler.is_compiling() else method)(*args, **kwargs)

    return cast(Method, called)


def _autocast_key(device_type: str) -> Any:
    name = {"privateuseone": "PrivateUse1"}.get(device_type, device_type.upper())
    return getattr(torch._C.DispatchKey, f"Autocast{name}")


def registered_operators(device_type: str) -> list[str]:
    """The operators with a kernel at a device type's Autocast key: only the dispatcher itself has the list."""
    return torch._C._dispatch_get_registrations_for_dispatch_key(_autocast_key(device_type).name)


def all_operators() -> list[str]:
    """The names of all operators with their overloads; ``torch.ops`` finds them only by name."""
    return torch._C._dispatch_get_all_op_names()


def is_composite(operator: str) -> bool:
    """Whether an operator consists of others, which then are dispatched, and autocast, themselves."""
    return torch._C._dispatch_has_kernel_for_dispatch_key(operator, "CompositeImplicitAutograd")


def schema_arguments(overload: Any) -> list[Any]:
    """An operator's arguments; its schema is private. See also `written_arguments`."""
    arguments: list[Any] = overload._schema.arguments
    return arguments


def overloads_of(op: Any) -> list[Any]:
    """The overloads of an operator, given as such, by name or as a custom operator; none where it is no operator.

    The classes of operators, and the operator of what `torch.library.custom_op` gives, have private names.
    """
    if isinstance(op, str):
        namespace, _, name = op.partition("::")
        base, _, overload = name.partition(".")
        op = getattr(getattr(torch.ops, namespace), base, None) if base else None
        op = getattr(op, overload, None) if overload else op
    if isinstance(op, torch._library.custom_ops.CustomOpDef):
        op = op._opoverload
    if isinstance(op, torch._ops.OpOverloadPacket):
        return [getattr(op, overload) for overload in op.overloads()]  # type: ignore[no-untyped-call]
    return [op] if isinstance(op, torch._ops.OpOverload) else []


class AutocastKey:
    """The dispatch key of one device type's autocast, and what lies below it: public names say only "AutocastCPU".

    Attributes:
        name: of the key, as `torch.library.Library.impl` takes it.
        keys: the set of this key alone.
        below: the set of all keys that are dispatched after it.
    """

    def __init__(self, device_type: str) -> None:
        key = _autocast_key(device_type)
        self.name: str = key.name
        self.keys = torch._C.DispatchKeySet(key)
        self.below = torch._C._dispatch_keyset_full_after(key)

    def excluded(self) -> Any:
        """A context in which this device type's autocast is not dispatched, as inside native autocast's kernels.

        ``torch.autocast(..., enabled=False)`` would be public, but changes settings that tracing sees, and is slower.
        """
        return torch._C._ExcludeDispatchKeyGuard(self.keys)


next_sequence_number: Callable[[], int] = torch._C._autograd._get_sequence_nr
"""The number that the next node of this thread's autograd graph gets: nodes show theirs only by a private method."""


def running_sequence_number() -> int | None:
    """The number of the autograd node whose backward runs in this thread; None outside of a backward pass."""
    if torch._C._current_graph_task_id() == -1:
        return None
    node = torch._C._current_autograd_node()
    return None if node is None else node._sequence_nr()


def checkpointing() -> Any:
    """What lives as long as the graph of the checkpointed function that runs; None outside of one.

    Non-reentrant checkpointing puts hooks on saved tensors, and does not say so.
    """
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return hooks[1] if hooks is not None and hooks[1].__module__ == "torch.utils.checkpoint" else None


def is_transformed() -> bool:
    """Whether a transform of `torch.func` runs; it hides behind tensors of the plain type."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def constant_when_compiled(fn: Method) -> Method:
    """Have Dynamo run a function while it traces and take the result as a constant, guarded by the arguments.

    `torch.compiler.assume_constant_result` does this, but imports Dynamo when the function is decorated.
    """
    fn._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return fn


def never_compiled(fn: Method) -> Method:
    """Have Dynamo leave the frames of a function, and of what it calls, to Python; where it inlines, nothing changes.

    `torch.compiler.disable` imports Dynamo, and is itself a frame and a graph break.
    """
    _leave_to_python(inspect.unwrap(fn).__code__)
    return fn


def _leave_to_python(code: Any) -> None:
    from torch._C._dynamo import eval_frame

    skip = eval_frame._FrameExecStrategy(eval_frame._FrameAction.SKIP, eval_frame._FrameAction.SKIP)
    eval_frame.set_code_exec_strategy(code, skip)


def when_tracing_ends(undo: Callable[[], None]) -> None:
    """Have Dynamo call a function when it ends tracing this frame, also where it gives up: it does so for its own."""
    from torch._dynamo.symbolic_convert import tls

    if hasattr(tls, "current_tx"):  # torch.export may trace without Dynamo
        tls.current_tx.output.add_cleanup_hook(undo)


def traces_dtype_of_autocast() -> bool:
    """Whether Dynamo puts `torch.set_autocast_dtype` into a graph; torch 2.10 does not."""
    from torch._dynamo import trace_rules

    return "InGraph" in getattr(trace_rules.lookup(torch.set_autocast_dtype), "__name__", "")


def object_with_id(number: int) -> Any:
    """The object with an ``id``, which has to be alive: of a module that is being traced Dynamo gives away no more."""
    return ctypes.cast(number, ctypes.py_object).value


def trace_backward_without_autocast() -> Callable[[], None] | None:
    """Have AOTAutograd trace backward passes without autocast, as eager code runs them; gives what undoes it.

    By default it traces them in the region that surrounds the compiled function, where gradients of float32 work
    leave float16 (pytorch #153044). A user's own setting stays.
    """
    from torch._functorch import config

    before = config.backward_pass_autocast
    if before not in ("same_as_forward", "default"):
        return None
    config.backward_pass_autocast = "off"
    return lambda: setattr(config, "backward_pass_autocast", before)


def withdraw(library: Any) -> None:
    """Take back what a library registered, now: publicly that is left to the garbage collector."""
    library._destroy()


def note_step(optimizer: torch.optim.Optimizer) -> None:
    """Let schedulers know that a step was made, or skipped, without the ``step`` that they watch: else they warn of a
    wrong order. They keep what they saw there in a private attribute."""
    optimizer._opt_called = True  # type: ignore[attr-defined]


def run_with_step_hooks(optimizer: torch.optim.Optimizer, function: Callable[[], Any]) -> Any:
    """Run what stands in for an optimizer's own step as that would be: in a profiler range, between all its hooks.

    What wraps a step in them is public in torch, and undocumented.
    """
    note_step(optimizer)
    return torch.optim.Optimizer.profile_hook_step(lambda _: function())(optimizer)


def has_step_pre_hooks(optimizer: torch.optim.Optimizer, *, beside: type) -> bool:
    """Whether anything is to run before an optimizer steps, beside hooks of one type: hooks can be added and removed,
    and not be looked up."""
    from torch.optim.optimizer import _global_optimizer_pre_hooks

    hooks = optimizer._optimizer_step_pre_hooks.values()
    return bool(_global_optimizer_pre_hooks) or any(not isinstance(hook, beside) for hook in hooks)


def step_without_hooks(optimizer: torch.optim.Optimizer) -> Any:
    """An optimizer's own step alone, where `run_with_step_hooks` is under way: torch hides it behind the hooks."""
    step: Any = type(optimizer).step
    return getattr(step, "__wrapped__", step)(optimizer)


def is_new(tensor: Tensor) -> bool:
    """Whether a tensor has memory that nothing was written to, nor shares: only private counts say so."""
    if tensor.layout is not torch.strided or tensor.is_inference() or tensor._version:
        return False
    if torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        return False  # it has no memory
    return torch._C._storage_Use_Count(tensor.untyped_storage()._cdata) == 2  # the tensor, and the object made here


def wrapper_like(kind: type[Tensor], tensor: Tensor, dtype: torch.dtype) -> Any:
    """A tensor without memory, of a subclass, that says of itself what another one is, but for its dtype.

    PyTorch's own documents make subclasses with ``torch_dispatch`` in this way, which has an underscore all the same.
    """
    return Tensor._make_wrapper_subclass(
        kind,
        tensor.shape,
        strides=tensor.stride(),
        storage_offset=tensor.storage_offset(),
        dtype=dtype,
        device=tensor.device,
    )


no_torch_function: Any = torch._C._disabled_torch_function_impl
"""What a subclass has as ``__torch_function__`` to be handled below autograd alone; it has no public name."""


class EagerDispatchMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A dispatch mode whose method is called as it is.

    By default torch wraps the method so that Dynamo leaves it alone, and for that imports Dynamo at the first call,
    which takes seconds; what says so has an underscore.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


def running_node() -> Any:
    """The autograd node whose backward runs in this thread; None outside of a backward pass."""
    return None if torch._C._current_graph_task_id() == -1 else torch._C._current_autograd_node()


def sequence_number(node: Any) -> int:
    """The number by which a node is known where it is recorded; see `next_sequence_number`."""
    number: int = node._sequence_nr()
    return number


def set_version(tensor: Tensor, version: int) -> None:
    """Set how often a tensor was changed, once it is again what it was: publicly one can only look."""
    torch._C._autograd._unsafe_set_version_counter((tensor,), (version,))


def change_shape_alone(op: Any, args: Sequence[Any], kwargs: Any) -> None:
    """Run an operator that changes a tensor's shape in place on a `wrapper_like` tensor, below all subclasses.

    Of a tensor without memory the shape is all that there is to change, and no public call does that.
    """
    with torch._C._DisableTorchDispatch():
        op(*args, **kwargs)


def gathers_16_bits(module: torch.nn.Module) -> bool:
    """Whether a module's parameters are gathered in 16 bits by ``fully_shard``: only its private state says so."""
    state = getattr(module, "_get_fsdp_state", None)
    policy = None if state is None else state()._mp_policy
    return getattr(policy, "param_dtype", None) in (torch.float16, torch.bfloat16)


def until_backward_ends(held: Callable[[], None]) -> None:
    """Have the backward pass that runs hold an object, and call it at its end. Only the engine itself can."""
    Variable: Any = torch.autograd.Variable
    Variable._execution_engine.queue_callback(held)


_FSDP = "torch.distributed.fsdp.fully_sharded_data_parallel"
_CLIPPING = ("clip_grad_norm_", "clip_grad_value_", "_clip_grads_with_norm_")


def before_clipping(notice: Callable[[list[Tensor], float], None]) -> None:
    """Have a function called with the parameters and the limit before torch clips gradients; the first one stays.

    Nothing tells of clipping, so torch's functions are replaced by ones that ask first. `clip_grad_norm_` calls the
    private one by its name in its module, so that one sees it also where somebody imported it before.
    """
    from torch.nn import utils
    from torch.nn.utils import clip_grad

    for name in _CLIPPING:
        original = getattr(clip_grad, name, None)
        if original is None or hasattr(original, "_asks_polyamp"):
            continue
        asking = _asking(original, notice)
        for module in (clip_grad, utils):
            for known in [known for known, value in vars(module).items() if value is original]:
                setattr(module, known, asking)
    fsdp = sys.modules.get(_FSDP)
    if fsdp is not None and not hasattr(fsdp.FullyShardedDataParallel.clip_grad_norm_, "_asks_polyamp"):
        kind = fsdp.FullyShardedDataParallel
        kind.clip_grad_norm_ = _asking(kind.clip_grad_norm_, notice)


def _asking(original: Callable[..., Any], notice: Callable[[list[Tensor], float], None]) -> Callable[..., Any]:
    @wraps(original)
    def asks(parameters: Any, limit: Any = None, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return original(parameters, *(() if limit is None else (limit,)), *args, **kwargs)
        owner = parameters.parameters() if isinstance(parameters, torch.nn.Module) else parameters
        given = [owner] if isinstance(owner, Tensor) else list(owner)
        most = kwargs.get("max_norm", kwargs.get("clip_value")) if limit is None else limit
        if isinstance(most, int | float):
            notice(given, float(most))
        again: Any = (one for one in given) if isinstance(parameters, Iterator) else parameters
        return original(again, *(() if limit is None else (limit,)), *args, **kwargs)

    asks._asks_polyamp = True  # type: ignore[attr-defined]
    return asks


def asked_by_checkpoint(callers: int = 1) -> bool:
    """Whether `torch.distributed.checkpoint` asks the caller, which has no other way to know.

    It takes what an optimizer says of itself as said of a model's own parameters, and keeps two keys of its state.

    Args:
        callers: how many of the caller's callers may have handed the call on.
    """
    name = "torch.distributed.checkpoint.state_dict"
    if name not in sys.modules:
        return False
    frame = sys._getframe(2)
    for _ in range(callers):
        if frame.f_globals.get("__name__") == name:
            return True
        if frame.f_back is None:
            return False
        frame = frame.f_back
    return False


def flattened_shards() -> Iterator[tuple[Tensor, Any]]:
    """Each parameter of which `FullyShardedDataParallel` keeps a flattened part on each rank, and those ranks' group.

    Nothing public leads from such a parameter to its ranks, so the modules in this process are searched.
    """
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
    """Whether `FullyShardedDataParallel` flattened a parameter."""
    return bool(getattr(param, "_fsdp_flattened", False))
