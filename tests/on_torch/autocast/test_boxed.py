"""The compiled kernels of autocast do the same as those in Python, for every operator and every class.

What both have to do is asked by the other tests of autocast, which run with ``POLYAMP_EXTENSION=off`` and ``require``.
"""

import contextlib
import itertools
import os
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.nn import functional
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils._python_dispatch import TorchDispatchMode

import polyamp
from polyamp.backends.torch.autocast import behaviours, boxed, overrides
from polyamp.backends.torch.autocast.regions import Region
from polyamp.backends.torch.unstable import AutocastKey, is_composite
from polyamp.operations import CLASSES
from support.harness_torch import casts_of

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
def samples() -> Samples:
    """Calls of the overridable operators that a sample of PyTorch's reaches."""
    found: Samples = {}
    with polyamp.autocast(polyamp.policy("mixed_bfloat16", rules={"*": "full"})):
        pass  # from here on polyamp's kernels are registered for all of them
    recorder = torch.library.Library("aten", "IMPL")
    try:
        for name in behaviours.operators_of("*"):
            recorder.impl(name, recording(name, found), KEY.name, with_keyset=True)
        with torch.autocast("cpu", torch.bfloat16):
            for info in op_db:
                run_samples(info)
    finally:
        recorder._destroy()
    assert len(found) > 400
    del found["aten::empty_like"]  # whose result is any
    return found


def recording(name: str, found: Samples) -> Any:
    op, composite = behaviours.overload_named(name), is_composite(name)

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
    for sample in itertools.islice(info.sample_inputs_func(info, "cpu", torch.float32, False), 4):
        for variant in (info.op, *(alias.op for alias in info.aliases)):
            with contextlib.suppress(RuntimeError, TypeError, ValueError, NotImplementedError):
                variant(sample.input, *sample.args, **sample.kwargs)


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
    args, kwargs = call
    torch.manual_seed(0)
    with Seen() as seen:
        try:
            result = run(*args, **kwargs)
        except Exception as error:
            return seen.calls, type(error)
    with KEY.excluded():
        return seen.calls, [bits(leaf) for leaf in torch.utils._pytree.tree_leaves(result)]


def bits(leaf: Any) -> Any:
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


def differing(samples: Samples, types: str, expected: Callable[[str], Any]) -> list[str]:
    """Return the operators whose result is not the ``expected`` one; None expects nothing."""
    found = []
    for name, calls in samples.items():
        op, other = behaviours.overload_named(name), expected(name)
        for call in calls if other is not None else ():
            ours, theirs = outcome(op, of_types(call, types)), outcome(other, of_types(call, types))
            if ours != theirs:
                found.append(f"{name}: {ours[0]}, not {theirs[0]}")
    return found


@pytest.mark.parametrize("types", TYPES)
@pytest.mark.parametrize("op_class", CLASSES)
@pytest.mark.filterwarnings("ignore")
def test_every_operator_does_what_the_kernels_in_python_do(samples: Samples, op_class: str, types: str) -> None:
    policy = polyamp.policy("mixed_bfloat16", rules={"*": op_class})
    region = Region(torch.bfloat16, policy.rules[:1])

    def in_python(name: str) -> Any:
        found = behaviours.behaviour(name, region, "cpu")
        if found is None:
            return None
        run = overrides.call_as(
            found, behaviours.overload_named(name), behaviours.class_name(name), "cpu", torch.bfloat16
        )
        return lambda *args, **kwargs: excluded(run, args, kwargs)

    with polyamp.autocast(policy):
        assert differing(samples, types, in_python) == []


def excluded(run: Any, *args: Any) -> Any:
    with KEY.excluded():
        return run(*args)


# Casts of weights.


@pytest.mark.parametrize(
    "transform", [torch.func.grad, torch.func.jacrev, torch.func.vmap], ids=lambda one: one.__name__
)
def test_updates_by_a_number_run_under_transforms(transform: Any) -> None:
    """Where a kernel in Python is asked for the number, PyTorch looks for the memory of a tensor that has none."""

    def updated(x: Tensor) -> Tensor:
        return (x * 1.0).add_(1).sum()

    with polyamp.autocast(LOWER):
        inside = transform(updated)(X)
    assert torch.equal(inside, transform(updated)(X))


def test_casts_are_the_threads_that_made_them() -> None:
    weight, other = nn.Parameter(torch.ones(4)), []

    def run() -> Tensor:
        return functional.layer_norm(X, (4,), weight)

    def elsewhere() -> None:
        with polyamp.autocast(LOWER):
            other.append(casts_of(run))

    with polyamp.autocast(LOWER):
        first = casts_of(run)
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
        assert casts_of(run) == first - 1
    assert other == [first]


def test_casts_that_are_made_while_a_graph_is_captured_are_not_kept() -> None:
    weight = nn.Parameter(torch.ones(4))
    with polyamp.autocast(LOWER):
        with FakeTensorMode(allow_non_fake_inputs=True):
            assert isinstance(functional.layer_norm(torch.ones(4, 4), (4,), weight), FakeTensor)
        assert not isinstance(functional.layer_norm(X, (4,), weight), FakeTensor)
