"""Private interfaces of PyTorch for operators and their dispatch.

Each function states why there is no public way.
"""

from __future__ import annotations

import ctypes
import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import cache, wraps
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils import checkpoint
from torch.utils._python_dispatch import TorchDispatchMode


def written_arguments(overload: Any) -> list[tuple[int, str]]:
    """Return positions and names of the arguments that an operator changes, which only its private schema has."""
    return [(index, one.name) for index, one in _written(overload._schema)]


def written_by(operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """Return the arguments that a call of an operator changes, under any overload that fits."""
    found = list[Any]()
    for schema in [operator._schema] if hasattr(operator, "_schema") else _schemas(str(operator).replace(".", "::")):
        places = [(str(one.type), -1 if one.kwarg_only else index, one.name) for index, one in _written(schema)]
        given = [
            (kind, args[index] if 0 <= index < len(args) else kwargs.get(name, kwargs.get(_PYTHONS.get(name, name))))
            for kind, index, name in places
        ]
        if all(_takes(kind, value) for kind, value in given):
            found += [value for _, value in given]
    return found


def _takes(kind: str, value: Any) -> bool:
    """Return whether a value is of an argument's kind; ``sort``, for one, changes a list, but not a tensor."""
    return "Optional" in kind if value is None else ("List" in kind) == isinstance(value, list | tuple)


_PYTHONS = {"self": "input"}  # Python's names of arguments, where they differ from the schemas'


def _written(schema: Any) -> list[tuple[int, Any]]:
    arguments = enumerate(schema.arguments)
    return [(index, one) for index, one in arguments if one.alias_info is not None and one.alias_info.is_write]


@cache
def _schemas(name: str) -> list[Any]:
    """Return the schemas of an operator's overloads; empty if there is no operator of that name."""
    return torch._C._jit_get_schemas_for_operator(name)


def _autocast_key(device_type: str) -> Any:
    name = {"privateuseone": "PrivateUse1"}.get(device_type, device_type.upper())
    return getattr(torch._C.DispatchKey, f"Autocast{name}")


def registered_operators(device_type: str) -> list[str]:
    """Return the operators with a kernel at a device type's Autocast key; only the dispatcher has this list."""
    return torch._C._dispatch_get_registrations_for_dispatch_key(_autocast_key(device_type).name)


def all_operators() -> list[str]:
    """Return the names of all operators with their overloads; ``torch.ops`` only finds them by name."""
    return torch._C._dispatch_get_all_op_names()


def is_composite(operator: str) -> bool:
    """Return whether an operator only calls other operators, which autocast then sees one by one."""
    return torch._C._dispatch_has_kernel_for_dispatch_key(operator, "CompositeImplicitAutograd")


def schema_arguments(overload: Any) -> list[Any]:
    """Return an operator's arguments; its schema is private. See also `written_arguments`."""
    arguments: list[Any] = overload._schema.arguments
    return arguments


class AutocastKey:
    """The dispatch key of one device type's autocast, and the keys below it; only the name "AutocastCPU" is public."""

    def __init__(self, device_type: str) -> None:
        key = _autocast_key(device_type)
        self.name: str = key.name
        self.keys = torch._C.DispatchKeySet(key)
        self.below = torch._C._dispatch_keyset_full_after(key)

    def excluded(self) -> Any:
        """Return a context without this device type's autocast, as inside native autocast's kernels."""
        # ``torch.autocast(..., enabled=False)`` is public, but changes settings that tracing sees, and is slower.
        return torch._C._ExcludeDispatchKeyGuard(self.keys)


next_sequence_number: Callable[[], int] = torch._C._autograd._get_sequence_nr
"""The number that the next node of this thread's autograd graph gets; a node's number is private."""


def checkpointing() -> Any:
    """Return an object that lives as long as the graph of the running checkpointed function; None outside one."""
    # Non-reentrant checkpointing puts hooks on saved tensors, and has no public sign that it runs.
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return hooks[1] if hooks is not None and hooks[1].__module__ == "torch.utils.checkpoint" else None


class _Kept(dict[str, Any]):
    kept: Any


def keep_in_checkpoints(state: Callable[[], Any]) -> None:
    """Make each of torch's checkpoints, when called, keep the result of ``state()``."""
    # A checkpoint keeps native autocast's state for the second run of its function, and nothing else can be added.
    original = checkpoint._get_autocast_kwargs

    @wraps(original)
    def kept(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
        device, cpu = original(*args, **kwargs)  # type: ignore[no-untyped-call]
        both = _Kept(cpu)
        both.kept = state()
        return device, both

    checkpoint._get_autocast_kwargs = kept


def kept_by_checkpoint() -> list[Any]:
    """Return in a list what a checkpoint kept, while it reruns its function in this thread; else an empty list."""
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_globals is vars(checkpoint):
            own = frame.f_locals
            found = own.get("cpu_autocast_kwargs") or getattr(own.get("ctx"), "cpu_autocast_kwargs", None)
            if isinstance(found, _Kept):
                return [found.kept]
        frame = frame.f_back
    return []


def object_with_id(number: int) -> Any:
    """Return the live object with this ``id``: Dynamo reveals only the id of a module that it traces."""
    return ctypes.cast(number, ctypes.py_object).value


def withdraw(library: Any) -> None:
    """Remove a library's registrations now; the public way leaves that to the garbage collector."""
    library._destroy()


def is_new(tensor: Tensor) -> bool:
    """Return whether a tensor's memory was never written to and is not shared; only private counts show this."""
    if tensor.layout is not torch.strided or tensor.is_inference() or tensor._version:
        return False
    if torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        return False  # it has no memory
    return torch._C._storage_Use_Count(tensor.untyped_storage()._cdata) == 2  # the tensor, and the storage made here


def wrapper_like(kind: type[Tensor], tensor: Tensor, dtype: torch.dtype) -> Any:
    """Return a tensor of class ``kind`` without memory, with this dtype and else the metadata of ``tensor``."""
    # PyTorch's own documentation makes subclasses with ``torch_dispatch`` in this way, although it is a private name.
    return Tensor._make_wrapper_subclass(
        kind,
        tensor.shape,
        strides=tensor.stride(),
        storage_offset=tensor.storage_offset(),
        dtype=dtype,
        device=tensor.device,
    )


no_torch_function: Any = torch._C._disabled_torch_function_impl
"""The ``__torch_function__`` of a subclass that is only handled below autograd; it has no public name."""


class EagerDispatchMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A dispatch mode that torch does not wrap for Dynamo."""

    # By default torch wraps the method so that Dynamo skips it, which imports Dynamo at the first call and takes
    # seconds. The method that turns this off is private.

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


def running_node() -> Any:
    """Return the autograd node whose backward runs in this thread; None outside a backward pass."""
    return None if torch._C._current_graph_task_id() == -1 else torch._C._current_autograd_node()


def sequence_number(node: Any) -> int:
    """Return the number that identifies a node in recordings; see `next_sequence_number`."""
    number: int = node._sequence_nr()
    return number


def makes_tangents() -> bool:
    """Return whether forward-mode derivatives are being computed, which nothing public reports."""
    return forward_ad._current_level != -1


def set_version(tensor: Tensor, version: int) -> None:
    """Set a tensor's count of changes, once its old value is restored; publicly the count is read-only."""
    torch._C._autograd._unsafe_set_version_counter((tensor,), (version,))


def change_shape_alone(op: Any, args: Sequence[Any], kwargs: Any) -> None:
    """Change the shape of a `wrapper_like` tensor by an operator in place, below all subclasses."""
    # A tensor without memory has only a shape to change, and no public call does that.
    with torch._C._DisableTorchDispatch():
        op(*args, **kwargs)
