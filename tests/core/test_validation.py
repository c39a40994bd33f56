"""Arguments that are refused: numbers, counts, functions, options and names; a near miss gets a suggestion."""

import functools
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import polyamp
from polyamp import LossScale, policy
from polyamp.adapters import check_options


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: policy("mixed_fp16"), "did you mean mixed_float16"),
        (lambda: policy("mixed_bf16"), "did you mean mixed_bfloat16"),
        (lambda: policy("02"), "did you mean O2"),
        (lambda: policy("paramz=float32"), "did you mean param"),
        (lambda: policy(compute="flaot16"), "did you mean float16"),
        (lambda: policy("fp16", rules={"softmax": "lowr"}), "did you mean lower"),
        (lambda: LossScale.like("pytorch"), "did you mean torch"),
        (lambda: LossScale().to_state_dict(LossScale().initial_state(), like="megatrn"), "did you mean megatron"),
        (lambda: polyamp.convert(3, backend="tensorfow"), "did you mean tensorflow"),
        (lambda: polyamp.autocast("fp16", backend="torhc"), "did you mean torch"),
        (lambda: polyamp.rewrite(policy="fp16", backend="torhc"), "did you mean torch"),
        (lambda: polyamp.value_and_grad(len, backend="torhc"), "did you mean torch"),
        (lambda: polyamp.watch(len, backend="torhc"), "did you mean torch"),
        (lambda: polyamp.watch(len, polciy="fp16"), "did you mean policy"),
        (lambda: polyamp.parity(len, better="high"), "parity.better="),
        (lambda: policy("nonesuch"), "mixed_float16, (.*), O2, and others of docs/reference/policies.md"),
    ],
)
def test_a_near_miss_gets_a_suggestion(call: Any, says: str) -> None:
    with pytest.raises(polyamp.PolyampError, match=says):
        call()


@pytest.mark.parametrize("word", ["cuda", "CPU", "cuda:1", "mps"])
def test_a_device_as_a_policy_is_told_that_none_is_needed(word: str) -> None:
    with pytest.raises(polyamp.errors.InvalidValueError, match="no device is needed"):
        polyamp.autocast(word)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"dtype": np.float16}, r'autocast\("mixed_float16"\)'),
        ({"dtype": "bfloat16", "device_type": "cuda"}, "a policy names the formats"),
        ({"enabled": False}, r'autocast\("float32"\)'),
        ({"cache_enabled": True}, "autocast takes a policy"),
    ],
    ids=str,
)
def test_other_libraries_arguments_of_autocast_are_told_ours(arguments: dict[str, Any], says: str) -> None:
    with pytest.raises(polyamp.errors.InvalidTypeError, match=says):
        polyamp.autocast(**arguments)
    with pytest.raises(polyamp.errors.InvalidTypeError, match=says):
        polyamp.autocast("mixed_float16", **arguments)


def test_a_long_value_is_not_printed_in_an_error() -> None:
    with pytest.raises(polyamp.errors.InvalidTypeError, match=r"found: +a numpy\.ndarray and") as caught:
        polyamp.autocast(np.ones((50, 50)), "mixed_float16")
    assert len(str(caught.value)) < 400


class Adam:
    """A class, as torch's and Keras' are."""


def schedule(step: int) -> float:
    return 0.1 / (1 + step)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (Adam, r"a class(?s:.)*Adam\(\.\.\.\)"),
        (schedule, r"a function(?s:.)*call it first: schedule\(\.\.\.\)"),
        (functools.partial(schedule, 1), "call it first"),
        ((one for one in (1, 2)), "of parameters perhaps"),
        (iter([1, 2]), "of parameters perhaps"),
    ],
    ids=["class", "function", "partial", "generator", "iterator"],
)
def test_what_makes_an_optimizer_is_not_one(given: Any, says: str) -> None:
    with pytest.raises(polyamp.errors.InvalidTypeError, match=says):
        polyamp.wrap_optimizer(given, "mixed_float16")


# --- options ----------------------------------------------------------------------------------------------------------


def test_options_of_a_method_are_its_keyword_only_parameters() -> None:
    def verb(fn: object, *, engine: str = "", jit_compile: bool = False) -> None: ...

    check_options(verb, {"engine": 1, "jit_compile": 2}, where="verb()")
    for wrong in ("fn", "engin", "self"):
        with pytest.raises(polyamp.errors.UnsupportedError, match="engine, jit_compile") as caught:
            check_options(verb, {"engine": 1, wrong: 2}, where="verb()")
        assert isinstance(caught.value, TypeError)
    check_options(lambda **options: None, {"anything": 1}, where="verb()")


# --- policies and dtypes of other libraries ---------------------------------------------------------------------------


@pytest.mark.parametrize("compute", [np.float16, np.dtype("float16"), np.half], ids=repr)
def test_dtypes_name_formats(compute: Any) -> None:
    assert policy(compute=compute, output="f32", param="f32") == policy("mixed_float16")
    assert policy("float32", compute=np.float32) == policy("float32")


def test_a_dtype_can_mean_two_policies() -> None:
    for call in (polyamp.policy, polyamp.autocast):
        with pytest.raises(polyamp.errors.InvalidValueError, match=r'"mixed_float16", which .*; "float16", which'):
            call(np.float16)
    assert policy(np.float32) == policy("float32")
    with pytest.raises(polyamp.errors.InvalidTypeError, match="a Policy or a string"):
        policy(np.int32)


def test_a_policy_of_jmp_s_kind_is_read_by_its_attributes() -> None:
    theirs = SimpleNamespace(param_dtype=np.float32, compute_dtype=np.float16, output_dtype=np.dtype("float32"))
    assert policy(theirs) == policy("mixed_float16")
    assert policy(theirs, output="float16") == policy("p=f32,c=f16,o=f16")
    with pytest.raises(polyamp.errors.InvalidTypeError, match=r"policy\(spec\)\.compute_dtype"):
        policy(SimpleNamespace(param_dtype=np.float32, compute_dtype=np.int8, output_dtype=np.float32))


def test_a_policy_has_jmp_s_attributes() -> None:
    for name in ("float32", "mixed_float16", "O2", "float64"):
        chosen = policy(name)
        assert chosen.param_dtype == np.dtype(chosen.param)
        assert (chosen.compute_dtype.name, chosen.output_dtype.name) == (chosen.compute, chosen.output)
    assert policy("float32", param="tf32").param_dtype == "tensorfloat32"  # no dtype has this name
