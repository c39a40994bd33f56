"""Policies: every dialect, what is refused, value semantics, and scoping by thread and async task."""

import asyncio
import json
import pickle
import threading
from collections.abc import Iterator
from dataclasses import FrozenInstanceError
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import polyamp
from polyamp import LossScale, Policy, policy
from polyamp.policy_words import WORDS  # noqa: TID251

F32, F16, BF16 = "float32", "float16", "bfloat16"
DYNAMIC, CHECKED, NONE = LossScale(), LossScale.skip_nonfinite(), LossScale.none()

DIALECTS = {
    # Keras
    "float32": (F32, F32, F32, NONE),
    "mixed_float16": (F32, F16, F32, DYNAMIC),
    "mixed_bfloat16": (F32, BF16, F32, CHECKED),
    "float16": (F16, F16, F16, DYNAMIC),
    "bfloat16": (BF16, BF16, BF16, CHECKED),
    # jmp
    "params=float32,compute=float16,output=float32": (F32, F16, F32, DYNAMIC),
    "p=f32,c=bf16,o=f32": (F32, BF16, F32, CHECKED),
    "p=f16,c=f16,o=f32": (F16, F16, F32, DYNAMIC),
    "params=float32": (F32, F32, F32, NONE),
    "compute=half": (F32, F16, F16, DYNAMIC),
    "half": (F16, F16, F16, DYNAMIC),
    "full": (F32, F32, F32, NONE),
    # Apex
    "O0": (F32, F32, F32, NONE),
    "O1": (F32, F16, F32, DYNAMIC),
    "O2": (F16, F16, F32, DYNAMIC),
    "O3": (F16, F16, F16, CHECKED),
    # trainers
    "no": (F32, F32, F32, NONE),
    "fp16": (F32, F16, F32, DYNAMIC),
    "bf16": (F32, BF16, F32, CHECKED),
    "16-mixed": (F32, F16, F32, DYNAMIC),
    "bf16-mixed": (F32, BF16, F32, CHECKED),
    "16-true": (F16, F16, F16, DYNAMIC),
    "bf16-true": (BF16, BF16, BF16, CHECKED),
    "amp_fp16": (F32, F16, F32, DYNAMIC),
    "amp_bf16": (F32, BF16, F32, CHECKED),
}


@pytest.mark.parametrize(("text", "expected"), DIALECTS.items())
def test_dialect(text: str, expected: tuple[str, str, str, LossScale]) -> None:
    made = policy(text)
    assert (made.param, made.compute, made.output, made.loss_scale) == expected


@pytest.mark.parametrize("text", WORDS)
def test_every_known_word_survives_its_text_and_its_dict(text: str) -> None:
    made = policy(text)
    assert policy(str(made)) == made
    assert hash(policy(str(made))) == hash(made)
    assert Policy.from_dict(json.loads(json.dumps(made.to_dict()))) == made
    assert pickle.loads(pickle.dumps(made)) == made


formats = st.sampled_from(sorted(polyamp.formats.FORMATS))
scales = st.one_of(
    st.just(None),
    st.builds(LossScale.fixed, st.sampled_from([1.0, 128.0, 0.1])),
    st.builds(LossScale, interval=st.integers(1, 9), growth=st.floats(1.5, 4), max_skips=st.none() | st.integers(1, 9)),
)
patterns = st.text(st.characters(codec="utf-8", exclude_characters="./"), min_size=1, max_size=6)
rules = st.dictionaries(patterns, st.sampled_from(sorted(polyamp.operations.CLASSES)), max_size=3)


@given(param=formats, compute=formats, output=formats, rules=rules, scale=scales, name=st.text(max_size=5))
def test_any_policy_survives_its_text_and_its_dict(
    param: str, compute: str, output: str, rules: dict[str, str], scale: LossScale | None, name: str
) -> None:
    if compute == BF16 and scale is not None and scale.dynamic:
        scale = None
    made = policy(param=param, compute=compute, output=output, rules=rules, loss_scale=scale, name=name)
    again = policy(str(made))
    assert (again, again.name) == (made, made.name)
    restored = Policy.from_dict(json.loads(json.dumps(made.to_dict())))
    assert (restored, restored.name, restored.rules) == (made, made.name, made.rules)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "blank"),
        ("  ", "blank"),
        ("float12", "unknown policy"),
        ("fp16 fp16", "repeated"),
        ("fp16,mixed_float16", "repeated"),
        ("fp16,bf16", "contradictory"),
        ("O1 O2", "contradictory"),
        ("p=f32,params=f16", "param appears twice"),
        ("p=f32,p=f32", "param appears twice"),
        ("p=,c=f16", "blank"),
        ("p=f32,,c=f16", "blank"),
        ("=f16", "blank"),
        ("dtype=f16", "unknown policy key 'dtype'"),
        ("dtype=f16", "compute=FORMAT,output=FORMAT"),
        ("p=f12", "unknown number format"),
        ('fp16 {"rules": 3', "not a JSON object"),
        ('fp16 {"colour": 3}', "unknown policy settings colour"),
        ('fp16 {"rules": {"softmax": "up"}}', "unknown class"),
    ],
)
def test_bad_words_are_refused_and_the_known_ones_are_listed(text: str, says: str) -> None:
    with pytest.raises(polyamp.errors.InvalidValueError, match=says) as caught:
        policy(text)
    assert "float16" in str(caught.value) or "lower" in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"compute": "float12"}, polyamp.errors.InvalidValueError),
        ({"compute": 16}, polyamp.errors.InvalidTypeError),
        ({"loss_scale": "128"}, polyamp.errors.InvalidTypeError),
        ({"loss_scale": True}, polyamp.errors.InvalidTypeError),
        ({"loss_scale": 0.0}, polyamp.errors.InvalidValueError),
        ({"name": 3}, polyamp.errors.InvalidTypeError),
        ({"rules": "softmax"}, polyamp.errors.InvalidTypeError),
    ],
)
def test_bad_arguments_are_refused(arguments: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error):
        policy("mixed_float16", **arguments)


@pytest.mark.parametrize("spec", [np.dtype(np.float16), np.float16])
def test_a_dtype_is_told_the_two_policies_that_it_can_mean(spec: Any) -> None:
    with pytest.raises(polyamp.errors.InvalidValueError, match=r'"mixed_float16".*"float16"'):
        policy(spec)


@pytest.mark.parametrize("arguments", [(3,), ("matmul", None)])
def test_an_operation_and_its_path_are_strings(arguments: tuple[Any, ...]) -> None:
    with pytest.raises(polyamp.errors.InvalidTypeError, match="a string"):
        policy("mixed_float16").decide(*arguments)


@pytest.mark.parametrize("spec", [16, object(), ["fp16"], {"compute": "float16"}])
def test_what_is_no_policy_is_refused(spec: Any) -> None:
    with pytest.raises(polyamp.errors.InvalidTypeError, match="a Policy or a string"):
        policy(spec)


@pytest.mark.parametrize(
    ("text", "arguments"),
    [("mixed_float16", {"compute": BF16}), ("p=f32,c=f16", {"compute": BF16}), ("p=f32,c=f16", {"param": F16})],
)
def test_two_formats_for_one_field_are_refused(text: str, arguments: dict[str, str]) -> None:
    with pytest.raises(polyamp.errors.InvalidValueError, match="two formats"):
        policy(text, **arguments)


def test_dynamic_loss_scale_under_bfloat16_is_refused() -> None:
    with pytest.raises(polyamp.errors.InvalidValueError, match="range of float32"):
        policy("mixed_bfloat16", loss_scale=LossScale())
    assert policy("mixed_bfloat16", loss_scale=LossScale.fixed(1.0)).loss_scale.check
    assert policy("mixed_bfloat16", loss_scale=8).loss_scale == LossScale.fixed(8.0)


def test_policy_is_frozen_and_compares_by_value() -> None:
    assert policy("fp16") == policy("O1") == policy("mixed_float16", name="mine")
    assert policy("fp16") != policy("fp16", rules={"softmax": "lower"})
    with pytest.raises(FrozenInstanceError):
        policy("fp16").compute = "float32"  # type: ignore[misc]


def test_own_rules_come_first_and_replace_the_same_pattern() -> None:
    made = policy("half", rules={"layer_norm": "full", "*_norm": "follow"})
    assert made.rules == (("layer_norm", "full"), ("*_norm", "follow"))
    assert made.decide("layer_norm").op_class == "full"
    assert made.decide("batch_norm").op_class == "follow"


def test_policy_from_a_policy_changes_only_what_is_given() -> None:
    base = policy("mixed_float16", rules={"softmax": "lower"})
    assert policy(base) == base
    changed = policy(base, compute=BF16)
    assert (changed.compute, changed.loss_scale, changed.rules) == (BF16, CHECKED, base.rules)
    scaled = policy("mixed_float16", loss_scale=LossScale.fixed(8.0))
    assert policy(scaled, output=F16).loss_scale == LossScale.fixed(8.0)


@pytest.mark.parametrize("saved", [{"param": F16}, policy("O2").to_dict() | {"extra": 1}, 3, [("param", F16)]], ids=str)
def test_saved_policy_with_other_fields_is_refused(saved: Any) -> None:
    with pytest.raises(polyamp.errors.InvalidValueError, match="exactly these fields"):
        Policy.from_dict(saved)


def test_with_nests_and_unwinds_after_an_error() -> None:
    outer, inner = policy("fp16"), policy("bf16")
    with outer:
        with pytest.raises(KeyError), inner:
            {}[polyamp.current_policy()]
        with outer:  # entering the same policy again
            assert policy() is outer
        assert polyamp.current_policy() is outer
    assert polyamp.current_policy() == policy("float32")


def test_global_policy_holds_where_no_with_does() -> None:
    try:
        assert polyamp.set_global_policy("bf16") == policy("mixed_bfloat16")
        seen = in_thread(polyamp.current_policy)
        assert seen == policy("mixed_bfloat16")
        with policy("fp16"):
            assert polyamp.current_policy() == policy("fp16")
    finally:
        polyamp.set_global_policy("float32")
    assert polyamp.current_policy() == policy("float32")


def test_threads_do_not_see_each_other() -> None:
    with policy("fp16"):
        assert in_thread(polyamp.current_policy) == policy("float32")


def test_async_tasks_do_not_see_each_other() -> None:
    async def enter(name: str, barrier: asyncio.Barrier) -> str:
        with policy(name):
            await barrier.wait()  # every task is inside its own policy now
            return str(polyamp.current_policy())

    async def main() -> list[str]:
        names = ["mixed_float16", "mixed_bfloat16", "O2"]
        barrier = asyncio.Barrier(len(names))
        return await asyncio.gather(*(enter(name, barrier) for name in names))

    assert asyncio.run(main()) == ["mixed_float16", "mixed_bfloat16", "O2"]


def in_thread(fn: Any) -> Any:
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(fn()))
    thread.start()
    thread.join()
    return results[0]


def test_policies_that_are_left_in_another_order_leave_the_right_one() -> None:
    def within(spec: str) -> Iterator[None]:
        with policy(spec):
            yield

    with policy("float32"):
        first, second = within("mixed_float16"), within("mixed_bfloat16")
        next(first), next(second)
        first.close()
        assert str(polyamp.current_policy()) == "mixed_bfloat16"
        second.close()
        assert str(polyamp.current_policy()) == "float32"
