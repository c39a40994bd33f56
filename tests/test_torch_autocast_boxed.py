"""The compiled kernels of autocast do what those do that are written in Python, for every operator and every class.

What both have to do is asked by the other tests of autocast, which run with ``POLYAMP_EXTENSION=off`` and ``require``.
"""

from __future__ import annotations

import itertools
import os
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.nn import functional
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils._python_dispatch import TorchDispatchMode

import polyamp
from polyamp.backends.torch.ambient import boxed, casts, overrides, weights
from polyamp.backends.torch.ambient.regions import Region
from polyamp.backends.torch.unstable import AutocastKey, is_composite, schema_arguments
from polyamp.operations import CLASSES

pytestmark = pytest.mark.skipif(
    os.environ.get("POLYAMP_EXTENSION") != "require", reason="asks the compiled kernels: POLYAMP_EXTENSION=require"
)

KEY = AutocastKey("cpu")
LOWER = polyamp.policy("mixed_bfloat16", rules={"softmax": "lower", "layer_norm": "lower"})
X = torch.arange(16.0).reshape(4, 4) / 16

Call = tuple[tuple[Any, ...], dict[str, Any]]
Samples = dict[str, list[Call]]


def test_the_compiled_kernels_are_in_use() -> None:
    with polyamp.autocast(LOWER):
        pass
    assert isinstance(boxed.kernels(), boxed.Kernels)
    for name in ("aten::softmax.int", "aten::layer_norm", "aten::add_.Tensor", "aten::_foreach_add_.Scalar"):
        said = torch._C._dispatch_dump(name)
        assert f"{KEY.name}: registered at " in said
        assert "autocast.cpp" in said.partition(f"{KEY.name}:")[2].partition("\n")[0]


# Every operator that rules can reach, called as PyTorch's own samples call it.


@pytest.fixture(scope="module")
def samples() -> Iterator[Samples]:
    """Calls of overridable operators; those that no sample of PyTorch's reaches get arguments that are made up.

    The latter are fake: most are refused, and real kernels might not look at them before.
    """
    found: Samples = {}
    recorder = torch.library.Library("aten", "IMPL")
    for name in overrides.operators_of("*"):
        recorder.impl(name, recording(name, found), KEY.name, with_keyset=True)
    try:
        with torch.autocast("cpu", torch.bfloat16):
            for info in op_db:
                run_samples(info)
    finally:
        recorder._destroy()
    assert len(found) > 400
    with FakeTensorMode():
        for name in overrides.operators_of("*"):
            found.setdefault(name, [made_up(name)])
    yield found


def recording(name: str, found: Samples) -> Any:
    op, composite = overrides._overload(name), is_composite(name)

    def kernel(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        calls = found.setdefault(name, [])
        if len(calls) < 2:
            calls.append((args, kwargs))
        if composite and not any(isinstance(value, int | float) for value in args):
            return op.redispatch(keyset & KEY.below, *args, **kwargs)  # what it consists of is recorded too
        with KEY.excluded():
            return op(*args, **kwargs)

    return kernel


def run_samples(info: Any) -> None:
    torch.manual_seed(0)
    if torch.float32 not in info.supported_dtypes("cpu") or info.name.startswith("jiterator"):
        return
    for sample in itertools.islice(info.sample_inputs("cpu", torch.float32), 4):
        for variant in (info.op, *(alias.op for alias in info.aliases)):
            with_suppressed(variant, sample.input, *sample.args, **sample.kwargs)


def with_suppressed(function: Any, *args: Any, **kwargs: Any) -> None:
    try:
        function(*args, **kwargs)
    except (RuntimeError, TypeError, ValueError, NotImplementedError):
        pass


MADE_UP = {
    "Tensor": lambda: torch.rand(2, 4, 4, 4),
    "List[Tensor]": lambda: [torch.rand(4, 4), torch.rand(4, 4)],
    "int": lambda: 1,
    "float": lambda: 0.5,
    "bool": lambda: False,
    "number": lambda: 2,
    "List[int]": lambda: [1, 1],
    "List[float]": lambda: [1.0, 1.0],
    "str": lambda: "fro",
}


def made_up(name: str) -> Call:
    arguments = [one for one in schema_arguments(overrides._overload(name)) if not one.has_default_value()]
    values = [(one, MADE_UP.get(str(one.type), lambda: None)()) for one in arguments]
    args = tuple(value for one, value in values if not one.kwarg_only)
    return args, {one.name: value for one, value in values if one.kwarg_only}


class Seen(TorchDispatchMode):
    """What reaches the kernels behind autocast: operators, and the types of the tensors that they get."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, list[torch.dtype]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        leaves = torch.utils._pytree.tree_leaves((args, kwargs or {}))
        if str(func) != "prim.device.default":  # fake tensors are asked by this
            self.calls.append((str(func), [leaf.dtype for leaf in leaves if isinstance(leaf, Tensor)]))
        return func(*args, **(kwargs or {}))


def outcome(run: Any, call: Call) -> Any:
    """The operators that ran, and the result as comparable data, or what kind of exception there was."""
    torch.manual_seed(0)
    with Seen() as seen:
        try:
            result = run(*call)
        except Exception as error:
            return seen.calls, type(error)
    with KEY.excluded():
        return seen.calls, [bits(leaf) for leaf in torch.utils._pytree.tree_leaves(result)]


def bits(leaf: Any, *, uninitialised: bool = False) -> Any:
    if not isinstance(leaf, Tensor) or leaf.layout != torch.strided or not leaf.numel() or isinstance(leaf, FakeTensor):
        return repr(leaf)
    flat = leaf.detach().clone(memory_format=torch.contiguous_format).flatten()
    return leaf.dtype, leaf.shape, flat.view(torch.uint8).numpy().tobytes()


TYPES = {
    "float32": [torch.float32],
    "bfloat16": [torch.bfloat16],
    "mixed": [torch.float16, torch.float32, torch.bfloat16],
}


def of_types(call: Call, name: str) -> Call:
    """The same call with copies of its tensors, whose floating ones have the types in turn."""
    turns = itertools.cycle(TYPES[name])

    def copy(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        return leaf.detach().to(next(turns)) if leaf.dtype == torch.float32 else leaf.detach().clone()

    with KEY.excluded():
        return torch.utils._pytree.tree_map(copy, call)


@pytest.mark.parametrize("types", TYPES)
@pytest.mark.parametrize("op_class", CLASSES)
@pytest.mark.filterwarnings("ignore")
def test_every_operator_does_the_same(samples: Samples, op_class: str, types: str) -> None:
    region = Region(torch.bfloat16, polyamp.policy("mixed_bfloat16", rules={"*": op_class}).rules[:1])
    differing = []
    with polyamp.autocast(polyamp.policy("mixed_bfloat16", rules={"*": op_class})):
        for name, calls in samples.items():
            behaviour = overrides._behaviour(name, region, "cpu")
            if behaviour is None:
                continue
            op = overrides._overload(name)
            in_python = behaviour(op, overrides.class_name(name), "cpu", torch.bfloat16)
            for call in calls:
                compiled = outcome(lambda args, kwargs, op=op: op(*args, **kwargs), of_types(call, types))
                with KEY.excluded():
                    expected = outcome(in_python, of_types(call, types))
                if compiled != expected:
                    differing.append(f"{name}: {compiled[0]} not {expected[0]}")
    assert differing == []
