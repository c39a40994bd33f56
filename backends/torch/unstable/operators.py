"""What of operators and their dispatch is private in PyTorch.

Each function says why there is no public way.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


def written_arguments(overload: Any) -> list[tuple[int, str]]:
    """Positions and names of the arguments that an operator changes: only its private schema says so."""
    arguments = enumerate(overload._schema.arguments)
    return [(index, one.name) for index, one in arguments if one.alias_info is not None and one.alias_info.is_write]


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


def object_with_id(number: int) -> Any:
    """The object with an ``id``, which has to be alive: of a module that is being traced Dynamo gives away no more."""
    return ctypes.cast(number, ctypes.py_object).value


def withdraw(library: Any) -> None:
    """Take back what a library registered, now: publicly that is left to the garbage collector."""
    library._destroy()


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
