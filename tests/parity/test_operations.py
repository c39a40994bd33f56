"""The canonical table against the installed frameworks: names that exist, and lists with the claimed entries."""

import gc
import importlib
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import keras
import pytest
import tensorflow as tf
import torch
from jax.extend.core import Primitive

from polyamp import adapters
from polyamp.backends.jax.operations import OPERATIONS as jax_names
from polyamp.backends.keras.operations import ACTIVATIONS
from polyamp.backends.keras.operations import OPERATIONS as keras_names
from polyamp.backends.tensorflow.operations import OPERATIONS as tensorflow_names
from polyamp.backends.torch.autocast.behaviours import registered
from polyamp.backends.torch.operations import FUNCTIONS, MODULES, canonical
from polyamp.backends.torch.operations import OPERATIONS as torch_names
from polyamp.operations import OPERATIONS

NATIVES = {"torch": torch_names, "jax": jax_names, "tensorflow": tensorflow_names, "keras": keras_names}


# --- names ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("framework", NATIVES)
def test_adapters_offer_their_names(framework: str) -> None:
    assert adapters.adapter_named(framework).operations == NATIVES[framework]


def test_every_canonical_operation_has_a_native_name() -> None:
    used = {name for names in (*NATIVES.values(), FUNCTIONS) for name in names.values()}
    assert used == set(OPERATIONS)


def aten_names() -> set[str]:
    registered = torch._C._dispatch_get_all_op_names()
    names = {name.removeprefix("aten::").partition(".")[0] for name in registered if name.startswith("aten::")}
    return names | {name.removesuffix("_") for name in names}  # an in-place operator may be the only form


def jax_primitives() -> set[str]:
    for name in ("jax.nn", "jax.scipy.linalg", "jax.experimental.pallas"):  # their primitives come with them
        importlib.import_module(name)
    # not isinstance: other libraries' objects warn when asked for their class
    gc.unfreeze()  # see tests/conftest.py
    return {thing.name for thing in gc.get_objects() if issubclass(type(thing), Primitive)}


def tensorflow_nodes() -> set[str]:
    nvidia_only = {name for lists in tensorflow_lists().values() for names in lists.values() for name in names}
    return {name for name in dir(tf.raw_ops) if name[0] != "_"} | nvidia_only | {"_FusedMatMul", "_FusedConv2D"}


def keras_layers() -> set[str]:
    classes = {name: thing for name, thing in vars(keras.layers).items() if isinstance(thing, type)}
    return set(classes) | {thing.__name__ for thing in classes.values()}


NEW_IN_TORCH = {"linalg_matrix_sqrth"}  # 2.15
NEW_IN_JAX = {"log2", "one_minus_square"}  # 0.12
NAMES: dict[str, tuple[Iterable[str], Callable[[], Iterable[str]]]] = {
    "torch": (torch_names, lambda: aten_names() | NEW_IN_TORCH),
    "torch modules": (MODULES, lambda: dir(torch.nn) + dir(torch.nn.modules.linear)),
    "jax": (jax_names, lambda: {*jax_primitives(), *NEW_IN_JAX}),
    "tensorflow": (tensorflow_names, tensorflow_nodes),
    "keras": (keras_names, keras_layers),
    "keras activations": (ACTIVATIONS, lambda: dir(keras.activations)),
}


@pytest.mark.parametrize(("ours", "known"), NAMES.values(), ids=NAMES)
def test_names_exist(ours: Iterable[str], known: Callable[[], Iterable[str]]) -> None:
    assert set(ours) - set(known()) == set()


@pytest.mark.parametrize("family", [torch.nn.modules.conv, torch.nn.modules.batchnorm, torch.nn.modules.normalization])
def test_torch_modules_with_weights_are_mapped(family: object) -> None:
    kinds = [vars(family)[name] for name in vars(family)["__all__"]]
    assert [kind for kind in kinds if MODULES.keys().isdisjoint(base.__name__ for base in kind.__mro__)] == []


@pytest.mark.parametrize(
    ("spelling", "name"),
    [
        ("aten::softmax.int", "softmax"),
        ("aten.softmax.int", "softmax"),
        (str(torch.ops.aten.mm.default), "matmul"),
        (torch.ops.aten.convolution.default.name(), "conv"),
        ("add_", "add"),
        ("aten::relu_", "relu"),
        ("mylib::softmax", None),
        ("aten::no_such_operator", None),
    ],
)
def test_torch_spellings(spelling: str, name: str | None) -> None:
    assert canonical(spelling) == name


# --- lists of the sources ---------------------------------------------------------------------------------------------

CUDA_LISTS = {
    "AT_FORALL_LOWER_PRECISION_FP": "lower",
    "AT_FORALL_FP32": "full",
    "AT_FORALL_FP32_SET_OPT_DTYPE": "full",
    "AT_FORALL_PROMOTE": "promote",
}
NOT_IN_THE_LISTS = {
    "norm": "full",  # AT_FORALL_DIFFERENT_REDISPATCH_SIGNATURE: in float32, by another overload
    "binary_cross_entropy": "banned",
    "cudnn_convolution": "lower",
    "cudnn_convolution_transpose": "lower",
}


def cuda_lists() -> Iterator[tuple[str, str]]:
    """Return (operator, class) pairs from the macros of the installed header."""
    header = (Path(torch.__path__[0]) / "include" / "ATen" / "autocast_mode.h").read_text()
    for macro, op_class in CUDA_LISTS.items():
        body = re.search(rf"#define {macro}\(_\)((?:.*\\\n)*.*)", header)
        assert body is not None
        yield from ((native, op_class) for native in re.findall(r"_\((\w+)", body[1]))
    yield from NOT_IN_THE_LISTS.items()


def test_cuda_autocast_says_what_we_say_it_says() -> None:
    listed = sorted(set(cuda_lists()))
    assert [(native, OPERATIONS[canonical(native) or ""].sources["cuda"]) for native, _ in listed] == listed


@pytest.mark.parametrize("device_type", ["cuda", "cpu", "xpu", "mps"])
def test_every_operator_that_torch_casts_is_mapped(device_type: str) -> None:
    natives = registered(device_type)  # without the kernels that our own regions register
    assert len(natives) > 50
    assert {native for native in natives if canonical(native) is None} == set()
    source = device_type if device_type in ("cuda", "cpu") else None
    silent = {native for native in natives if source and source not in OPERATIONS[canonical(native) or ""].sources}
    assert silent == set()


def test_the_lists_are_all_of_the_cuda_registry() -> None:
    natives = registered("cuda")
    listed = {native for native, _ in cuda_lists()}
    assert {native.removeprefix("aten::").partition(".")[0] for native in natives} - listed == set()


CPU_EXAMPLES = {
    "mm": (lambda x: torch.mm(x, x), torch.bfloat16),
    "scaled_dot_product_attention": (
        lambda x: torch.nn.functional.scaled_dot_product_attention(x, x, x),
        torch.bfloat16,
    ),
    "prelu": (lambda x: torch.prelu(x, x[0, :1]), torch.bfloat16),
    "mse_loss": (lambda x: torch.nn.functional.mse_loss(x.bfloat16(), x.bfloat16()), torch.float32),
    "prod": (lambda x: x.bfloat16().prod(), torch.float32),
    "trace": (lambda x: x.bfloat16().trace(), torch.float32),
    "cat": (lambda x: torch.cat([x, x.bfloat16()]), torch.float32),
    "stack": (lambda x: torch.stack([x.bfloat16(), x.bfloat16()]), torch.bfloat16),
}
CLASS_OF_RESULT = {"lower": torch.bfloat16, "full": torch.float32}


@pytest.mark.parametrize("native", CPU_EXAMPLES)
def test_cpu_autocast_does_what_we_say_it_does(native: str) -> None:
    run, dtype = CPU_EXAMPLES[native]
    with torch.autocast("cpu", torch.bfloat16):
        assert run(torch.ones(4, 4)).dtype == dtype
    listed = OPERATIONS[canonical(native) or ""].sources["cpu"]
    assert CLASS_OF_RESULT.get(listed, dtype) == dtype


TENSORFLOW_CLASSES = {"Allow": "lower", "Infer": "follow", "Deny": "full", "Clear": "neutral"}


def tensorflow_lists() -> dict[str, dict[str, set[str]]]:
    """Return {source: {class: node types}} from the header in the wheel."""
    folder = Path(tf.sysconfig.get_include()) / "tensorflow" / "core" / "grappler" / "optimizers"
    header = re.sub(r"UpdateList\(\"\w+\"", "", (folder / "auto_mixed_precision_lists.h").read_text())
    base, fp16, mkl = re.split(r"class AutoMixedPrecisionLists(?:Fp16|Mkl)\b", header)
    tensor_lists = set(re.findall(r'"(TensorList\w+)"', base))
    lists: dict[str, dict[str, set[str]]] = {}
    for source, text in {"tf_fp16": fp16, "tf_bf16": mkl}.items():
        parts = re.split(r"(Allow|Infer|Deny|Clear)List\(\) override", text)
        named = {
            TENSORFLOW_CLASSES[key]: set(re.findall(r'"(\w+)"', body))
            for key, body in zip(parts[1::2], parts[2::2], strict=True)
        }
        lists[source] = named | {"neutral": named["neutral"] | tensor_lists}
    return lists


def tensorflow_votes() -> list[tuple[str, str, str]]:
    lists = tensorflow_lists()
    return [
        (source, native, kind) for source in lists for kind in lists[source] for native in sorted(lists[source][kind])
    ]


def test_tensorflow_s_lists_were_read_whole() -> None:
    sizes = {
        source: {kind: len(names) for kind, names in lists.items()} for source, lists in tensorflow_lists().items()
    }
    assert sizes == {
        "tf_fp16": {"lower": 39, "follow": 46, "full": 9, "neutral": 110},
        "tf_bf16": {"lower": 14, "follow": 48, "full": 7, "neutral": 111},
    }


@pytest.mark.parametrize("source", ["tf_fp16", "tf_bf16"])
def test_tensorflow_says_what_we_say_it_says(source: str) -> None:
    votes = [(native, kind) for key, native, kind in tensorflow_votes() if key == source]
    ours = [(native, OPERATIONS[tensorflow_names[native]].sources.get(source)) for native, _ in votes]
    assert ours == votes


@pytest.mark.parametrize("source", ["cuda", "cpu", "tf_fp16", "tf_bf16"])
def test_no_source_is_cited_for_what_it_does_not_name(source: str) -> None:
    if source in ("cuda", "cpu"):
        registered = torch._C._dispatch_get_registrations_for_dispatch_key(f"Autocast{source.upper()}")
        named = {canonical(native) for native in registered} | {canonical(native) for native in NEW_IN_TORCH}
    else:
        named = {tensorflow_names.get(native) for key, native, _ in tensorflow_votes() if key == source}
    assert {name for name, entry in OPERATIONS.items() if source in entry.sources} - named == set()
