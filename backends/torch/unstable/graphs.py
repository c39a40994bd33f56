"""Private interfaces of PyTorch for capturing, compiling and rewriting graphs.

Each function states why there is no public way.
"""

from __future__ import annotations

import importlib
import inspect
import linecache
import logging
import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache, partial, wraps
from importlib.abc import MetaPathFinder
from typing import Any, TypeVar

import torch

from polyamp.backends.torch.unstable.fakes import forget_sizes

Method = TypeVar("Method", bound=Callable[..., Any])


def has_context(index: int) -> bool:
    """Return whether this process uses a GPU. Nothing public reports this without starting CUDA on an idle GPU."""
    return bool(torch._C._cuda_hasPrimaryContext(index))  # type: ignore[attr-defined]


@contextmanager
def capturing(code: Any, backend: Any) -> Iterator[None]:
    """Make Dynamo capture recurrent layers, numbers as constants, and each size as a symbol of its own."""
    # None of these is an option of ``torch.compile``. Dynamo's data about code and backend is removed afterwards, since
    # it counts the graphs of a function and refuses more after a limit.
    import torch._dynamo as dynamo
    import torch.fx.experimental._config as shapes

    settings: dict[str, Any] = {"allow_rnn": True, "specialize_float": True, "specialize_int": True}
    settings["fake_tensor_cache_enabled"] = False  # it would keep sizes, and everything they came from, forever
    ignored = (
        "ignore_logging_functions" if hasattr(dynamo.config, "ignore_logging_functions") else "ignore_logger_methods"
    )
    settings[ignored] = {*getattr(dynamo.config, ignored), *_logging_methods()}
    # Before PyTorch 2.13 Dynamo cannot write these functions into its log of settings, and logs a page of errors.
    logged = dynamo.utils._get_dynamo_config_for_logging
    dynamo.utils._get_dynamo_config_for_logging = lambda: None
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
        dynamo.utils._get_dynamo_config_for_logging = logged
        _forget_guards(code)
        dynamo.reset_code(code)  # type: ignore[attr-defined]
        kept: dict[int, Any] = getattr(dynamo.eval_frame, "cached_backends", {})
        for key in [key for key, one in kept.items() if getattr(one, "compiler_fn", None) is backend]:
            del kept[key]


def _forget_guards(code: Any) -> None:
    """Remove the guards of captured code, which finalizers of objects known by identity keep alive forever."""
    from torch._C._dynamo.eval_frame import _debug_get_cache_entry_list
    from torch._dynamo.guards import CheckFunctionManager

    known = {id(entry.guard_manager) for entry in _debug_get_cache_entry_list(code)}
    for finalizer in list(getattr(weakref.finalize, "_registry", ())):
        found = finalizer.peek()
        manager = getattr(getattr(found[1], "func", None), "__self__", None) if found else None
        if isinstance(manager, CheckFunctionManager) and id(getattr(manager, "guard_manager", None)) in known:
            finalizer.detach()


def _logging_methods() -> Iterator[Any]:
    """Yield functions that write logs, which would break graphs, also those that libraries add to `logging.Logger`."""
    for name, method in vars(logging.Logger).items():
        if callable(method) and (name in _LOGS or getattr(method, "__module__", "logging") != "logging"):
            yield method
    yield from (getattr(logging, name) for name in _LOGS)


_LOGS = ("debug", "info", "warning", "error", "exception", "critical", "log")


def capture_errors() -> tuple[tuple[type[Exception], ...], type[Exception]]:
    """Return Dynamo's exceptions for code that is not one graph, and its exception for failed operations."""
    from torch._dynamo import exc

    return (exc.Unsupported, exc.UserError), exc.TorchRuntimeError


def drop_source(file: str) -> None:
    """Drop the source of a graph, which `torch.fx` keeps forever for tracebacks."""
    from torch.fx.graph_module import _loader

    if file.startswith("<eval_with_key>"):
        _loader.eval_cache.pop(file, None)
        linecache.cache.pop(file, None)


@contextmanager
def _letting_go_of_failures() -> Iterator[None]:
    """Let the objects of a failed capture, which can only be found here, be collected; see `let_go`."""
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
    """Return a size as it was in the example, which symbolic sizes hide; 0 if it depends on values."""
    if not isinstance(number, torch.SymInt):
        return int(number)
    return int(number.node.hint) if number.node.has_hint() else 0


def same_symbol(one: Any, other: Any) -> bool:
    """Return whether two symbolic numbers are the same expression; a public comparison would add a guard."""
    return isinstance(one, torch.SymInt) and isinstance(other, torch.SymInt) and one.node.expr == other.node.expr


def with_trees(graph: Any, names: Sequence[str], in_spec: Any, out_spec: Any) -> None:
    """Make a graph take named arguments and return results that are pytrees, as exported modules do."""
    from torch.fx.graph import _PyTreeCodeGen, _PyTreeInfo

    graph.set_codegen(_PyTreeCodeGen(_PyTreeInfo(list(names), in_spec, out_spec)))


def aten_graph(function: Callable[..., Any], fakes: Sequence[Any]) -> Any:
    """Return a function as a graph of aten operators, without decomposing them."""
    from torch.fx.experimental.proxy_tensor import make_fx

    return make_fx(function, pre_dispatch=True)(*fakes)


def is_operator_of_bodies(target: Any, name: str) -> bool:
    """Return whether a node calls the higher-order operator ``name``, whose class is private."""
    from torch._ops import HigherOrderOperator

    return isinstance(target, HigherOrderOperator) and target.__name__ == name


def not_traced(method: Method) -> Method:
    """Make Dynamo call a function in Python, and not look into it, as torch's own optimizers are called."""
    # The public `torch.compiler.disable` imports Dynamo at once, which takes longer than importing torch.
    method._torchdynamo_disable = True  # type: ignore[attr-defined]
    return never_compiled(method)


def constant_when_compiled(fn: Method) -> Method:
    """Make Dynamo run a function while it traces and use the result as a constant, guarded by the arguments."""
    # `torch.compiler.assume_constant_result` does this, but imports Dynamo when the function is decorated.
    fn._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return fn


def never_compiled(fn: Method) -> Method:
    """Make Dynamo leave a function, and all that it calls, to Python, unless Dynamo inlines the function."""
    # `torch.compiler.disable` imports Dynamo, and is itself a frame and a graph break.
    from torch._C._dynamo import eval_frame

    skip = eval_frame._FrameExecStrategy(eval_frame._FrameAction.SKIP, eval_frame._FrameAction.SKIP)
    eval_frame.set_code_exec_strategy(inspect.unwrap(fn).__code__, skip)
    return fn


def when_tracing_ends(undo: Callable[[], None]) -> None:
    """Make Dynamo call a function when it stops tracing this frame, even if it gives up; no public hook does this."""
    from torch._dynamo.symbolic_convert import tls

    if hasattr(tls, "current_tx"):  # torch.export may trace without Dynamo
        tls.current_tx.output.add_cleanup_hook(undo)


def traces_dtype_of_autocast() -> bool:
    """Return whether Dynamo puts `torch.set_autocast_dtype` into a graph; torch 2.11 does not."""
    from torch._dynamo import trace_rules

    return "InGraph" in getattr(trace_rules.lookup(torch.set_autocast_dtype), "__name__", "")


def cache_no_code_without_autocast() -> None:
    """Turn AOTAutograd's cache off before torch 2.13, where its keys lack the dtypes of autocast."""
    if torch.__version__ < "2.13":
        config: Any = importlib.import_module("torch._functorch.config")
        config.enable_autograd_cache = False


def trace_backward_without_autocast() -> Callable[[], None] | None:
    """Make AOTAutograd trace backward passes without autocast, as eager code runs them; return an undo function."""
    # By default it traces them in the region around the compiled function, where gradients of float32 work overflow
    # float16 (pytorch #153044). A user's own setting is kept; then return None.
    config, override = _backward_setting()
    before = override.get() if isinstance(override, ContextVar) else config.backward_pass_autocast
    if before not in (_unset(), "same_as_forward", "default"):
        return None
    _set_backward_autocast("off")
    return partial(_set_backward_autocast, before)


def _set_backward_autocast(value: Any) -> None:
    config, override = _backward_setting()
    if isinstance(override, ContextVar):  # since torch 2.13; what the attribute does, in a fifth of the time
        override.set(value)
        config._hash_dirty_var.set(True)
        config._mark_get_dict_dirty(_BACKWARD)
    else:
        config.backward_pass_autocast = value


_BACKWARD = "backward_pass_autocast"


def _backward_setting() -> tuple[Any, Any]:
    config: Any = importlib.import_module("torch._functorch.config")
    return config, config._config[_BACKWARD].user_override


@cache
def _unset() -> Any:
    from torch.utils import _config_module

    return _config_module._UNSET_SENTINEL


def before_compiling(begin: Callable[[], None]) -> None:
    """Call ``begin`` before this program compiles code: now if it has called `torch.compile`, else when it does."""
    # Nothing public reports this. Dynamo keeps the backends of all compiled functions. If it is not loaded yet, nobody
    # can be asked later, since it may be imported and used at once; so then its import counts.
    eval_frame: Any = sys.modules.get("torch._dynamo.eval_frame")
    backends = getattr(eval_frame, "cached_backends", None)
    if eval_frame is None:
        sys.meta_path.insert(0, _BeforeDynamo(begin))
    elif backends is None or eval_frame.TorchPatcher.patch.cache_info().currsize:
        begin()
    else:
        eval_frame.cached_backends = _Backends(backends, begin)


class _Backends(dict[int, Any]):
    def __init__(self, backends: dict[int, Any], begin: Callable[[], None]) -> None:
        super().__init__(backends)
        self._begin = begin

    def setdefault(self, key: int, backend: Any = None) -> Any:
        if backend is not None:  # None is for code that is not to be compiled
            self._begin()
        return super().setdefault(key, backend)


class _BeforeDynamo(MetaPathFinder):
    def __init__(self, begin: Callable[[], None]) -> None:
        self._begin = begin

    def find_spec(self, name: str, path: Any, target: Any = None) -> None:
        if name == "torch._dynamo":
            sys.meta_path.remove(self)
            self._begin()
