"""What of capturing, compiling and rewriting graphs is private in PyTorch.

Each function says why there is no public way.
"""

from __future__ import annotations

import inspect
import linecache
import logging
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import Any, TypeVar, cast

import torch

from polyamp.backends.torch.unstable.fakes import forget_sizes

Method = TypeVar("Method", bound=Callable[..., Any])


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
