"""Private interfaces of PyTorch for fake tensors.

Each function states why there is no public way.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor


def fake_mode_of(values: Iterable[Any]) -> Any:
    """Return the private mode of a captured graph's fake tensors; None if there are none."""
    from torch._subclasses import FakeTensor

    return next((value.fake_mode for value in values if isinstance(value, FakeTensor)), None)


@contextmanager
def on_fakes(mode: Any) -> Iterator[None]:
    """Run operations on fake tensors as Dynamo does: kernels written in Python see symbolic sizes."""
    from torch._dispatch.python import enable_python_dispatcher

    with mode, enable_python_dispatcher(), torch.no_grad():
        yield


def size_guards(fakes: Sequence[Tensor]) -> Callable[[Sequence[Tensor]], bool]:
    """Return a function that tests, as Dynamo's guards would, if a captured graph is valid for tensors' sizes."""
    mode: Any = fake_mode_of(fakes)
    shapes: Any = None if mode is None else mode.shape_env
    guards = None if shapes is None else shapes.produce_guards_expression(fakes)
    code = compile(guards or "True", "<sizes>", "eval")
    sizes = ((place, dim, _fixed(length)) for place, fake in enumerate(fakes) for dim, length in enumerate(fake.shape))
    fixed = [(place, dim, length) for place, dim, length in sizes if length is not None]

    def fit(tensors: Sequence[Tensor]) -> bool:
        if any(tensors[place].shape[dim] != length for place, dim, length in fixed):
            return False
        return guards is None or bool(shapes.evaluate_guards_expression(code, tensors))

    return fit


def _fixed(length: Any) -> int | None:
    """Return a size if it is a number, even if Dynamo found that out later; None if it is symbolic."""
    expression = length.node.expr if isinstance(length, torch.SymInt) else None
    return int(length) if expression is None else int(expression) if expression.is_number else None


def fake_mode_for(tensors: Iterable[Any]) -> Any:
    """Return a mode in which operations run on tensors without data: the tensors' own, or a new one."""
    # Use it as a context; its ``from_tensor`` makes a fake. Tensors with data are allowed too.
    from torch._subclasses import FakeTensorMode

    return fake_mode_of(tensors) or FakeTensorMode(allow_non_fake_inputs=True)


def on_a_device(meta: Tensor, device_type: str, mode: Any) -> Tensor:
    """Return a fake on a device from a meta tensor, since autocast does nothing for the device type ``meta``."""
    with mode:
        made = torch.empty_strided(meta.shape, meta.stride(), dtype=meta.dtype, device=device_type)
        if isinstance(meta, torch.nn.Parameter):
            return torch.nn.Parameter(made, requires_grad=meta.requires_grad)
        return made.requires_grad_(meta.requires_grad)


@contextmanager
def quietly() -> Iterator[None]:
    """Suppress PyTorch's log message about an operator without a fake kernel: an error reports it too."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    before, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = before


@contextmanager
def with_data() -> Iterator[None]:
    """Leave the fake mode, to operate on tensors with data."""
    from torch._subclasses.fake_tensor import unset_fake_temporarily

    with unset_fake_temporarily():
        yield


def is_fake(value: Any) -> bool:
    """Return whether a tensor is without data: a fake or a meta tensor."""
    from torch._subclasses import FakeTensor

    return isinstance(value, FakeTensor) or (isinstance(value, Tensor) and value.is_meta)


def storage_of(value: Any) -> int | None:
    """Return a number that is the same for views of the same memory; fake tensors have no data pointer."""
    return value.untyped_storage()._cdata if isinstance(value, Tensor) and value.layout == torch.strided else None


def let_go(fakes: Iterable[Any]) -> None:
    """Let fake tensors be garbage-collected when they are no longer used."""
    # The origin of their sizes keeps a list of them, and their sizes keep that origin alive in a way that the garbage
    # collector does not see. Guards of the sizes have to be made before.
    mode: Any = fake_mode_of(fakes)
    if mode is not None and getattr(mode.shape_env, "tracked_fakes", None):
        mode.shape_env.tracked_fakes = []


def forget_sizes() -> None:
    """Clear PyTorch's caches of symbolic sizes: they are caches of methods, and keep whole captures alive."""
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    for method in vars(ShapeEnv).values():
        clear = getattr(method, "cache_clear", None)
        if clear is not None:
            clear()
