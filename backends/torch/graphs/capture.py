"""Captures a function of tensors as one graph of torch functions, without computing anything.

Dynamo reads the user's code and keeps what training needs, such as custom derivatives, checkpoints and dropout. Graphs
of `torch.export` lose these.
"""

from __future__ import annotations

import contextlib
import inspect
import io
import os
import pickle
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch.fx import GraphModule, Node

from polyamp.backends.torch import unstable
from polyamp.backends.torch.user_code import line_of_error
from polyamp.errors import InvalidTypeError, InvalidValueError, PolyampError, UsageError, kind_of


class Captured(NamedTuple):
    """A function, captured for arguments like the example's."""

    module: GraphModule  # Dynamo's graph, and the bodies of its checkpoints and branches
    inputs: Sequence[Any]  # the value of each of its placeholders: the example's own tensor, or a number
    leaves: Sequence[Any]  # the leaves of the arguments
    in_spec: Any  # the tree that the leaves form, ``(args, kwargs)``
    results: Sequence[Any]  # the leaves of what the function returned; computed tensors are those of ``outputs``
    out_spec: Any  # the tree that they form
    outputs: Sequence[Any]  # a fake for each output of the graph
    assigned: Mapping[
        str, tuple[Tensor, Any]
    ]  # by path the modules' tensors that the code assigns: the old and the new


def capture(fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Captured:
    """Capture ``fn`` for these arguments; a size stays symbolic unless the code depends on it."""
    if isinstance(fn, nn.parallel.DistributedDataParallel | nn.DataParallel):
        kind = type(fn).__name__
        raise UsageError(
            f"{kind} cannot be captured as one graph, and the module inside can",
            where="rewrite(module)",
            found=kind,
            allowed="the module inside",
            fix=f"rewrite the module inside, and wrap the result: {kind}(polyamp.rewrite(module, policy=policy))",
        )
    _refuse_modules(root_of(fn))
    # Some operators, such as ``gather`` with ``out=``, refuse symbolic sizes as they do wrong arguments.
    with contextlib.suppress(InvalidValueError), unstable.quietly():
        return _captured(fn, args, kwargs, dynamic=True)
    return _captured(fn, args, kwargs, dynamic=False)


def _refuse_modules(root: nn.Module) -> None:
    """Refuse lazy modules, which a capture would leave half made, and code that reads a step count as a number."""
    for path, module in root.named_modules():
        if any(map(nn.parameter.is_lazy, (*module._parameters.values(), *module._buffers.values()))):
            what, allowed = "the parameters of a module have no shapes yet", "modules that have run once"
            fix = "run the model on a batch first: with torch.no_grad(): model(x)"
        elif isinstance(module, _BATCH_NORMS) and module.training and module.momentum is None:
            what, allowed = "a batch norm without momentum reads its number of steps in Python", "a momentum"
            fix = "set one, as in module.momentum = 0.1; polyamp.autocast(policy) runs any code"
        else:
            continue
        found = f"{path}: {type(module).__name__}" if path else type(module).__name__
        raise UsageError(what, where="rewrite(module)", found=found, allowed=allowed, fix=fix)


_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


def _captured(fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], *, dynamic: bool) -> Captured:
    leaves, in_spec = pytree.tree_flatten((tuple(args), dict(kwargs)))
    seen: dict[str, Any] = {}  # emptied at the end, since Dynamo keeps every backend forever

    def backend(module: GraphModule, _: Sequence[Any]) -> Callable[..., Any]:
        given: Any = module.graph.output_node().args[0]
        fakes = [value.meta["example_value"] if isinstance(value, Node) else value for value in given]
        seen.update(module=module, outputs=fakes)
        return run

    def run(*inputs: Any) -> Any:
        seen["inputs"] = inputs
        return tuple(seen["outputs"])

    def captured_call(*args: Any, **kwargs: Any) -> Any:
        return fn(*args, **kwargs)

    compiled = torch.compile(captured_call, backend=backend, fullgraph=True, dynamic=dynamic)
    copies = [copy_of(leaf) for leaf in leaves]
    args, kwargs = pytree.tree_unflatten(copies, in_spec)
    with unstable.capturing(captured_call.__code__, backend), refusals(), _assignments(root_of(fn)) as assigned:
        returned = compiled(*args, **kwargs)
        _refuse_changes(copies, leaves)
    _refuse_state(assigned, seen.get("inputs", ()), root_of(fn))
    new = [value for _, value in assigned.values()]
    results, out_spec = pytree.tree_flatten((hold(returned), new) if assigned else hold(returned))
    if not seen:
        if any(isinstance(one, Tensor) and not any(one is leaf for leaf in leaves) for one in results):
            raise UsageError(
                "torch.compile is turned off, and polyamp captures code with it",
                where="rewrite(module), explain(module)",
                found=f"TORCH_COMPILE_DISABLE={os.environ.get('TORCH_COMPILE_DISABLE', '0')}, or "
                'torch.compiler.set_stance("force_eager")',
                fix="turn it on for this call, or use polyamp.autocast(policy)",
            )
        nothing = torch.fx.Graph()
        nothing.output(())
        seen.update(module=GraphModule(nn.Module(), nothing), inputs=(), outputs=())
    module, inputs, outputs = seen["module"], seen["inputs"], seen["outputs"]
    seen.clear()
    return Captured(module, inputs, leaves, in_spec, results, out_spec, outputs, assigned)


@contextlib.contextmanager
def refusals() -> Iterator[None]:
    """Replace PyTorch's errors, raised inside the context, by polyamp's own."""
    graph_breaks, failed = unstable.capture_errors()
    try:
        yield
    except PolyampError:
        raise
    except graph_breaks as error:
        raise _no_graph("the code cannot be captured as one graph (a graph break)", error) from error
    except failed as error:
        raise InvalidValueError(
            "the operations do not accept these arguments",
            where=line_of_error(error),
            found=_headline(error),
            fix="use example arguments for which the call works without polyamp",
        ) from error
    except Exception as error:  # an internal error of the compiler, such as for sizes that depend on values
        raise _no_graph("the code cannot be captured as one graph", error) from error


def _no_graph(what: str, error: Exception) -> UsageError:
    return UsageError(
        what,
        where=line_of_error(error),
        found=_headline(error),
        allowed="tensor operations; Python control flow that does not depend on the values of tensors",
        fix="move that line out of the rewritten code, or write it with torch.where or torch.cond; "
        "polyamp.autocast(policy) runs any code",
    )


def _headline(error: Exception) -> str:
    """Return the sentence of Dynamo's long message that tells what happened."""
    cause = re.search(r"got (\w+\(.*\))", str(error))
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return cause[1] if cause else next(iter(lines), type(error).__name__)


@contextlib.contextmanager
def _assignments(root: nn.Module) -> Iterator[dict[str, tuple[Any, Any]]]:
    """Yield a dict; at the end undo assignments to modules' attributes, and put old and new values in it."""
    saved = [
        (f"{path}." * bool(path), attributes, dict(attributes))
        for path, module in root.named_modules()
        for attributes in (vars(module), module._parameters, module._buffers)
    ]
    found = dict[str, tuple[Any, Any]]()
    try:
        yield found
    finally:
        for path, attributes, before in saved:
            found |= {path + name: values for name, values in _restore(attributes, before).items()}


def _refuse_state(assigned: Mapping[str, tuple[Any, Any]], inputs: Sequence[Any], root: nn.Module) -> None:
    """Refuse assignments that no graph can repeat: of unlike values, or to non-buffers that the code reads."""
    buffers = {id(buffer) for buffer in root.buffers()}
    read = {id(one) for one in inputs} - buffers
    if names := [name for name, (old, new) in assigned.items() if id(old) in read or not _alike(old, new)]:
        raise UsageError(
            "the code assigns attributes, which a graph cannot do",
            where="rewrite(module)",
            found=", ".join(sorted(names)),
            allowed="buffers, and tensors that the code does not read before; a new value has the dtype, device and "
            "shape of the old one",
            fix="register them as buffers with their final shape, return the values, or use polyamp.autocast(policy), "
            "which runs any code",
        )


def _alike(old: Any, new: Any) -> bool:
    if not isinstance(old, Tensor) or not isinstance(new, Tensor) or isinstance(old, nn.Parameter):
        return False
    return (old.dtype, old.device) == (new.dtype, new.device) and old.shape == new.shape


def copy_of(leaf: Any, fn: Callable[[Any], Any] = lambda tensor: tensor) -> Any:
    """Return a copy of an object, such as a cache, with ``fn`` of its tensors; return any other leaf unchanged."""
    taken = take_apart(leaf) if hasattr(leaf, "__dict__") and not callable(leaf) else None
    return leaf if taken is None else put_together(taken, [fn(one) for one in taken.tensors])


def _contents(taken: Held | None) -> Any:
    return taken and (taken.rest, list(map(id, taken.tensors)))


def _refuse_changes(copies: Sequence[Any], leaves: Sequence[Any]) -> None:
    """Refuse code that changed an object among its arguments, since a graph would not repeat the change."""
    for copy, leaf in zip(copies, leaves, strict=True):
        if copy is leaf:
            continue
        now, before = take_apart(copy), take_apart(leaf)
        if _contents(now) != _contents(before):
            raise UsageError(
                "the code changes an object among its arguments, which a graph cannot do",
                where="rewrite(module)",
                found=kind_of(copy),
                allowed="tensors, and dicts, lists, tuples and registered pytrees of them",
                fix="leave it out, or use polyamp.autocast(policy), which runs any code",
            )


def _restore(attributes: dict[str, Any], before: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Restore the attributes that were assigned; return their old and their new values."""
    names = {name for name in {*before, *attributes} if attributes.get(name) is not before.get(name)}
    changed = {
        name: (before.get(name), attributes.get(name)) for name in sorted(names) if not name.startswith("_dynamo")
    }
    for name in changed:
        if name in before:
            attributes[name] = before[name]
        else:
            del attributes[name]
    return changed


def root_of(fn: Any) -> nn.Module:
    """Return a module itself, a method's module, or for another function a new module of the modules it uses."""
    owner = fn if isinstance(fn, nn.Module) else getattr(fn, "__self__", None)
    if isinstance(owner, nn.Module):
        return owner
    root = nn.Module()
    if inspect.isfunction(fn):
        named = inspect.getclosurevars(fn)
        for name, module in {**named.globals, **named.nonlocals}.items():
            if isinstance(module, nn.Module):
                root.add_module(name, module)
    return root


def check_arguments(fn: Any, leaves: Sequence[Any]) -> None:
    """Refuse arguments that hide tensors from the graph."""
    if hidden := [leaf for leaf in leaves if not isinstance(leaf, Tensor | nn.Module) and _holds_tensors(leaf)]:
        raise InvalidTypeError(
            "an argument holds numbers, but is neither a tensor nor a container that PyTorch knows",
            where=f"rewrite({getattr(fn, '__name__', type(fn).__name__)}, ...)",
            found=kind_of(hidden[0]),
            allowed="tensors, numbers, strings, and dicts, lists, tuples and registered pytrees of them",
            fix="pass the tensors themselves, or register the class: torch.utils._pytree.register_pytree_node",
        )


def _holds_tensors(leaf: object) -> bool:
    if hasattr(leaf, "__array__") or any(isinstance(one, Tensor) for one in getattr(leaf, "__dict__", {}).values()):
        return True
    taken = take_apart(leaf) if hasattr(leaf, "__dict__") else None
    return taken is not None and bool(taken.tensors)


CONSTANTS = (int, float, bool, str, complex, type(None), torch.dtype, torch.device, torch.SymInt)


class Held:
    """An object as a pytree of its tensors; `put_together` builds a new object of the same class from it."""

    def __init__(self, tensors: Sequence[Any], rest: Any) -> None:
        self.tensors, self.rest = tensors, rest


def hold(tree: Any) -> Any:
    """Replace each object of a tree by `Held`, if it is neither a tensor nor a constant, and can be pickled."""
    return pytree.tree_map(_held, tree)


def _held(leaf: Any) -> Any:
    taken = None if isinstance(leaf, CONSTANTS) else take_apart(leaf)
    return leaf if taken is None else Held(taken.tensors, taken.rest if taken.tensors else leaf)


def take_apart(leaf: Any) -> Held | None:
    """Return an object's tensors, and all else of it; None if the object cannot be rebuilt."""
    if isinstance(leaf, Tensor | torch.nn.Module):
        return None
    file, tensors = io.BytesIO(), list[Any]()

    def place_of(obj: Any) -> int | None:
        if not isinstance(obj, Tensor | torch.SymInt | torch.SymFloat):
            return None
        place = next((place for place, one in enumerate(tensors) if one is obj), len(tensors))
        if place == len(tensors):
            tensors.append(obj)
        return place

    pickler = pickle.Pickler(file)
    pickler.persistent_id = place_of  # type: ignore[method-assign]
    try:
        pickler.dump(leaf)
    except Exception:  # its class may raise anything
        return None
    return Held(tensors, file.getvalue())


def put_together(taken: Held, tensors: Sequence[Any]) -> Any:
    """Rebuild an object that was taken apart, with other tensors; return it."""
    unpickler = pickle.Unpickler(io.BytesIO(taken.rest))
    unpickler.persistent_load = tensors.__getitem__  # type: ignore[method-assign]
    return unpickler.load()


def _unflatten(tensors: Iterable[Any], rest: Any) -> Any:
    given = list(tensors)
    return put_together(Held(given, rest), given) if given else rest


pytree.register_pytree_node(Held, lambda held: (list(held.tensors), held.rest), _unflatten)
